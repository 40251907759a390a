# SPDX-License-Identifier: Apache-2.0
"""A run directory is read, however the run ended."""

from __future__ import annotations

import json

import pytest

from oktopk.lab.runlog.reader import parse, read_runlog
from oktopk.lab.runlog.schema import UnknownRecord


def step(number: int, **more) -> dict:
    return {
        "kind": "step",
        "step": number,
        "phase": "dense",
        "bytes_sent": 1,
        "bytes_dense": 1,
    } | more


def test_an_empty_folder_has_problems_and_no_entries(tmp_path):
    runlog = read_runlog(tmp_path)
    assert not runlog.steps and runlog.end is None and not runlog.finished
    assert runlog.problems == [f"There is no metrics.jsonl in {tmp_path}."]


def test_damaged_lines_are_listed_and_skipped(tmp_path):
    (tmp_path / "config.toml").write_text('name = "mine"\n')
    good = [step(n) for n in range(3)]
    lines = [json.dumps(good[0]), '{"kind": "st', json.dumps(good[1]), "[1]", json.dumps(good[2])]
    (tmp_path / "metrics.jsonl").write_bytes("\n".join(lines).encode() + b'\n{"kind": \xff')
    runlog = read_runlog(tmp_path)
    assert runlog.config == {"name": "mine"}
    assert runlog.steps == [parse(json.dumps(entry).encode()) for entry in good]
    assert runlog.problems == ["metrics.jsonl: lines 2, 4, 6 could not be read and were skipped"]


def test_the_last_run_record_and_the_end_count(tmp_path):
    entries = [{"kind": "run", "step": 0, "size": 4}, {"kind": "run", "step": 5, "size": 2}]
    entries += [{"kind": "end", "how": "finished"}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    runlog = read_runlog(tmp_path)
    assert runlog.info.size == 2 and runlog.finished


def test_records_without_required_fields_are_damaged():
    nothing = [b"", b"7", b"[]", b'{"kind": ["a"]}', b'{"kind": "step"}', b'{"kind": "end"}']
    nothing += [json.dumps(step(1) | {name: None}).encode() for name in ("step", "phase")]
    assert [parse(line) for line in nothing] == [None] * len(nothing)
    assert parse(b'{"kind": "mine", "x": 1}') == UnknownRecord("mine")


def test_numbers_that_json_does_not_have_are_null():
    """`json.dumps` writes NaN for a NaN."""
    record = parse(json.dumps(step(1, loss=float("nan"), lr=float("inf"))).encode())
    assert record.step == 1 and record.loss is None and record.lr is None


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_line_that_a_kill_cut_off_loses_only_itself(tmp_path, cut):
    lines = [json.dumps(step(n)).encode() for n in range(3)]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines)[:-cut])
    runlog = read_runlog(tmp_path)
    assert [record.step for record in runlog.steps] == [0, 1]
    assert runlog.problems == ["metrics.jsonl: line 3 could not be read and was skipped"]


def test_a_resumed_run_that_appends_to_half_a_line_damages_that_line_only(tmp_path):
    half, whole = json.dumps(step(1)).encode()[:25], json.dumps(step(2)).encode()
    (tmp_path / "metrics.jsonl").write_bytes(half + whole + b"\n" + whole + b"\n")
    runlog = read_runlog(tmp_path)
    assert [record.step for record in runlog.steps] == [2]
    assert runlog.problems == ["metrics.jsonl: line 1 could not be read and was skipped"]


def test_records_of_unknown_kinds_are_no_problem(tmp_path):
    lines = [json.dumps(step(0)), json.dumps({"kind": "mine"}), json.dumps(step(1))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    runlog = read_runlog(tmp_path)
    assert len(runlog.steps) == 2 and runlog.problems == []


def test_fields_that_the_schema_does_not_know_are_ignored():
    record = parse(json.dumps(step(1, colour="red")).encode())
    assert record.step == 1 and not hasattr(record, "colour")
