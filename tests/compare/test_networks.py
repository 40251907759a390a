# SPDX-License-Identifier: Apache-2.0
"""Times on other networks: what a short run measures, and what a training would have taken."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import runlogs
from oktopk.errors import RunError
from oktopk.lab.compare.networks import check_networks, on_network, seconds_by_bytes, timing_run
from oktopk.lab.compare.plan import parse_method, plan, refuse_others
from oktopk.lab.compare.results import arrival, row, where_time_went, write_tables
from oktopk.lab.runlog.reader import read_runlog
from oktopk.lab.tasks.base import Metric
from oktopk.lab.train.config import Config, make_config
from oktopk.lab.train.setup import Target

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


def test_the_dense_steps_of_a_hook_are_a_kind_of_their_own(tmp_path):
    """PowerSGD begins with dense steps, and all its steps are recorded with the phase dense."""
    entries = timing_entries(dense=2.0, sparse=0.5)
    for entry in entries[1:-1]:
        entry["phase"] = "dense"
    timing = read_runlog(runlogs.write(tmp_path / "a", entries))
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
    assert said.count(" first, after ") == 1  # nothing is said of the time of the training itself
    page = (tmp_path / "compare.html").read_text()
    assert "WER against time at 50mbit:5ms" in page and "Timed at 50mbit:5ms" in page
    assert "Where the time went at 50mbit:5ms" in page


def test_a_short_run_has_every_kind_of_step_and_nothing_else():
    run = make_config(method="oktopk", warmup_steps=200, ramp_steps=200, until="wer<0.3")
    short = timing_run(run, "1gbit:2ms")
    assert (short.warmup_steps, short.ramp_steps, short.max_steps) == (6, 0, 40)
    assert short.network == "1gbit:2ms" and short.runs == "runs/timing/1gbit-2ms"
    assert not short.until and short.density == run.density
    local = timing_run(
        make_config(method="local_steps", every=32, warmup_steps=0, ramp_steps=0), "1gbit"
    )
    assert local.max_steps == 6 * 32
    rare = timing_run(
        make_config(method="diloco", every=500, warmup_steps=0, ramp_steps=0), "1gbit"
    )
    assert rare.max_steps == 3 * 500  # two exchanges are left out, and one is timed
    ramp = timing_run(make_config(method="oktopk", warmup_steps=0, ramp_steps=60), "1gbit")
    assert ramp.warmup_steps == 6
    auto = timing_run(make_config(method="oktopk"), "1gbit")
    assert (auto.warmup_steps, auto.ramp_steps) == (6, 0)
    for method in ("ddp_dense", "ddp_powersgd_r4", "topka"):  # the same batches as oktopk
        assert timing_run(make_config(method=method), "1gbit").max_steps == 40
    often = make_config(method="local_steps", every=5, warmup_steps=0, ramp_steps=0)
    assert timing_run(often, "1gbit").max_steps == 35


def test_a_short_run_is_for_all_seeds(tmp_path):
    runs = [make_config(name=f"oktopk-0.02{s}", seed=i) for i, s in enumerate(("", "-s1", "-s2"))]
    (short,) = {timing_run(run, "1gbit") for run in runs}
    assert (short.name, short.seed) == ("oktopk-0.02", 0)
    for run in runs:
        runlogs.write(tmp_path / run.name, runlogs.whole_run(), run)
    runlogs.write(tmp_path / "timing/1gbit/oktopk-0.02", timing_entries(1.0, 0.5), short)
    write_tables(tmp_path, "wer", None, ["1gbit"])
    timed = json.loads((tmp_path / "table-1gbit.json").read_text())
    assert [row["setting"] for row in timed] == [run.name for run in runs]
    assert len({row["minutes"] for row in timed}) == 1
    assert "| oktopk-0.02 |     3 |" in (tmp_path / "seeds-1gbit.md").read_text()


def test_steps_of_a_kind_that_was_not_timed_are_said(tmp_path):
    """Steps without an exchange say nothing about the time of one."""
    config = make_config(name="diloco", method="diloco")
    runlogs.write(tmp_path / "diloco", runlogs.whole_run(), config)
    silent = [runlogs.step(i, warmup=0, sent=0) for i in range(8)]
    entries = [runlogs.opening(), *silent, runlogs.end()]
    runlogs.write(tmp_path / "timing" / "1gbit" / "diloco", entries, config)
    said = write_tables(tmp_path, "wer", TARGET, ["1gbit"])
    assert "timed at 1gbit" not in said
    assert "diloco has steps that sent 100 B, and its short run at 1gbit has none above 0 B" in said


def test_a_short_run_of_other_settings_is_refused(tmp_path):
    run = make_config(name="oktopk-0.02", runs=str(tmp_path))
    runlogs.write(tmp_path / run.name, runlogs.whole_run(), run)
    place = tmp_path / "timing" / "1gbit" / run.name
    runlogs.write(place, timing_entries(1.0, 1.0), timing_run(run, "1gbit"))
    refuse_others(tmp_path, run, [run], ["1gbit"])
    runlogs.write(place, timing_entries(1.0, 1.0), timing_run(replace(run, batch=99), "1gbit"))
    refuse_others(tmp_path, run, [run], [])
    for wanted in ([run], []):
        with pytest.raises(RunError, match=r"timing/1gbit/oktopk-0.02 was trained with batch 99"):
            refuse_others(tmp_path, run, wanted, ["1gbit"])


def test_the_parts_of_a_step_are_those_of_the_network(tmp_path):
    run = read_runlog(runlogs.write(tmp_path / "run", runlogs.whole_run()))
    entries = timing_entries(2.0, 0.5)
    for entry in entries[1:-1]:
        entry["exposed"] = entry["whole"] - 0.07  # the rest as in the training
    timing = read_runlog(runlogs.write(tmp_path / "timing", entries))
    (figure,) = where_time_went([on_network(run, timing, "50mbit")])
    total = sum(trace["x"][0] for trace in figure.traces)
    assert total == pytest.approx(2 * 2.0 + 6 * 0.5)


def test_a_network_that_is_no_rate_is_refused():
    base = make_config()
    with pytest.raises(ValueError, match=r"network: .*fast"):
        check_networks(["1gbit", "fast"], base, [base])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"network": "1gbit"}, "--networks and --network: give one of them"),
        ({"max_minutes": 2.0}, "--networks: the minutes of --max-minutes would be those of the tr"),
        ({"density": "auto"}, "--networks: density = auto is measured, so x would take other"),
        ({"group_numel": "auto"}, "--networks: group_numel = auto is measured"),
        ({"method": "auto"}, "--networks: method = auto is measured"),
    ],
)
def test_what_a_network_would_change_cannot_be_timed(settings, message):
    base = make_config(name="x", **settings)
    with pytest.raises(ValueError, match=message):
        check_networks(["1gbit"], base, [base])
    check_networks([], base, [base])


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


def test_local_steps_have_their_usual_settings_where_none_are_given():
    base = Config(density=0.02, every=32)
    names = [
        run.name for run in plan(base, ["local_steps", "local_steps:7", "diloco"], [0.02], [0])
    ]
    assert names == ["local_steps-0.1-every5", "local_steps-0.1-every7", "diloco-every32"]
    assert plan(base, ["local_steps"], [0.02], [0], {"density", "every"})[0].name == (
        "local_steps-0.02-every32"
    )
    own = replace(base, method="local_steps")
    assert plan(own, ["local_steps"], [0.02], [0])[0].name == "local_steps-0.02-every32"


def test_any_target_can_be_looked_up_in_a_run_without_one(tmp_path):
    whole = make_config(name="oktopk-0.02", method="oktopk")
    runlogs.write(tmp_path / "oktopk-0.02", runlogs.whole_run(), whole)
    refuse_others(tmp_path, make_config(until="wer<0.3"))
    ended = make_config(name="topka-0.02", method="topka", until="wer<0.3")
    runlogs.write(tmp_path / "topka-0.02", runlogs.whole_run(), ended)
    with pytest.raises(RunError, match="until"):
        refuse_others(tmp_path, make_config(until="wer<0.2"))
