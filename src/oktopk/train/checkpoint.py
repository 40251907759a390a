# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: one folder for each step, which is complete or does not count.

Every rank writes a file of its own (residuals, random state), and rank 0 also the common one
(weights, optimizer). When all files are on disk, `complete.json` is written with their sizes and
hashes; a folder without it is not a checkpoint. Older checkpoints are deleted only after that, so
the last good one survives a full disk and a process that is killed while it writes. Loading accepts
tensors and plain values only, never pickled code.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from oktopk.comm.communicator import Comm
from oktopk.comm.newest import newest_on_all
from oktopk.errors import CheckpointError
from oktopk.train.all_or_raise import all_or_raise
from oktopk.utils.files import (
    FileError,
    file_error,
    read_json,
    read_tensors,
    write_atomically,
    write_tensors,
)

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
