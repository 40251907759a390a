# SPDX-License-Identifier: Apache-2.0
"""The state dict of a handle: its schema, whether it fits this run, and a change of world size.

What is read is checked here, once, before anything of it is used.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from oktopk.errors import StateError
from oktopk.exchange.budget import Speeds
from oktopk.exchange.engine import SavedEngine
from oktopk.exchange.layout import Layout
from oktopk.methods.base import Count
from oktopk.sparse import acc_dtype
from oktopk.utils.arguments import short_repr
from oktopk.wire import CodecName

FORMAT = 2
"""Counts up when a state dict changes so that older code would misread it."""

T = TypeVar("T")
DTYPES = (torch.float32, torch.float64)
"""Of a residual."""
RANKS = "ranks"
"""Key of the states of all ranks in a gathered state."""

Exchanged = Literal["gradients", "weight changes"]
"""What a model's ranks exchange, and so what its residuals are of."""


class SavedRates(msgspec.Struct, frozen=True, kw_only=True):
    """Learning rates and loss scale of the last step (`optim.residual_scaling`)."""

    rates: dict[str, float]
    peaks: dict[str, float]
    scale: float | None


class SavedBudget(msgspec.Struct, frozen=True, kw_only=True):
    """What `density="auto"` has chosen, and what its next choices depend on."""

    density: Annotated[float, Meta(gt=0, le=1)]
    wire: CodecName
    speeds: Speeds
    """Network, kernels and codecs as probed."""

    measured: list[tuple[float, float]]
    """Seconds of computing and of exchanging since the last revision."""


class SavedMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """All of a state that is not a tensor."""

    format: int
    method: str
    world_size: Annotated[int, Meta(ge=1)]
    rank: Count
    frozen: list[str]
    """Parameters without gradients: they have no residual."""

    layout: Layout
    settled_layout: Layout
    engine: SavedEngine
    residual_scaling: SavedRates
    exchanged: Exchanged = "gradients"
    budget: SavedBudget | None = None
    shards: Annotated[int, Meta(ge=1)] = 1
    """Ranks that have one replica of the model together. Those of replica 0 are counted first."""

    @property
    def replicas(self) -> int:
        return self.world_size // self.shards

    @property
    def replica(self) -> int:
        """Which of the replicas the rank that saved belongs to."""
        return self.rank // self.shards

    @property
    def shard(self) -> int:
        """Which shard of its replica the rank that saved has."""
        return self.rank % self.shards


@dataclass(frozen=True, slots=True)
class Saved:
    """A state that was read and checked: one rank's."""

    metadata: SavedMetadata
    residuals: dict[str, Tensor]
    arrived: dict[str, Tensor]
    """By parameter, the step in which an entry last arrived; empty if that is not tracked."""


def clean_name(name: str) -> str:
    """A parameter's name without what torch.compile puts into it."""
    return name.replace("_orig_mod.", "")


def load(
    state: Any,
    *,
    rank: int,
    world_size: int,
    method: str | None,
    exchanged: Exchanged = "gradients",
    advice: str = "attach with the method it was saved with",
    parameters: Mapping[str, Tensor],
    frozen: Collection[str],
) -> Saved:
    """This rank's part of a state, or of all ranks' states, for the parameters it trains.

    `state` is what `Handle.state_dict` gave on this rank, a list of what it gave on all ranks,
    or what `Handle.gathered_state_dict` gave. A `method` of None takes any; else `advice` says what
    to do with a state of another one. Parameters that were frozen when the state was saved get
    residuals of zero; residuals of parameters that are frozen now are left out.
    """
    try:
        states = state[RANKS] if isinstance(state, dict) and RANKS in state else state
        if isinstance(states, list):
            saved = _resharded([_parse(each) for each in states], rank, world_size)
        else:
            saved = _of_this_rank(_parse(states), rank, world_size)
        if saved.metadata.exchanged != exchanged:
            raise StateError(
                f"the state has residuals of {saved.metadata.exchanged}, and {exchanged} are "
                "exchanged here: attach and local_steps cannot load each other's states"
            )
        if method is not None and saved.metadata.method != method:
            raise StateError(
                f"the state was saved with method={saved.metadata.method!r} and this is "
                f"{method!r}: {advice}"
            )
        return _fitted(saved, parameters, frozen)
    except StateError as error:
        raise StateError(f"rank {rank}: {error}") from error.__cause__


