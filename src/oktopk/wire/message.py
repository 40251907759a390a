"""A letter: a run of entries, and riders behind it.

Riders are values that must arrive whole: biases, norms and tiny tensors are not worth indices, nor
a round trip of their own. They are carried along in the messages that travel anyway, exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oktopk.wire import codec
from oktopk.wire.codec import Form, Run


def size(run: Run, form: Form, dtype: torch.dtype, num_riders: int) -> int:
    """Words of a letter; what both sides know without a message."""
    return codec.num_words(run, form, dtype) + num_riders * codec.words_per_value(dtype)


def write(
    indices: Tensor, values: Tensor, run: Run, form: Form, rider: Tensor
) -> tuple[Tensor, Tensor]:
    """The words of a letter, and the values of its run as they will arrive. O(num)."""
    run_words = codec.num_words(run, form, values.dtype)
    words = torch.empty(
        size(run, form, values.dtype, rider.numel()), dtype=torch.int32, device=values.device
    )
    words[run_words:] = rider.contiguous().view(torch.int32)
    return words, codec.encode(indices, values, run, form, words[:run_words])


def read(words: Tensor, run: Run, form: Form, indices: Tensor, values: Tensor) -> Tensor:
    """Fill `indices` and `values` with those of a letter; its riders. O(num)."""
    run_words = codec.num_words(run, form, values.dtype)
    codec.decode(words[:run_words], run, form, indices, values)
    return words[run_words:].clone().view(values.dtype)


def read_all(
    heard: dict[int, Tensor],
    runs: list[Run],
    form: Form,
    mine: tuple[int, Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """All ranks' entries, one rank after the other, and the sum of their riders in rank order.

    `mine` has this rank's number, indices, values and riders, which nobody has to send it.
    """
    rank, own_indices, own_values, own_rider = mine
    indices, index_parts, values, value_parts = codec.room(runs, own_values)
    riders = []
    for peer, run in enumerate(runs):
        if peer == rank:
            index_parts[peer].copy_(own_indices)
            value_parts[peer].copy_(own_values)
            riders.append(own_rider)
        else:
            riders.append(read(heard[peer], run, form, index_parts[peer], value_parts[peer]))
    return indices, values, in_rank_order(riders)


def in_rank_order(parts: list[Tensor]) -> Tensor:
    """The sum of parts, in their order."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
