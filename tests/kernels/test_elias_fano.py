# SPDX-License-Identifier: Apache-2.0
"""Elias-Fano coding: every backend writes the words of the reference and reads them back."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_cases import check, run
from oktopk.kernels import reference
from oktopk.wire import EliasFano, EntryRange

SIZES = EliasFano()


@st.composite
def cases(draw):
    """Ascending indices, and the range that they lie in."""
    lo = draw(st.sampled_from([0, 7, 2**20]))
    width = draw(st.sampled_from([1, 2, 31, 32, 33, 100, 5000, 2**30]))
    offsets = draw(st.sets(st.integers(0, width - 1), min_size=1, max_size=200))
    indices = torch.tensor(sorted(offsets), dtype=torch.int32) + lo
    return indices, EntryRange(len(offsets), lo, lo + width)


def new_words(entries):
    """Memory for the low and the high words, with something in it."""
    sizes = SIZES.num_low_words(entries), SIZES.num_high_words(entries)
    return [torch.full((num,), -1, dtype=torch.int32) for num in sizes]


def check_both_ways(backend, indices, entries):
    numbers = entries.lo, SIZES.num_low_bits(entries)
    check(backend, "encode_elias_fano", indices, *numbers, *new_words(entries))
    low, high = new_words(entries)
    reference.encode_elias_fano(indices, *numbers, low, high)
    read = run(backend, "decode_elias_fano", low, high, *numbers, indices * 0 - 1)[-1]
    assert read.equal(indices)


@given(case=cases())
@settings(deadline=None, max_examples=20)  # in the interpreter each takes a sixth of a second
def test_any_indices_are_coded_as_by_the_reference_and_read_back(backend, case):
    check_both_ways(backend, *case)


@pytest.mark.parametrize("density", [0.001, 0.02, 0.3, 1.0])
def test_many_indices_are_coded_as_by_the_reference_and_read_back(backend, density):
    n = 40_000
    indices = (torch.rand(n, generator=torch.Generator().manual_seed(1)) < density).nonzero()
    indices = indices.squeeze(1).int() + 9
    check_both_ways(backend, indices, EntryRange(len(indices), 9, 9 + n))


def test_the_largest_index_there_is(backend):
    indices = torch.tensor([0, 5, 2**31 - 2], dtype=torch.int32)
    entries = EntryRange(3, 0, 2**31 - 1)
    assert (SIZES.num_low_words(entries), SIZES.num_high_words(entries)) == (3, 1)
    check_both_ways(backend, indices, entries)


class Allocated(TorchDispatchMode):
    """The bytes of all tensors that operations make; views do not count."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in given:
            self.num_bytes += out.nbytes
        return out


@pytest.mark.parametrize("density", [0.01, 0.1, 0.5])
def test_coding_in_triton_takes_a_few_bytes_of_memory_for_an_entry(density):
    cuda = pytest.importorskip("oktopk.kernels.cuda", reason="it needs triton")
    if os.environ["TRITON_INTERPRET"] == "0":
        pytest.skip("the fake of a device's memory is on the CPU")
    num = 4000
    indices = torch.arange(num, dtype=torch.int32) * int(1 / density)
    entries = EntryRange(num, 0, int(num / density))
    low_bits, (low, high) = SIZES.num_low_bits(entries), new_words(entries)
    for kernel, args in (
        (cuda.encode_elias_fano, (indices, 0, low_bits, low, high)),
        (cuda.decode_elias_fano, (low, high, 0, low_bits, torch.empty_like(indices))),
    ):
        with Allocated() as allocated:
            kernel(*args)
        assert allocated.num_bytes <= 4 * num, kernel.__name__


@given(case=cases(), data=st.data())
@settings(deadline=None, max_examples=20)
def test_words_that_were_damaged_are_read_alike_or_refused(backend, case, data):
    indices, entries = case
    numbers, (low, high) = (entries.lo, SIZES.num_low_bits(entries)), new_words(entries)
    reference.encode_elias_fano(indices, *numbers, low, high)
    for words in (low, high):
        if len(words):
            place = data.draw(st.integers(0, len(words) - 1))
            words[place] ^= data.draw(st.integers(-(2**31), 2**31 - 1))
    check(backend, "decode_elias_fano", low, high, *numbers, indices * 0 - 1)


@given(case=cases(), data=st.data())
@settings(deadline=None, max_examples=20)
def test_the_check_of_indices_finds_what_does_not_ascend_within_the_range(backend, case, data):
    indices, entries = case
    ends = entries.lo, entries.hi
    assert run(backend, "ascend_within", indices, *ends)[0]
    place = data.draw(st.integers(0, len(indices) - 1))
    other = data.draw(st.sampled_from([-1, entries.lo - 1, entries.hi, -(2**31), 2**31 - 1]))
    damaged = indices.clone()
    damaged[place] = other
    assert not run(backend, "ascend_within", damaged, *ends)[0]
    if place:
        damaged[place] = indices[place - 1]  # twice
        assert not run(backend, "ascend_within", damaged, *ends)[0]


def test_no_indices_are_sound(backend):
    assert run(backend, "ascend_within", torch.empty(0, dtype=torch.int32), 3, 3)[0]
