# SPDX-License-Identifier: Apache-2.0
"""What `LocalSteps` saves beside the residual: weights, float buffers, their anchors, momentum,
steps of the round, and what is in flight.

The ranks leave the anchor by different amounts, so a state that is taken inside a round belongs to
one rank. Anchor and momentum are the same on every rank. With several fragments the state of a rank
is the list of theirs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from oktopk.adapters.buffers import FLOATS
from oktopk.adapters.handle import BaseHandle
from oktopk.adapters.local_driver import SHARED_METHOD, InFlight, RoundDriver, landed
from oktopk.adapters.local_writes import Written, listed
from oktopk.adapters.parameters import ParameterLayout
from oktopk.adapters.thread import finished
from oktopk.errors import StateError
from oktopk.exchange.saved_state import (
    DTYPES,
    RANKS,
    Exchanged,
    Saved,
    SavedRates,
    checked_tensors,
    parse_metadata,
    taken_over,
)
from oktopk.methods.base import Count
from oktopk.sparse import acc_dtype
from oktopk.stats import StepStats

KEYS = ("anchor", "weights", "momentum", "local_steps")
FRAGMENTS = "fragments"
"""Key of the states of all fragments in the state of a rank that has several."""


@dataclass(frozen=True, slots=True)
class Round:
    """One rank's round: where it started and how far it is."""

    local_steps: int
    """Optimizer steps since the last exchange."""

    anchor: dict[str, Tensor]
    """The weights after the last exchange."""

    weights: dict[str, Tensor]
    """The weights now."""

    momentum: dict[str, Tensor]
    """Of the outer step; empty if it has none."""

    launched: dict[str, Tensor]
    """The weights at the launch of the exchange that is in flight; empty if none is."""

    stats: StepStats | None
    """Of the exchange that is in flight: its result is in the anchor already."""

    buffers: dict[str, Tensor]
    """The float buffers now; empty in a fragment without any."""

    buffer_anchor: dict[str, Tensor]
    """The float buffers after the last exchange."""
    written: Written = field(default_factory=Written)
    """What something else than the optimizer has written, and no exchange has dealt with yet."""

    def landed(self, mixing: float, *, roll_back: bool) -> Round:
        """The same with nothing in flight: what was launched is applied, or all is rolled back."""
        if self.stats is None and not roll_back:
            return self
        # what was loaded since the launch stays, and what else was written are moves
        written = self.written.copy()
        written.forget(written.values.keys() - written.loaded)
        weights = {
            name: anchor
            if roll_back
            else landed(anchor, self.weights[name], self.launched[name], mixing)
            for name, anchor in self.anchor.items()
        }
        weights |= {n: x if roll_back else self.weights[n] for n, x in written.values.items()}
        weights = {name: weight.to(self.weights[name].dtype) for name, weight in weights.items()}
        buffers = self.buffers | self.buffer_anchor
        more = {"buffers": buffers, "written": written}
        return replace(self, weights=weights, launched={}, stats=None, **more)

    def started_from(self, starts: Mapping[str, Tensor]) -> Round:
        """The same where all ranks have written these weights, and they are a new start."""
        anchor = self.anchor | {name: x.to(self.anchor[name].dtype) for name, x in starts.items()}
        momentum = _zeroed(self.momentum, starts)
        return replace(self, anchor=anchor, momentum=momentum, written=Written())

    def change(self, name: str) -> Tensor:
        """What the weights of a parameter have changed by since the last exchange."""
        anchor, weights = self.anchor[name], self.weights[name]
        return anchor.to(weights.dtype).to(anchor.dtype) - weights


@dataclass(frozen=True, slots=True)
class SavedLocalSteps(Saved):
    """The state of a `LocalSteps` that was read and checked: one rank's."""

    round: Round


@dataclass(frozen=True, slots=True)
class SavedFragments(Saved):
    """The states of all fragments; what `Saved` has is that of the first."""

    fragments: list[SavedLocalSteps]


def joined(fragments: list[SavedLocalSteps]) -> SavedFragments:
    """The states of all fragments as one."""
    return SavedFragments(**_fields(fragments[0]), fragments=fragments)


