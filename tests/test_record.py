"""A run's folder is read whatever became of the run."""

from __future__ import annotations

import json

from oktopk.report.record import read


def test_an_empty_folder_has_problems_and_no_entries(tmp_path):
    record = read(tmp_path)
    assert not record.steps and record.end is None and not record.finished
    assert [p.split()[0] for p in record.problems] == ["config.toml", "metrics.jsonl"]


def test_damaged_lines_are_named_and_passed_over(tmp_path):
    (tmp_path / "config.toml").write_text('name = "mine"\n')
    good = [{"kind": "step", "step": n} for n in range(3)]
    lines = [json.dumps(good[0]), '{"kind": "st', json.dumps(good[1]), "[1]", json.dumps(good[2])]
    (tmp_path / "metrics.jsonl").write_bytes("\n".join(lines).encode() + b'\n{"kind": \xff')
    record = read(tmp_path)
    assert record.config == {"name": "mine"}
    assert record.steps == good
    assert record.problems == [
        "metrics.jsonl: lines 2, 4, 6 could not be read and were passed over"
    ]


def test_the_last_opening_and_the_end_count(tmp_path):
    entries = [{"kind": "run", "size": 4}, {"kind": "run", "size": 2}]
    entries += [{"kind": "end", "how": "finished"}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    record = read(tmp_path)
    assert record.opening["size"] == 2 and record.finished
