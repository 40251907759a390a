# SPDX-License-Identifier: Apache-2.0
"""Records are written as lines of JSON that the reader takes back."""

from __future__ import annotations

import json

import pytest

from oktopk.lab.runlog.reader import parse, read_runlog
from oktopk.lab.runlog.schema import (
    RECORD_TYPES,
    EndRecord,
    EpochRecord,
    MessagesRecord,
    PhaseTotals,
    RunRecord,
    StepRecord,
    ValidationRecord,
)
from oktopk.lab.runlog.writer import RunLogWriter, encode


def step(number: int, **more) -> StepRecord:
    return StepRecord(step=number, phase="dense", bytes_sent=1, bytes_dense=2, **more)


@pytest.mark.parametrize(
    "record",
    [
        step(3, loss=0.5, stages={}),
        EpochRecord(epoch=0, step=3),
        ValidationRecord(step=3, metrics={"wer": 0.5}, samples=[{"said": "GO", "heard": "NO"}]),
        RunRecord(step=0, size=2, settings={"method": "oktopk", "mine": [1]}),
        MessagesRecord(step=3, sent={"split": {5: 2, 12: 1}}),
        EndRecord(how="finished", seconds=1.0, totals={"dense": PhaseTotals(steps=2)}),
    ],
)
def test_a_record_is_read_as_it_was_written(record):
    assert parse(encode(record).encode()) == record


def test_a_line_begins_with_its_kind_and_has_no_nan():
    line = encode(step(3, loss=float("nan"), lr=float("inf")))
    assert line.startswith('{"kind": "step", "epoch": null, "loss": null, "lr": null, "step": 3')


def test_kinds_are_the_tags_of_their_types():
    for kind, record_type in RECORD_TYPES.items():
        assert record_type.__struct_config__.tag == kind


def test_only_a_finished_run_writes_seconds_and_totals():
    assert json.loads(encode(EndRecord(how="failed", text="no disk"))) == {
        "kind": "end",
        "how": "failed",
        "text": "no disk",
    }


def test_a_resumed_run_continues_after_the_bytes_of_its_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = RunLogWriter(path)
    writer.write(step(0), step(1))
    saved = writer.num_bytes
    writer.write(step(2), step(3))
    writer.close()
    again = RunLogWriter(path, saved)
    assert again.num_bytes == saved
    again.write(step(2, loss=0.5))
    assert again.num_bytes == path.stat().st_size
    again.close()
    assert read_runlog(tmp_path).steps == [step(0), step(1), step(2, loss=0.5)]


def test_an_unfinished_line_before_the_checkpoint_is_cut_off(tmp_path):
    """Bytes may be missing when the machine crashed before they were on disk."""
    path = tmp_path / "metrics.jsonl"
    whole = encode(step(0)).encode()
    path.write_bytes(whole + encode(step(1)).encode()[:20])
    writer = RunLogWriter(path, 10_000)
    writer.write(step(1))
    writer.close()
    runlog = read_runlog(tmp_path)
    assert runlog.steps == [step(0), step(1)] and runlog.problems == []
