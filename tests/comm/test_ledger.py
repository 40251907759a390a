# SPDX-License-Identifier: Apache-2.0
"""The ledger: sums by stage, differences between two moments, and sizes of messages."""

from __future__ import annotations

import pytest

from oktopk.comm.communicator import Ledger, Traffic, dense_allreduce, messages


def test_empty_messages_do_not_count():
    assert messages([0, 8, 0], [4], header=False) == Traffic(8, 0, 1, 4, 0, 1)
    assert messages([8, 8], [0], header=True) == Traffic(0, 16, 2, 0, 0, 0)


def test_traffic_adds_and_subtracts_field_by_field():
    a, b = Traffic(1, 2, 3, 4, 5, 6), Traffic(10, 20, 30, 40, 50, 60)
    assert (a + b) - a == b
    assert (b.sent, b.received) == (30, 90)


@pytest.mark.parametrize(
    ("nbytes", "size", "sent", "num"),
    [(80, 1, 0, 0), (80, 2, 80, 2), (80, 8, 140, 14), (0, 4, 0, 0)],
)
def test_a_dense_allreduce_sends_twice_all_shares_but_one(nbytes, size, sent, num):
    assert dense_allreduce(nbytes, size) == Traffic(sent, 0, num, sent, 0, num)


def test_a_ledger_tells_what_was_added_since_a_snapshot():
    ledger = Ledger()
    ledger.add("split", messages([8], [8], header=False), [8])
    before = ledger.snapshot()
    ledger.add("split", messages([4], [], header=False), [4])
    ledger.add("counts", messages([2], [2], header=True), [2])
    assert ledger.since(before) == {
        "split": messages([4], [], header=False),
        "counts": messages([2], [2], header=True),
    }
    assert ledger.total() == Traffic(12, 2, 3, 8, 2, 2)
    assert before["split"].sent == 8, "a snapshot does not change"


def test_messages_are_counted_by_the_bit_length_of_their_size():
    ledger = Ledger()
    ledger.add("gather", messages([1024, 2047, 0, 2048], [], header=False), [1024, 2047, 0, 2048])
    assert ledger.sizes == {"gather": {11: 2, 12: 1}}


class Late:
    """Traffic during whose counting another thread adds a stage."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __getattr__(self, name: str) -> int:
        self._ledger.add(f"late {len(self._ledger.stages)}", Traffic(payload_sent=1), [])
        return 0


def test_a_stage_may_be_added_while_the_total_is_read():
    ledger = Ledger()
    ledger.add("first", Traffic(payload_sent=5), [5])
    ledger.stages["second"] = Late(ledger)
    ledger.add("third", Traffic(payload_sent=7), [7])
    assert ledger.total().payload_sent == 12
    assert len(ledger.stages) > 3
