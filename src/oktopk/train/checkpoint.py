"""Checkpoints: a folder per step, complete or not there.

Every rank writes its own file (what it owes, its random state) and rank 0 the common one (weights,
optimizer). When all are on disk, `complete.json` is written with their sizes and hashes; a folder
without it is not a checkpoint. Older ones go only after that, so the last good one survives a full
disk or a death while writing. Nothing is unpickled but tensors and plain values.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from oktopk.comm.communicator import Comm
from oktopk.errors import CheckpointError
from oktopk.train.all_or_raise import together
from oktopk.utils.files import (
    FileError,
    file_error,
    read_json,
    read_tensors,
    write_whole,
)

log = logging.getLogger("oktopk")

COMMON = "common.pt"
COMPLETE = "complete.json"
DIGEST = 32  # bytes of a SHA-256
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Written(msgspec.Struct, frozen=True):
    """A file of a checkpoint, as it was written."""

    bytes: Count
    sha256: Annotated[str, Meta(pattern=f"^[0-9a-f]{{{2 * DIGEST}}}$")]


class Complete(msgspec.Struct, frozen=True):
    """`complete.json`: the step, how many ranks saved it, and all files."""

    step: Count
    world_size: Annotated[int, Meta(ge=1, le=10**6)]
    files: dict[str, Written]


def rank_file(rank: int) -> str:
    return f"rank-{rank}.pt"


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def save(
    folder: Path, step: int, contents: dict[str, Any], comm: Comm, device: torch.device
) -> Path:
    """Write this rank's files, by name, and complete the checkpoint. Every rank calls it."""
    target = step_folder(folder, step)
    failed = f"writing the checkpoint of step {step}"
    mine = together(comm, device, failed, lambda: _write_all(target, contents))
    facts = Complete(step, comm.size, _gather(mine, comm, device))

    def complete() -> None:
        # several nodes may share the folder: the same content from each, replaced whole
        write_whole(target / COMPLETE, msgspec.json.encode(facts).decode())

    together(comm, device, failed, complete)
    return target


def _write_all(target: Path, contents: dict[str, Any]) -> dict[str, Written]:
    written = {}
    try:
        target.mkdir(parents=True, exist_ok=True)
        (target / COMPLETE).unlink(missing_ok=True)
        for name, content in contents.items():
            written[name] = _write(target / name, content)
    except OSError as error:
        for name in contents:
            (target / f"{name}.part").unlink(missing_ok=True)
            (target / name).unlink(missing_ok=True)
        kept = any(target.parent.glob(f"step-*/{COMPLETE}"))
        advice = "Earlier checkpoints are kept: make room and go on with --resume"
        raise CheckpointError(
            f"the checkpoint {target} could not be written: {error}. "
            f"{advice if kept else 'Make room and start again'}"
        ) from error
    return written


def _write(path: Path, content: Any) -> Written:
    draft = path.with_name(f"{path.name}.part")
    try:
        torch.save(content, draft)
    except RuntimeError as error:  # torch's writer does not say OSError when the disk is full
        raise OSError(f"{draft}: {error}") from error
    _to_disk(draft)
    draft.replace(path)
    return Written(path.stat().st_size, _digest(path))


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _gather(mine: dict[str, Written], comm: Comm, device: torch.device) -> dict[str, Written]:
    """Sizes and hashes of all ranks' files: the common one is rank 0's."""
    nothing = Written(0, "00" * DIGEST)
    row = b""
    for name in (COMMON, rank_file(comm.rank)):
        facts = mine.get(name, nothing)
        row += facts.bytes.to_bytes(8, "little") + bytes.fromhex(facts.sha256)
    own = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(device)
    rows = [bytes(row) for row in comm.all_gather(own, stage="checkpoint").tolist()]
    half = len(row) // 2
    parts = {COMMON: rows[0][:half]}
    parts |= {rank_file(rank): row[half:] for rank, row in enumerate(rows)}
    return {
        name: Written(int.from_bytes(part[:8], "little"), part[8:].hex())
        for name, part in parts.items()
    }


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` complete checkpoints, and what was never completed."""
    found = {path: (path / COMPLETE).exists() for path in folder.glob(f"step-{'[0-9]' * 8}")}
    complete = sorted(path for path, is_complete in found.items() if is_complete and _is_own(path))
    for path, is_complete in found.items():
        # a checkpoint that somebody renamed is his: it is complete, and not of this folder's name
        ours = path in complete or not is_complete
        if ours and path not in complete[-keep:] and (complete and path <= complete[-1]):
            # nodes that share the folder may do so at once
            shutil.rmtree(path, ignore_errors=True)


def _is_own(path: Path) -> bool:
    """Whether it has its own name: one renamed to a higher step must not push out the others."""
    try:
        read_facts(path)
    except FileError as error:
        log.warning("%s", error)
        return False
    return True


def find(folder: Path, comm: Comm, device: torch.device) -> Path | None:
    """The newest checkpoint that is whole for every rank; None when there is none at all.

    Damaged ones are named and passed over. When all are damaged: an error, not a fresh start.
    """
    steps = {
        int(path.parent.name.removeprefix("step-")): path.parent
        for path in folder.glob(f"step-{'[0-9]' * 8}/{COMPLETE}")
    }
    good = sorted(step for step, path in steps.items() if _whole(path, comm))
    newest = torch.full((8,), -1, dtype=torch.int64)
    newest[: len(good[-8:])] = torch.tensor(good[-8:], dtype=torch.int64)
    lists = comm.all_gather(newest.to(device), stage="checkpoint").tolist()
    common = set.intersection(*(set(steps) for steps in lists)) - {-1}
    if common:
        return step_folder(folder, max(common))
    if any(comm.all_gather_size(len(steps), device, stage="checkpoint")):
        raise CheckpointError(
            f"no checkpoint in {folder} is whole on every rank; to start anew, move the folder away"
        )
    return None


def _whole(path: Path, comm: Comm) -> bool:
    """Whether the files this rank will read are as they were written."""
    try:
        facts = read_facts(path)
        for name in needed(facts, comm):
            size, expected = (path / name).stat().st_size, facts.files[name]
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


def read_facts(path: Path) -> Complete:
    """`complete.json` of a checkpoint. It must be of this folder, and name every rank's file."""
    facts = read_json(path / COMPLETE, Complete)
    if step_folder(path.parent, facts.step).name != path.name:
        raise file_error(
            path / COMPLETE,
            f"is of step {facts.step}, and the folder is called {path.name}",
            place="step",
            advice=f"rename the folder to {step_folder(path.parent, facts.step).name}",
        )
    wanted = 1 + facts.world_size
    if len(facts.files) != wanted or not all(
        name in facts.files for name in (COMMON, *map(rank_file, range(facts.world_size)))
    ):
        problem = f"names {len(facts.files)} files, and {facts.world_size} ranks have {wanted}"
        raise file_error(path / COMPLETE, problem, place="files")
    return facts


def needed(facts: Complete, comm: Comm) -> list[str]:
    """The files this rank reads: its own, or everybody's when there were other ranks."""
    same = facts.world_size == comm.size
    ranks = [comm.rank] if same else range(facts.world_size)
    return [COMMON, *(rank_file(rank) for rank in ranks)]


def load(path: Path, comm: Comm) -> tuple[Complete, Any, list[Any]]:
    """What is known of the checkpoint, the common content, and this rank's; else all ranks'."""
    facts = read_facts(path)
    common, *owns = (read_tensors(path / name) for name in needed(facts, comm))
    return facts, common, owns
