# SPDX-License-Identifier: Apache-2.0
"""Selection and counting by a threshold in numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from oktopk.kernels import reference
from oktopk.kernels.bits import NUM_BINS, NUMPY, bins_from, cut_bin, from_bits, kth_largest
from oktopk.sparse import EntryBuffer, Sparse

# Vector instructions that numba does not offer: compare 32 values at once, get a bit per hit.
#
# They are written as operations on LLVM vectors, which become AVX on x86 and NEON on ARM.


def compiled(function: Callable[..., Any]) -> Any:
    """Have Numba compile a function when it is first called, or load it from its cache."""
    # error_model "numpy": a division by 0 gives Inf or NaN, as in torch, and needs no branch
    options = {"nogil": True, "boundscheck": False, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder for the cache can be written (`kernels.ready` says so)
        return numba.njit(**options)(function)


WIDTH = 32  # values compared at once: one 32-bit word of hits


def _pointer(context, builder, array_type, array, position):
    """A pointer to the vector of 32 values that starts at `position` of an array."""
    lane = ir.FloatType() if array_type.dtype.bitwidth == 32 else ir.DoubleType()
    lanes = ir.VectorType(lane, WIDTH)
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [position]), lanes.as_pointer())


def _load(builder, pointer, width):
    vector = builder.load(pointer)
    # the alignment of one value, not of a vector: a view may start at any value
    vector.align = width // 8
    return vector


def _hits(builder, vector, threshold, bits):
    """A word with one bit per lane: whether the magnitude reaches the threshold.

    Both are compared as integers, so that a NaN is larger than every number.
    """
    lanes = ir.VectorType(ir.IntType(bits), WIDTH)
    magnitude = builder.and_(
        builder.bitcast(vector, lanes), ir.Constant(lanes, [(1 << (bits - 1)) - 1] * WIDTH)
    )
    first = builder.insert_element(ir.Constant(lanes, ir.Undefined), threshold, ir.IntType(32)(0))
    everywhere = ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH)
    threshold = builder.shuffle_vector(first, ir.Constant(lanes, ir.Undefined), everywhere)
    hit = builder.icmp_signed(">=", magnitude, threshold)
    return builder.bitcast(hit, ir.IntType(WIDTH))


@intrinsic
def hit_word(typing, x, position, threshold):
    """A bit for each of x[position : position + 32] that reaches the threshold, given as bits."""
    bits = x.dtype.bitwidth
    integer = types.int32 if bits == 32 else types.int64
    signature = types.uint32(x, types.intp, integer)

    def codegen(context, builder, signature, args):
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        return _hits(builder, _load(builder, pointer, bits), args[2], bits)

    return signature, codegen


@intrinsic
def add_hit_word(typing, residual, grad, acc, position, threshold):
    """Set acc = residual + grad for 32 values from `position` on; then as `hit_word` on acc."""
    bits = acc.dtype.bitwidth
    integer = types.int32 if bits == 32 else types.int64
    signature = types.uint32(residual, grad, acc, types.intp, integer)

    def codegen(context, builder, signature, args):
        one, other, to = (
            _pointer(context, builder, signature.args[i], args[i], args[3]) for i in range(3)
        )
        total = builder.fadd(_load(builder, one, bits), _load(builder, other, bits))
        builder.store(total, to).align = bits // 8
        return _hits(builder, total, args[4], bits)

    return signature, codegen


@intrinsic
def prefetch(typing, x, position):
    """Fetch the cache line of x[position] ahead of a write to it."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        types_ = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        instruction = builder.module.declare_intrinsic("llvm.prefetch", [pointer], types_)
        address = builder.bitcast(builder.gep(data, [args[1]]), pointer)
        # for writing, into every level of cache, of data rather than instructions
        builder.call(instruction, [address, number(1), number(3), number(1)])
        return context.get_dummy_value()

    return types.none(x, types.intp), codegen


@intrinsic
def lowest_bit(typing, word):
    """The position of the lowest set bit of a word; 32 if there is none."""

    def codegen(context, builder, signature, args):
        return builder.cttz(args[0], ir.IntType(1)(0))

    return types.uint32(types.uint32), codegen


@intrinsic
def num_bits(typing, word):
    """How many bits of a word are set."""

    def codegen(context, builder, signature, args):
        return builder.ctpop(args[0])

    return types.uint32(types.uint32), codegen


# What the kernels for CPUs count: magnitudes as integers (`float_bits`), in numba.


DIGIT_BITS = 16  # counted in one pass of `kth_magnitude`: two passes for float32, four for float64
FEW_DIGIT_BITS = 11  # if there are fewer than FEW: one pass more, but the counts fit a cache
FEW = 2**17

UNSIGNED = {torch.float32: np.uint32, torch.float64: np.uint64}


