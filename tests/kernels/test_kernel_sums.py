# SPDX-License-Identifier: Apache-2.0
"""Sums of sparse vectors: every backend gives the bits of the reference, which is right."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernel_cases import (
    BF16,
    DTYPES,
    F16,
    F32,
    PAIRS,
    bits,
    check,
    examples,
    joined,
    run,
    sparses,
    vectors,
)
from oktopk.sparse import Sparse, empty


@given(data=st.data(), dtype=st.sampled_from(DTYPES), lo=st.integers(0, 40))
@examples
def test_merge_equals_the_reference(backend, data, dtype, lo):
    hi = lo + data.draw(st.integers(0, 60))
    parts = data.draw(st.lists(sparses(lo, hi, dtype), min_size=1, max_size=5))
    check(backend, "merge", *joined(parts), lo, hi)


@given(data=st.data(), dtypes=st.sampled_from(PAIRS), divisor=st.sampled_from([1, 2, 3, 7]))
@examples
def test_apply_result_equals_the_reference(backend, data, dtypes, divisor):
    residual = data.draw(vectors(dtypes[0], st.integers(0, 60)))
    grad = data.draw(vectors(dtypes[1], st.just(residual.numel())))
    result, local = (data.draw(sparses(0, residual.numel(), dtypes[0])) for _ in range(2))
    factor = data.draw(st.sampled_from([1.0, 1.3]))
    for base in (0, 7):
        moved = [Sparse(s.indices + base, s.values, s.numel + base) for s in (result, local)]
        check(backend, "apply_result_", grad, residual, *moved, divisor, factor, base)


def selection(numel: int, density: float, seed: int) -> Sparse:
    """Random entries of a vector, at a density."""
    generator = torch.Generator().manual_seed(seed)
    where = torch.rand(numel, generator=generator) < density
    values = torch.randn(numel, generator=generator)[where]
    return Sparse(where.nonzero().squeeze(1).int(), values, numel)


@pytest.mark.parametrize("offset", [0, 3000])
@pytest.mark.parametrize("density", [0.01, 0.2, 1.0])
def test_apply_result_equals_the_reference_over_several_blocks(backend, density, offset):
    numel = 5001
    grad, residual = torch.ones(numel), torch.arange(float(numel))
    result, sent = (selection(numel, density, seed) for seed in range(2))
    moved = [Sparse(s.indices + offset, s.values, s.numel + offset) for s in (result, sent)]
    check(backend, "apply_result_", grad, residual, *moved, 3, 1.3, offset)


def test_merge_equals_the_reference_over_several_blocks(backend):
    parts = [selection(70_001, 0.02, seed) for seed in range(3)]
    check(backend, "merge", *joined(parts), 0, 70_001)


@given(data=st.data(), dtype=st.sampled_from(DTYPES), factor=st.sampled_from([1.0, 1.3]))
@examples
def test_add_at_equals_the_reference(backend, data, dtype, factor):
    x = data.draw(vectors(dtype, st.integers(0, 60)))
    there = data.draw(sparses(5, 5 + x.numel(), dtype))
    check(backend, "add_at_", x, there, factor, 5)


@pytest.mark.parametrize("order", list(itertools.permutations([1e8, 1.0, -1e8])))
def test_merge_adds_in_the_order_of_the_parts(backend, order):
    want = np.float32(0)
    for value in order:
        want = want + np.float32(value)  # 1 is lost beside 1e8: six orders, two sums
    indices = torch.full((3,), 5, dtype=torch.int32)
    merged, *_ = run(backend, "merge", indices, torch.tensor(order), [1, 1, 1], 4, 9)
    assert (merged.indices.tolist(), merged.values.tolist(), merged.numel) == ([5], [want], 9)


@pytest.mark.parametrize("grad_dtype", [F32, F16, BF16])
def test_apply_result_divides_and_clears_what_was_sent_and_came_back(backend, grad_dtype):
    grad, residual = torch.ones(8, dtype=grad_dtype), torch.arange(1.0, 9.0)
    result = Sparse(torch.tensor([1, 4, 6], dtype=torch.int32), torch.tensor([1.0, 0.7, 5.0]), 8)
    local = Sparse(torch.tensor([0, 4, 6], dtype=torch.int32), torch.tensor([1.0, 5, 6.75]), 8)
    _, grad, residual, *_ = run(backend, "apply_result_", grad, residual, result, local, 3, 1.0)
    quotients = torch.from_numpy(result.values.numpy() / np.float32(3)).to(grad_dtype)
    assert bits(grad) == bits(Sparse(result.indices, quotients, 8).to_dense())
    assert residual.tolist() == [1, 2, 3, 4, 0, 6, 0.25, 8]  # what rounding took off stays
    _, grad, residual, *_ = run(
        backend, "apply_result_", grad, residual, empty(8, residual), local, 3, 1.0
    )
    assert (grad.tolist(), residual.tolist()) == ([0] * 8, [1, 2, 3, 4, 0, 6, 0.25, 8])
