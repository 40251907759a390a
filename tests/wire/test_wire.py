"""Every wire form: what is written is what is read, sizes are known, and nothing is lost."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oktopk
from laws import assert_all_agree, assert_nothing_is_lost, simulated
from oktopk.kernels import cpu, reference
from oktopk.wire import codec
from oktopk.wire.codec import Form, Run

FORMS = get_args(Form)
BITS = {"plain": 64, "fp32": 40, "bf16": 24, "fp16": 24, "int8": 16.2}


@st.composite
def runs(draw) -> tuple[torch.Tensor, Run]:
    lo = draw(st.sampled_from([0, 7, 2**20]))
    width = draw(st.sampled_from([1, 2, 31, 32, 33, 100, 5000]))
    offsets = draw(st.sets(st.integers(0, width - 1), max_size=200))
    indices = torch.tensor(sorted(offsets), dtype=torch.int32) + lo
    return indices, Run(len(indices), lo, lo + width)


@given(runs(), st.sampled_from([cpu, reference]), st.sampled_from([cpu, reference]))
@settings(deadline=None, max_examples=150)
def test_indices_come_back_from_every_kernel(case, writer, reader):
    indices, run = case
    if not run.count:
        return
    low = torch.full((run.low_words,), -1, dtype=torch.int32)
    high = torch.full((run.high_words,), -1, dtype=torch.int32)
    writer.encode_indices(indices, run.lo, run.low_bits, low, high)
    read = torch.empty_like(indices)
    reader.decode_indices(low, high, run.lo, run.low_bits, read)
    assert read.equal(indices)


@given(runs(), st.sampled_from(FORMS), st.sampled_from([torch.float32, torch.float64]))
@settings(deadline=None, max_examples=150)
def test_what_is_told_to_arrive_is_what_is_read(case, form, dtype):
    indices, run = case
    values = (indices.to(dtype) - run.lo).mul(0.7).sin() * 3
    words = torch.full((codec.num_words(run, form, dtype),), -1, dtype=torch.int32)
    arriving = codec.encode(indices, values, run, form, words)
    where, what = torch.empty_like(indices), torch.empty_like(values)
    codec.decode(words, run, form, where, what)
    assert where.equal(indices) and what.equal(arriving) and what.dtype == dtype
    assert len(words) <= run.count * (1 + dtype.itemsize // 4)  # never larger than plain
    tolerance = {"plain": 0, "fp32": 1e-6, "bf16": 0.012, "fp16": 0.0015, "int8": 0.012}[form]
    torch.testing.assert_close(what, values, rtol=0, atol=tolerance)


def test_the_largest_index_there_is():
    numel = 2**31 - 1
    indices = torch.tensor([0, 5, numel - 1], dtype=torch.int32)
    low, high = torch.empty(3, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
    run = Run(3, 0, numel)
    assert (run.low_words, run.high_words) == (3, 1)
    cpu.encode_indices(indices, 0, run.low_bits, low, high)
    read = torch.empty_like(indices)
    cpu.decode_indices(low, high, 0, run.low_bits, read)
    assert read.equal(indices)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("density", [0.001, 0.02, 0.25, 1.0])
def test_bits_per_entry(form, density):
    """2 + log2(1/density) for an index, at most; the shape of the run does not matter."""
    run = Run(int(density * 1e6), 0, 1_000_000)
    bits = 32 * codec.num_words(run, form, torch.float32) / run.count
    assert bits <= min(64, BITS[form] + (4.3 if density < 0.02 else 0))


def test_int8_knows_zeros_and_extremes():
    values = torch.cat([torch.zeros(256), torch.tensor([1e38, -1e38, 1e-40])])
    indices = torch.arange(259, dtype=torch.int32)
    run = Run(259, 0, 259)
    words = torch.empty(codec.num_words(run, "int8", values.dtype), dtype=torch.int32)
    arrive = codec.encode(indices, values, run, "int8", words)
    assert arrive[:256].eq(0).all() and arrive[258] == 0
    torch.testing.assert_close(arrive[256:258], values[256:258], rtol=1e-5, atol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", oktopk.METHODS)
@pytest.mark.parametrize("P", [1, 2, 3, 8])
def test_nothing_is_lost_and_all_agree(P, method, form):
    ranks = simulated(P, method, 3000, 0.02, "heavy", 36, torch.float32, wire=form)
    assert_nothing_is_lost(ranks, tolerance=1e-4)
    assert_all_agree(ranks)


@pytest.mark.parametrize("form", FORMS)
def test_fewer_bits_send_fewer_bytes(form):
    (step, *_), *_ = simulated(4, "oktopk", 100_000, 0.02, "heavy", 1, torch.float32, wire=form)
    bits = 8 * (step.stats.bytes_sent - step.stats.bytes_header) / step.stats.entries_sent
    assert bits <= BITS[form] * 1.02


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="wire must be one of"):
        oktopk.Reducer(10, wire="zip")
