"""`Undo`: what a step has done to the residual so far, to be taken back to the bit."""

from __future__ import annotations

from torch import Tensor


class Undo:
    """Costs no memory of its own: a bucket that was accumulated holds what the residual was.

    The bucket is overwritten by the average, or by zeros, once it is decided whether the step
    counts; until then it is the only copy (16-bit buckets are widened first, and that copy kept).
    """

    def __init__(self) -> None:
        self._accumulated: list[tuple[Tensor, Tensor]] = []
        self._held: list[tuple[Tensor, Tensor]] = []

    def accumulated(self, residual: Tensor, before: Tensor) -> None:
        """`residual` has become acc, `before` has what it was."""
        self._accumulated.append((residual, before))

    def hold(self, residual: Tensor) -> None:
        """Leave this part out of the step: nothing of it may be offered."""
        self._held.append((residual, residual.clone()))
        residual.zero_()

    def put_back(self) -> None:
        """The step does not count: everything is as it was before."""
        for residual, before in self._accumulated:
            residual.copy_(before)
        for residual, owed in self._held:
            residual.copy_(owed)

    def release(self) -> None:
        """The step counts: what was left out of it is owed as before."""
        for residual, owed in self._held:
            residual.add_(owed)
