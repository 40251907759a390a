# SPDX-License-Identifier: Apache-2.0
"""How a run is asked to stop: SIGTERM or SIGINT to any rank, then all ranks save and leave.

1. The first signal sets a flag on the rank that receives it. The default handlers are back after
   that, so a second signal ends the process at once.
2. The recorder sends the flag along with the metrics that it gathers from all ranks anyway, at
   least every `MAX_SECONDS_BETWEEN_CHECKS`. From then on every rank knows that one was asked.
3. All ranks save a checkpoint of the same step and raise `StoppedError`.
"""

from __future__ import annotations

from oktopk.errors import StoppedError
from oktopk.utils.signals import SignalFlag

MAX_SECONDS_BETWEEN_CHECKS = 5.0
"""Longest time, in whole steps, until all ranks know that one was asked to stop."""


class StopRequest:
    """Turns the first stop signal in its block into a flag that ranks share."""

    def __init__(self) -> None:
        self.agreed = False
        """Whether every rank knows that one of them received a signal."""

        self._signal: SignalFlag | None = None

    @property
    def requested(self) -> bool:
        """Whether this rank received a signal."""
        return self._signal is not None and self._signal.received

    def __enter__(self) -> StopRequest:
        self._signal = SignalFlag()
        return self

    def __exit__(self, *_: object) -> None:
        if self._signal is not None:
            self._signal.close()

    def share(self, any_rank: bool) -> None:
        """Take in whether any rank has the flag set. Every rank calls it with the same value."""
        self.agreed = self.agreed or any_rank

    def raise_if_agreed(self, step: int, saved: bool) -> None:
        """End the run, once the checkpoint of this step is saved, if the exchange can be saved."""
        if not self.agreed:
            return
        if saved:
            raise StoppedError(f"stopped and saved at step {step}: continue with --resume")
        raise StoppedError(
            f"stopped at step {step}; a baseline saves no checkpoints, so it starts from the "
            "beginning next time"
        )


def steps_between_checks(seconds_per_step: float, most: int) -> int:
    """Steps until ranks share their flags again. The slowest rank decides, so that all agree."""
    return max(1, min(most, int(MAX_SECONDS_BETWEEN_CHECKS / seconds_per_step)))