def load(
    state: Any,
    saved: Saved,
    *,
    rank: int,
    world_size: int,
    parameters: Mapping[str, Tensor],
    mixing: float,
    roll_back: bool,
) -> SavedLocalSteps:
    """Add what is particular to local steps to `saved`, which was read from the same state.

    If the world size changes inside a round, a rank takes over the weights of one old rank, and the
    weight changes of the others are added to its residual: so the sum over ranks of residual plus
    weight change stays what it was. An exchange that is in flight is applied before; with
    `roll_back`, which is for one that was skipped in some fragment, all weights are the anchor's.
    """
    try:
        states = state[RANKS] if isinstance(state, dict) and RANKS in state else state
        if not isinstance(states, list):
            return _joined(saved, _fitted(_parse(states), parameters))
        # `saved_state.load` has checked that these are the states of all ranks, each once
        ordered = sorted(states, key=_rank_of)
        rounds = [_fitted(_parse(each), parameters) for each in ordered]
        if len({each.local_steps for each in rounds}) > 1:
            raise StateError(
                "the ranks' states are of different optimizer steps: pass those of one"
            )
        if len(rounds) == world_size:
            return _joined(saved, rounds[rank])
        rounds = [each.landed(mixing, roll_back=roll_back) for each in rounds]
        starts = _starts(rounds)
        rounds = [each.started_from(starts) for each in rounds]
        saved = replace(saved, residuals=_zeroed(saved.residuals, starts))
        return _resharded(saved, rounds, taken_over(rounds, rank, world_size))
    except StateError as error:
        raise StateError(f"rank {rank}: {error}") from error.__cause__


def check_shards(state: Any, shards: int, rank: int, world_size: int) -> None:
    """Raise StateError for a state of other shards: a shard of a model fits no other."""
    states = state[RANKS] if isinstance(state, dict) and RANKS in state else state
    is_own = not isinstance(states, list)
    for each in [states] if is_own else states:
        if not isinstance(each, dict) or "metadata" not in each:
            return  # `saved_state.load` says what is missing
        saved = parse_metadata(each["metadata"])
        same = is_own and saved.world_size == world_size and saved.shards == shards
        if not same and max(saved.shards, shards) > 1:
            raise StateError(
                f"rank {rank}: the state is of {saved.replicas} sites of {saved.shards} ranks, and "
                f"these are {world_size // shards} of {shards}: of a model that FSDP2 shards, each "
                "rank loads its own state, on the mesh that saved it"
            )


def _resharded(saved: Saved, rounds: list[Round], mine: Sequence[Round]) -> SavedLocalSteps:
    """The round of a rank that takes over those in `mine`, of all `rounds` that were saved."""
    first = rounds[0]
    residuals = {name: residual.clone() for name, residual in saved.residuals.items()}
    for each in mine[1:]:
        if all(torch.isfinite(x).all() for x in each.weights.values()):  # else it is rolled back
            for name, residual in residuals.items():
                residual.add_(each.change(name))
    own = {"weights": first.anchor, "buffers": first.buffer_anchor}
    if mine:
        own = {"weights": mine[0].weights, "buffers": mine[0].buffers}
    return _joined(Saved(saved.metadata, residuals, saved.arrived), replace(first, **own))


def _starts(rounds: list[Round]) -> dict[str, Tensor]:
    """Weights that something else than the optimizer has written, the same on all ranks.

    StateError for loaded ones that are not: no rank could go on from them.
    """
    values = [each.written.values for each in rounds]
    starts, refused = {}, []
    for name in dict.fromkeys(name for each in values for name in each):
        theirs = [each[name] for each in values if name in each]
        if len(theirs) == len(rounds) and all(torch.equal(x, theirs[0]) for x in theirs):
            starts[name] = theirs[0]
        elif any(name in each.written.loaded for each in rounds):
            refused.append(name)
    if refused:
        raise StateError(
            f"weights were loaded into {listed(refused)} before the state was saved, and they are "
            "not the same on all ranks: load the states on as many ranks as saved them, or an "
            "older one"
        )
    return starts


def _zeroed(tensors: dict[str, Tensor], names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(x) if name in names else x for name, x in tensors.items()}


def _joined(saved: Saved, each: Round) -> SavedLocalSteps:
    return SavedLocalSteps(**_fields(saved), round=each)


def _fields(saved: Saved) -> dict[str, Any]:
    return {field.name: getattr(saved, field.name) for field in fields(Saved)}


def _rank_of(state: Any) -> int:
    return json.loads(state["metadata"])["rank"]


