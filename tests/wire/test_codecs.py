# SPDX-License-Identifier: Apache-2.0
"""Every row of the table of codecs: sizes, exact indices, and values as the receiver reads them."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk import wire
from oktopk.kernels import QUANTIZE_BLOCK
from oktopk.wire import BLOCK, CODECS, CodecName, EntryRange
from wire_cases import BITS, DTYPES, EXTREME, NOT_FINITE, ranges, same_bits, values

VALUE_CODECS = {name: row.values for name, row in CODECS.items()}
INDEX_CODECS = {type(row.indices).__name__: row.indices for row in CODECS.values()}
COUNTS = [0, 1, 2, 3, 4, 5, BLOCK - 1, BLOCK, BLOCK + 1, 1000]
# the largest error of a value, relative to itself and to the largest value of its block
ERROR = {"plain": (0, 0), "fp32": (1e-7, 0), "bf16": (2**-8, 0), "fp16": (2**-11, 0)}
ERROR |= {"int8": (0, 0.5 / 127 + 1e-6)}
# the widest step between levels, of which a value is at most half away, and bfloat16's rounding
ERROR |= {"int4": (2**-7, 0.1), "int2": (2**-7, 0.7), "sign": (2**-7, 1)}
BY_BLOCKS = ["int8", "int4", "int2", "sign"]
LOW_BIT = BY_BLOCKS[1:]


many = settings(deadline=None, max_examples=100)


def new_words(num: int) -> torch.Tensor:
    """Words with something in them, all of which must be overwritten."""
    return torch.full((num,), -1, dtype=torch.int32)


def sent(row, given_values: torch.Tensor) -> torch.Tensor:
    """Values as the receiver reads them, from words at an odd position of a larger tensor."""
    count, dtype = given_values.numel(), given_values.dtype
    words = row.encode(given_values)
    assert words.dtype == torch.int32 and words.numel() == row.num_words(count, dtype)
    return decoded(row, torch.cat([new_words(1), words])[1:], given_values)


def decoded(row, words: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Values read from words, into the middle of a larger tensor."""
    room = torch.full((like.numel() + 2,), 7.0, dtype=like.dtype)
    row.decode(words, room[1:-1])
    assert room[0] == room[-1] == 7
    return room[1:-1]


def test_the_table_has_a_row_for_every_name():
    assert tuple(CODECS) == get_args(CodecName)


@pytest.mark.parametrize("name", VALUE_CODECS)
@given(data=st.data(), count=st.sampled_from(COUNTS), dtype=st.sampled_from(DTYPES))
@many
def test_values_are_read_as_the_sender_decodes_them(name, data, count, dtype):
    row, x = VALUE_CODECS[name], data.draw(values(count, dtype))
    before = x.clone()
    read = sent(row, x)
    mine = decoded(row, row.encode(x), x)
    assert same_bits(read, mine) and same_bits(x, before)
    assert not row.is_exact or same_bits(read, x)


@pytest.mark.parametrize("name", VALUE_CODECS)
@pytest.mark.parametrize("count", COUNTS)
def test_values_are_as_near_as_the_codec_promises(name, count):
    x = torch.randn(count, generator=torch.Generator().manual_seed(count))
    relative, to_block = ERROR[name]
    block = QUANTIZE_BLOCK if name in LOW_BIT else BLOCK
    for part, read in zip(x.split(block), sent(VALUE_CODECS[name], x).split(block), strict=True):
        largest = part.abs().amax() if part.numel() else 0
        assert (read - part).abs().le(relative * part.abs() + to_block * largest).all()


@pytest.mark.parametrize("name", [name for name in VALUE_CODECS if name not in LOW_BIT])
def test_extreme_values_become_the_nearest_of_the_narrow_dtype(name):
    x = torch.tensor(EXTREME)
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)
    want = x.to(narrow).float() if name != "int8" else None
    read = sent(VALUE_CODECS[name], x)
    if want is None:  # the scale is that of the largest: all others are far below one step
        torch.testing.assert_close(read, torch.where(x.abs() > 1e38, x, 0), rtol=1e-6, atol=0)
    else:
        assert same_bits(read, want)


@pytest.mark.parametrize("name", [name for name in VALUE_CODECS if name not in BY_BLOCKS])
def test_values_that_are_not_finite_arrive_as_such(name):
    x = torch.tensor(NOT_FINITE)
    assert sent(VALUE_CODECS[name], x).isfinite().logical_not().all()


