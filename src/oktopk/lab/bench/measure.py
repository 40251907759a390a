# SPDX-License-Identifier: Apache-2.0
"""What the bench measures: methods and baselines, shapes and synthetic gradients."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import cycle
from time import perf_counter

import torch
import torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks as debugging_hooks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from oktopk.adapters.ddp import attach
from oktopk.adapters.ddp_handle import Handle
from oktopk.adapters.local_handle import LocalSteps
from oktopk.adapters.local_steps import local_steps
from oktopk.comm.communicator import Comm
from oktopk.lab.baselines import HOOK_NAMES
from oktopk.lab.baselines.base import HOOKS, ONE_BUCKET, BaselineOptions, Hook, without_state
from oktopk.lab.baselines.local import BASELINES
from oktopk.methods import METHODS
from oktopk.stats import StepStats
from oktopk.wire import CodecName

# Tensor shapes of well-known models, without their code.


Shapes = list[tuple[int, ...]]


def lstman4() -> Shapes:
    """Return the shapes of lstman4 at full size: 27,569,568 gradients, 40 tensors."""
    from oktopk.lab.tasks.speech.lstman4 import Lstman4

    with torch.device("meta"):
        return [tuple(p.shape) for p in Lstman4(hidden=800, layers=5, channels=32).parameters()]


def vgg16() -> Shapes:
    """Return those of VGG-16, batch norm, 32 x 32 images: 14,728,266 gradients, 54 tensors."""
    shapes, channels = [], 3
    for width, repeats in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(repeats):
            shapes += [(width, channels, 3, 3), (width,), (width,), (width,)]
            channels = width
    return [*shapes, (10, 512), (10,)]


def bert_base() -> Shapes:
    """Return those of BERT-base with its masked-word head: 133,547,324 gradients, 207 tensors."""
    width, inner, words = 768, 3072, 30522
    norm: Shapes = [(width,), (width,)]
    square: Shapes = [(width, width), (width,)]
    layer = [*square * 4, *norm, (inner, width), (inner,), (width, inner), (width,), *norm]
    embeddings: Shapes = [(words, width), (512, width), (2, width), *norm]
    head: Shapes = [*square, *norm, (words, width), (words,), (2, width), (2,)]
    return [*embeddings, *layer * 12, *square, *head]


MODELS: dict[str, Callable[[], Shapes]] = {
    "lstman4": lstman4,
    "vgg16": vgg16,
    "bert-base": bert_base,
}


def shapes_of(model: str) -> Shapes:
    """Return the shapes of a named model, or of a near-square matrix and a bias for a number."""
    if model in MODELS:
        return MODELS[model]()
    try:
        numel = int(float(model))
    except (ValueError, OverflowError):
        numel = 0
    if numel < 1:
        raise ValueError(f"--model is one of {', '.join(MODELS)} or a number, got {model!r}")
    rows = math.isqrt(numel)
    matrix, rest = (rows, numel // rows), numel - rows * (numel // rows)
    return [matrix, (rest,)] if rest else [matrix]


# Synthetic gradients. They are made once, so that a step takes no time to generate them.
#
# Real gradients have large entries at the same places for many steps and on many ranks, tensors of
# very different scale, and tails far heavier than those of a normal distribution. So every tensor
# and every entry has a scale that is the same on all ranks, times a random number that is in part
# the same on all ranks and in part each rank's own.


VARIANTS = 3  # different gradients, taken in turn
SHARED = (
    0.5  # the part that is the same on all ranks: an entry of the result then comes from few ranks
)


class Stream(nn.Module):
    """A model with given gradients. Its forward pass takes no time."""

    def __init__(self, shapes: Shapes, rank: int, variants: int = VARIANTS) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(shape) for shape in shapes])
        self.numels = [math.prod(shape) for shape in shapes]
        self.numel = sum(self.numels)
        self.shapes = shapes
        self._variants = cycle(gradients(self.numels, rank, variants))

    def forward(self) -> Tensor:
        return _Known.apply(next(self._variants), *self.parts)


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx, flat, *parameters):  # noqa: ANN001, ANN002, ANN205 - torch's signature
        ctx.flat, ctx.shapes = flat, [parameter.shape for parameter in parameters]
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx, *_):  # noqa: ANN001, ANN002, ANN205 - torch's signature
        parts = ctx.flat.split([shape.numel() for shape in ctx.shapes])
        views = [part.view(shape) for part, shape in zip(parts, ctx.shapes, strict=True)]
        return None, *views


def gradients(numels: list[int], rank: int, variants: int) -> list[Tensor]:
    """Return flat gradients of one rank, the same for the same arguments. O(variants * n)."""
    common = torch.Generator().manual_seed(1)
    own = torch.Generator().manual_seed(1000 + rank)
    numel = sum(numels)
    scale = torch.randn(numel, generator=common).exp_()
    for part, factor in zip(
        scale.split(numels), torch.randn(len(numels), generator=common).exp(), strict=True
    ):
        part.mul_(factor * 1e-3)
    made = []
    for _ in range(variants):
        flat = torch.randn(numel, generator=common).mul_(SHARED)
        made.append(flat.add_(torch.randn(numel, generator=own)).mul_(scale))
    return made


# What the bench compares: plain DDP, PyTorch's communication hooks, every method of ours, and the
# exchanges that happen only every few steps.


NOOP, DENSE = "noop", "ddp_dense"
LOCAL_STEPS = "local_steps"


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """The settings that every case is measured with."""

    density: float
    wire: CodecName
    world_size: int


@dataclass(frozen=True, slots=True)
class Started:
    """An exchange that is ready to be measured."""

    step: Callable[[], float]
    """Makes a gradient, exchanges it, and returns the seconds of that."""

    handle: Handle | LocalSteps | None
    """If it is one of ours; its ledger counts."""

    bytes_sent: int = 0
    """By the algorithm, for those without a handle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchCase:
    """One exchange that is measured: a row of the table for each network."""

    start: Callable[[Stream, BenchSettings], Started]
    settling_steps: int = 2
    """Steps before it runs at its usual speed. DDP rebuilds its buckets after the first."""

    is_local: bool = False
    """Whether training has it only every few steps (`--every`)."""


