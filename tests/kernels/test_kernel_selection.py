# SPDX-License-Identifier: Apache-2.0
"""Selection by a threshold: every backend gives the bits of the reference, which is right."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernel_cases import (
    DTYPES,
    LENGTHS,
    NUMPY,
    SIZES,
    bits,
    check,
    check_out,
    examples,
    joined,
    run,
    thresholds,
    vector,
    vectors,
)
from oktopk.kernels import reference


@given(data=st.data(), dtype=st.sampled_from(DTYPES))
@examples
def test_kth_magnitude_equals_the_reference(backend, data, dtype):
    x = data.draw(vectors(dtype, st.integers(1, 300)))
    check(backend, "kth_magnitude", x, data.draw(st.integers(1, x.numel())))


@given(data=st.data(), dtype=st.sampled_from(DTYPES))
@examples
def test_select_equals_the_reference(backend, data, dtype):
    x = data.draw(vectors(dtype, LENGTHS))
    capacity = data.draw(st.integers(0, x.numel() + 2))
    check(backend, "select", x, data.draw(thresholds(x)), capacity)


@given(data=st.data(), dtype=st.sampled_from(DTYPES))
@examples
def test_accumulate_select_equals_the_reference(backend, data, dtype):
    residual = data.draw(vectors(dtype, LENGTHS))
    grad = data.draw(vectors(dtype, st.just(residual.numel())))
    capacity = data.draw(st.integers(0, residual.numel() + 2))
    threshold = data.draw(thresholds(residual))
    acc = torch.zeros_like(residual)
    check(backend, "accumulate_select", residual, grad, acc, threshold, capacity)


@given(data=st.data(), dtype=st.sampled_from(DTYPES))
@examples
def test_smallest_magnitude_equals_the_reference(backend, data, dtype):
    check(backend, "smallest_magnitude", data.draw(vectors(dtype, st.integers(1, 99))))


@given(data=st.data(), dtype=st.sampled_from(DTYPES))
@examples
def test_count_at_least_equals_the_reference(backend, data, dtype):
    x = data.draw(vectors(dtype, LENGTHS))
    check(backend, "count_at_least", x, [0.0, 0.5, 1.0, 3.0])


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_around_a_word_and_a_block(backend, n, dtype):
    x, grad = vector(n, dtype), vector(n, dtype, seed=1)
    for capacity in (0, 1, n // 3, n):
        check(backend, "select", x, 0.75, capacity)
        check(backend, "accumulate_select", x, grad, torch.zeros_like(x), 0.75, capacity)
        check_out(backend, x, grad, capacity)
    for k in range(1, n + 1, max(n // 3, 1)):
        check(backend, "kth_magnitude", x, k)
    parts = [reference.select(part, 0.75, n)[0] for part in (x, grad, x + grad)]
    check(backend, "merge", *joined(parts), 0, n)
    check(backend, "apply_result_", grad, x, parts[2], parts[0], 3, 1.0)


@pytest.mark.parametrize("n", [1, 33, 500])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kth_magnitude_is_the_kth_of_the_sorted_magnitudes(n, dtype):
    x = vector(n, dtype)
    # a NaN before everything else, then the largest first
    order = sorted(map(abs, x.tolist()), key=lambda m: (not math.isnan(m), -m))
    assert [repr(reference.kth_magnitude(x, k + 1)) for k in range(n)] == list(map(repr, order))


@pytest.mark.parametrize("n", [0, 1, 33, 500])
@pytest.mark.parametrize("dtype", DTYPES)
def test_select_keeps_what_is_not_below_the_threshold(n, dtype):
    x = vector(n, dtype)
    kept, count = reference.select(x, 0.75, n)
    want = [i for i, value in enumerate(x.tolist()) if abs(value) >= 0.75 or math.isnan(value)]
    assert (kept.indices.tolist(), kept.indices.dtype) == (want, torch.int32)  # so they ascend
    assert (count, kept.numel) == (len(want), n)
    assert bits(kept.values) == bits(x[want])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_threshold_itself_is_kept(backend, dtype):
    below = np.nextafter(NUMPY[dtype](0.1), NUMPY[dtype](0)).item()
    x = torch.tensor([0.1, below, -0.1, -below, 0.0] * 20, dtype=dtype)
    (kept, count), *_ = run(backend, "select", x, 0.1, 100)
    assert kept.indices.tolist() == [i for i in range(100) if i % 5 in (0, 2)]
    assert count == 40


@pytest.mark.parametrize("n", [10, 10_000])
def test_beyond_the_capacity_only_the_count_goes_on(backend, n):
    (kept, count), *_ = run(backend, "select", torch.ones(n), 1.0, 7)
    assert (kept.indices.tolist(), count) == (list(range(7)), n)


@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulating_adds_once_and_leaves_the_residual_alone(backend, dtype):
    grad, residual = vector(100, dtype), torch.full((100,), 0.1, dtype=dtype)
    want = residual + grad
    after = run(backend, "accumulate_select", residual, grad, torch.zeros_like(grad), 0.75, 100)
    selected = list(reference.select(want, 0.75, 100))
    assert bits(after[:4]) == bits([selected, residual, grad, want])


@given(data=st.data(), dtype=st.sampled_from(DTYPES), k=st.integers(0, 60))
@examples
def test_trim_equals_the_reference_and_keeps_k_at_most(backend, data, dtype, k):
    x = data.draw(vectors(dtype, LENGTHS))
    found, _ = reference.select(x, 0.5, x.numel())
    kept, threshold = reference.trim(found, 0.5, k)
    mine, same = run(backend, "trim", found, 0.5, k)[0]
    assert bits([mine, same]) == bits([kept, threshold])
    assert kept.num <= k and kept.values.abs().lt(threshold).sum() == 0


def test_trim_is_within_a_percent_of_k(backend):
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(3))
    (found, _), *_ = run(backend, "select", x, 1.5, 100_000)
    (kept, threshold), *_ = run(backend, "trim", found, 1.5, 10_000)
    assert 9_900 <= kept.num <= 10_000
    assert kept.num == int((x.abs() >= threshold).sum())