def test_int8_keeps_blocks_of_zeros_and_denormals_apart_from_others():
    x = torch.cat([torch.zeros(BLOCK), torch.full((BLOCK,), 1e-45), torch.tensor([1e38, -1e38])])
    read = sent(VALUE_CODECS["int8"], x)
    assert read[: 2 * BLOCK].eq(0).all()
    torch.testing.assert_close(read[2 * BLOCK :], x[2 * BLOCK :], rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", INDEX_CODECS)
@given(case=ranges())
@many
def test_indices_arrive_exactly(name, case):
    row, (indices, entries) = INDEX_CODECS[name], case
    if not entries.count:
        return
    words = row.encode(indices, entries)
    assert words.dtype == torch.int32 and words.numel() <= row.max_words(entries)
    assert not row.is_sized_by_count or words.numel() == row.num_words(entries)
    read = torch.empty_like(indices)
    row.decode(torch.cat([new_words(1), words])[1:], entries, read)
    assert read.equal(indices)


@pytest.mark.parametrize("name", INDEX_CODECS)
@pytest.mark.parametrize("indices", [[0], [2**31 - 2], [0, 5, 2**31 - 2], [2**30, 2**30 + 1]])
def test_the_largest_indices_arrive_exactly(name, indices):
    row, x = INDEX_CODECS[name], torch.tensor(indices, dtype=torch.int32)
    entries = EntryRange(len(indices), 0, 2**31 - 1)
    words, read = row.encode(x, entries), torch.empty_like(x)
    row.decode(words, entries, read)
    assert read.equal(x)


@pytest.mark.parametrize("name", CODECS)
@given(case=ranges(), data=st.data(), dtype=st.sampled_from(DTYPES))
@many
def test_entries_are_read_as_the_sender_was_told(name, case, data, dtype):
    indices, entries = case
    x = data.draw(values(entries.count, dtype))
    words, received, told = wire.encode(indices, x, entries, name)
    assert words.numel() == wire.num_words(told, name, dtype)
    assert words.numel() <= wire.max_words(entries, name, dtype)
    (entries,) = wire.told_ranges(wire.sizes_to_tell(told, name), name, [(entries.lo, entries.hi)])
    read_indices, read = torch.empty_like(indices), torch.empty_like(x)
    assert wire.is_possible(entries, name, dtype)
    assert wire.decode(words, entries, name, read_indices, read)
    assert read_indices.equal(indices) and same_bits(read, received)
    assert same_bits(received, sent(CODECS[name].values, x))  # packed or not
    assert name != "plain" or received is x


@pytest.mark.parametrize("name", CODECS)
@given(case=ranges(), dtype=st.sampled_from(DTYPES))
@many
def test_no_codec_is_larger_than_the_plain_one(name, case, dtype):
    indices, entries = case
    most = entries.count * (1 + dtype.itemsize // 4)
    assert wire.max_words(entries, name, dtype) <= most
    x = torch.ones(entries.count, dtype=dtype)
    assert wire.encode(indices, x, entries, name).words.numel() <= most


def bits_of(name, density: float, n: int) -> float:
    """Bits per entry of a message whose indices lie evenly, though not at equal distances."""
    drawn = torch.rand(n, generator=torch.Generator().manual_seed(0)) < density
    indices = drawn.nonzero().squeeze(1).int()
    entries = EntryRange(len(indices), 0, n)
    words = wire.encode(indices, torch.ones(len(indices)), entries, name).words
    return 32 * words.numel() / len(indices)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("density", [0.001, 0.02, 0.25, 1.0])
def test_bits_per_entry(name, density):
    """An index takes at most 2 + log2(1 / density) bits, however many entries there are."""
    assert bits_of(name, density, 1_000_000) <= min(64, BITS[name] + 4.5 * (density < 0.02))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("density", [0.001, 0.02, 0.25])
def test_the_estimate_of_bits_per_entry_is_that_of_a_real_message(name, density):
    bits = bits_of(name, density, round(20_000 / density))
    assert wire.entry_bits(name, density) == pytest.approx(bits, abs=0.1)


def test_indices_in_clusters_take_fewer_bits_than_spread_evenly():
    """Half of the entries in a tenth of the range: what `Rice` is for, and Elias-Fano cannot."""
    generator = torch.Generator().manual_seed(0)
    wanted = torch.full((1_000_000,), 0.01 / 0.9)
    wanted[:100_000] = 0.1
    indices = (torch.rand(1_000_000, generator=generator) < wanted).nonzero().squeeze(1).int()
    entries = EntryRange(len(indices), 0, 1_000_000)
    bits = {
        name: 32 * row.encode(indices, entries).numel() / len(indices)
        for name, row in INDEX_CODECS.items()
    }
    assert bits["Rice"] < bits["EliasFano"] - 1 and bits["Rice"] < 6.6


def test_everything_travels_plain_at_density_1():
    assert wire.entry_bits("bf16", 1.0) == 64


def test_memory_for_several_ranges_is_one_tensor_cut_into_views():
    entries = [EntryRange(3, 0, 9), EntryRange(0, 9, 9), EntryRange(2, 9, 20)]
    like = torch.empty(0, dtype=torch.float64)
    indices, index_parts, all_values, value_parts = wire.allocate_entries(entries, like)
    assert (indices.dtype, all_values.dtype) == (torch.int32, torch.float64)
    for number, (part, value_part) in enumerate(zip(index_parts, value_parts, strict=True)):
        part.fill_(number)
        value_part.fill_(number)
    assert indices.tolist() == all_values.tolist() == [0, 0, 0, 2, 2]
