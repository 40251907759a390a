# SPDX-License-Identifier: Apache-2.0
"""Have the kernels for CPUs ready before the first step, so that none is compiled inside of one.

Numba compiles a kernel when it is first called, and keeps what it has compiled in a folder. So one
process of a machine calls all kernels once, which takes seconds, while the others wait at a lock in
that folder; then they load what it has written.
"""

from __future__ import annotations

import fcntl
import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

LOCK_SECONDS = 120.0
"""How long to wait for another process that compiles; to compile beside it only takes longer."""
POLL_SECONDS = 0.05

OnProgress = Callable[[int, int], None]
"""Called with how many kernels are compiled, and how many there are."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """How long it took until kernels were compiled, by this process or by one it waited for."""

    seconds: float
    folder: Path | None
    """Where the next process finds them; None if Numba may not write anywhere."""

    def __str__(self) -> str:
        where = f"cached in {self.folder}" if self.folder else NOT_CACHED
        return f"compiled the kernels in {self.seconds:.1f} s ({where})"


DTYPES = torch.float32, torch.float64
"""Those of sums; gradients may have others."""
NOT_CACHED = (
    "not cached, so every process does it again: no folder for the cache can be written; set "
    "NUMBA_CACHE_DIR to one"
)
_ready: set[torch.dtype] = set()
"""The dtypes whose kernels are ready in this process."""


def make_ready(
    dtypes: Iterable[torch.dtype], on_progress: OnProgress | None = None
) -> Compiled | None:
    """Compile all kernels for sums of some dtypes, or load them, if that was not done before.

    Returns None if there was nothing to compile, and shows no progress then. Processes of a machine
    that call this at the same time compile once; none waits for another that only loads.
    """
    wanted = set(dtypes) - _ready
    missing = [dtype for dtype in DTYPES if dtype in wanted]
    if not missing or find_spec("numba") is None:
        return None
    started, folder = time.monotonic(), _cache_folder()
    marks = [folder / _mark(dtype) for dtype in missing] if folder else []
    if folder and all(mark.exists() for mark in marks):
        _call_all(missing)
        return None
    with _locked(folder):
        _call_all(missing, on_progress)
        for mark in marks:
            mark.touch()
    return Compiled(time.monotonic() - started, folder)


def _call_all(dtypes: list[torch.dtype], on_progress: OnProgress | None = None) -> None:
    from oktopk.kernels.cpu.every_kernel import calls

    every = [call for dtype in dtypes for call in calls(dtype)]
    for number, call in enumerate(every):
        if on_progress is not None:
            on_progress(number, len(every))
        call()
    _ready.update(dtypes)


def _cache_folder() -> Path | None:
    """Where Numba keeps what it compiles: beside the kernels, or in the user's cache."""
    from oktopk.kernels.cpu.every_kernel import cache_path

    path = cache_path()
    return Path(path) if path else None


@cache
def _mark(dtype: torch.dtype) -> str:
    """The name of a file that says that all kernels are in the cache, as they are here and now.

    Other sources, another Numba and another processor have other names. If the cache was emptied
    by hand but for this file, kernels are compiled without a lock.
    """
    import llvmlite.binding as llvm
    import numba

    versions = numba.__version__, sys.implementation.cache_tag, llvm.get_host_cpu_name()
    digest = hashlib.sha256(repr((versions, str(dtype))).encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return f"oktopk-{digest.hexdigest()[:16]}.ready"


@contextmanager
def _locked(folder: Path | None) -> Iterator[None]:
    """Keep other processes from compiling too, for the length of the block."""
    if folder is None:
        yield
        return
    with (folder / "oktopk.lock").open("w") as file:
        deadline = time.monotonic() + LOCK_SECONDS
        while not _is_locked_by_us(file.fileno()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        yield


def _is_locked_by_us(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, as some networks have
        return True
    return True