def load_flat(state: Any, here: Mapping[str, Any]) -> tuple[SavedEngine, Tensor | None]:
    """The state of a `Reducer`: `here` has what it must have been saved with."""
    keys = {*here, "residual", "engine"}
    if not isinstance(state, dict) or not keys <= set(state):
        raise StateError(f"not a state of a reducer: expected one with {sorted(keys)}")
    _check_format(state.get("format"))
    for name, mine in here.items():
        if type(state[name]) is not type(mine) or state[name] != mine:
            raise StateError(
                f"the state was saved with {name}={short_repr(state[name])}, this is {mine}"
            )
    try:
        engine = msgspec.convert(state["engine"], SavedEngine)
    except msgspec.ValidationError as error:
        raise StateError(f"'engine' of the state cannot be read: {error}") from error
    _check_engine(engine, here["size"])
    residual = state["residual"]
    if residual is None:
        return engine, None
    flat = isinstance(residual, Tensor) and residual.layout == torch.strided
    if not flat or residual.dtype not in DTYPES or residual.shape != (here["numel"],):
        expected = f"a flat fp32 or float64 tensor of {here['numel']} elements"
        raise StateError(f"the residual must be {expected}, got {short_repr(residual)}")
    if residual.device.type == "meta" or not torch.isfinite(residual).all():
        raise StateError("the residual has no data, or a NaN or Inf: load an older checkpoint")
    return engine, residual


def _parse(state: Any) -> Saved:
    """One rank's state, of the right types."""
    if not isinstance(state, dict) or not {"metadata", "residuals"} <= set(state):
        had = sorted(map(str, state)) if isinstance(state, dict) else f"a {type(state).__name__}"
        raise StateError(
            "not a state of a handle: expected what `state_dict` gave, with 'metadata' and "
            f"'residuals', got {had or 'an empty one'}"
        )
    metadata = parse_metadata(state["metadata"])
    residuals = checked_tensors(state["residuals"], "residuals", DTYPES)
    arrived = checked_tensors(state.get("arrived", {}), "arrived", (torch.int32,))
    for name, residual in residuals.items():
        if not torch.isfinite(residual).all():
            raise StateError(f"the residual of {name!r} has a NaN or Inf: load an older checkpoint")
    _check_layout(metadata, residuals)
    return Saved(metadata, residuals, arrived)


def _check_format(version: Any) -> None:
    if not isinstance(version, int) or version != FORMAT:  # a tensor has no truth value
        raise StateError(
            f"the state has format {short_repr(version)} and this version of oktopk reads format "
            f"{FORMAT}: resume with the version that saved it"
        )


def write_metadata(metadata: SavedMetadata) -> str:
    """The text of a state's metadata."""
    return json.dumps(msgspec.to_builtins(metadata))  # not msgspec's JSON, which has no Infinity


