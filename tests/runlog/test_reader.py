"""A run directory is read, however the run ended."""

from __future__ import annotations

import json

from oktopk.runlog.reader import parse, read_runlog
from oktopk.runlog.schema import UnknownRecord


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
