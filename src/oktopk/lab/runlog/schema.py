# SPDX-License-Identifier: Apache-2.0
"""The records of `metrics.jsonl`: one type for each `kind`, with the fields in written order.

Other programs may write the file too. They need the fields that have no default here; a field that
this module does not know is ignored. A number is None where it was NaN, which JSON does not have.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from msgspec import Meta

from oktopk.stats import Phase, StepStats

Count = Annotated[int, Meta(ge=0, le=2**53)]
Number = Annotated[float, Meta(ge=-1e100, le=1e100)] | None
Seconds = Annotated[float, Meta(ge=0, le=1e12)] | None
Text = Annotated[str, Meta(max_length=100_000)]

STEP_PARTS: tuple[str, ...] = ("data", "forward", "backward", "exposed", "optimizer")
"""Parts of a step that follow one another. `exposed` is the time spent waiting for the exchange."""

OVERLAPPED_PARTS: tuple[str, ...] = ("select", "exchange", "scatter")
"""Parts of the exchange, which overlap with the backward pass."""

TIMED_PARTS: tuple[str, ...] = (*STEP_PARTS, *OVERLAPPED_PARTS, "whole")
"""All fields of a step that are seconds; `whole` is the duration of the step."""


class StageTraffic(msgspec.Struct, frozen=True):
    """What rank 0 sent and received in one stage of the exchange."""

    payload_sent: Count | None = None
    header_sent: Count | None = None
    messages_sent: Count | None = None
    payload_received: Count | None = None
    header_received: Count | None = None
    messages_received: Count | None = None

    @property
    def sent(self) -> int:
        """Bytes sent, headers included."""
        return (self.payload_sent or 0) + (self.header_sent or 0)


class StepRecord(msgspec.Struct, kw_only=True, tag_field="kind", tag="step"):
    """One finished step. `loss` is the mean over ranks; everything else is measured on rank 0."""

    epoch: Count | None = None
    loss: Number = None
    lr: Number = None
    step: Count
    phase: Phase
    numel: Count | None = None
    k: Number = None
    local: Number = None
    result: Number = None
    local_threshold: Number = None
    global_threshold: Number = None
    imbalance: Number = None
    bytes_sent: Count
    bytes_header: Count | None = None
    bytes_received: Count | None = None
    bytes_dense: Count
    entries_sent: Count | None = None
    messages: Count | None = None
    skipped: bool | None = None
    select: Seconds = None
    exchange: Seconds = None
    scatter: Seconds = None
    exposed: Seconds = None
    stages: dict[str, StageTraffic] | None = None
    sparsity: Number = None
    compression_ratio: Number = None
    data: Seconds = None
    forward: Seconds = None
    backward: Seconds = None
    optimizer: Seconds = None
    whole: Seconds = None


def step_record(
    stats: StepStats, *, epoch: int, loss: float, lr: float, seconds: dict[str, float]
) -> StepRecord:
    """The record of a step: what the exchange counted, and the seconds of the other parts."""
    stages = {name: StageTraffic(**asdict(traffic)) for name, traffic in stats.stages.items()}
    fields: dict[str, Any] = stats.as_dict() | {"stages": stages} | seconds
    return StepRecord(epoch=epoch, loss=loss, lr=lr, **fields)


class RankMemory(msgspec.Struct, frozen=True):
    """Bytes of memory that one rank uses, or used at its peak."""

    rss: Count | None = None
    rss_peak: Count | None = None
    gpu_allocated: Count | None = None
    gpu_allocated_peak: Count | None = None
    gpu_reserved: Count | None = None


class EpochRecord(msgspec.Struct, kw_only=True, tag_field="kind", tag="epoch"):
    """One finished epoch."""

    epoch: Count
    step: Count
    """The last finished step."""

    train_loss: Number = None
    seconds: dict[str, Seconds] | None = None
    """Mean seconds of each part of a step."""

    complete: bool | None = None
    memory: list[RankMemory] | None = None


class ValidationRecord(msgspec.Struct, kw_only=True, tag_field="kind", tag="validation"):
    """The metrics on the test examples after a step."""

    epoch: Count | None = None
    step: Count
    """The last finished step."""

    metrics: dict[Text, Number]
    examples: Count | None = None
    samples: list[dict[Text, Text]] | None = None
    """A few results as text; the keys are the names of columns."""

    seconds: Seconds = None
    """Training time up to this step, without validation."""


class MetricInfo(msgspec.Struct, frozen=True):
    """A metric of the task."""

    name: Text
    label: Text
    higher_is_better: bool = False
    shown: bool = True
    """Whether tables have a column for it."""


class TaskInfo(msgspec.Struct, frozen=True):
    """What was trained."""

    name: Text
    metrics: list[MetricInfo]
    """The most important first."""

    unit: Text = "examples"
    train: Count | None = None
    """Examples to train on."""

    test: Count | None = None


class TensorInfo(msgspec.Struct, frozen=True):
    """Size of a parameter, and its kind: the class of its layer and its name there."""

    numel: Count
    kind: Text


class KnownSettings(TypedDict, total=False):
    """The exchange settings that reports look at; the others are shown as they are."""

    method: Text | None
    density: Number
    warmup_steps: Count | None


class KnownMachine(TypedDict, total=False):
    """The facts about a machine that reports look at; the others are shown as they are."""

    memory: Count | None


class RunRecord(msgspec.Struct, kw_only=True, tag_field="kind", tag="run"):
    """What is known when a run begins, and again each time that it is resumed."""

    time: Text | None = None
    step: Count
    """Steps that were finished before."""

    size: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    """The world size."""

    total_steps: Count | None = None
    steps_per_epoch: Count | None = None
    settings: dict[str, Any] | None = None
    """Settings of the exchange."""

    changed: dict[str, list[Any]] | None = None
    """Settings that were changed on resume: the old and the new value."""

    task: TaskInfo | None = None
    command: Text | None = None
    """The command line that started the run."""

    target: Text | None = None
    """The metric that ends the run, as a text; None without one."""

    network: Text | None = None
    """The network that the workers run in: a rate, or what the machine has."""

    tensors: dict[str, TensorInfo] | None = None
    versions: dict[str, Any] | None = None
    machine: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        msgspec.convert(self.settings or {}, KnownSettings)
        msgspec.convert(self.machine or {}, KnownMachine)


class PhaseTotals(msgspec.Struct):
    """Sums over the steps of one phase."""

    steps: Count = 0
    skipped: Count = 0
    bytes_sent: Count = 0
    bytes_dense: Count = 0
    """Bytes that a dense allreduce would have sent."""

    result: Count = 0
    """Entries of the results, out of `numel`."""

    numel: Count = 0
    microseconds: Count = 0


class EndRecord(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="kind", tag="end"):
    """How a run ended: `finished`, `stopped` or `failed`. Only a finished one has totals."""

    how: Text
    text: Text | None = None
    seconds: Seconds = None
    totals: dict[Phase, PhaseTotals] | None = None
    """Sums by phase over all ranks."""


class WarningRecord(msgspec.Struct, kw_only=True, tag_field="kind", tag="warning"):
    """A warning that was logged up to this step."""

    step: Count | None = None
    text: Text


class ProbeRecord(msgspec.Struct, kw_only=True, tag_field="kind", tag="probe"):
    """How good the selection of a step was, compared with the exact top k of the dense sum."""

    step: Count
    seconds: Seconds = None
    recall: Number = None
    energy: Number = None
    best_energy: Number = None
    xi: Number = None
    age_mean: Number = None
    age_90: Number = None
    age_most: Number = None
    ages: dict[str, Number] | None = None


class Histogram(msgspec.Struct, frozen=True):
    """Counts of magnitudes in bins of equal ratio; see `runlog.histogram`."""

    zeros: Count
    first: Annotated[int, Meta(ge=0, le=1000)]
    """Index of the first bin that is not empty."""

    counts: Annotated[list[Count], Meta(max_length=1000)]


class TensorsRecord(msgspec.Struct, kw_only=True, tag_field="kind", tag="tensors"):
    """Gradients and residuals of rank 0 after a step, by parameter."""

    step: Count
    kept: dict[str, Count]
    """Nonzero entries of the exchanged gradient, out of those in `of`."""

    of: dict[str, Count]
    spread: dict[str, Histogram] | None = None
    norm: dict[str, Number] | None = None
    residual_norm: dict[str, Number] | None = None


class MessagesRecord(msgspec.Struct, kw_only=True, tag_field="kind", tag="messages"):
    """Messages of rank 0 since it started, by stage and by the bit length of their size."""

    step: Count
    sent: dict[str, dict[Annotated[int, Meta(ge=0, le=64)], Count]]


class RanksRecord(msgspec.Struct, kw_only=True, tag_field="kind", tag="ranks"):
    """Mean seconds of each part of the last `steps` steps, by rank."""

    steps: Count
    seconds: list[dict[str, Seconds]]
    step: Count


class MemoryRecord(msgspec.Struct, kw_only=True, tag_field="kind", tag="memory"):
    """The memory of every rank."""

    ranks: list[RankMemory]
    step: Count | None = None


class UnknownRecord(msgspec.Struct, frozen=True):
    """A record of a kind that another version or another program writes."""

    kind: str


Record = (
    StepRecord
    | EpochRecord
    | ValidationRecord
    | RunRecord
    | EndRecord
    | WarningRecord
    | ProbeRecord
    | TensorsRecord
    | MessagesRecord
    | RanksRecord
    | MemoryRecord
)

RECORD_TYPES: dict[str, type[Record]] = {
    "step": StepRecord,
    "epoch": EpochRecord,
    "validation": ValidationRecord,
    "run": RunRecord,
    "end": EndRecord,
    "warning": WarningRecord,
    "probe": ProbeRecord,
    "tensors": TensorsRecord,
    "messages": MessagesRecord,
    "ranks": RanksRecord,
    "memory": MemoryRecord,
}


class KnownConfig(TypedDict, total=False):
    """The settings in `config.toml` that reports look at; the others are shown as they are."""

    method: Text
    density: Annotated[float, Meta(ge=0, le=1e100)] | Literal["auto"]
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    warmup_steps: Count | Literal["auto"]
