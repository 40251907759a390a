# SPDX-License-Identifier: Apache-2.0
"""When weights are written by others than the optimizer, and when a state may be taken."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from oktopk.adapters.parameters import ParameterLayout
from oktopk.comm.communicator import Comm
from oktopk.comm.consistency import checksum, ranks_text
from oktopk.exchange.saved_state import clean_name

# Weights that something else than the optimizer writes, as `model.load_state_dict` does.
#
# An exchange would take them for one huge move of this rank: send a part of it, set the rest back.
# So such writes are noticed between the end of an optimizer step and the begin of the next, and
# before an exchange the ranks compare what was written. If it is the same on all of them, the
# weights are a new start. If it is not, and was loaded, it is an error; else it is a move of each
# rank, like a projection after every step, or the step of another optimizer.


LOADED = 2
"""Of a parameter: by `load_state_dict`. 1 is written otherwise, 0 not at all."""


@dataclass(slots=True)
class Written:
    """What was written since the last exchange, by parameter."""

    values: dict[str, Tensor] = field(default_factory=dict)
    """The weights as they were written: those at the begin of the next optimizer step."""

    loaded: set[str] = field(default_factory=set)
    """Those that `load_state_dict` has written."""

    def copy(self) -> Written:
        """The same tensors, and what is written later is not in it."""
        return Written(dict(self.values), set(self.loaded))

    def forget(self, names: Iterable[str]) -> None:
        """What was written to these parameters is dealt with."""
        for name in list(names):
            self.values.pop(name, None)
            self.loaded.discard(name)


class Watch:
    """Notices writes to the parameters of one fragment."""

    def __init__(self, parameters: ParameterLayout) -> None:
        self._parameters = parameters
        self.written = Written()
        self.sees_all = True
        """Whether all writes matter. Only what is loaded does, once the ranks have found that
        others differ: it would cost a copy of the weights in every step to know no more."""

        self.note()

    def note(self) -> None:
        """What was written until now was the optimizer's, or ours."""
        self._marks = self._parameters.marks()
        self._kept = self.written.copy()
        self._sums: dict[str, Tensor | None] = {}
        """Of weights that were loaded into since the last note: as they were before, or None where
        something else had written them by then."""

    def before_load(self, names: Iterable[str]) -> None:
        """`load_state_dict` will write these parameters."""
        weights, marks = self._parameters.stored(), self._parameters.marks()
        for name in marks.keys() & set(names) - self._sums.keys():
            is_untouched = marks[name] == self._marks[name]
            self._sums[name] = checksum(weights[name]) if is_untouched else None

    def look(self, anchors: Mapping[str, Tensor] | None) -> None:
        """Keep what was written since the last note.

        `anchors` are what the weights are if nobody has written to them, where that is known. Then
        writes through `p.data` are seen too. What was undone is no write, as far as it is known:
        weights are loaded for an evaluation, and then those of before. What is written to loaded
        weights after the step that followed is a move: only another load is another start.
        """
        marks, written = self._parameters.marks(), self._kept.copy()
        names = [name for name, mark in marks.items() if mark != self._marks[name]]
        if anchors is not None and self.sees_all:
            names = different(self._parameters.stored(), anchors)
        names = [name for name in names if self._is_start(name, written)]
        weights = self._parameters.stored() if names else {}
        for name in names:
            before = self._sums.get(name)
            if before is None or bool(checksum(weights[name]) != before):
                written.values[name] = weights[name].detach().clone()
                written.loaded |= {name} & self._sums.keys()
        self.written = written

    def forget(self, done: Written) -> None:
        """What `done` has is dealt with; what was written to the same weights later is not."""
        for each in (self.written, self._kept):
            each.forget([name for name, x in done.values.items() if each.values.get(name) is x])

    def _is_start(self, name: str, written: Written) -> bool:
        """Whether a write to a parameter may be the start of the next moves."""
        return name in self._sums or (self.sees_all and name not in written.loaded)


