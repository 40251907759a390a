"""The objects of a journal, by `kind`: which fields they have, of which types.

Fields that are not here are passed on as they are. A journal of somebody else's training has the
required ones and whichever others it likes. Numbers may be null where a NaN was: JSON has none.
"""

from __future__ import annotations

from typing import Annotated, Any, Required, TypedDict

from msgspec import Meta

from oktopk.stats import Phase

Count = Annotated[int, Meta(ge=0, le=2**53)]
Number = Annotated[float, Meta(ge=-1e100, le=1e100)] | None
Seconds = Annotated[float, Meta(ge=0, le=1e12)] | None
Text = Annotated[str, Meta(max_length=100_000)]


class Traffic(TypedDict, total=False):
    payload_sent: Count | None
    header_sent: Count | None


class Step(TypedDict, total=False):
    step: Required[Count]
    phase: Required[Phase]
    bytes_sent: Required[Count]
    bytes_dense: Required[Count]
    epoch: Count | None
    loss: Number
    lr: Number
    numel: Count | None
    k: Number
    local: Number
    result: Number
    local_threshold: Number
    global_threshold: Number
    compression_ratio: Number
    skipped: bool | None
    stages: dict[str, Traffic] | None
    data: Seconds
    forward: Seconds
    backward: Seconds
    exposed: Seconds
    optimizer: Seconds
    select: Seconds
    exchange: Seconds
    scatter: Seconds
    whole: Seconds


class Sample(TypedDict):
    said: Text
    heard: Text


class Epoch(TypedDict, total=False):
    step: Required[Count]
    epoch: Required[Count]
    train_loss: Number
    val_loss: Number
    wer: Number
    cer: Number
    samples: list[Sample] | None


class TensorFacts(TypedDict):
    numel: Count
    kind: Text


class Settings(TypedDict, total=False):
    method: Text | None
    density: Number
    warmup_steps: Count | None


class Machine(TypedDict, total=False):
    memory: Count | None


class Opening(TypedDict, total=False):
    step: Required[Count]
    time: Text | None
    size: Annotated[int, Meta(ge=1, le=10**6)] | None
    total_steps: Count | None
    settings: Settings | None
    changed: dict[str, list[Any]] | None
    tensors: dict[str, TensorFacts] | None
    versions: dict[str, Any] | None
    machine: Machine | None


class Sums(TypedDict, total=False):
    steps: Required[Count]
    bytes_sent: Required[Count]
    bytes_dense: Required[Count]
    microseconds: Required[Count]


class End(TypedDict, total=False):
    how: Required[Text]
    text: Text | None
    seconds: Seconds
    totals: dict[Phase, Sums] | None


class Warned(TypedDict, total=False):
    text: Required[Text]


class Probe(TypedDict, total=False):
    step: Required[Count]
    recall: Number
    energy: Number
    best_energy: Number
    xi: Number
    age_mean: Number
    age_90: Number
    age_most: Number
    ages: dict[str, Number] | None


class Spread(TypedDict):
    zeros: Count
    first: Annotated[int, Meta(ge=0, le=1000)]
    counts: Annotated[list[Count], Meta(max_length=1000)]


class Tensors(TypedDict, total=False):
    step: Required[Count]
    kept: Required[dict[str, Count]]
    of: Required[dict[str, Count]]
    norm: dict[str, Number] | None
    residual_norm: dict[str, Number] | None
    spread: dict[str, Spread] | None


class Messages(TypedDict, total=False):
    step: Required[Count]
    sent: Required[dict[str, dict[Annotated[int, Meta(ge=0, le=64)], Count]]]


class Ranks(TypedDict, total=False):
    step: Required[Count]
    steps: Required[Count]
    seconds: Required[list[dict[str, Seconds]]]


class RankMemory(TypedDict, total=False):
    rss: Count | None
    rss_peak: Count | None
    gpu_allocated_peak: Count | None


class Memory(TypedDict, total=False):
    ranks: Required[list[RankMemory]]


KINDS: dict[str, Any] = {
    "step": Step,
    "epoch": Epoch,
    "run": Opening,
    "end": End,
    "warning": Warned,
    "probe": Probe,
    "tensors": Tensors,
    "messages": Messages,
    "ranks": Ranks,
    "memory": Memory,
}


class Config(TypedDict, total=False):
    """The settings of a run that reports look at; others are shown as they are."""

    method: Text
    density: Annotated[float, Meta(ge=0, le=1e100)]
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    warmup_steps: Count