def _no_bytes(_: Shapes, __: int) -> int:
    return 0


def _wrapped(stream: Stream, bucket_mb: float | None = None) -> DistributedDataParallel:
    return DistributedDataParallel(
        stream,
        init_sync=False,
        gradient_as_bucket_view=True,
        bucket_cap_mb=bucket_mb,  # type: ignore[arg-type] - None is DDP's default
    )


def _backward(model: DistributedDataParallel) -> float:
    """Take a step and return its seconds."""
    model.zero_grad(set_to_none=True)
    start = perf_counter()
    model().backward()
    return perf_counter() - start


def _optimizer_step(stream: Stream, optimizer: Optimizer) -> float:
    """Change the weights by the next gradient; the seconds of that and of its exchange."""
    stream.zero_grad(set_to_none=True)
    stream().backward()
    start = perf_counter()
    optimizer.step()
    return perf_counter() - start


def _hook(hook: Hook, *, settling_steps: int = 2) -> BenchCase:
    """Measure a communication hook of PyTorch, without dense steps at the start."""

    def start(stream: Stream, settings: BenchSettings) -> Started:
        model = _wrapped(stream, ONE_BUCKET if hook.one_bucket else None)
        hook.register(model, 0)
        sent = hook.bytes_sent(stream.shapes, settings.world_size)
        return Started(partial(_backward, model), None, sent)

    return BenchCase(start=start, settling_steps=settling_steps)


def _method(name: str) -> BenchCase:
    def start(stream: Stream, settings: BenchSettings) -> Started:
        model = _wrapped(stream)
        handle = attach(
            model,
            method=name,
            warmup_steps=0,
            check_every=0,
            verbose=False,
            density=settings.density,
            wire=settings.wire,
        )
        return Started(partial(_backward, model), handle)

    return BenchCase(start=start, settling_steps=6)


def _start_local_steps(stream: Stream, settings: BenchSettings) -> Started:
    """An exchange after every step, so that every step measures one."""
    optimizer = SGD(stream.parameters(), lr=1.0)
    handle = local_steps(
        stream,
        optimizer,
        every=1,
        check_every=0,
        density=settings.density,
        wire=settings.wire,
        verbose=False,
    )
    return Started(partial(_optimizer_step, stream, optimizer), handle)


def _baseline(name: str) -> BenchCase:
    def start(stream: Stream, settings: BenchSettings) -> Started:
        options = BaselineOptions(
            world_size=settings.world_size,
            warmup_steps=0,
            every=1,
            density=settings.density,
            ddp_arguments={},
        )
        made = BASELINES[name](stream, SGD(stream.parameters(), lr=1.0), options)
        step = partial(_optimizer_step, stream, made.optimizer)
        return Started(step, None, made.bytes_sent(0))

    return BenchCase(start=start, is_local=True)


NOOP_HOOK = Hook(without_state(debugging_hooks.noop_hook), _no_bytes)
POWERSGD = [name for name in HOOK_NAMES if "powersgd" in name]
CASES: dict[str, BenchCase] = {
    NOOP: _hook(NOOP_HOOK),
    DENSE: _hook(HOOKS[DENSE]),
    "ddp_fp16": _hook(HOOKS["ddp_fp16"]),
    **{name: _hook(HOOKS[name], settling_steps=4) for name in POWERSGD},
    **{name: _method(name) for name in METHODS},
    **{name: _baseline(name) for name in ("diloco", "sparseloco")},
    LOCAL_STEPS: BenchCase(start=_start_local_steps, settling_steps=6, is_local=True),
}


# Measure one case on this network: steps that all ranks take together.


