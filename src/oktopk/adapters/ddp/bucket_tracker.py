# SPDX-License-Identifier: Apache-2.0
"""`BucketTracker`: in which layout a step is exchanged, while DDP rebuilds its buckets.

DDP rebuilds its buckets once, in the order in which gradients arrived: after its first backward
pass, or after its second with a static graph. Where a gradient lies in a buffer decides in which
order the ranks' values are added (a ring starts elsewhere), and so the last bits of the sum. A run
that is resumed has a new DDP, which starts from its first buckets again. It still has to exchange
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

from enum import Enum, auto

from oktopk.engine.buckets import Layout

SETTLED = 4
"""Steps of a run before DDP's final layout is used. DDP has its final buckets in its third backward
pass in every mode; a run that is resumed in an earlier step has had a third pass by then, too."""


class Seen(Enum):
    """What the backward passes so far have shown of DDP's buckets."""

    NOTHING = auto()
    ONCE = auto()
    TWICE = auto()
    """Two passes with the same buckets: with a static graph DDP may still rebuild them."""

    REBUILT = auto()
    """Other buckets than in the pass before. DDP rebuilds once, so these are the final ones."""

    REBUILT_TWICE = auto()
    """The rebuilt buckets in a second pass."""

    STEADY = auto()
    """The same buckets in three passes: DDP keeps them."""


TRANSITIONS: dict[Seen, tuple[Seen, Seen]] = {
    # state: (after a pass with the same buckets, after a pass with other buckets)
    Seen.NOTHING: (Seen.ONCE, Seen.ONCE),
    Seen.ONCE: (Seen.TWICE, Seen.REBUILT),
    Seen.TWICE: (Seen.STEADY, Seen.REBUILT),
    Seen.REBUILT: (Seen.REBUILT_TWICE, Seen.REBUILT),
    Seen.REBUILT_TWICE: (Seen.STEADY, Seen.REBUILT),
    Seen.STEADY: (Seen.STEADY, Seen.REBUILT),
}

FINAL = (Seen.REBUILT, Seen.REBUILT_TWICE, Seen.STEADY)


class BucketTracker:
    """Watches DDP's buckets. Asking DDP whether it has rebuilt would take a lock of backward's."""

    def __init__(self) -> None:
        self.settled: Layout = []
        """What DDP settled on, in this process or in the one that saved; empty when not known."""

        self.seen = Seen.NOTHING
        self._last: Layout = []

    @property
    def is_steady(self) -> bool:
        """Whether DDP keeps its buckets, so that each can be exchanged as it arrives."""
        return self.seen is Seen.STEADY

    def restart(self, settled: Layout) -> None:
        """Begin again, with what a state dict says that DDP will settle on."""
        self.__init__()
        self.settled = settled

    def observe(self, step: int, current: Layout, ddp: Layout) -> Layout:
        """The layout of this step, where the last step had `current` and DDP now has `ddp`."""
        same, other = TRANSITIONS[self.seen]
        self.seen, self._last = same if ddp == self._last else other, ddp
        # DDP may settle on other buckets than those that were saved, as after a change of their
        # size: then a resumed run cannot have the same bits, but it can have the speed
        if self.seen in FINAL and (not self.settled or self.is_steady):
            self.settled = ddp
        if step >= SETTLED and self.settled:
            return self.settled
        return current or ddp
