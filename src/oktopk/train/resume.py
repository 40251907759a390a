"""What a checkpoint holds, and going on from one."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from oktopk.train import checkpoint
from oktopk.train.config import Config, changes, parse, to_toml
from oktopk.train.errors import CheckpointError
from oktopk.train.folder import CHECKPOINTS
from oktopk.train.recorder import Recorder
from oktopk.train.setup import Run

log = logging.getLogger("oktopk")

FIXED = ("hidden", "layers", "bidirectional", "channels", "optimizer", "method")
"""What a run is; the rest may be changed when it goes on."""
NOT_OF_THE_RUN = ("name", "runs", "workers", "data", "cache", "timeout")


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
            "corpus": run.corpus.fingerprint(),
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
    world_size, common, owns = checkpoint.load(path, run.comm)
    _compare(run, common, path)
    mine = owns[run.comm.rank % len(owns)]
    run.model.load_state_dict(common["model"])
    run.model.load_state_dict(mine["buffers"], strict=False)
    run.optimizer.load_state_dict(common["optimizer"])
    same = world_size == run.comm.size
    run.handle.load_state_dict(mine["handle"] if same else [own["handle"] for own in owns])
    for key, value in mine["progress"].items():
        setattr(run.progress, key, value)
    if same:
        run.totals.load(mine["totals"])
    else:
        _share_out(run, owns)
    run.skipped_in_a_row = mine["skipped_in_a_row"]
    torch.set_rng_state(mine["random"])
    if run.device.type == "cuda" and "cuda_random" in mine:
        torch.cuda.set_rng_state(mine["cuda_random"], run.device)
    _find_place(run, common["steps_per_epoch"])
    return common["journal_bytes"]


def _compare(run: Run, common: dict[str, Any], path: Path) -> None:
    """Refuse another model, method or corpus; say what else has changed."""
    stored: Config = parse(common["config"], "stored", str(path))
    differing = changes(stored, run.config)
    fixed = {name: pair for name, pair in differing.items() if name in FIXED}
    if fixed:
        what = ", ".join(f"{name} {old} and not {new}" for name, (old, new) in fixed.items())
        raise CheckpointError(
            f"{path} is of a run with {what}: resume with that, or start another with --name"
        )
    if common["corpus"] != run.corpus.fingerprint():
        raise CheckpointError(
            f"{path} is of a run on other recordings (its data: {stored.data or 'spoken'!r}, now: "
            f"{run.config.data or 'spoken'!r}): resume with those, or start another with --name"
        )
    rest = {name: pair for name, pair in differing.items() if name not in NOT_OF_THE_RUN}
    for name, (old, new) in rest.items() if run.comm.rank == 0 else ():
        log.info("%s was %s and is now %s", name, old, new)


def _share_out(run: Run, owns: list[dict[str, Any]]) -> None:
    """The sums of other ranks, so that the sum over ranks stays what it was."""
    rank, size = run.comm.rank, run.comm.size
    run.totals.take_over([own["totals"] for own in owns], rank, size)
    past = [own["progress"] for own in owns[rank::size]]
    run.progress.loss_sum = sum(progress["loss_sum"] for progress in past)
    run.progress.loss_count = sum(progress["loss_count"] for progress in past)


def _find_place(run: Run, steps_per_epoch: int) -> None:
    """The same place in the epoch, in steps of the present batches and ranks."""
    progress = run.progress
    if steps_per_epoch != run.steps_per_epoch:
        done = progress.index / steps_per_epoch
        progress.index = min(run.steps_per_epoch, round(done * run.steps_per_epoch))
    left = (run.config.epochs - progress.epoch) * run.steps_per_epoch - progress.index
    run.planned_steps = progress.step + max(left, 0)
    limit = run.config.max_steps or run.planned_steps
    run.total_steps = max(progress.step, min(run.planned_steps, limit))
