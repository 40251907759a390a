# SPDX-License-Identifier: Apache-2.0
"""Vector instructions that numba does not offer: compare 32 values at once, get a bit per hit.

They are written as operations on LLVM vectors, which become AVX on x86 and NEON on ARM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic


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
