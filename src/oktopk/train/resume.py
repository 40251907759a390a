"""What a checkpoint holds, and going on from one."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from oktopk.errors import CheckpointError, ExchangeError, RunError
from oktopk.runlog.reader import CHECKPOINTS
from oktopk.train import checkpoint
from oktopk.train.checkpoint import Count
from oktopk.train.config import (
    HARMLESS,
    Config,
    as_flag,
    changes,
    parse,
    to_toml,
)
from oktopk.train.recorder import Recorder
from oktopk.train.setup import Run
from oktopk.utils.files import checked, file_error, one_line

log = logging.getLogger("oktopk")

FIXED = ("hidden", "layers", "bidirectional", "channels", "optimizer", "method")
"""What the stored weights and states depend on: it cannot be changed at all."""


class Common(msgspec.Struct, frozen=True):
    """`common.pt`: what all ranks have alike."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    config: str
    corpus: str
    steps_per_epoch: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    journal_bytes: Count


class SavedProgress(msgspec.Struct, frozen=True):
    """The fields of `Progress`."""

    epoch: Count
    index: Count
    step: Count
    loss_sum: float
    loss_count: Count


Sums = Annotated[list[Count], Meta(min_length=7, max_length=7)]


class Own(msgspec.Struct, frozen=True):
    """`rank-R.pt`: what a rank has for itself."""

    handle: dict[str, Any]
    buffers: dict[str, Tensor]
    random: Tensor
    progress: SavedProgress
    totals: Annotated[list[Sums], Meta(min_length=2, max_length=2)]
    skipped_in_a_row: Count
    cuda_random: Tensor | None = None


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


def restore(run: Run, path: Path, given: Collection[str]) -> int:
    """Go on from a checkpoint; returns how much of the journal belongs to it.

    `given` are the settings on the command line: only those may have changed. With another number
    of ranks the epoch goes on after the utterances that were done, and the residuals of the old
    ranks are shared out; only with the same number are the bits those of one run.
    """
    facts, common, owns = _read(run, path)
    run.changed = _compare(run, common, path, given)
    same = facts.world_size == run.comm.size
    if not same:
        run.changed["workers"] = (facts.world_size, run.comm.size)
    for name, (old, new) in run.changed.items() if run.comm.rank == 0 else ():
        log.info("changed on resume: %s %s -> %s", name, old, new)
    mine = owns[run.comm.rank % len(owns)]
    with _fitting(path):
        run.model.load_state_dict(common.model)
        run.model.load_state_dict(mine.buffers, strict=False)
        run.optimizer.load_state_dict(common.optimizer)
        run.handle.load_state_dict(mine.handle if same else [own.handle for own in owns])
        torch.set_rng_state(mine.random)
        if run.device.type == "cuda" and mine.cuda_random is not None:
            torch.cuda.set_rng_state(mine.cuda_random, run.device)
    for key, value in msgspec.structs.asdict(mine.progress).items():
        setattr(run.progress, key, value)
    if same:
        run.totals.load(mine.totals)
    else:
        _share_out(run, owns)
    run.skipped_in_a_row = mine.skipped_in_a_row
    _find_place(run, common.steps_per_epoch)
    return common.journal_bytes


def _read(run: Run, path: Path) -> tuple[checkpoint.Complete, Common, list[Own]]:
    """The files of a checkpoint, with their types checked, and all of the same step."""
    facts, common, owns = checkpoint.load(path, run.comm)
    advice = f"to resume from an earlier checkpoint, move {path} away"
    names = checkpoint.needed(facts, run.comm)
    content = checked(common, Common, path / names[0], advice)
    own = [
        checked(one, Own, path / name, advice) for one, name in zip(owns, names[1:], strict=True)
    ]
    for one, name in zip(own, names[1:], strict=True):
        if one.progress.step != facts.step:
            problem = f"is of step {one.progress.step}, and the checkpoint of step {facts.step}"
            raise file_error(path / name, problem, place="progress.step", advice=advice)
    return facts, content, own


@contextmanager
def _fitting(path: Path) -> Iterator[None]:
    """Tell what does not fit in one sentence: torch's errors have many types and lines."""
    try:
        yield
    except (RunError, ExchangeError):
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointError(
            f"{path} does not fit this run ({one_line(error)}): to resume from an earlier "
            "checkpoint, move it away"
        ) from error


def _compare(
    run: Run, common: Common, path: Path, given: Collection[str]
) -> dict[str, tuple[Any, Any]]:
    """The settings that have changed. Refuse another model or corpus, and what nobody asked for."""
    stored: Config = parse(
        common.config, "stored", f"{path / checkpoint.COMMON}: config", whole=True
    )
    differing = changes(stored, run.config)
    fixed = {name: pair for name, pair in differing.items() if name in FIXED}
    if fixed:
        what = ", ".join(f"{name} {old} and not {new}" for name, (old, new) in fixed.items())
        raise CheckpointError(
            f"{path} is of a run with {what}: resume with that, or start another with --name"
        )
    if common.corpus != run.corpus.fingerprint():
        raise CheckpointError(
            f"{path} is of a run on other recordings (its data: {stored.data or 'spoken'!r}, now: "
            f"{run.config.data or 'spoken'!r}): resume with those, or start another with --name"
        )
    changed = {name: pair for name, pair in differing.items() if name not in HARMLESS}
    unasked = {name: pair for name, pair in changed.items() if name not in given}
    if unasked:
        what = ", ".join(f"{name} {old} and not {new}" for name, (old, new) in unasked.items())
        keep, change = (
            shlex.join(word for name, pair in unasked.items() for word in as_flag(name, pair[i]))
            for i in range(2)
        )
        raise CheckpointError(
            f"{path} is of a run with {what}: give {keep} to keep the settings of then, or "
            f"{change} to change them"
        )
    return changed


def _share_out(run: Run, owns: list[Own]) -> None:
    """The sums of other ranks, so that the sum over ranks stays what it was."""
    rank, size = run.comm.rank, run.comm.size
    run.totals.take_over([own.totals for own in owns], rank, size)
    past = [own.progress for own in owns[rank::size]]
    run.progress.loss_sum = sum(progress.loss_sum for progress in past)
    run.progress.loss_count = sum(progress.loss_count for progress in past)


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