def different(weights: Mapping[str, Tensor], anchors: Mapping[str, Tensor]) -> list[str]:
    """Names of the weights that are not the anchor's. The host waits for the device once."""
    flags = [
        (weights[name] != anchor.to(weights[name].dtype)).any() for name, anchor in anchors.items()
    ]
    return [name for name, flag in zip(anchors, torch.stack(flags).tolist(), strict=True) if flag]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What all ranks have decided about what was written."""

    adopted: dict[str, Tensor]
    """The same on all ranks: these weights are a new start."""

    moves: list[str]
    """Not the same, and not loaded: moves of each rank, as those of its optimizer are."""


def compare(
    written: Written, weights: Mapping[str, Tensor], anchors: Mapping[str, Tensor], comm: Comm
) -> Outcome:
    """Decide with the other ranks. ValueError on all of them if loaded weights differ.

    Header: 16 bytes per parameter, to every other rank. A rank where a parameter was not written
    stands for its anchor, which it may have adopted in an exchange that failed on another.
    """
    starts = {
        name: written.values.get(name, anchor.to(weights[name].dtype))
        for name, anchor in anchors.items()
    }
    sums = torch.stack([checksum(start) for start in starts.values()])
    kinds = [(name in written.values) + (name in written.loaded) for name in starts]
    mine = torch.stack([sums, sums.new_tensor(kinds)], dim=1)
    ranks = comm.all_gather_header(mine, stage="agreement").cpu()
    adopted, moves = {}, []
    for name, theirs in zip(starts, ranks.unbind(1), strict=True):
        same, kind = bool((theirs[:, 0] == theirs[0, 0]).all()), int(theirs[:, 1].max())
        if kind == LOADED and not same:
            raise ValueError(_refusal(list(starts), ranks, comm))
        if kind and same and torch.isfinite(starts[name]).all():  # else it is rolled back
            adopted[name] = starts[name]
        elif kind:
            moves.append(name)
    return Outcome(adopted, moves)


def _refusal(names: Sequence[str], ranks: Tensor, comm: Comm) -> str:
    """What to say where loaded weights differ; `ranks` has checksum and kind by rank and name."""
    loaded = ranks[:, :, 1] == LOADED
    differs = (ranks[:, :, 0] != ranks[:1, :, 0]).any(0) & loaded.any(0)
    bad = [name for name, each in zip(names, differs.tolist(), strict=True) if each]
    who = [comm.global_ranks[r] for r in loaded[:, differs].any(1).nonzero().view(-1).tolist()]
    return (
        f"rank {comm.global_rank}: {ranks_text(who)} loaded weights into {listed(bad)} after "
        "local_steps was called, and they are not the same on all ranks: load the same on each, or "
        "load them before local_steps, which takes over those of rank 0; to resume a run, load "
        "the handle's state after those of the model"
    )


def listed(names: Sequence[str]) -> str:
    """`a, b, c, d and 3 more`."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


class _LoadHook:
    """What torch calls before `load_state_dict` of a module, or of one that contains it."""

    def __init__(self, watches: Sequence[Watch], prefix: str) -> None:
        self._watches, self._prefix = watches, prefix

    def __call__(self, module: nn.Module, *_: object) -> None:
        names = {
            clean_name(self._prefix + name) for name, _ in module.named_parameters(recurse=False)
        }
        for watch in self._watches:
            watch.before_load(names)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model is not watched, and who unpickles it may not have oktopk: the hook
        of a copy does nothing, whatever its arguments."""
        return partial, (nn.Identity,)


def hook_loads(model: nn.Module, watches: Sequence[Watch]) -> list[RemovableHandle]:
    """Tell `watches` what `load_state_dict` writes, until what is returned is removed."""
    return [
        module.register_load_state_dict_pre_hook(_LoadHook(watches, f"{name}." if name else ""))
        for name, module in model.named_modules()
    ]


# `Moments`: when a state of local steps may be taken.
#
# The weights are written in place, by the optimizer and by the exchange, so in between a state
# would be half old and half new. It can be taken between steps, not inside of one.


INSIDE = (
    "the state of local_steps was asked for inside optimizer.step() or exchange(), where weights "
    "and counters are half old and half new: let the signal handler set a flag, and take the state "
    "between two steps"
)
LOOK_SECONDS = 0.02


class Moments:
    """Whether a thread is inside of a step. Others wait for its end to take a state, and it waits
    until they have taken it."""

    def __init__(self, is_stepping: Callable[[int], bool]) -> None:
        self._is_stepping = is_stepping
        """Whether a thread is inside the optimizer's step: nobody is told of the end of one that
        raised."""

        self._condition = threading.Condition()
        self._step: int | None = None
        """The thread that began a step last; None when it has ended."""

        self._block: int | None = None
        """The thread that is inside of a block of `changing`."""

    def begin_step(self) -> None:
        """A step of the optimizer begins on this thread."""
        with self._condition:
            self._step = threading.get_ident()

    def end_step(self) -> None:
        """The step has ended, and all that it did to the state."""
        with self._condition:
            self._step = None
            self._condition.notify_all()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """The block changes the state outside of a step."""
        with self._condition:
            before, self._block = self._block, threading.get_ident()
        try:
            yield
        finally:
            with self._condition:
                self._block = before
                self._condition.notify_all()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """The block takes a state. RuntimeError inside of a step of this very thread."""
        with self._condition:
            while (thread := self._inside()) is not None:
                if thread == threading.get_ident():
                    raise RuntimeError(INSIDE)
                self._condition.wait(LOOK_SECONDS)
            yield

    def _inside(self) -> int | None:
        if self._block is None and self._step is not None and self._is_stepping(self._step):
            return self._step
        return self._block
