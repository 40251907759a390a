# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds, and how a run is saved to one and restored from one."""

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

from oktopk.engine.saved_state import taken_over
from oktopk.errors import CheckpointError, ExchangeError, RunError, StateError
from oktopk.runlog.aggregates import load_totals, reshard_totals
from oktopk.runlog.run_directory import CHECKPOINT_FOLDER
from oktopk.train import checkpoint
from oktopk.train.agreed_model import agreed_model
from oktopk.train.checkpoint import Count
from oktopk.train.config import Config, changes, names_with
from oktopk.train.config_files import parse, to_toml
from oktopk.train.flags import as_flag
from oktopk.train.recorder import Recorder
from oktopk.train.setup import Run
from oktopk.utils.files import convert, file_error, single_line

log = logging.getLogger("oktopk")


class CommonState(msgspec.Struct, frozen=True):
    """`common.pt`: what is the same on all ranks."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    config: str
    data: str = msgspec.field(name="corpus")
    """The fingerprint of the data."""

    steps_per_epoch: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    metrics_bytes: Count = msgspec.field(name="journal_bytes")
    """Bytes of `metrics.jsonl` when the checkpoint was saved."""


class SavedProgress(msgspec.Struct, frozen=True):
    """The fields of `Progress`."""

    epoch: Count
    index: Count
    step: Count
    loss_sum: float
    loss_count: Count
    seconds: float = 0.0
    target_reached: bool = False


Sums = Annotated[list[Count], Meta(min_length=7, max_length=7)]


class RankState(msgspec.Struct, frozen=True):
    """`rank-R.pt`: what differs between ranks."""

    handle: dict[str, Any]
    buffers: dict[str, Tensor]
    random: Tensor
    progress: SavedProgress
    totals: Annotated[list[Sums], Meta(min_length=2, max_length=2)]
    skipped_in_a_row: Count
    cuda_random: Tensor | None = None
    optimizer: dict[str, Any] | None = None
    """Where every rank has a state of its own; else it is in `common.pt`."""


def save(run: Run, recorder: Recorder, directory: Path) -> bool:
    """Save a checkpoint and delete the oldest. Collective. Returns whether it was saved.

    A baseline is not: PyTorch's hooks have no state dicts that could be restored. Where the ranks
    have weights of their own, between two exchanges, the common file has their mean.
    """
    recorder.flush()
    state = run.exchange.state_dict()
    if state is None:
        return False
    model = agreed_model(run)
    own = {
        "handle": state,
        "buffers": dict(run.model.named_buffers()),
        "random": torch.get_rng_state(),
        "progress": asdict(run.progress),
        "totals": run.totals.state(),
        "skipped_in_a_row": run.skipped_in_a_row,
    }
    if not run.exchange.shares_optimizer:
        own["optimizer"] = run.optimizer.state_dict()
    if run.device.type == "cuda":
        own["cuda_random"] = torch.cuda.get_rng_state(run.device)
    contents: dict[str, Any] = {checkpoint.rank_file(run.comm.rank): own}
    if run.comm.rank == 0:
        contents[checkpoint.COMMON] = {
            "model": model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "config": to_toml(run.config),
            "corpus": run.task.fingerprint(),
            "steps_per_epoch": run.steps_per_epoch,
            "journal_bytes": recorder.metrics_bytes,
        }
    folder = directory / CHECKPOINT_FOLDER
    checkpoint.save(folder, run.progress.step, contents, run.comm, run.device)
    if run.env.local_rank == 0:
        checkpoint.prune(folder, run.config.keep)
    return True


def restore(run: Run, path: Path, given: Collection[str]) -> int:
    """Restore a checkpoint; returns the bytes of `metrics.jsonl` that belong to it.

    `given` are the settings on the command line: only those may have changed. If the world size has
    changed, the epoch continues after the examples that are done, and the saved residuals are
    distributed over the ranks. With the same world size, the run ends with the same bits as if it
    had not been interrupted.
    """
    info, common, states = _read(run, path)
    run.changed = _changed_settings(run, common, path, given)
    same_size = info.world_size == run.comm.size
    if not same_size:
        run.changed["workers"] = (info.world_size, run.comm.size)
    for name, (old, new) in run.changed.items() if run.comm.rank == 0 else ():
        log.info("changed on resume: %s %s -> %s", name, old, new)
    mine = states[run.comm.rank % len(states)]
    with _as_checkpoint_error(path):
        run.model.load_state_dict(common.model)
        run.model.load_state_dict(mine.buffers, strict=False)
        run.optimizer.load_state_dict(mine.optimizer or common.optimizer)
        run.exchange.load_state_dict(
            mine.handle if same_size else [state.handle for state in states]
        )
        torch.set_rng_state(mine.random)
        if run.device.type == "cuda" and mine.cuda_random is not None:
            torch.cuda.set_rng_state(mine.cuda_random, run.device)
    for key, value in msgspec.structs.asdict(mine.progress).items():
        setattr(run.progress, key, value)
    if "until" in run.changed:  # another target is not reached yet
        run.progress.target_reached = False
    if same_size:
        run.totals = load_totals(mine.totals)
    else:
        _reshard(run, states)
    run.skipped_in_a_row = mine.skipped_in_a_row
    _set_position(run, common.steps_per_epoch)
    return common.metrics_bytes


def _read(run: Run, path: Path) -> tuple[checkpoint.CheckpointInfo, CommonState, list[RankState]]:
    """Read the files of a checkpoint, and check their types and that all are of the same step."""
    info, common, ranks = checkpoint.load(path, run.comm)
    advice = f"to resume from an earlier checkpoint, move {path} away"
    common_name, *names = checkpoint.files_to_read(info, run.comm)
    common_state = convert(common, CommonState, path / common_name, advice)
    states = [
        convert(content, RankState, path / name, advice)
        for content, name in zip(ranks, names, strict=True)
    ]
    for state, name in zip(states, names, strict=True):
        if state.progress.step != info.step:
            problem = f"is of step {state.progress.step}, and the checkpoint of step {info.step}"
            raise file_error(path / name, problem, place="progress.step", advice=advice)
    return info, common_state, states


@contextmanager
def _as_checkpoint_error(path: Path) -> Iterator[None]:
    """Raise what torch says about an unfit state as one sentence that names the checkpoint."""
    try:
        yield
    except (RunError, ExchangeError):
        raise
    except StateError as error:  # says itself what to do
        raise CheckpointError(f"{path} does not fit this run: {single_line(error)}") from error
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointError(
            f"{path} does not fit this run ({single_line(error)}): to resume from an earlier "
            "checkpoint, move it away"
        ) from error


def _changed_settings(
    run: Run, common: CommonState, path: Path, given: Collection[str]
) -> dict[str, tuple[Any, Any]]:
    """The settings that have changed since the checkpoint: old and new value.

    Raise if the model or the data is a different one, or if a setting changed without a flag.
    """
    stored: Config = parse(
        common.config, "stored", f"{path / checkpoint.COMMON}: config", whole=True
    )
    differing = changes(stored, run.config)
    may_not_change, harmless = (names_with(run.config, mark) for mark in ("fixed", "harmless"))
    fixed = {name: pair for name, pair in differing.items() if name in may_not_change}
    if fixed:
        what = ", ".join(f"{name} {old} and not {new}" for name, (old, new) in fixed.items())
        raise CheckpointError(
            f"{path} is of a run with {what}: resume with that, or start another with --name"
        )
    if common.data != run.task.fingerprint():
        before, now = (c.options.data or "the task's own" for c in (stored, run.config))
        raise CheckpointError(
            f"{path} is of a run on other data (its data: {before}, now: {now}): resume with that, "
            "or start another with --name"
        )
    changed = {name: pair for name, pair in differing.items() if name not in harmless}
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


def _reshard(run: Run, states: list[RankState]) -> None:
    """Distribute losses and bytes over the ranks; their sums over ranks stay the same."""
    rank, world_size = run.comm.rank, run.comm.size
    run.totals = reshard_totals([state.totals for state in states], rank, world_size)
    past = [state.progress for state in taken_over(states, rank, world_size)]
    run.progress.loss_sum = sum(progress.loss_sum for progress in past)
    run.progress.loss_count = sum(progress.loss_count for progress in past)


def _set_position(run: Run, steps_per_epoch: int) -> None:
    """Continue at the same share of the epoch, counted in steps of the present batch and ranks."""
    progress = run.progress
    if steps_per_epoch != run.steps_per_epoch:
        done = progress.index / steps_per_epoch
        progress.index = min(run.steps_per_epoch, round(done * run.steps_per_epoch))
    left = (run.config.epochs - progress.epoch) * run.steps_per_epoch - progress.index
    run.planned_steps = progress.step + max(left, 0)
    limit = run.config.max_steps or run.planned_steps
    run.total_steps = max(progress.step, min(run.planned_steps, limit))
