# SPDX-License-Identifier: Apache-2.0
"""The line that says how long some work may still take."""

from __future__ import annotations

import sys

import pytest

from oktopk.utils import console
from oktopk.utils.console import LINE_SECONDS, QUIET_SECONDS, TimeLeft, said_if_slow


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_work_of_a_moment_shows_nothing(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with TimeLeft("rows", 4) as left:
        for done in range(1, 5):
            clock[0] += QUIET_SECONDS / 5
            left(done)
    assert capsys.readouterr().out == ""


def test_a_terminal_has_one_line_that_is_erased(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with TimeLeft("rows", 4) as left:
        clock[0] += 10
        left(1)
        clock[0] += 2
        left(3)
    said = capsys.readouterr().out
    assert said.split("\r")[1:3] == ["rows: 1 of 4, 0:30 left", "rows: 3 of 4, 0:04 left"]
    assert "\n" not in said and said.endswith(" \r")


def test_a_pipe_has_a_line_now_and_then(clock, capsys):
    for in_pipes in (True, False):
        left = TimeLeft("rows", 40, in_pipes=in_pipes)
        for done in range(1, 41):
            clock[0] += LINE_SECONDS / 10
            left(done)
        assert capsys.readouterr().out.count("\n") == (4 if in_pipes else 0)


def test_nothing_done_has_no_time_left(clock):
    assert TimeLeft("rows", 4).line(0) == "rows: 0 of 4"


def test_parts_are_counted_one_by_one(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with TimeLeft("rows", 4) as left:
        left.advance()
        clock[0] += 10
        left.advance()
    assert "rows: 2 of 4, 0:10 left" in capsys.readouterr().out


def test_what_takes_long_is_said_while_it_does(capsys, monkeypatch):
    monkeypatch.setattr(console, "SLOW_SECONDS", 1000.0)
    with said_if_slow("loading"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(console, "SLOW_SECONDS", 0.0)
    said = ""
    with said_if_slow("loading"):
        while not said:
            said = capsys.readouterr().err
    assert said == "loading\n"
