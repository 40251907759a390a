"""Pure functions on one flat tensor: the passes over memory that every method is made of.

Each has three forms that give the same bits: `reference` in plain torch for any device, `cpu` in
numba, `cuda` in Triton. The form is chosen by the tensor's device. Nothing here knows of a network.

Magnitudes are ordered as their bits are, so a NaN counts as larger than everything: it is always
selected, and whoever looks at the few selected values has seen every NaN of the tensor.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from oktopk.kernels.reference import Late as Late
from oktopk.sparse import EntryBuffer, Sparse

T = TypeVar("T")

# device type -> (the package its form needs, the form)
FORMS = {"cpu": ("numba", "oktopk.kernels.cpu"), "cuda": ("triton", "oktopk.kernels.cuda")}


@cache
def form(device_type: str) -> ModuleType:
    """The module with the fastest kernels for a device; plain torch where there is none."""
    package, module = FORMS.get(device_type, ("", ""))
    if package and importlib.util.find_spec(package):
        return importlib.import_module(module)
    return importlib.import_module("oktopk.kernels.reference")


SPAN = 2**21  # values worth a thread of their own
SLACK = 64  # entries a kernel may write behind those that count


@cache
def _pool(threads: int, pid: int) -> ThreadPoolExecutor:
    # one per process: threads do not survive a fork, and their pool would wait for them in a child
    return ThreadPoolExecutor(threads, thread_name_prefix="oktopk-kernel")


def spans(x: Tensor) -> list[slice]:
    """Parts of x, in order, that are worth a thread each; on a CPU as many as torch has threads.

    torch counts per calling thread: one has the number that was set when it first asked. So ranks,
    and threads of one rank, may differ here; nothing that is exchanged may depend on it.
    """
    num = 1
    if x.device.type == "cpu":
        num = max(1, min(torch.get_num_threads(), x.numel() // SPAN))
    edges = [x.numel() * i // num for i in range(num + 1)]
    return [slice(lo, hi) for lo, hi in pairwise(edges)]


def side_by_side(work: Callable[[slice], T], parts: list[slice]) -> list[T]:
    """`work` on all parts at once, the results in order. It must not call this function itself.

    An error, Ctrl-C too, is raised only when all parts are done: until then they write.
    """
    pool = _pool(len(parts), os.getpid())
    futures = [pool.submit(work, part) for part in parts]
    try:
        return [future.result() for future in futures]
    finally:
        wait(futures)


def finds_at_once(x: Tensor) -> bool:
    """Whether the host knows what a kernel has found when it returns, or has to wait for it."""
    return form(x.device.type).AT_ONCE


def all_finite(x: Tensor) -> bool:
    """Whether x has no NaN and no Inf. One read of n."""
    return form(x.device.type).all_finite(x)


def least_magnitude(x: Tensor) -> float:
    """The smallest |x| of one value or more, float32 or float64. One read of n."""
    return form(x.device.type).least_magnitude(x)


def survey(sums: list[Tensor], *groups: list[Tensor]) -> tuple[bool, list[float]]:
    """Whether all `sums` are finite, and the smallest magnitude of each group of tensors.

    A group's are float32 or float64, and none is empty; a group of none has 0. One read of each
    tensor, and the host waits once for all of them.
    """
    everything = [*sums, *(x for group in groups for x in group)]
    if not everything:
        return True, [0.0 for _ in groups]
    kernels = form(everything[0].device.type)
    if not kernels.AT_ONCE:
        return kernels.survey(sums, list(groups))
    least = [min((kernels.least_magnitude(x) for x in group), default=0.0) for group in groups]
    return all(kernels.all_finite(x) for x in sums), least


def kth_magnitude(x: Tensor, k: int) -> float:
    """The k-th largest |x|, exactly, for 1 <= k <= n. Two passes of counting, no sort: O(n)."""
    return form(x.device.type).kth_magnitude(x, k)


def select(x: Tensor, threshold: float, capacity: int) -> tuple[Sparse, int]:
    """Keep `|x| >= threshold`, and tell how many there are. One pass: O(n).

    When there are more than `capacity`, the count is right but the entries are only the first ones.
    """
    return form(x.device.type).select(x, threshold, capacity)


def take(x: Tensor, threshold: float, num: int) -> Sparse:
    """Keep `|x| >= threshold`, when it is known that there are `num`: no wait for the device."""
    return form(x.device.type).take(x, threshold, num)


def histogram(x: Tensor, num: int) -> Tensor:
    """How often each integer from 0 to `num - 1` is in x, int32; there may be no others. O(n)."""
    return form("").histogram(x, num)


def magnitude(bits: int, dtype: torch.dtype) -> float:
    """The number with these bits. No pass: it is a matter of the host."""
    return form("").bin_threshold(bits, dtype)


def places(mask: Tensor, num: int) -> Tensor:
    """Where a mask is true, ascending, when it is known that it is `num` times. O(n)."""
    return form("").places(mask, num)


def count_reaching(x: Tensor, thresholds: list[float]) -> Tensor:
    """How many `|x|` reach each threshold, int32, on the device of x. One read of n for each."""
    return form(x.device.type).count_reaching(x, thresholds)


def trim(sparse: Sparse, low: float, k: int) -> tuple[Sparse, float]:
    """The largest entries of a selection above `low`, k at most and a fraction of a percent less.

    Counted in 4,096 bins of magnitude above `low`, so it takes two passes over the selection and no
    search; entries of one bin go together. Also the threshold that they reach. Overwrites `sparse`.
    """
    return form(sparse.values.device.type).trim(sparse, low, k)


def accumulate_select(
    residual: Tensor,
    grad: Tensor,
    acc: Tensor,
    threshold: float,
    capacity: int,
    into: EntryBuffer | None = None,
    base: int = 0,
) -> tuple[Sparse, int]:
    """`acc = residual + grad`, then `select` from `acc`, in one pass over the three.

    Indices count from `base`. They and the values are written to `into`, which has room for
    `capacity + SLACK`, and come back as views of it; None makes new ones.
    """
    kernel = form(residual.device.type).accumulate_select
    return kernel(residual, grad, acc, threshold, capacity, into, base)


def merge(indices: Tensor, values: Tensor, splits: list[int], lo: int, hi: int) -> Sparse:
    """Sum several selections that all lie in [lo, hi), each ascending, one after the other.

    Every sum is taken in the order of the parts, so it has the same bits wherever it is computed.
    O(entries + (hi - lo)). `numel` of what comes back is `hi`.
    """
    return form(values.device.type).merge(indices, values, splits, lo, hi)


def settle_(
    grad: Tensor,
    residual: Tensor,
    result: Sparse,
    offered: Sparse,
    divisor: int,
    factor: float = 1.0,
    base: int = 0,
) -> None:
    """`grad` becomes `result * factor / divisor`; where `offered` and `result` meet, `residual`
    is less by `offered * factor`, which is 0 for what was offered whole. Indices count from `base`.

    One write of n, then O(|result| + |offered|).
    """
    form(grad.device.type).settle_(grad, residual, result, offered, divisor, factor, base)


def encode_indices(indices: Tensor, lo: int, low_bits: int, low: Tensor, high: Tensor) -> None:
    """Ascending indices from `lo` on as Elias-Fano words: their low bits, and a one for each at
    `((index - lo) >> low_bits) + its number`. O(num)."""
    form(indices.device.type).encode_indices(indices, lo, low_bits, low, high)


def decode_indices(low: Tensor, high: Tensor, lo: int, low_bits: int, out: Tensor) -> None:
    """Fill `out` with the int32 indices that `encode_indices` wrote. O(num)."""
    form(low.device.type).decode_indices(low, high, lo, low_bits, out)


def add_at_(x: Tensor, sparse: Sparse, factor: float, base: int = 0) -> None:
    """Add `sparse * factor` to x; indices count from `base`. O(num)."""
    form(x.device.type).add_at_(x, sparse, factor, base)


def take_late(
    late: list[Late], step: int, scale: float | Tensor = 1.0, found_inf: Tensor | None = None
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Ready Adam's second moments for sums that arrive now (`grad` is not 0, nor
    subnormal) after some steps. All parameters of one device in one call.

    `square` is lowered so that a step with `grad / scale` leaves it at `beta * square` and
    `shares[age]` of the sum's square, but not below 0; `arrived` becomes `step`. Nothing changes
    where `found_inf` is not 0, for then there is no step. For each comes back: the places that had
    to wait, and what `square` was there and is to be after the step. One read of n, then O(k); on a
    GPU the host waits for it twice, for however many parameters.
    """
    device = late[0].grad.device.type if late else "cpu"
    return form(device).take_late(late, step, scale, found_inf)