MIN_STEPS, MAX_STEPS = 3, 30  # of a row
SETTLING = 2.0  # the limit for settling steps, in multiples of the seconds of a row


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What a case took on a network. Times are of the slowest rank of each step."""

    method: str
    rate: str
    workers: int
    numel: int
    density: float
    steps: int
    ms_per_step: float
    """The median of the steps."""

    ms_low: float
    """A quarter of the steps took less."""

    ms_high: float
    """A quarter of the steps took more."""

    ms_above_noop: float = 0.0
    ratio_to_dense: float | None = None
    """`ms_above_noop` over that of DDP's own allreduce in the same run."""

    every: int = 1
    """Training steps for each exchange; times and bytes are those of an exchange."""

    bytes_sent: int = 0
    """Sent by a rank in an exchange, from the ledger; for baselines by their algorithm."""

    bytes_on_interface: int | None = None
    """The same from the kernel's counters, with the headers of TCP and Ethernet."""

    bits_per_kept: float | None = None
    """Bits sent per entry sent, headers included; None where everything is sent."""

    parts: dict[str, float] = field(default_factory=dict)
    """Milliseconds of select, exchange and scatter: the mean over steps, on rank 0."""

    as_dict = asdict


def measure(
    name: str,
    stream: Stream,
    comm: Comm,
    *,
    rate: str,
    seconds: float,
    settings: BenchSettings,
    every: int,
    counter: Callable[[], int | None],
) -> Row:
    """Measure one case. Every rank must call it, and gets the same row except for `parts`."""
    case = CASES[name]
    started = case.start(stream, settings)
    step, handle = started.step, started.handle
    _repeat(step, comm, fewest=2, most=case.settling_steps, seconds=SETTLING * seconds)
    stats: list[StepStats] = []
    if handle is not None:
        handle.on_step = stats.append
    before = counter()
    times = _repeat(step, comm, fewest=MIN_STEPS, most=MAX_STEPS, seconds=seconds)
    after = counter()
    if handle is not None:
        handle.close()
    on_interface = _sent_on_interface(before, after, len(times), comm)
    sent, entries = _sent(stats, started.bytes_sent, comm)
    low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    return Row(
        method=name,
        rate=rate,
        workers=comm.size,
        numel=stream.numel,
        density=settings.density,
        steps=len(times),
        ms_per_step=1e3 * middle,
        ms_low=1e3 * low,
        ms_high=1e3 * high,
        every=every if case.is_local else 1,
        bytes_sent=sent,
        bytes_on_interface=on_interface,
        bits_per_kept=8 * sent / entries if entries else None,
        parts=_parts(stats),
    )


def _sent_on_interface(
    before: int | None, after: int | None, num_steps: int, comm: Comm
) -> int | None:
    """Return the bytes a rank sent in a step, from two readings of the kernel's counter."""
    if before is None or after is None:
        return None
    total = _gathered(torch.tensor(after - before), comm).sum()
    return int(total) // comm.size // num_steps


def compared(row: Row, others: list[Row]) -> Row:
    """Return the row with its time above the no-op and its ratio to dense, where known."""
    here = {other.method: other for other in [*others, row] if other.rate == row.rate}
    if NOOP not in here:
        return row
    noop = here[NOOP].ms_per_step
    above = row.ms_per_step - noop
    ratio = None
    if DENSE in here and row.method != NOOP and here[DENSE].ms_per_step > noop:
        ratio = above / (here[DENSE].ms_per_step - noop)
    return replace(row, ms_above_noop=above, ratio_to_dense=ratio)


def _repeat(
    step: Callable[[], float], comm: Comm, *, fewest: int, most: int, seconds: float
) -> list[float]:
    """Take steps until rank 0's time is up; return the slowest rank's seconds for each step."""
    times: list[float] = []
    begun = perf_counter()
    while True:
        passed = int(1e3 * (perf_counter() - begun))
        # also a barrier: all ranks begin each step together
        rank_0 = comm.all_gather_size(passed, torch.device("cpu"), stage="bench")[0]
        if len(times) >= most or (len(times) >= fewest and rank_0 >= 1e3 * seconds):
            break
        times.append(step())
    return _gathered(torch.tensor(times, dtype=torch.float64), comm).amax(0).tolist()


def _sent(seen: list[StepStats], by_algorithm: int, comm: Comm) -> tuple[int, int]:
    """Return the bytes and entries that a rank sent in a step, as means over steps and ranks."""
    bytes_sent = sum(stats.bytes_sent for stats in seen)
    entries = sum(stats.entries_sent for stats in seen if stats.phase == "sparse")
    total = _gathered(torch.tensor([bytes_sent, entries]), comm).sum(0) // comm.size
    if not seen:
        return by_algorithm, 0
    return int(total[0]) // len(seen), int(total[1]) // len(seen)


def _gathered(x: Tensor, comm: Comm) -> Tensor:
    return comm.all_gather_header(x, stage="bench")


def _parts(seen: list[StepStats]) -> dict[str, float]:
    if not seen:
        return {}
    return {
        part: 1e3 * statistics.mean(getattr(stats, part) for stats in seen)
        for part in ("select", "exchange", "scatter")
    }
