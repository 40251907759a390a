"""The run: epochs of steps, validation, checkpoints."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from oktopk.comm.process_groups import watched
from oktopk.errors import StoppedError
from oktopk.runlog.reader import OVERLAPPED, PARTS
from oktopk.train.all_or_raise import same_weights
from oktopk.train.data.batches import plan
from oktopk.train.recorder import Recorder
from oktopk.train.resume import save
from oktopk.train.setup import Run
from oktopk.train.step import take_step
from oktopk.train.validate import Validation, validate, validates


def train(run: Run, recorder: Recorder, folder: Path) -> Validation | None:
    """All epochs that are left; the last validation, None when nothing was left to do."""
    last = None
    with watched():
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
    spent = dict.fromkeys((*PARTS, *OVERLAPPED), 0.0)
    began_at = progress.index
    while _goes_on(run):
        turn = batches[progress.index * micro : (progress.index + 1) * micro]
        entry = take_step(run, [ranks[run.comm.rank] for ranks in turn])
        spent = {part: seconds + entry[part] for part, seconds in spent.items()}
        recorder.step(entry)
        if _draws_histograms(run):
            recorder.histograms(entry["step"])
        if _goes_on(run):  # else the end saves
            due = config.checkpoint_every and progress.step % config.checkpoint_every == 0
            if due or recorder.stops:
                same_weights(run.model, run.comm, progress.step)
                save(run, recorder, folder)
            stop_if_asked(run, recorder)
    recorder.flush()
    result = _end_epoch(run, recorder, folder, _per_step(spent, progress.index - began_at))
    stop_if_asked(run, recorder)
    return result


def _goes_on(run: Run) -> bool:
    """Whether the epoch has another step."""
    return run.progress.index < run.steps_per_epoch and not finished(run)


def stop_if_asked(run: Run, recorder: Recorder) -> None:
    """All ranks know whether one was asked to stop; the step was saved before."""
    if recorder.stops:
        raise StoppedError(f"stopped and saved at step {run.progress.step}: go on with --resume")


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
    same_weights(run.model, run.comm, progress.step)  # of what is validated and saved here
    entry: dict[str, Any] = {"kind": "epoch", "epoch": progress.epoch, "step": progress.step - 1}
    entry |= {"train_loss": _train_loss(run), "seconds": seconds}
    entry["complete"] = progress.index == run.steps_per_epoch  # max_steps may end it before
    result = None
    if validates(progress.epoch, config.epochs, config.validate_every) or finished(run):
        result = validate_now(run)
    blank = dict.fromkeys(Validation.__slots__)
    recorder.epoch(entry | (asdict(result) if result else blank))
    for sample in result.samples if result else ():
        recorder.say(f"  said  {sample['said']}\n  heard {sample['heard']}")
    if entry["complete"]:
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


def _train_loss(run: Run) -> float | None:
    """Mean loss of the epoch over all ranks and batches; None when all steps were skipped."""
    own = torch.tensor([run.progress.loss_sum, run.progress.loss_count], dtype=torch.float64)
    loss, count = run.comm.all_gather(own.to(run.device), stage="run").sum(0).tolist()
    return loss / count if count else None
