# SPDX-License-Identifier: Apache-2.0
"""Groups of buckets, sums by bucket, and how k is divided."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk.exchange import layout
from oktopk.exchange.layout import Bucket, by_bucket, check_indexable, grouped, share_out, split_at
from oktopk.methods.base import SparseSum
from oktopk.sparse import Sparse


def sparse(indices: list[int], numel: int) -> Sparse:
    return Sparse(torch.tensor(indices, dtype=torch.int32), torch.tensor(indices) * 1.0, numel)


@pytest.mark.parametrize(
    ("min_numel", "expected"),
    [(1, [[0], [1], [2]]), (6, [[0, 1], [2]]), (7, [[0, 1, 2]]), (100, [[0, 1, 2]])],
)
def test_a_group_is_closed_as_soon_as_it_is_large_enough(min_numel, expected):
    cut = grouped([Bucket(4), Bucket(2), Bucket(3)], min_numel)
    assert [list(group) for group in cut.groups] == expected
    assert cut.starts == [0, 4, 6, 9] and cut.numel == 9


def test_without_buckets_there_is_nothing():
    none = grouped([], 10)
    assert (none.numel, none.num_dense, none.groups, none.starts) == (0, 0, (), [0])


def test_what_travels_dense_is_not_sparse():
    cut = grouped([Bucket(10, dense=((0, 2), (5, 6))), Bucket(5)], 1)
    assert cut.num_dense == 3
    assert [cut.num_sparse(group) for group in cut.groups] == [7, 5]
    assert cut.part(torch.arange(15), range(1, 2)).tolist() == [10, 11, 12, 13, 14]


def test_a_selection_is_split_at_edges_and_keeps_its_indices():
    (parts,) = split_at([sparse([0, 3, 4, 9], 10)], [0, 4, 4, 10])
    assert [part.indices.tolist() for part in parts] == [[0, 3], [], [4, 9]]
    assert [part.values.tolist() for part in parts] == [[0.0, 3.0], [], [4.0, 9.0]]


def test_sums_by_bucket_have_their_part_of_everything():
    cut = grouped([Bucket(4, dense=((0, 2),)), Bucket(6, dense=((1, 2),))], 10)
    sums = SparseSum(
        sparse([1, 3, 4, 9], 10),
        sparse([3, 9], 10),
        torch.tensor([1.0, 2.0, 3.0]),
        corrections=(sparse([4], 10),),
        imbalance=2.0,
        num_sent=7,
    )
    first, second = by_bucket(sums, range(2), cut).values()
    assert first.result.indices.tolist() == [1, 3] and second.result.indices.tolist() == [4, 9]
    assert first.sent.indices.tolist() == [3] and second.sent.indices.tolist() == [9]
    assert first.dense_part.tolist() == [1, 2] and second.dense_part.tolist() == [3]
    assert [c.num for c in first.corrections] == [0] and [c.num for c in second.corrections] == [1]
    assert (first.offset, second.offset) == (0, 4)
    assert first.num_sent + second.num_sent == 7


@given(st.integers(0, 1000), st.lists(st.integers(0, 50), min_size=1, max_size=9), st.data())
def test_shares_add_up_within_their_limits(total, weights, data):
    limits = [data.draw(st.integers(0, 300)) for _ in weights]
    shares = share_out(total, weights, limits)
    assert sum(shares) == min(total, sum(limits))
    assert all(0 <= share <= limit for share, limit in zip(shares, limits, strict=True))


def test_shares_are_by_weight():
    assert share_out(100, [1, 1, 2], [99, 99, 99]) == [25, 25, 50]
    assert share_out(10, [1, 0, 0], [4, 3, 9]) == [4, 3, 3]
    assert share_out(3, [0, 0], [2, 2]) == [2, 1]


def test_more_entries_than_int32_are_refused(monkeypatch):
    monkeypatch.setattr(layout, "MAX_INDEXABLE", 10)
    check_indexable([5, 5], "model")
    check_indexable([10, 10], "bucket")
    with pytest.raises(ValueError, match="the model has 11 trainable entries"):
        check_indexable([5, 6], "model")
    with pytest.raises(ValueError, match="a bucket has 11 trainable entries"):
        check_indexable([11, 1], "bucket")
