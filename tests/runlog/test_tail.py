# SPDX-License-Identifier: Apache-2.0
"""The tail of a run log that another process writes."""

from __future__ import annotations

import pytest

import runlogs
from oktopk.lab.runlog.reader import RunLogTail


def test_only_what_is_new_is_read_and_half_a_line_waits(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = RunLogTail(path)
    assert tail.read() == (False, [])  # not begun
    text = runlogs.lines([runlogs.step(i) for i in range(3)])
    path.write_bytes(text[:-5])
    assert [record.step for record in tail.read()[1]] == [0, 1]
    assert tail.read() == (False, [])
    with path.open("ab") as file:
        file.write(text[-5:] + b"{broken\n[1]\n")
    assert [record.step for record in tail.read()[1]] == [2]
    path.unlink()
    assert tail.read() == (True, [])


@pytest.mark.parametrize("more", [0, 40])
def test_a_resumed_run_is_told_from_the_start(tmp_path, more):
    """Also when it has written more than was there, by the time somebody looks."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(runlogs.lines([runlogs.step(i) for i in range(8)]))
    tail = RunLogTail(path)
    tail.read()
    again = [runlogs.step(i) | {"whole": 0.1 if i < 4 else 0.3} for i in range(6 + more)]
    path.write_bytes(runlogs.lines(again))
    rewritten, records = tail.read()
    assert rewritten and [record.step for record in records] == list(range(6 + more))
