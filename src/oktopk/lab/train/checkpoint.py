# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: their folders and files, what they hold, and how a run is resumed from one."""

from __future__ import annotations

import hashlib
import logging
import shlex
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from oktopk.comm.communicator import Comm
from oktopk.comm.consistency import newest_on_all
from oktopk.errors import CheckpointError, ExchangeError, RunError, StateError
from oktopk.exchange.saved_state import taken_over
from oktopk.lab.runlog.reader import CHECKPOINT_FOLDER
from oktopk.lab.runlog.writer import load_totals, reshard_totals
from oktopk.lab.train.config import Config, changes, names_with
from oktopk.lab.train.config_files import as_flag, parse, to_toml
from oktopk.lab.train.recorder import Recorder
from oktopk.lab.train.setup import Run
from oktopk.lab.train.validate import all_or_raise, average_statistics
from oktopk.utils.files import (
    FileError,
    convert,
    file_error,
    read_json,
    read_tensors,
    single_line,
    write_atomically,
    write_tensors,
)

# Checkpoints: one folder for each step, which is complete or does not count.
#
# Every rank writes a file of its own (residuals, random state), and rank 0 also the common one
# (weights, optimizer). When all files are on disk, `complete.json` is written with their sizes and
# hashes; a folder without it is not a checkpoint. Older checkpoints are deleted only after that,
# so the last good one survives a full disk and a process that is killed while it writes. Loading
# accepts tensors and plain values only, never pickled code.


log = logging.getLogger("oktopk")

COMMON = "common.pt"
COMPLETE = "complete.json"
DIGEST = 32  # bytes of a SHA-256
FORMAT = 2
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class FileInfo(msgspec.Struct, frozen=True):
    """Size and hash of a file, as it was written."""

    bytes: Count
    sha256: Annotated[str, Meta(pattern=f"^[0-9a-f]{{{2 * DIGEST}}}$")]


class CheckpointInfo(msgspec.Struct, frozen=True):
    """`complete.json`: the step, the world size that saved it, and all files."""

    step: Count
    world_size: Annotated[int, Meta(ge=1, le=10**6)]
    files: dict[str, FileInfo]
    format: Count = 1
    """Counts up when a checkpoint changes so that older code would misread it."""


def rank_file(rank: int) -> str:
    return f"rank-{rank}.pt"


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def save(
    folder: Path, step: int, contents: dict[str, Any], comm: Comm, device: torch.device
) -> Path:
    """Write this rank's files, by name, and complete the checkpoint. Collective."""
    target = step_folder(folder, step)
    failed = f"writing the checkpoint of step {step}"
    mine = all_or_raise(comm, device, failed, lambda: _write_all(target, contents))
    info = CheckpointInfo(step, comm.size, _gather(mine, comm, device), FORMAT)

    def complete() -> None:
        # every rank writes the same content: nodes may or may not share the folder
        write_atomically(target / COMPLETE, msgspec.json.encode(info).decode())

    all_or_raise(comm, device, failed, complete)
    return target


def _write_all(target: Path, contents: dict[str, Any]) -> dict[str, FileInfo]:
    written = {}
    try:
        target.mkdir(parents=True, exist_ok=True)
        (target / COMPLETE).unlink(missing_ok=True)
        for name, content in contents.items():
            written[name] = _write(target / name, content)
    except OSError as error:
        for name in contents:
            (target / name).unlink(missing_ok=True)
        kept = any(target.parent.glob(f"step-*/{COMPLETE}"))
        advice = "Earlier checkpoints are kept: make room and continue with --resume"
        raise CheckpointError(
            f"the checkpoint {target} could not be written: {error}. "
            f"{advice if kept else 'Make room and start again'}"
        ) from error
    return written


def _write(path: Path, content: Any) -> FileInfo:
    write_tensors(path, content)
    return FileInfo(path.stat().st_size, _digest(path))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _gather(mine: dict[str, FileInfo], comm: Comm, device: torch.device) -> dict[str, FileInfo]:
    """Sizes and hashes of the files of all ranks; rank 0 wrote the common one. Collective."""
    nothing = FileInfo(0, "00" * DIGEST)
    row = b""
    for name in (COMMON, rank_file(comm.rank)):
        info = mine.get(name, nothing)
        row += info.bytes.to_bytes(8, "little") + bytes.fromhex(info.sha256)
    own = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(device)
    rows = [bytes(row) for row in comm.all_gather_header(own, stage="checkpoint").tolist()]
    half = len(row) // 2
    parts = {COMMON: rows[0][:half]}
    parts |= {rank_file(rank): row[half:] for rank, row in enumerate(rows)}
    return {
        name: FileInfo(int.from_bytes(part[:8], "little"), part[8:].hex())
        for name, part in parts.items()
    }


def prune(folder: Path, keep: int) -> None:
    """Delete older checkpoints, except the newest `keep`, and those that were never completed."""
    found = {path: (path / COMPLETE).exists() for path in folder.glob(f"step-{'[0-9]' * 8}")}
    complete = sorted(
        path for path, is_complete in found.items() if is_complete and _has_own_name(path)
    )
    for path, is_complete in found.items():
        # a complete checkpoint whose folder was renamed belongs to the user
        ours = path in complete or not is_complete
        if ours and path not in complete[-keep:] and (complete and path <= complete[-1]):
            # other nodes that share the folder may delete it at the same time
            shutil.rmtree(path, ignore_errors=True)


