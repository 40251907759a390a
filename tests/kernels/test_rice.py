# SPDX-License-Identifier: Apache-2.0
"""Rice coding: every backend writes the words of the reference and reads them back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_cases import check, run
from oktopk.kernels import reference
from oktopk.kernels.bits import RICE_BLOCK
from wire_cases import ranges


def check_both_ways(backend, indices, lo):
    check(backend, "encode_rice", indices, lo)
    words = reference.encode_rice(indices, lo)
    assert run(backend, "decode_rice", words, lo, indices * 0 - 1)[-1].equal(indices)


def num_bits(gaps, parameter):
    """What one block of gaps takes with a parameter, without the parameter itself."""
    return sum(parameter + 1 + (gap >> parameter) for gap in gaps)


@given(case=ranges())
@settings(deadline=None, max_examples=40)
def test_any_indices_are_coded_as_by_the_reference_and_read_back(backend, case):
    indices, entries = case
    check_both_ways(backend, indices, entries.lo)


@pytest.mark.parametrize("count", [0, 1, RICE_BLOCK - 1, RICE_BLOCK, RICE_BLOCK + 1])
@pytest.mark.parametrize("gap", [1, 2, 50, 2**20])
def test_blocks_of_equal_gaps(backend, count, gap):
    check_both_ways(backend, torch.arange(count, dtype=torch.int32) * gap + 3, 0)


@pytest.mark.parametrize("indices", [[0], [2**31 - 2], [0, 5, 2**31 - 2], [2**30, 2**30 + 1]])
def test_the_largest_indices_there_are(backend, indices):
    check_both_ways(backend, torch.tensor(indices, dtype=torch.int32), 0)


@pytest.mark.parametrize("density", [0.001, 0.02, 0.3, 1.0])
def test_many_indices_whose_density_changes(backend, density):
    generator = torch.Generator().manual_seed(1)
    wanted = density * torch.linspace(0, 2, 20_000)
    indices = (torch.rand(20_000, generator=generator) < wanted).nonzero().squeeze(1).int()
    check_both_ways(backend, indices + 9, 9)


@given(gaps=st.lists(st.integers(0, 2**24), min_size=1, max_size=RICE_BLOCK))
@settings(deadline=None, max_examples=40)
def test_a_block_takes_the_fewest_bits_that_any_parameter_gives(gaps):
    indices = (torch.tensor(gaps) + 1).cumsum(0).sub(1).int()
    words = reference.encode_rice(indices, 0)
    chosen = int(words[0])  # of the only block
    fewest = min(num_bits(gaps, parameter) for parameter in range(32))
    assert num_bits(gaps, chosen) == fewest
    assert 32 * (words.numel() - 1) < fewest + 64  # the parameter, and two parts of whole words


@given(case=ranges(), data=st.data())
@settings(deadline=None, max_examples=60)
def test_words_that_were_damaged_are_read_alike_or_refused(backend, case, data):
    indices, entries = case
    words = reference.encode_rice(indices, entries.lo).clone()
    words = words[: len(words) - data.draw(st.sampled_from([0, 0, 1, 2]))]
    for place in data.draw(st.lists(st.integers(0, 2**20), max_size=4)):
        if len(words):
            words[place % len(words)] ^= data.draw(st.integers(-(2**31), 2**31 - 1))
    check(backend, "decode_rice", words, entries.lo, indices * 0 - 1)
