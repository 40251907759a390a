# SPDX-License-Identifier: Apache-2.0
"""Kernels: pure functions on one flat tensor, the passes over memory that every method is made of.

There are three backends that give the same bits: `reference` in plain torch for any device, `cpu`
in numba, `cuda` in Triton. The device of a tensor chooses the backend. Nothing here knows of ranks.

Magnitudes are ordered as their bits are, so a NaN is larger than every number: it is always
selected, and the few selected values tell whether the whole tensor has a NaN.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from oktopk.kernels.backend import Correction as Correction
from oktopk.kernels.backend import KernelBackend as KernelBackend
from oktopk.kernels.backend import SecondMoment as SecondMoment
from oktopk.kernels.bits import QUANTIZE_BLOCK as QUANTIZE_BLOCK
from oktopk.kernels.bits import QUANTIZERS as QUANTIZERS
from oktopk.kernels.bits import RICE_BLOCK as RICE_BLOCK
from oktopk.kernels.bits import from_bits as from_bits
from oktopk.kernels.bits import histogram as histogram
from oktopk.kernels.bits import nonzero_counted as nonzero_counted
from oktopk.kernels.bits import num_blocks as num_blocks
from oktopk.sparse import EntryBuffer, Sparse

# Threads for kernels on the CPU: every kernel runs on one core, without the GIL.


T = TypeVar("T")

MIN_VALUES = 2**21  # a thread with fewer values than this is not worth starting


def thread_slices(x: Tensor) -> list[slice]:
    """Cut x into consecutive slices, one for each thread that is worth its start.

    On a CPU there are at most as many as torch has threads. That number may differ between ranks,
    and between threads of one rank, since torch fixes it when a thread first asks for it. So
    nothing that ranks exchange may depend on how many slices there are.
    """
    num = 1
    if x.device.type == "cpu":
        num = max(1, min(torch.get_num_threads(), x.numel() // MIN_VALUES))
    edges = [x.numel() * i // num for i in range(num + 1)]
    return [slice(lo, hi) for lo, hi in pairwise(edges)]


def run_in_threads(work: Callable[[slice], T], slices: list[slice]) -> list[T]:
    """Call `work` with every slice, each in a thread; the results in the order of the slices.

    `work` must not call this function itself. An error, such as KeyboardInterrupt, is raised only
    when all threads are done, since until then they write to the caller's tensors.
    """
    pool = _pool(len(slices), os.getpid())
    futures = [pool.submit(work, part) for part in slices]
    try:
        return [future.result() for future in futures]
    finally:
        wait(futures)


@cache
def _pool(num_threads: int, pid: int) -> ThreadPoolExecutor:
    # By process id: a forked child inherits the pool but not its threads, and would wait forever.
    return ThreadPoolExecutor(num_threads, thread_name_prefix="oktopk-kernel")


SPARE_SLOTS = 64  # that `accumulate_select` may overwrite behind the `capacity` of its `out`


def _cpu() -> KernelBackend:
    from oktopk.kernels import cpu

    return cpu


def _cuda() -> KernelBackend:
    from oktopk.kernels import cuda

    return cuda


BACKENDS: dict[str, tuple[str, Callable[[], KernelBackend]]] = {
    "cpu": ("numba", _cpu),
    "cuda": ("triton", _cuda),
}
"""By device type: the package that the backend needs, and a function that imports the backend."""


@cache
def backend_for(device_type: str) -> KernelBackend:
    """The fastest kernels for a type of device; plain torch where there are no others."""
    from oktopk.kernels import reference

    if device_type in BACKENDS:
        package, load = BACKENDS[device_type]
        if importlib.util.find_spec(package):
            return load()
    return reference


def is_synchronous(x: Tensor) -> bool:
    """Whether the host knows a kernel's results when the kernel returns, as on a CPU.

    On a GPU the host has to wait for every number that it reads.
    """
    return backend_for(x.device.type).SYNCHRONOUS


def all_finite(x: Tensor) -> bool:
    """Whether x has no NaN and no Inf. One read of n."""
    return backend_for(x.device.type).all_finite(x)


def smallest_magnitude(x: Tensor) -> float:
    """The smallest |x| of a tensor that is not empty, float32 or float64. One read of n."""
    return backend_for(x.device.type).smallest_magnitude(x)


def finite_and_smallest(sums: list[Tensor], *groups: list[Tensor]) -> tuple[bool, list[float]]:
    """Whether all `sums` are finite, and the smallest magnitude of each group of tensors.

    The tensors of groups are float32 or float64 and not empty. A group without tensors has 0. One
    read of each tensor, and the host waits once for all of them.
    """
    tensors = [*sums, *(x for group in groups for x in group)]
    if not tensors:
        return True, [0.0 for _ in groups]
    return backend_for(tensors[0].device.type).finite_and_smallest(sums, list(groups))


def kth_magnitude(x: Tensor, k: int) -> float:
    """The k-th largest |x|, exactly, for 1 <= k <= n. A few counting passes, no sort: O(n)."""
    return backend_for(x.device.type).kth_magnitude(x, k)


def count_at_least(x: Tensor, thresholds: list[float]) -> Tensor:
    """How many `|x|` reach each threshold, int32, on the device of x. One read of n for each."""
    return backend_for(x.device.type).count_at_least(x, thresholds)


def select(x: Tensor, threshold: float, capacity: int) -> tuple[Sparse, int]:
    """The entries with `|x| >= threshold`, and how many there are. One pass: O(n).

    If there are more than `capacity`, only the first `capacity` entries are returned; the count is
    that of all.
    """
    return backend_for(x.device.type).select(x, threshold, capacity)


def select_counted(x: Tensor, threshold: float, count: int) -> Sparse:
    """The entries with `|x| >= threshold` when the caller knows that there are `count`.

    The host does not wait for the device. O(n).
    """
    return backend_for(x.device.type).select_counted(x, threshold, count)


def accumulate_select(
    residual: Tensor,
    grad: Tensor,
    acc: Tensor,
    threshold: float,
    capacity: int,
    out: EntryBuffer | None = None,
    offset: int = 0,
) -> tuple[Sparse, int]:
    """`acc = residual + grad`, then `select` from `acc`, in one pass over the three.

    `offset` is added to every index. Indices and values are written to the two tensors of `out`,
    which have room for `capacity + SPARE_SLOTS` entries each, and are returned as views of them. If
    `out` is None, new tensors are made.
    """
    kernel = backend_for(residual.device.type).accumulate_select
    return kernel(residual, grad, acc, threshold, capacity, out, offset)


def trim(sparse: Sparse, low: float, k: int) -> tuple[Sparse, float]:
    """The largest entries of a selection: k or a fraction of a percent fewer, and their threshold.

    All entries must reach `low`. They are counted in 4,096 bins of magnitude above it, which takes
    two passes over the selection and no search. Entries of one bin are kept or dropped together.
    Overwrites `sparse`.
    """
    return backend_for(sparse.values.device.type).trim(sparse, low, k)


def merge(indices: Tensor, values: Tensor, splits: list[int], lo: int, hi: int) -> Sparse:
    """The sum of several selections, given one after the other; `splits` has their lengths.

    All indices lie in [lo, hi) and ascend within a selection. Every sum is taken in the order of
    the selections, so it has the same bits wherever it is computed. The `numel` of the result is
    `hi`. O(entries + (hi - lo)).
    """
    return backend_for(values.device.type).merge(indices, values, splits, lo, hi)


def apply_result_(
    grad: Tensor,
    residual: Tensor,
    result: Sparse,
    sent: Sparse,
    divisor: int,
    factor: float = 1.0,
    offset: int = 0,
) -> None:
    """Set `grad` to the average, and take what was applied off `residual`, which holds acc.

    `grad` becomes `result * factor / divisor`, and 0 where the result has no entry. Where `sent`
    and `result` have the same index, `sent * factor` is subtracted from `residual`. `offset` is
    subtracted from all indices. One write of n, then O(|result| + |sent|).
    """
    kernel = backend_for(grad.device.type).apply_result_
    kernel(grad, residual, result, sent, divisor, factor, offset)


def add_at_(x: Tensor, sparse: Sparse, factor: float, offset: int = 0) -> None:
    """Add `sparse * factor` to x; `offset` is subtracted from all indices. O(entries)."""
    backend_for(x.device.type).add_at_(x, sparse, factor, offset)


def correct_second_moments_(
    moments: list[SecondMoment],
    step: int,
    scale: float | Tensor = 1.0,
    found_inf: Tensor | None = None,
) -> list[Correction]:
    """Lower Adam's second moments for sums of several steps that arrive in this step.

    An entry arrives when its `grad` is neither 0 nor subnormal. If it did not arrive in the step
    before, its second moment is lowered, though not below 0, so that the optimizer's step with
    `grad / scale` leaves it at `beta2 * exp_avg_sq + shares[age] * (grad / scale) ** 2`. The last
    arrival of every entry that arrives becomes `step`. Nothing changes if `found_inf` is not 0,
    since the gradient scaler then skips the optimizer's step.

    All parameters of one device go in one call. Returns what was corrected of each. One read of n,
    then O(k); on a GPU the host waits twice, for however many parameters.
    """
    device = moments[0].grad.device.type if moments else "cpu"
    return backend_for(device).correct_second_moments_(moments, step, scale, found_inf)


def encode_elias_fano(
    indices: Tensor, lo: int, num_low_bits: int, low: Tensor, high: Tensor
) -> None:
    """Write ascending int32 indices of at least `lo` as the two parts of an Elias-Fano code.

    `low` gets the lowest `num_low_bits` bits of every `index - lo`, one after the other. `high`
    gets a one for each entry, at bit `((index - lo) >> num_low_bits) + number of the entry`. Both
    are int32 tensors of the right size (`oktopk.wire.EliasFano`). O(entries).
    """
    backend_for(indices.device.type).encode_elias_fano(indices, lo, num_low_bits, low, high)


def decode_elias_fano(low: Tensor, high: Tensor, lo: int, num_low_bits: int, out: Tensor) -> None:
    """Fill `out` with the int32 indices that `encode_elias_fano` wrote. O(entries).

    The words may hold anything: they come from another rank. Where they do not hold as many indices
    as `out`, it is filled with -1. Whether indices are sound, `ascend_within` tells.
    """
    backend_for(low.device.type).decode_elias_fano(low, high, lo, num_low_bits, out)


def encode_rice(indices: Tensor, lo: int) -> Tensor:
    """Ascending int32 indices of at least `lo` as a Rice code, in as many int32 words as it takes.

    The gaps between indices are coded in blocks of `RICE_BLOCK`. The parameter of a block, a byte,
    is the number of low bits of its gaps that are sent as they are, chosen to take the fewest bits.
    What is left of a gap is sent in unary: so many zeros, then a one. The words hold all
    parameters, then all unary numbers, then all low bits. O(entries).
    """
    return backend_for(indices.device.type).encode_rice(indices, lo)


def decode_rice(words: Tensor, lo: int, out: Tensor) -> None:
    """Fill `out` with the int32 indices that `encode_rice` wrote; as `decode_elias_fano`."""
    backend_for(words.device.type).decode_rice(words, lo, out)


def ascend_within(indices: Tensor, lo: int, hi: int) -> Tensor:
    """Whether int32 indices ascend, none twice, and `lo <= index < hi` for each of them.

    A bool tensor of no dimension on their device; the host does not wait. One read of the indices.
    """
    return backend_for(indices.device.type).ascend_within(indices, lo, hi)


def quantize(values: Tensor, num_bits: int, parameters: Tensor, codes: Tensor) -> None:
    """Write float32 values as a sign and the nearest of 2 ** (num_bits - 1) levels of their block.

    `block_codes.QUANTIZERS` has the levels. `parameters` and `codes` are int32 tensors of the
    right size (`oktopk.wire.Quantized`). A block with a NaN or Inf is read as NaN. O(n).
    """
    backend_for(values.device.type).quantize(values, num_bits, parameters, codes)


def dequantize(parameters: Tensor, codes: Tensor, num_bits: int, out: Tensor) -> None:
    """Fill `out`, float32, with the values that `quantize` wrote. O(n)."""
    backend_for(codes.device.type).dequantize(parameters, codes, num_bits, out)