def _has_own_name(path: Path) -> bool:
    """Whether the folder is named after its step. A renamed one does not count as the newest."""
    try:
        read_info(path)
    except FileError as error:
        log.warning("%s", error)
        return False
    return True


def find(folder: Path, comm: Comm, device: torch.device) -> Path | None:
    """The newest checkpoint that is intact on every rank; None when there are none. Collective.

    Damaged checkpoints are logged and skipped. If all are damaged, raise: the run must not silently
    start over.
    """
    steps = {
        int(path.parent.name.removeprefix("step-")): path.parent
        for path in folder.glob(f"step-{'[0-9]' * 8}/{COMPLETE}")
    }
    good = [(step,) for step, path in steps.items() if _is_intact(path, comm)]
    common = newest_on_all(good, 1, comm, device)
    if common is not None:
        return step_folder(folder, *common)
    if any(comm.all_gather_size(len(steps), device, stage="checkpoint")):
        raise CheckpointError(
            f"no checkpoint in {folder} is intact on every rank; to start over, move the folder "
            "away"
        )
    return None


def _is_intact(path: Path, comm: Comm) -> bool:
    """Whether the files that this rank will read are as they were written."""
    try:
        info = read_info(path)
        for name in files_to_read(info, comm):
            size, expected = (path / name).stat().st_size, info.files[name]
            if size != expected.bytes:
                problem = f"{name} has {size} bytes instead of {expected.bytes}"
            elif _digest(path / name) != expected.sha256:
                problem = f"the content of {name} is not what was written"
            else:
                continue
            log.warning("rank %d: checkpoint %s is damaged: %s", comm.rank, path, problem)
            return False
    except (OSError, FileError) as error:
        log.warning("rank %d: checkpoint %s cannot be used: %s", comm.rank, path, error)
        return False
    return True


def read_info(path: Path) -> CheckpointInfo:
    """Read `complete.json`. It must name the step of this folder, and a file for every rank."""
    info = read_json(path / COMPLETE, CheckpointInfo)
    if info.format != FORMAT:
        raise file_error(
            path / COMPLETE,
            f"has format {info.format}, and this version of oktopk reads format {FORMAT}",
            place="format",
            advice="resume with the version that saved it, or start another run with --name",
        )
    if step_folder(path.parent, info.step).name != path.name:
        raise file_error(
            path / COMPLETE,
            f"is of step {info.step}, and the folder is called {path.name}",
            place="step",
            advice=f"rename the folder to {step_folder(path.parent, info.step).name}",
        )
    wanted = 1 + info.world_size
    if len(info.files) != wanted or not all(
        name in info.files for name in (COMMON, *map(rank_file, range(info.world_size)))
    ):
        problem = f"names {len(info.files)} files, and {info.world_size} ranks have {wanted}"
        raise file_error(path / COMPLETE, problem, place="files")
    return info


def files_to_read(info: CheckpointInfo, comm: Comm) -> list[str]:
    """The files this rank reads: its own, or those of all ranks when the world size differs."""
    same = info.world_size == comm.size
    ranks = [comm.rank] if same else range(info.world_size)
    return [COMMON, *(rank_file(rank) for rank in ranks)]


def load(path: Path, comm: Comm) -> tuple[CheckpointInfo, Any, list[Any]]:
    """The info, the common content, and the contents of the rank files of `files_to_read`."""
    info = read_info(path)
    common, *ranks = (read_tensors(path / name) for name in files_to_read(info, comm))
    return info, common, ranks


# The model that all ranks agree on, also while each of them trains alone.


def agreed_model(run: Run) -> nn.Module:
    """The model; where the ranks have different weights, a copy with their mean and that of the
    batch-norm statistics. Collective."""
    if run.exchange.weights_agree:
        return run.model
    mean = deepcopy(run.model)
    with torch.no_grad():
        flat = parameters_to_vector(mean.parameters())
        total = run.comm.all_reduce_(flat, stage="validation")
        vector_to_parameters(total / run.comm.size, mean.parameters())
        average_statistics(mean, run.comm)
    return mean


# What a checkpoint holds, and how a run is saved to one and restored from one.


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


def save_run(run: Run, recorder: Recorder, directory: Path) -> bool:
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
    contents: dict[str, Any] = {rank_file(run.comm.rank): own}
    if run.comm.rank == 0:
        contents[COMMON] = {
            "model": model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "config": to_toml(run.config),
            "corpus": run.task.fingerprint(),
            "steps_per_epoch": run.steps_per_epoch,
            "journal_bytes": recorder.metrics_bytes,
        }
    folder = directory / CHECKPOINT_FOLDER
    save(folder, run.progress.step, contents, run.comm, run.device)
    if run.env.local_rank == 0:
        prune(folder, run.config.keep)
    return True


def restore_run(run: Run, path: Path, given: Collection[str]) -> int:
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


def _read(run: Run, path: Path) -> tuple[CheckpointInfo, CommonState, list[RankState]]:
    """Read the files of a checkpoint, and check their types and that all are of the same step."""
    info, common, ranks = load(path, run.comm)
    advice = f"to resume from an earlier checkpoint, move {path} away"
    common_name, *names = files_to_read(info, run.comm)
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
    stored: Config = parse(common.config, "stored", f"{path / COMMON}: config", whole=True)
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
