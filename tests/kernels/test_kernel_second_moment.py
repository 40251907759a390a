# SPDX-License-Identifier: Apache-2.0
"""The correction of Adam's second moment: every backend gives the bits of the reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kernel_cases import BF16, F16, F32, F64, check, run, vectors
from oktopk import kernels
from oktopk.optim.staleness import shares


@given(data=st.data(), dtype=st.sampled_from([F32, F32, BF16]), scale=st.sampled_from([1.0, 3.0]))
@settings(deadline=None, max_examples=60)
def test_correct_second_moments_equals_the_reference(backend, data, dtype, scale):
    grad = data.draw(vectors(dtype, st.integers(0, 60)))
    square = data.draw(vectors(F32, st.just(grad.numel()))).abs()
    arrived = data.draw(arrays(np.int32, grad.numel(), elements=st.integers(-40, 8)))
    table = shares(0.99, 11, torch.device("cpu"))
    late = [kernels.SecondMoment(grad, square, torch.from_numpy(arrived), table, 0.99)] * 2
    found_inf = data.draw(st.sampled_from([None, torch.zeros(()), torch.ones(())]))
    check(backend, "correct_second_moments_", late, 9, scale, found_inf)


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
def test_zeros_do_not_arrive_and_the_smallest_values_do(backend, dtype):
    tiny = max(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps, 1.2e-38)
    grad = torch.tensor([0.0, 1.0, -0.0, tiny, -2.0], dtype=dtype)
    arrived, table = torch.zeros(5, dtype=torch.int32), shares(0.9, 11, torch.device("cpu"))
    for beta in (0.9, 0.0):  # Adam allows 0
        late = [kernels.SecondMoment(grad, torch.ones(5), arrived, table, beta)]
        ((found, *_),), (after,), *_ = run(backend, "correct_second_moments_", late, 9, 1.0, None)
        assert found.tolist() == [1, 3, 4]
        assert after.last_arrival.tolist() == [0, 9, 0, 9, 9]
