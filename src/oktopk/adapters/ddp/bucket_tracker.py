"""`BucketTracker`: in which layout a step is exchanged, while DDP rebuilds its buckets.

DDP rebuilds its buckets once, in the order in which gradients came: after its first backward pass,
with a static graph after its second. Where a gradient lies in a buffer decides in which order the
ranks' values are added (a ring starts elsewhere), and so the last bits of the sum. A run that
is resumed has a new DDP, which starts from its first buckets again. It still has to exchange
every step in the layout that the uninterrupted run had in that step. Hence three rules:

| step of the run | layout |
|---|---|
| the first of all | the one that DDP has |
| the others before `SETTLED` | the same as in the first step |
| from `SETTLED` on | the one that DDP settled on, which a state dict carries |

Where the rules ask for another layout than DDP has at the moment, the gradients are copied. That
lasts a few steps, in a new run as in a resumed one. No rule can help a run that is resumed twice
within its first `SETTLED` steps: none of its processes may have seen what DDP settles on.
"""

from __future__ import annotations

from oktopk.engine.buckets import Layout

REBUILT = 3  # backward passes of a DDP, of which the last has the final buckets in every mode
SETTLED = REBUILT + 1  # so a run resumed before REBUILT steps has seen that many when it is due
STEADY = 2  # equal steps after which DDP is taken to stay with its buckets


class BucketTracker:
    """Watches DDP's buckets. Asking DDP whether it has rebuilt would take a lock of backward's."""

    def __init__(self) -> None:
        self.settled: Layout = []
        """What DDP settled on, in this process or in the one that saved; empty when not known."""

        self._seen: Layout = []
        self._num_seen = 0  # backward passes; REBUILT at once when DDP is seen to rebuild
        self._num_equal = 0

    @property
    def is_steady(self) -> bool:
        """Whether DDP has stayed with its buckets for some steps."""
        return self._num_equal >= STEADY

    def restart(self, settled: Layout) -> None:
        """Begin again, with what a state dict says that DDP will settle on."""
        self.__init__()
        self.settled = settled

    def observe(self, step: int, current: Layout, ddp: Layout) -> Layout:
        """The layout of this step, where the last step had `current` and DDP now has `ddp`."""
        self._num_equal = self._num_equal + 1 if ddp == self._seen else 0
        self._num_seen = REBUILT if self._seen and ddp != self._seen else self._num_seen + 1
        self._seen = ddp
        # DDP may settle on other buckets than those that were saved, as after a change of their
        # size: then a resumed run cannot have the same bits, but it can have the speed
        if self._num_seen >= REBUILT and (not self.settled or self.is_steady):
            self.settled = ddp
        if step >= SETTLED and self.settled:
            return self.settled
        return current or ddp
