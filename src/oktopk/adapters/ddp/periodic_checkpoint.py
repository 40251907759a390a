# SPDX-License-Identifier: Apache-2.0
"""`PeriodicCheckpoint`: every rank saves its own state every so many steps.

Many programs write their checkpoint on rank 0 alone, where no other rank takes part. The number of
steps is the same on all ranks, so each rank can save by itself what belongs to that checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oktopk.adapters.rank_files import has_states, is_complete, write_state
from oktopk.utils.files import file_error


class PeriodicCheckpoint:
    """Saves after the optimizer's step: only then do weights, moments and residuals belong
    together. A scaler may skip that step; then the state is saved before the next exchange."""

    def __init__(self, folder: Path, every: int, keep: int) -> None:
        self._folder, self._every, self._keep = folder, every, keep
        self._due: int | None = None
        """The number of finished steps whose state is still to be saved."""

    def folder_of(self, step: int) -> Path:
        """Where the states after so many steps are."""
        return self._folder / f"step-{step}"

    def saved_steps(self) -> list[int]:
        """The numbers of steps that have a folder, ascending."""
        names = [path.name.removeprefix("step-") for path in self._folder.glob("step-*")]
        return sorted(int(name) for name in names if name.isdecimal())

    def check(self, step: int) -> None:
        """Raise `FileError` if no rank has saved a state after so many steps."""
        if not has_states(self.folder_of(step)):
            known = ", ".join(map(str, self.saved_steps())) or "none"
            raise file_error(
                self.folder_of(step),
                f"no rank has saved its state after step {step}",
                advice=f"states were saved after steps: {known}; save the weights at one of them",
            )

    def after_exchange(self, step: int) -> None:
        """An exchange has ended, the `step`-th."""
        self._due = step if step % self._every == 0 else None

    def save_if_due(self, state: Callable[[], dict[str, Any]], rank: int, world_size: int) -> None:
        """Save, if the last exchange was one to save after and that has not happened yet."""
        if self._due is None:
            return
        step, self._due = self._due, None
        write_state(self.folder_of(step), state(), rank, world_size, (step, 0))
        older = [known for known in self.saved_steps() if known < step]
        # one more as long as other ranks may still fail to write theirs; the last one removes it
        kept = self._keep - is_complete(self.folder_of(step), world_size)
        for old in older[: max(len(older) - kept, 0)]:
            shutil.rmtree(self.folder_of(old), ignore_errors=True)
