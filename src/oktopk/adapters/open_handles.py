# SPDX-License-Identifier: Apache-2.0
"""Which handles exchange which parameters with which ranks.

`attach` and `local_steps` may share a model, dense or sparse gradients inside a site and local
steps across sites. Over the same ranks one of them would only repeat what the other has done.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor

from oktopk.adapters.handle import BaseHandle
from oktopk.engine.saved_state import Exchanged


@dataclass(frozen=True, slots=True)
class _Reach:
    """What a handle exchanges, and with which ranks of the job."""

    parameters: frozenset[int]
    """Their ids: the handle keeps them alive."""

    ranks: frozenset[int]


_OPEN: WeakKeyDictionary[BaseHandle, _Reach] = WeakKeyDictionary()


def note_open(handle: BaseHandle, parameters: Iterable[Tensor], ranks: Collection[int]) -> None:
    """Remember a handle until it is closed or dropped."""
    _OPEN[handle] = _Reach(frozenset(map(id, parameters)), frozenset(ranks))


def refuse_other_exchange(
    parameters: Iterable[Tensor], ranks: Collection[int], exchanged: Exchanged
) -> None:
    """Raise ValueError where the other kind of handle has these parameters and two of the ranks."""
    ids = set(map(id, parameters))
    for handle, reach in list(_OPEN.items()):
        shared = sorted(reach.ranks.intersection(ranks))
        if handle.exchanged != exchanged and len(shared) > 1 and not handle.closed:
            if reach.parameters.isdisjoint(ids):
                continue
            raise ValueError(
                f"ranks {shared} exchange the {handle.exchanged} of this model already, so they "
                f"cannot exchange its {exchanged} too: close() the other handle first, or let one "
                "work inside a site and the other across sites (docs/guides/local_steps.md)"
            )