@compiled
def _count_digits(bits, sign_off, prefix, digit_bits, shift, counts):
    """Count the digit at `shift` of all magnitudes that begin with the digits `prefix`."""
    one = bits.dtype.type(1)
    low = (one << digit_bits) - one
    for i in range(bits.size):
        digits = (bits[i] & sign_off) >> shift
        if (digits >> digit_bits) == prefix:
            counts[digits & low] += 1


@compiled
def _largest(bits, sign_off):
    """The largest magnitude. It compiles to a vector maximum, so it runs as fast as memory."""
    largest = sign_off - sign_off
    for i in range(bits.size):
        largest = max(largest, bits[i] & sign_off)
    return largest


@compiled
def _smallest(bits, sign_off):
    smallest = sign_off
    for i in range(bits.size):
        smallest = min(smallest, bits[i] & sign_off)
    return smallest


@compiled
def _count_bins(bits, sign_off, start, shift, counts):
    for i in range(bits.size):
        counts[min(((bits[i] & sign_off) - start) >> shift, counts.size - 1)] += 1


@compiled
def _compact(indices, values, bits, sign_off, threshold):
    """Move the entries that reach the threshold to the front, in order, and count them.

    Every entry is written, and only a hit moves the end: there is no branch to mispredict.
    """
    count = 0
    for i in range(indices.size):
        hit = (bits[i] & sign_off) >= threshold
        indices[count] = indices[i]
        values[count] = values[i]
        count += hit
    return count


@compiled
def _count_at_least(bits, sign_off, threshold):
    count = 0
    for i in range(bits.size):
        count += (bits[i] & sign_off) >= threshold
    return count


def threshold_of(threshold: float, x: Tensor) -> tuple[np.floating, np.integer]:
    """A threshold rounded to the dtype of x, and its bits as a signed integer."""
    # rounded by torch: numpy warns when a large one becomes infinite
    rounded = x.numpy().dtype.type(torch.tensor(threshold, dtype=x.dtype).item())
    return rounded, rounded.view(NUMPY[x.dtype][1])


def _unsigned(x: Tensor) -> tuple[np.ndarray, np.unsignedinteger]:
    """The bits of x as unsigned integers, and a mask of all bits but the sign."""
    bits = x.detach().numpy().view(UNSIGNED[x.dtype])
    return bits, bits.dtype.type((1 << (bits.itemsize * 8 - 1)) - 1)


def _signed(x: Tensor) -> tuple[np.ndarray, int]:
    """The bits of x as signed integers, and a mask of all bits but the sign."""
    bits = x.numpy().view(NUMPY[x.dtype][1])
    return bits, np.iinfo(bits.dtype).max


def all_finite(x: Tensor) -> bool:
    if x.dtype not in UNSIGNED:
        return reference.all_finite(x)
    bits, sign_off = _unsigned(x)
    infinity = torch.tensor(torch.inf, dtype=x.dtype).numpy().view(bits.dtype)
    return bool(_largest(bits, sign_off) < infinity)


def smallest_magnitude(x: Tensor) -> float:
    bits, sign_off = _unsigned(x)
    return bits.dtype.type(_smallest(bits, sign_off)).view(x.numpy().dtype).item()


def finite_and_smallest(sums: list[Tensor], groups: list[list[Tensor]]) -> tuple[bool, list[float]]:
    smallest = [min((smallest_magnitude(x) for x in group), default=0.0) for group in groups]
    return all(all_finite(x) for x in sums), smallest


def kth_magnitude(x: Tensor, k: int) -> float:
    bits, sign_off = _unsigned(x)
    unsigned = bits.dtype.type

    def count_digits(prefix: int, shift: int, digit_bits: int) -> np.ndarray:
        counts = np.zeros(1 << digit_bits, np.int32)
        numbers = unsigned(prefix), unsigned(digit_bits), unsigned(shift)
        _count_digits(bits, sign_off, *numbers, counts)
        return counts

    num_bits = bits.itemsize * 8 - 1  # without the sign
    digit_bits = FEW_DIGIT_BITS if bits.size < FEW else DIGIT_BITS
    kth = kth_largest(k, num_bits, digit_bits, count_digits)
    return from_bits(kth, x.dtype)


def trim(sparse: Sparse, low: float, k: int) -> tuple[Sparse, float]:
    dtype = sparse.values.dtype
    bits, sign_off = _signed(sparse.values)
    start, shift = bins_from(low, dtype)
    counts = np.zeros(NUM_BINS, np.int64)
    _count_bins(bits, sign_off, start, shift, counts)
    first = int(cut_bin(torch.from_numpy(counts), k)[0])
    threshold = start + (first << shift)
    num = 0
    if first < NUM_BINS:  # else the last bin, which has all larger magnitudes too, is dropped whole
        lists = sparse.indices.numpy(), sparse.values.numpy()
        num = _compact(*lists, bits, sign_off, threshold)
    trimmed = Sparse(sparse.indices[:num], sparse.values[:num], sparse.numel)
    return trimmed, from_bits(threshold, dtype)


