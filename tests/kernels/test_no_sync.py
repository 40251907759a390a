# SPDX-License-Identifier: Apache-2.0
"""Operations whose result size the caller knows equal those of torch that have to find it out."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk.kernels import histogram, nonzero_counted

examples = settings(deadline=None, max_examples=50)


@given(st.lists(st.booleans(), max_size=70))
@examples
def test_nonzero_counted_equals_nonzero(flags):
    mask = torch.tensor(flags, dtype=torch.bool)
    found = nonzero_counted(mask, sum(flags))
    assert found.equal(mask.nonzero().squeeze(1))


@given(st.lists(st.integers(0, 8), max_size=70), st.sampled_from([torch.int32, torch.int64]))
@examples
def test_histogram_equals_bincount(numbers, dtype):
    x = torch.tensor(numbers, dtype=dtype)
    counts = histogram(x, 9)
    assert counts.dtype == torch.int32
    assert counts.equal(torch.bincount(x.long(), minlength=9).int())