def _parse(state: Any) -> Round:
    if not isinstance(state, dict) or not set(KEYS) <= set(state):
        raise StateError(f"not a state of local_steps: expected one with {sorted(KEYS)}")
    try:
        local_steps = msgspec.convert(state["local_steps"], Count)
    except msgspec.ValidationError as error:
        raise StateError(f"'local_steps' of the state cannot be read: {error}") from error
    anchor = checked_tensors(state["anchor"], "anchor", DTYPES)
    for name, x in anchor.items():
        if not torch.isfinite(x).all():
            raise StateError(f"the anchor of {name!r} has a NaN or Inf: load an older checkpoint")
    weights = checked_tensors(state["weights"], "weights", FLOATS)
    momentum = checked_tensors(state["momentum"], "momentum", DTYPES)
    # a state that was saved before there was a delay has neither
    launched = checked_tensors(state.get("launched", {}), "launched", FLOATS)
    stats = _parse_stats(state.get("launched_stats", ""))
    if (stats is None) != (not launched) or (launched and launched.keys() != weights.keys()):
        raise StateError("'launched' and 'launched_stats' of the state do not fit each other")
    # nor have states that were saved before buffers were exchanged
    buffers = checked_tensors(state.get("buffers", {}), "buffers", FLOATS)
    buffer_anchor = checked_tensors(state.get("buffer_anchor", {}), "buffer_anchor", FLOATS)
    # nor has one that was saved before there was a watch for writes
    written = checked_tensors(state.get("written", {}), "written", FLOATS)
    loaded = state.get("loaded", [])
    if not isinstance(loaded, list) or not all(name in written for name in loaded):
        raise StateError("'loaded' and 'written' of the state do not fit each other")
    own = Written(written, set(loaded))
    each = local_steps, anchor, weights, momentum, launched, stats, buffers, buffer_anchor
    return Round(*each, own)


def write_stats(stats: StepStats | None) -> str:
    """The text of a state's statistics; none are the empty text.

    Without the seconds that it took: equal runs have equal states.
    """
    if stats is None:
        return ""
    timeless = replace(stats, select=0.0, exchange=0.0, scatter=0.0, exposed=0.0)
    return json.dumps(msgspec.to_builtins(timeless))


