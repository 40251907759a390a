# SPDX-License-Identifier: Apache-2.0
"""Messages: entries, and values that travel dense behind them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk import wire
from oktopk.wire import CODECS, EntryRange, Message
from wire_cases import DTYPES, ranges, same_bits, values


@pytest.mark.parametrize("name", CODECS)
@given(
    case=ranges(max_count=40),
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    num_dense=st.integers(0, 5),
)
@settings(deadline=None, max_examples=50)
def test_a_message_is_read_as_the_sender_was_told(name, case, data, dtype, num_dense):
    indices, entries = case
    x = data.draw(values(entries.count, dtype))
    dense = data.draw(values(num_dense, dtype))
    words, received, entries = wire.write_message(indices, x, entries, name, dense)
    assert words.numel() == wire.message_words(entries, name, dtype, num_dense)
    read_indices, read = torch.empty_like(indices), torch.empty_like(x)
    read_dense, is_sound = wire.read_message(words, entries, name, read_indices, read)
    assert is_sound
    assert read_indices.equal(indices) and same_bits(read, received)
    assert same_bits(read_dense, dense)  # exactly, whatever the codec rounds


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("rank", [0, 2])
def test_messages_of_all_ranks_are_read_in_rank_order(name, rank):
    counts = [2, 0, 3]
    sent = [
        Message(
            torch.arange(count, dtype=torch.int32) + peer,
            torch.arange(count) + 0.5,
            torch.tensor([1e8, 1.0, -1e8])[peer : peer + 1],
        )
        for peer, count in enumerate(counts)
    ]
    written = [
        wire.write_message(
            each.indices, each.values, EntryRange(count, 0, 9), name, each.dense_part
        )
        for count, each in zip(counts, sent, strict=True)
    ]
    words = {peer: each.words for peer, each in enumerate(written) if peer != rank}
    checked = []
    read = wire.read_messages(
        words,
        [each.entries for each in written],
        name,
        sent[rank],
        lambda is_sound, peer: checked.append((bool(is_sound), peer)),
    )
    assert checked == [(True, peer) for peer in range(3) if peer != rank]
    assert read.indices.tolist() == [0, 1, 2, 3, 4]
    want = [sent[peer].values if peer == rank else written[peer].values for peer in range(3)]
    assert read.values.equal(torch.cat(want))
    assert read.dense_part.tolist() == [0.0]  # (1e8 + 1) - 1e8, in this order