def count_at_least(x: Tensor, thresholds: list[float]) -> Tensor:
    bits, sign_off = _signed(x)
    counts = [_count_at_least(bits, sign_off, threshold_of(t, x)[1]) for t in thresholds]
    return torch.tensor(counts, dtype=torch.int32)


# Selection by a threshold in numba.
#
# The loops read 32 values at a time and compare them as one vector, which gives a word with a bit
# per hit. At a density of a few percent most words have no hit or one. So three slots of the
# output are written for every word without a branch, whether it has hits or not: that costs less
# than a branch that the processor mispredicts. What was written without a hit is overwritten by
# the next word. The fused pass is about as fast as the addition alone (benchmarks/selection.py).


# pyright: reportCallIssue=false
# (numba passes an intrinsic its first argument itself)


UNCONDITIONAL = 3  # slots written per word before looking how many hits it has


@compiled
def _write_hits(word, x, start, offset, indices, values, count):
    """Write the hits of one word behind the `count` entries so far; the count after it.

    The outputs need room for a whole word of hits. An empty word has its lowest bit at 32, so x is
    read one value behind the word.
    """
    end = count + np.intp(num_bits(word))
    for i in range(UNCONDITIONAL):
        at = start + np.intp(lowest_bit(word))
        indices[count + i] = at + offset
        values[count + i] = x[at]
        word &= word - np.uint32(1)
    slot = count + UNCONDITIONAL
    while word:
        at = start + np.intp(lowest_bit(word))
        indices[slot] = at + offset
        values[slot] = x[at]
        word &= word - np.uint32(1)
        slot += 1
    return end


@compiled
def _select_tail(x, threshold, capacity, offset, indices, values, start, count):
    for i in range(start, x.size):
        if not abs(x[i]) < threshold:  # a NaN is a hit here too
            if count <= capacity:
                indices[count] = i + offset
                values[count] = x[i]
            count += 1
    return count


@compiled
def _select(x, threshold, threshold_bits, capacity, indices, values):
    count = offset = np.intp(0)
    num_words = max(x.size // WIDTH - 1, 0)  # not the last: a value behind each word is read
    for word in range(num_words):
        hits = hit_word(x, word * WIDTH, threshold_bits)
        if count <= capacity:
            count = _write_hits(hits, x, word * WIDTH, offset, indices, values, count)
        else:
            count += np.intp(num_bits(hits))
    return _select_tail(x, threshold, capacity, offset, indices, values, num_words * WIDTH, count)


@compiled
def _accumulate_select(
    residual, grad, acc, threshold, threshold_bits, capacity, offset, indices, values
):
    count = np.intp(0)
    num_words = max(acc.size // WIDTH - 1, 0)
    for word in range(num_words):
        hits = add_hit_word(residual, grad, acc, word * WIDTH, threshold_bits)
        if count <= capacity:
            count = _write_hits(hits, acc, word * WIDTH, offset, indices, values, count)
        else:
            count += np.intp(num_bits(hits))
    start = num_words * WIDTH
    for i in range(start, acc.size):
        acc[i] = residual[i] + grad[i]
    return _select_tail(acc, threshold, capacity, offset, indices, values, start, count)


def _new_outputs(x: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    # the loops write until they are past the capacity, which is at most one word behind it
    slots = capacity + WIDTH + UNCONDITIONAL
    return torch.empty(slots, dtype=torch.int32), torch.empty(slots, dtype=x.dtype)


def select(x: Tensor, threshold: float, capacity: int) -> tuple[Sparse, int]:
    capacity = min(capacity, x.numel())
    indices, values = _new_outputs(x, capacity)
    rounded, bits = threshold_of(threshold, x)
    count = _select(x.numpy(), rounded, bits, capacity, indices.numpy(), values.numpy())
    num = min(count, capacity)
    return Sparse(indices[:num], values[:num], x.numel()), count


def select_counted(x: Tensor, threshold: float, count: int) -> Sparse:
    return select(x, threshold, count)[0]


def accumulate_select(
    residual: Tensor,
    grad: Tensor,
    acc: Tensor,
    threshold: float,
    capacity: int,
    out: EntryBuffer | None = None,
    offset: int = 0,
) -> tuple[Sparse, int]:
    capacity = min(capacity, residual.numel())
    indices, values = _new_outputs(residual, capacity) if out is None else out
    rounded, bits = threshold_of(threshold, residual)
    args = residual.numpy(), grad.numpy(), acc.numpy(), rounded, bits, capacity, offset
    count = _accumulate_select(*args, indices.numpy(), values.numpy())
    num = min(count, capacity)
    return Sparse(indices[:num], values[:num], offset + residual.numel()), count