def _parse_stats(text: Any) -> StepStats | None:
    if text == "":
        return None
    try:
        return msgspec.convert(json.loads(text), StepStats)
    except (TypeError, json.JSONDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise StateError(f"'launched_stats' of the state cannot be read: {error}") from error


def _fitted(each: Round, parameters: Mapping[str, Tensor]) -> Round:
    """With exactly the parameters that this run trains.

    `saved_state.load` has checked the names: one that is missing was frozen, so its weights are
    those that it has now.
    """
    written = each.written.values
    for tensors in (each.anchor, each.weights, each.momentum, each.launched, written):
        for name in tensors.keys() & parameters.keys():
            theirs, mine = tuple(tensors[name].shape), tuple(parameters[name].shape)
            if mine != theirs:
                raise StateError(f"{name!r} has the shape {theirs} in the state and {mine} here")
    anchor = {
        name: each.anchor[name] if name in each.anchor else p.detach().to(acc_dtype(p))
        for name, p in parameters.items()
    }
    weights = {name: each.weights.get(name, p.detach()) for name, p in parameters.items()}
    momentum = {name: x for name, x in each.momentum.items() if name in parameters}
    launched = {name: each.launched.get(name, x) for name, x in weights.items()}
    launched = launched if each.launched else {}
    written = each.written.copy()
    written.forget(written.values.keys() - parameters.keys())
    fitted = {"anchor": anchor, "weights": weights, "momentum": momentum, "launched": launched}
    return replace(each, **fitted, written=written)


def by_fragment(state: Any, num: int, rank: int) -> list[Any]:
    """For each of `num` fragments its state, or those of all ranks, from that of the model."""
    states = state[RANKS] if isinstance(state, dict) and RANKS in state else state
    try:
        if isinstance(states, list):
            if not states:
                raise StateError("the list of states is empty: pass those of all ranks")
            return [list(each) for each in zip(*(_parts(one, num) for one in states), strict=True)]
        return _parts(states, num)
    except StateError as error:
        raise StateError(f"rank {rank}: {error}") from None


def is_skipped_in_flight(parts: list[Any]) -> bool:
    """Whether an exchange that is in flight was skipped in a fragment: it rolls all of them back.

    `parts` are of `by_fragment`, and were read before.
    """
    states = [each for part in parts for each in (part if isinstance(part, list) else [part])]
    stats = [_parse_stats(each.get("launched_stats", "")) for each in states]
    return any(each is not None and each.skipped for each in stats)


def _parts(state: Any, num: int) -> list[Any]:
    several = isinstance(state, dict) and FRAGMENTS in state
    parts = state[FRAGMENTS] if several else [state]
    if not isinstance(parts, list):
        raise StateError(f"{FRAGMENTS!r} must be a list, got a {type(parts).__name__}")
    if len(parts) != num:
        raise StateError(
            f"the state was saved with fragments={len(parts)} and this is fragments={num}: call "
            "local_steps with the number it was saved with"
        )
    return parts


# `Fragment`: a part of the model that is exchanged by itself; by default there is one, the model.
#
# Each has its own engine, anchor and round. All have one communicator, and one background thread.


class Fragment(BaseHandle[RoundDriver]):
    """The state of one fragment. `LocalSteps` says when it is exchanged, and closes what it uses.

    Nothing of it may be in use by the background thread when its state is read or loaded.
    """

    exchanged: Exchanged = "weight changes"
    method_advice = (
        "call local_steps with the method it was saved with; method='auto' stands for "
        f"{SHARED_METHOD!r}"
    )

    def state_dict(self) -> dict[str, Any]:
        """See `LocalSteps.state_dict`."""
        driver = self.driver
        parameters, in_flight = driver.parameters.stored(), driver.in_flight
        momentum = {} if driver.momentum is None else driver.views(driver.momentum)
        stats = None if in_flight is None else in_flight.job.result()
        return {
            "residuals": driver.copied_residuals(),
            "anchor": _copies(driver.views(driver.anchor)),
            "weights": _copies({name: p.detach() for name, p in parameters.items()}),
            "momentum": _copies(momentum),
            "launched": {} if in_flight is None else _copies(in_flight.weights),
            "launched_stats": write_stats(stats),
            **driver.buffers.state_dict(),
            "written": _copies(driver.watch.written.values),
            "loaded": sorted(driver.watch.written.loaded),
            "local_steps": driver.local_steps,
            "metadata": self._metadata([], SavedRates(rates={}, peaks={}, scale=None)),
        }

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """See `LocalSteps.load_state_dict`."""
        self.load_saved(self.parse(state))

    def parse(self, state: Any, *, roll_back: bool = False) -> SavedLocalSteps:
        """This rank's part of a state; StateError if it does not fit.

        `roll_back`: of another number of ranks, with an exchange in flight that was skipped.
        """
        rank, world_size = self._place
        check_shards(state, self.driver.engine.shards.size, rank, world_size)
        saved = load(
            state,
            super()._parse(state),
            rank=rank,
            world_size=world_size,
            parameters=self.driver.parameters.stored(),
            mixing=self.driver.options.mixing,
            roll_back=roll_back,
        )
        try:
            self.driver.buffers.check(saved.round.buffers, saved.round.buffer_anchor)
        except StateError as error:
            raise StateError(f"rank {rank}: {error}") from None
        return saved

    def load_saved(self, saved: SavedLocalSteps) -> None:
        """Take over a state that was read."""
        driver, each = self.driver, saved.round
        weights = driver.parameters.stored()
        with torch.no_grad(), driver.engine.lock.changing():
            self._load_exchange(saved, driver.layout)
            for name, view in driver.views(driver.anchor).items():
                view.copy_(each.anchor[name])
                weights[name].copy_(each.weights[name])
            if driver.momentum is not None:
                driver.momentum.zero_()
                for name, view in driver.views(driver.momentum).items():
                    if name in each.momentum:
                        view.copy_(each.momentum[name])
            driver.buffers.load(each.buffers, each.buffer_anchor)
            driver.local_steps = driver.loaded_steps = each.local_steps
            driver.in_flight = self._in_flight(each)
            driver.num_steps, driver.notices = 0, []
            driver.is_at_anchor = False
            driver.watch.written = each.written.copy()
            driver.is_checked = False

    def _in_flight(self, each: Round) -> InFlight | None:
        if each.stats is None:
            return None
        engine, device = self.driver.engine, self.driver.parameters.device
        counts = engine.step - 1, engine.skipped - each.stats.skipped
        launched = {name: x.to(device) for name, x in each.launched.items()}
        return InFlight(launched, counts, finished(each.stats), 0)

    def close(self) -> None:
        """Nothing: connections and threads belong to `LocalSteps`."""


def divide(parameters: ParameterLayout, num: int) -> list[ParameterLayout]:
    """The trained parameters in `num` parts of about equal size, in the order of the model.

    Each part takes parameters while that brings it nearer to its share of those that are left, and
    leaves at least one for every later part.
    """
    names = list(parameters.parameters)
    if num > len(names):
        raise ValueError(
            f"fragments must be at most the number of trained parameters, {len(names)}, got {num}"
        )
    parts = []
    for later in range(num - 1, -1, -1):
        numels = [parameters.numel(name) for name in names]
        share = sum(numels) / (later + 1)
        sizes = range(len(names) - later, 0, -1)  # the longest of equals: shards may be empty
        size = min(sizes, key=lambda size: abs(sum(numels[:size]) - share))
        parts.append(parameters.part(set(names[:size])))
        names = names[size:]
    return parts


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    contiguous = torch.contiguous_format
    return {name: x.clone(memory_format=contiguous) for name, x in tensors.items()}
