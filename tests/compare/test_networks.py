# SPDX-License-Identifier: Apache-2.0
"""Times on other networks: what a short run measures, and what a training would have taken."""

from __future__ import annotations

import json

import pytest

import runlogs
from oktopk.compare.command import write_tables
from oktopk.compare.networks import check_networks, on_network, seconds_by_bytes, timing_run
from oktopk.compare.plan import parse_method, plan, refuse_others
from oktopk.compare.results import arrival, row
from oktopk.errors import RunError
from oktopk.runlog.reader import read_runlog
from oktopk.train.config import Config, make_config
from oktopk.train.target import Target
from oktopk.train.tasks.base import Metric

TARGET = Target(Metric("wer", "WER"), 0.5)


def timing_entries(dense: float, sparse: float) -> list[dict]:
    """Steps of which the first of each phase take a second longer: they connect and compile."""
    steps = [runlogs.step(i, warmup=4) for i in range(8)]
    for i, step in enumerate(steps):
        step["whole"] = (dense if i < 4 else sparse) + (1.0 if i % 4 < 2 else 0.0)
    return [runlogs.opening(), *steps, runlogs.end(dense=runlogs.phase_sums(4, 400, 400))]


def test_the_first_steps_of_each_kind_are_not_counted(tmp_path):
    timing = read_runlog(runlogs.write(tmp_path / "a", timing_entries(dense=2.0, sparse=0.5)))
    sizes, seconds = seconds_by_bytes(timing)
    assert sizes == [10, 100] and seconds == pytest.approx([0.5, 2.0])


def test_a_run_takes_the_times_of_its_steps_on_the_network(tmp_path):
    entries = runlogs.whole_run()
    entries[3]["bytes_sent"] = 55  # half-way between sparse and dense, while the density falls
    run = read_runlog(runlogs.write(tmp_path / "run", entries))
    timing = read_runlog(runlogs.write(tmp_path / "timing", timing_entries(2.0, 0.5)))
    there = on_network(run, timing, "50mbit")
    assert [step.whole for step in there.steps] == pytest.approx([2, 2, 1.25, *[0.5] * 5])
    assert there.info.network == "50mbit" and run.info.network is None
    assert row(there).minutes == pytest.approx(7.75 / 60, abs=1e-6)
    assert arrival(there, TARGET).seconds == pytest.approx(7.75)
    assert [step.whole for step in run.steps] == [0.1] * 8  # the run itself is as it was


def test_tables_and_page_have_a_part_for_each_network(tmp_path):
    for method, sparse in (("ddp_dense", 2.0), ("oktopk", 0.5)):
        name = method if method == "ddp_dense" else f"{method}-0.02"
        config = make_config(name=name, method=method)
        runlogs.write(tmp_path / name, runlogs.whole_run(wer=0.5), config)
        place = tmp_path / "timing" / "50mbit-5ms" / name
        runlogs.write(place, timing_entries(2.0, sparse), config)
    said = write_tables(tmp_path, "wer", TARGET, ["50mbit:5ms", "1gbit"])
    assert "timed at 50mbit:5ms:" in said and "1gbit" not in said  # that was not timed yet
    rows = json.loads((tmp_path / "table-50mbit-5ms.json").read_text())
    assert [r["arrival"]["seconds"] for r in rows] == pytest.approx([16.0, 7.0])
    assert rows[1]["speedup"] == pytest.approx(16 / 7)
    assert "oktopk-0.02 reached WER <= 0.5 at 50mbit:5ms first" in said
    page = (tmp_path / "compare.html").read_text()
    assert "WER against time at 50mbit:5ms" in page and "Timed at 50mbit:5ms" in page


def test_a_short_run_has_every_kind_of_step_and_nothing_else():
    run = make_config(method="oktopk", warmup_steps=200, ramp_steps=200, until="wer<0.3")
    short = timing_run(run, "1gbit:2ms")
    assert (short.warmup_steps, short.ramp_steps, short.max_steps) == (6, 0, 40)
    assert short.network == "1gbit:2ms" and short.runs == "runs/timing/1gbit-2ms"
    assert not short.until and short.density == run.density
    local = timing_run(make_config(method="local_steps", every=32, warmup_steps=0), "1gbit")
    assert local.max_steps == 6 * 32


def test_a_network_that_is_no_rate_is_refused():
    with pytest.raises(ValueError, match=r"network: .*fast"):
        check_networks(["1gbit", "fast"])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("oktopk", ("oktopk", None, None)),
        ("local_steps:5", ("local_steps", 5, None)),
        ("local_steps:5@0.1", ("local_steps", 5, 0.1)),
        ("oktopk@0.05", ("oktopk", None, 0.05)),
    ],
)
def test_a_method_may_bring_its_interval_and_density(text, found):
    assert parse_method(text) == found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("oktopk:5", "steps between exchanges"),
        ("local_steps:0", "number of steps"),
        ("oktopk@2", "density in"),
        ("oktopk@x", "density in"),
        ("ddp_dense@0.1", "has no density"),
    ],
)
def test_an_odd_method_is_one_line(text, problem):
    with pytest.raises(ValueError, match=problem):
        parse_method(text)


def test_a_density_of_its_own_is_not_crossed_with_the_others():
    runs = plan(Config(), ["oktopk", "local_steps:5@0.1"], [0.01, 0.02], [0])
    assert [run.name for run in runs] == [
        "oktopk-0.01",
        "oktopk-0.02",
        "local_steps-0.1-every5",
    ]


def test_any_target_can_be_looked_up_in_a_run_without_one(tmp_path):
    whole = make_config(name="oktopk-0.02", method="oktopk")
    runlogs.write(tmp_path / "oktopk-0.02", runlogs.whole_run(), whole)
    refuse_others(tmp_path, make_config(until="wer<0.3"))
    ended = make_config(name="topka-0.02", method="topka", until="wer<0.3")
    runlogs.write(tmp_path / "topka-0.02", runlogs.whole_run(), ended)
    with pytest.raises(RunError, match="until"):
        refuse_others(tmp_path, make_config(until="wer<0.2"))