def parse_metadata(text: Any) -> SavedMetadata:
    if not isinstance(text, str):
        raise StateError(f"'metadata' must be text, got a {type(text).__name__}")
    try:
        values = json.loads(text)
        _check_format(values.get("format") if isinstance(values, dict) else None)
        metadata = msgspec.convert(values, SavedMetadata)
    except (json.JSONDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise StateError(f"'metadata' of the state cannot be read: {error}") from error
    _check_numbers(metadata)
    return metadata


def _check_numbers(metadata: SavedMetadata) -> None:
    """What types cannot say: numbers that must fit each other."""
    if metadata.rank >= metadata.world_size:
        raise StateError(f"the state is of rank {metadata.rank} of {metadata.world_size}")
    if metadata.world_size % metadata.shards:
        raise StateError(
            f"the state is of {metadata.world_size} ranks and {metadata.shards} shards of a replica"
        )
    _check_engine(metadata.engine, metadata.replicas)
    rates = (*metadata.residual_scaling.rates.values(), *metadata.residual_scaling.peaks.values())
    if not all(
        0 <= rate < float("inf") for rate in (*rates, metadata.residual_scaling.scale or 1.0)
    ):
        raise StateError("a learning rate or loss scale in the state is no positive number")


def _check_engine(engine: SavedEngine, world_size: int) -> None:
    if engine.skipped > engine.step:
        raise StateError(f"the state is of {engine.step} steps, {engine.skipped} of them skipped")
    tuning = engine.tuning
    if tuning is not None and len(tuning.times) != len(tuning.choices):
        raise StateError(
            f"the state has times of {len(tuning.times)} groupings, {len(tuning.choices)} expected"
        )
    for thresholds in (*engine.group_states, engine.model_state):
        for estimate in (thresholds.local, thresholds.result):
            if estimate is not None and not (estimate[0] >= 0 and 0 < estimate[1] < 1e6):
                raise StateError(f"the state has the threshold and slope {estimate}")
        bounds = thresholds.bounds
        regular = bounds is None or (len(bounds) == world_size + 1 and bounds[0] == 0)
        if not regular or (bounds is not None and bounds != sorted(bounds)):
            raise StateError(f"the state has the region bounds {short_repr(bounds)}")


def checked_tensors(value: Any, key: str, dtypes: tuple[torch.dtype, ...]) -> dict[str, Tensor]:
    """Dense tensors with data, by name."""
    if not isinstance(value, dict):
        raise StateError(f"{key!r} must be tensors by name, got a {type(value).__name__}")
    for name, x in value.items():
        if not isinstance(name, str) or not isinstance(x, Tensor):
            raise StateError(f"{key!r} has a {type(x).__name__} as {short_repr(name)}")
        if x.layout != torch.strided or x.device.type == "meta" or x.dtype not in dtypes:
            what = f"a tensor of {x.dtype}, {x.layout}, on {x.device.type}"
            raise StateError(f"{key!r} has {what} as {short_repr(name)}")
    return {clean_name(name): x for name, x in value.items()}


def _of_this_rank(saved: Saved, rank: int, world_size: int) -> Saved:
    metadata = saved.metadata
    if metadata.world_size != world_size:
        raise StateError(
            f"the state was saved by {metadata.world_size} ranks and there are {world_size}: "
            "pass the list of all ranks' states"
        )
    if metadata.rank != rank:
        raise StateError(
            f"the state was saved by rank {metadata.rank}, and every rank has residuals of its "
            "own: save and load one file per rank; where a framework saves one state for all ranks "
            "(Accelerate's register_for_checkpointing, callbacks of Lightning), give it "
            "`handle.gathered` instead of the handle"
        )
    return saved


def _resharded(states: list[Saved], rank: int, world_size: int) -> Saved:
    """Residuals by `taken_over`: their sum over ranks is as before."""
    if not states:
        raise StateError("the list of states is empty: pass those of all ranks")
    ordered = sorted(states, key=lambda saved: saved.metadata.rank)
    metadata, ranks = ordered[0].metadata, [saved.metadata.rank for saved in ordered]
    if ranks != list(range(metadata.world_size)):
        raise StateError(
            f"expected the states of all {metadata.world_size} ranks that saved, each once, got "
            f"those of ranks {ranks}"
        )
    for saved in ordered:
        if _shapes(saved) != _shapes(ordered[0]):
            raise StateError(f"the states of ranks 0 and {saved.metadata.rank} are of other models")
        if saved.metadata.engine.step != metadata.engine.step:
            raise StateError(
                f"the state of rank 0 is of step {metadata.engine.step}, that of rank "
                f"{saved.metadata.rank} of step {saved.metadata.engine.step}: pass those of one "
                "step"
            )
    if len(ranks) == world_size:
        return ordered[rank]
    mine = taken_over(ordered, rank, world_size)
    residuals = {
        name: sum((saved.residuals[name] for saved in mine), torch.zeros_like(like))
        for name, like in ordered[0].residuals.items()
    }
    engine = without_thresholds(metadata.engine)
    metadata = msgspec.structs.replace(
        metadata, rank=rank, world_size=world_size, shards=1, engine=engine
    )
    return Saved(metadata, residuals, ordered[0].arrived)  # arrivals are the same on every rank


def without_thresholds(engine: SavedEngine) -> SavedEngine:
    """Where they were for another world size, or for other buckets: without sizes, thresholds and
    bounds are not taken over."""
    return msgspec.structs.replace(engine, numels=[])


def taken_over(states: Sequence[T], rank: int, world_size: int) -> Sequence[T]:
    """What `rank` takes over when the world size changes: the saved states of ranks r, r+P, ...

    Each saved state is taken over by exactly one rank, so sums over ranks stay what they were. A
    rank for which none is left starts from zero.
    """
    return states[rank::world_size]


def _shapes(saved: Saved) -> dict[str, torch.Size]:
    return {name: residual.shape for name, residual in saved.residuals.items()}


def _fitted(saved: Saved, parameters: Mapping[str, Tensor], frozen: Collection[str]) -> Saved:
    """With exactly the parameters that this run trains; the others are frozen, then or now."""
    missing = parameters.keys() - saved.residuals.keys() - set(saved.metadata.frozen)
    unknown = saved.residuals.keys() - parameters.keys() - set(frozen)
    if missing or unknown:
        only = sorted(missing | unknown)
        raise StateError(f"the state is of another model; only one of them has {only}")
    for tensors in (saved.residuals, saved.arrived):
        for name in tensors.keys() & parameters.keys():
            theirs, mine = tuple(tensors[name].shape), tuple(parameters[name].shape)
            if mine != theirs:
                raise StateError(f"{name!r} has the shape {theirs} in the state and {mine} here")
    if saved.residuals.keys() == parameters.keys():
        return saved
    residuals = {
        name: saved.residuals[name]
        if name in saved.residuals
        else torch.zeros(parameter.shape, dtype=acc_dtype(parameter), device=parameter.device)
        for name, parameter in parameters.items()
    }
    # DDP has other buckets for other parameters
    engine = without_thresholds(saved.metadata.engine)
    metadata = msgspec.structs.replace(saved.metadata, engine=engine, layout=[], settled_layout=[])
    return Saved(metadata, residuals, saved.arrived)


def _check_layout(metadata: SavedMetadata, residuals: Mapping[str, Tensor]) -> None:
    for layout in (metadata.layout, metadata.settled_layout):
        named = Counter(name for bucket in layout for name in bucket)
        if layout and named != Counter(residuals.keys()):
            raise StateError("the buckets in the state do not hold each of its parameters once")
    sizes = [sum(residuals[name].numel() for name in bucket) for bucket in metadata.layout]
    if not _hold(metadata.engine.numels, sizes, metadata.shards):
        raise StateError(f"the buckets in the state have {sizes} entries, not as it says")


def _hold(numels: list[int], sizes: list[int], shards: int) -> bool:
    """Whether buckets of `numels` entries are for residuals of `sizes`. Those of shards may have
    padding, which is not saved, or be a slice of residuals that are saved whole."""
    if shards == 1 or not numels:
        return numels in ([], sizes)
    if len(numels) != len(sizes):
        return False
    return all(n * shards >= size for n, size in zip(numels, sizes, strict=True))
