"""A run's folder is read whatever became of the run."""

from __future__ import annotations

import json

from oktopk.runlog.reader import parse, read


def step(number: int, **more) -> dict:
    return {
        "kind": "step",
        "step": number,
        "phase": "dense",
        "bytes_sent": 1,
        "bytes_dense": 1,
    } | more


def test_an_empty_folder_has_problems_and_no_entries(tmp_path):
    record = read(tmp_path)
    assert not record.steps and record.end is None and not record.finished
    assert record.problems == [f"There is no metrics.jsonl in {tmp_path}."]


def test_damaged_lines_are_named_and_passed_over(tmp_path):
    (tmp_path / "config.toml").write_text('name = "mine"\n')
    good = [step(n) for n in range(3)]
    lines = [json.dumps(good[0]), '{"kind": "st', json.dumps(good[1]), "[1]", json.dumps(good[2])]
    (tmp_path / "metrics.jsonl").write_bytes("\n".join(lines).encode() + b'\n{"kind": \xff')
    record = read(tmp_path)
    assert record.config == {"name": "mine"}
    assert record.steps == good
    assert record.problems == [
        "metrics.jsonl: lines 2, 4, 6 could not be read and were passed over"
    ]


def test_the_last_opening_and_the_end_count(tmp_path):
    entries = [{"kind": "run", "step": 0, "size": 4}, {"kind": "run", "step": 5, "size": 2}]
    entries += [{"kind": "end", "how": "finished"}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    record = read(tmp_path)
    assert record.opening["size"] == 2 and record.finished


def test_what_readers_count_on_must_be_there():
    nothing = [b"", b"7", b"[]", b'{"kind": ["a"]}', b'{"kind": "step"}', b'{"kind": "end"}']
    nothing += [json.dumps(step(1) | {name: None}).encode() for name in ("step", "phase")]
    assert [parse(line) for line in nothing] == [None] * len(nothing)
    assert parse(b'{"kind": "mine", "x": 1}') == {"kind": "mine", "x": 1}


def test_numbers_that_json_does_not_have_are_null():
    """Who writes a journal with json.dumps writes NaN for a NaN."""
    line = json.dumps(step(1, loss=float("nan"), lr=float("inf")))
    assert parse(line.encode()) == step(1, loss=None, lr=None)
