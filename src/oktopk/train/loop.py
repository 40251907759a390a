"""The run: epochs of steps, validation, checkpoints."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from oktopk.train import checkpoint
from oktopk.train.config import to_toml
from oktopk.train.data.batches import plan
from oktopk.train.errors import StoppedError
from oktopk.train.folder import CHECKPOINTS
from oktopk.train.recorder import Recorder
from oktopk.train.setup import Run
from oktopk.train.step import PARTS, take_step
from oktopk.train.validate import Validation, validate, validates


def train(run: Run, recorder: Recorder, folder: Path) -> Validation | None:
    """All epochs that are left; the last validation, None when nothing was left to do."""
    last = None
    while run.progress.epoch < run.config.epochs and not finished(run):
        last = train_epoch(run, recorder, folder) or last
    return last


def finished(run: Run) -> bool:
    """Whether the limit of steps is reached."""
    return bool(run.config.max_steps) and run.progress.step >= run.config.max_steps


def train_epoch(run: Run, recorder: Recorder, folder: Path) -> Validation | None:
    """What is left of an epoch, its validation where due, its record and a checkpoint."""
    config, progress = run.config, run.progress
    micro = config.accumulate
    batches = plan(len(run.corpus.train), config.batch, run.comm.size, progress.epoch, config.seed)
    spent = dict.fromkeys(PARTS, 0.0)
    began_at = progress.index
    while progress.index < run.steps_per_epoch and not finished(run):
        turn = batches[progress.index * micro : (progress.index + 1) * micro]
        entry = take_step(run, [ranks[run.comm.rank] for ranks in turn])
        spent = {part: spent[part] + entry[part] for part in PARTS}
        recorder.step(entry)
        if _draws_histograms(run):
            recorder.histograms(entry["step"])
        if config.checkpoint_every and progress.step % config.checkpoint_every == 0:
            save(run, recorder, folder)
        if recorder.stops:
            save(run, recorder, folder)
            raise StoppedError(f"stopped and saved at step {progress.step}: go on with --resume")
    recorder.flush()
    return _end_epoch(run, recorder, folder, _per_step(spent, progress.index - began_at))


def _per_step(spent: dict[str, float], steps: int) -> dict[str, float] | None:
    """Mean seconds of the parts; None where no step was taken."""
    return {part: seconds / steps for part, seconds in spent.items()} if steps else None


def _draws_histograms(run: Run) -> bool:
    """At the last dense step, the first two sparse ones, each epoch's end, and as asked."""
    step, config = run.progress.step, run.config  # finished steps
    around = (config.warmup_steps, config.warmup_steps + 1, config.warmup_steps + 2)
    asked = config.histogram_every and step % config.histogram_every == 0
    return step in around or run.progress.index == run.steps_per_epoch or bool(asked)


def _end_epoch(
    run: Run, recorder: Recorder, folder: Path, seconds: dict[str, float] | None
) -> Validation | None:
    config, progress = run.config, run.progress
    entry: dict[str, Any] = {"kind": "epoch", "epoch": progress.epoch, "step": progress.step - 1}
    entry |= {"train_loss": _train_loss(run), "seconds": seconds}
    result = None
    if validates(progress.epoch, config.epochs, config.validate_every) or finished(run):
        result = validate_now(run)
    blank = dict.fromkeys(f for f in Validation.__slots__)
    recorder.epoch(entry | (asdict(result) if result else blank))
    for sample in result.samples if result else ():
        recorder.say(f"  said  {sample['said']}\n  heard {sample['heard']}")
    progress.epoch, progress.index = progress.epoch + 1, 0
    progress.loss_sum, progress.loss_count = 0.0, 0
    save(run, recorder, folder)
    return result


def validate_now(run: Run) -> Validation:
    """The test set with the weights of this moment."""
    return validate(
        run.model,
        run.corpus.test,
        run.corpus.test_spectra,
        run.comm,
        run.device,
        batch=run.config.validate_batch,
        width=run.config.beam,
        samples=run.config.samples,
    )


def _train_loss(run: Run) -> float:
    """Mean loss of the epoch over all ranks and batches."""
    own = torch.tensor([run.progress.loss_sum, run.progress.loss_count], dtype=torch.float64)
    loss, count = run.comm.all_gather(own.to(run.device), stage="run").sum(0).tolist()
    return loss / count


def save(run: Run, recorder: Recorder, folder: Path) -> None:
    """Write a checkpoint of everything and drop the oldest."""
    recorder.flush()
    own = {
        "handle": run.handle.state_dict(),
        "buffers": dict(run.model.named_buffers()),
        "random": torch.get_rng_state(),
        "progress": asdict(run.progress),
        "totals": run.totals.state(),
        "skipped_in_a_row": run.skipped_in_a_row,
    }
    if run.device.type == "cuda":
        own["cuda_random"] = torch.cuda.get_rng_state(run.device)
    contents: dict[str, Any] = {checkpoint.rank_file(run.comm.rank): own}
    if run.comm.rank == 0:
        contents[checkpoint.COMMON] = {
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "config": to_toml(run.config),
            "steps_per_epoch": run.steps_per_epoch,
            "journal_bytes": recorder.journal_bytes,
        }
    place = folder / CHECKPOINTS
    checkpoint.save(place, run.progress.step, contents, run.comm, run.device)
    if run.place.local_rank == 0:
        checkpoint.prune(place, run.config.keep)


def restore(run: Run, path: Path) -> int:
    """Go on from a checkpoint; returns how much of the journal belongs to it.

    With another number of ranks the epoch goes on after the utterances that were done, and what the
    old ranks owed is shared out; only with the same number are the bits those of one run.
    """
    common, owns = checkpoint.load(path, run.comm)
    mine = owns[run.comm.rank % len(owns)]
    run.model.load_state_dict(common["model"])
    run.model.load_state_dict(mine["buffers"], strict=False)
    run.optimizer.load_state_dict(common["optimizer"])
    states = [own["handle"] for own in owns]
    run.handle.load_state_dict(states[0] if len(owns) == 1 else states)
    for key, value in mine["progress"].items():
        setattr(run.progress, key, value)
    run.totals.load(mine["totals"])
    run.skipped_in_a_row = mine["skipped_in_a_row"]
    torch.set_rng_state(mine["random"])
    if run.device.type == "cuda" and "cuda_random" in mine:
        torch.cuda.set_rng_state(mine["cuda_random"], run.device)
    _go_on_with_others(run, common["steps_per_epoch"])
    return common["journal_bytes"]


def _go_on_with_others(run: Run, steps_per_epoch: int) -> None:
    """The same place in the epoch, in steps of the present number of ranks."""
    progress = run.progress
    if steps_per_epoch != run.steps_per_epoch:
        done = progress.index / steps_per_epoch
        progress.index = min(run.steps_per_epoch, round(done * run.steps_per_epoch))
    left = (run.config.epochs - progress.epoch) * run.steps_per_epoch - progress.index
    total = progress.step + left
    run.total_steps = min(total, run.config.max_steps) if run.config.max_steps else total
