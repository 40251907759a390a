# SPDX-License-Identifier: Apache-2.0
"""`oktopk compare`: which runs, what is done again, what is refused, and the table of them."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import browser
import runlogs
from oktopk import cli
from oktopk.lab.compare import compare
from oktopk.lab.compare.plan import plan
from oktopk.lab.compare.results import as_table, compared, curves, fitting, losses, outcome, row
from oktopk.lab.report.page import aligned, markdown
from oktopk.lab.runlog.reader import lock, read_runlog
from oktopk.lab.runlog.schema import MetricInfo
from oktopk.lab.runlog.writer import cumulative_bytes, cumulative_minutes
from oktopk.lab.tasks.base import Metric
from oktopk.lab.train import run_process
from oktopk.lab.train.config import Config, with_settings
from oktopk.lab.train.config_files import load
from oktopk.lab.train.setup import Target
from oktopk.utils.signals import InterruptedBySignal
from speech import SMALL

METRICS = [MetricInfo("wer", "WER")]


@pytest.fixture
def trainer(monkeypatch):
    """Runs that write their metrics at once; those in `fails` end after a few steps."""
    made = SimpleNamespace(names=[], fails=set(), compiled_before=[])

    @contextmanager
    def started(config, base, log):
        made.names.append(config.name)
        failed = config.name in made.fails
        log.write_text("first line\nthe disk is full\n" if failed else "")
        is_dense = config.method == "dense"
        sent = 100 if is_dense else round(1000 * config.density)
        entries = runlogs.whole_run(wer=0.22 if is_dense else 0.2 + config.density, sent=sent)
        entries = [*entries[:4], runlogs.end("failed", "no disk")] if failed else entries
        runlogs.write(Path(config.runs) / config.name, entries, config)
        yield SimpleNamespace(poll=lambda: int(failed))

    monkeypatch.setattr(run_process, "started", started)
    monkeypatch.setattr(compare, "prepare_data", lambda config: None)
    monkeypatch.setattr(
        compare, "prepare_kernels", lambda: made.compiled_before.append(list(made.names))
    )
    return made


@pytest.fixture
def call(oktopk):
    return partial(oktopk, "compare")


def test_every_method_at_every_density_but_dense_once():
    names = [run.name for run in plan(Config(), ["dense", "topka", "oktopk"], [0.01, 0.05], [0])]
    assert names == ["dense", "topka-0.01", "topka-0.05", "oktopk-0.01", "oktopk-0.05"]
    runs = plan(Config(density=0.3), ["dense", "oktopk"], [0.01], [0, 7])
    assert [(run.name, run.density, run.seed) for run in runs] == [
        ("dense", 0.3, 0),
        ("oktopk-0.01", 0.01, 0),
        ("dense-s7", 0.3, 7),
        ("oktopk-0.01-s7", 0.01, 7),
    ]


def test_kernels_are_compiled_before_the_first_contender(trainer, call):
    """Whoever came first would else have them on its clock, and the others would find them."""
    assert call("--methods", "dense,topka") == 0
    assert trainer.compiled_before == [[]] and len(trainer.names) == 2


def test_flags_make_the_same_config_again(monkeypatch):
    wanted = with_settings(load("quickstart"), name="x", runs="r", lr=0.1, augment=False)
    monkeypatch.setattr(sys, "argv", ["oktopk"])
    args = cli.parser([]).parse_args(["train", *run_process.flags(wanted, "quickstart")])
    from oktopk.lab.train.run import resolve

    assert resolve(args) == wanted
    assert run_process.command_line(wanted, "quickstart").startswith(
        "oktopk train --config quickstart "
    )


def test_all_are_trained_and_put_into_one_table(trainer, call, capsys):
    assert call("--methods", "dense,oktopk", "--densities", "0.01,0.05") == 0
    out = capsys.readouterr().out
    assert trainer.names == ["dense", "oktopk-0.01", "oktopk-0.05"]
    assert "2/3 oktopk-0.01: training; to look: oktopk watch runs/compare/oktopk-0.01" in out
    assert (
        "2/3 oktopk-0.01: WER 0.210, CER 0.105, validation loss 2.100, sent 520 B, 100 ms/step"
        in out
    )
    assert "state" not in Path("runs/compare/table.md").read_text()
    assert "\noktopk-0.01  0.210" in out and max(map(len, out.split("\n\n")[1].splitlines())) <= 80
    assert "oktopk-0.01 ended with WER 0.210, and dense with 0.220; it sent " in out
    found = {one["setting"]: one for one in json.loads(Path("runs/compare/table.json").read_text())}
    assert list(found) == ["dense", "oktopk-0.01", "oktopk-0.05"]
    assert found["oktopk-0.05"]["sparse_ratio"] == 2 and found["dense"]["to_dense"] is None
    assert found["oktopk-0.05"]["to_dense"] == pytest.approx(0.03)
    page = Path("runs/compare/compare.html").read_text()
    assert all(f"WER against {axis}" in page for axis in ("steps", "bytes", "time"))


def test_what_is_finished_is_not_trained_again_and_new_settings_join(trainer, call, capsys):
    call("--methods", "dense", "--densities", "0.01")
    assert call("--methods", "dense,topka", "--densities", "0.01", "--log-every", "3") == 0
    assert trainer.names == ["dense", "topka-0.01"]
    assert "(finished before)" in capsys.readouterr().out
    assert len(json.loads(Path("runs/compare/table.json").read_text())) == 2


def test_a_failed_run_is_named_and_does_not_lose_the_others(trainer, call, capsys):
    trainer.fails = {"dense"}
    assert call("--methods", "dense,oktopk") == 1
    said = capsys.readouterr()
    assert "1/2 dense: failed with exit code 1, in runs/compare/dense.log" in said.out
    assert "  | the disk is full" in said.out
    assert "dense failed, see runs/compare/dense.log" in said.err
    states = [one["state"] for one in json.loads(Path("runs/compare/table.json").read_text())]
    assert states == ["failed", "finished"]
    assert "| dense      |   failed |" in Path("runs/compare/table.md").read_text()
    trainer.fails = set()
    assert call("--methods", "dense,oktopk") == 0  # tries again only what failed
    assert trainer.names == ["dense", "oktopk-0.2", "dense"]


def test_another_training_in_the_same_folder_is_refused_by_name(trainer, call, capsys):
    call("--methods", "dense")
    assert call("--methods", "dense", "--lr", "0.5", "--epochs", "3") == 1
    said = capsys.readouterr().err
    assert "runs/compare/dense was trained with epochs 15, lr 0.006" in said
    assert "this is epochs 3, lr 0.5: give another --name" in said
    assert call("--methods", "dense", "--lr", "0.5", "--name", "other") == 0
    assert trainer.names == ["dense", "dense"]


def test_another_interval_is_another_run(trainer, call, capsys):
    """Each method with local steps has its interval in the name, wherever it was given."""
    methods = ("--methods", "diloco,local_steps@0.1,ddp_dense")
    assert call(*methods, "--every", "4") == 0 and call(*methods, "--every", "2") == 0
    assert trainer.names == [
        *("diloco-every4", "local_steps-0.1-every4", "ddp_dense"),
        *("diloco-every2", "local_steps-0.1-every2"),
    ]
    capsys.readouterr()
    assert call("--methods", "diloco:4") == 0
    assert "1/1 diloco-every4: WER" in capsys.readouterr().out and len(trainer.names) == 5


def test_a_run_with_the_name_but_not_the_settings_is_refused(trainer, call, capsys):
    assert call("--methods", "oktopk@0.1") == 0
    stored = Path("runs/compare/oktopk-0.1/config.toml")
    stored.write_text(stored.read_text().replace("density = 0.1", "density = 0.5"))
    assert call("--methods", "oktopk@0.1") == 1
    assert "was trained with density 0.5, and this is density 0.1" in capsys.readouterr().err


def test_a_run_without_its_settings_is_refused(trainer, call, capsys):
    assert call("--methods", "dense") == 0
    Path("runs/compare/dense/config.toml").unlink()
    assert call("--methods", "dense", "--lr", "0.5") == 1
    said = capsys.readouterr().err
    assert "runs/compare/dense: config.toml is missing: remove the folder or give another" in said
    assert trainer.names == ["dense"]


def test_a_race_without_methods_has_the_usual_rivals(trainer, call, capsys):
    assert call("--until", "wer<0.3", "--every", "5") == 0
    assert trainer.names == [
        *("ddp_dense", "ddp_fp16", "ddp_powersgd_r1", "ddp_powersgd_r4"),
        *("post_local_sgd-every5", "diloco-every5", "oktopk-0.2", "local_steps-0.1-every5"),
    ]
    out = capsys.readouterr().out
    assert out.startswith("the target is looked for every 5 epochs, when a run is validated: ")
    assert call("--until", "wer<0.3", "--every", "5", "--validate-steps", "9", "--name", "b") == 0
    assert "looked for" not in capsys.readouterr().out


def test_an_interrupted_comparison_says_how_it_continues(call, monkeypatch, capsys):
    def interrupted(*_):
        raise InterruptedBySignal(2)

    monkeypatch.setattr(compare, "prepare_data", lambda config: None)
    monkeypatch.setattr(compare, "prepare_kernels", lambda: None)
    monkeypatch.setattr(compare, "train_in_process", interrupted)
    assert call("--methods", "dense") == 130
    said = capsys.readouterr()
    assert said.out.endswith(
        "\nthe same command continues: what has finished is not trained again\n"
    )
    assert said.err == "oktopk: interrupted by SIGINT\n"


def test_two_comparisons_in_one_folder(trainer, call, capsys):
    Path("runs/compare").mkdir(parents=True)
    with lock(Path("runs/compare")):
        assert call("--methods", "dense") == 1
    said = capsys.readouterr().err
    assert "another comparison is using runs/compare: wait for it or end it, or give" in said


def test_folders_of_others_are_left_as_they_are(trainer, call, capsys):
    """A training run's own, a sweep's, and a file where a run's folder would be."""
    runlogs.write(Path("runs/a"), runlogs.whole_run(), Config())
    Path("runs/night").mkdir()
    Path("runs/night/sweep.json").write_text("{}")
    Path("runs/compare").mkdir()
    Path("runs/compare/oktopk-0.2").write_text("notes")
    before = sorted(Path("runs").rglob("*"))
    assert call("--name", "a") == 1
    assert "runs/a is the folder of a training run" in capsys.readouterr().err
    assert call("--name", "night") == 1
    assert "runs/night is the folder of a sweep (sweep.json)" in capsys.readouterr().err
    assert sorted(Path("runs").rglob("*")) == before
    assert call() == 1
    said = capsys.readouterr().err
    assert "runs/compare/oktopk-0.2 is a file, where the folder of that run would be" in said
    assert trainer.names == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "dense,oktok"], "method must be one of dense, topka"),
        (["--densities", "0.1,x"], "--densities '0.1,x': 'x' is not a density: give numbers"),
        (["--seeds", "a"], "--seeds 'a': 'a' is not a seed: give whole numbers with commas"),
        (["--methods", ""], "--methods '': '' is not a method: give their names"),
        (["--methods", "oktopk,,dense"], "--methods 'oktopk,,dense': '' is not a method"),
        (["--densities", "2"], "density must be in (0, 1], got 2.0"),
        (["--methods", "dense", "--method", "topka"], "--methods and --method: give one of them"),
        (["--metod", "dense"], "did you mean '--method'"),
        (["--name", "a/b"], "name must be letters"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(trainer, call, capsys, arguments, message):
    assert call(*arguments) == 2
    assert message in capsys.readouterr().err and trainer.names == []


def test_a_file_that_cannot_be_used_has_the_exit_code_of_train(trainer, call, oktopk, capsys):
    """1 for the data, 2 for a file that the command line names as config or task."""
    Path("short.txt").write_text("a")
    Path("bad.toml").write_text("lr = ")
    for flags, code in (
        (("--task", "text", "--data", "short.txt"), 1),
        (("--config", "bad.toml"), 2),
        (("--task", "none.py"), 2),
    ):
        assert [call(*flags), oktopk("train", *flags)] == [code, code]
        compared, trained = capsys.readouterr().err.splitlines()
        assert compared.removeprefix("oktopk compare") == trained.removeprefix("oktopk train")
    assert trainer.names == []


def test_it_refuses_to_be_started_many_times(trainer, call, monkeypatch, capsys):
    monkeypatch.setenv("OKTOPK_RANK", "0")
    monkeypatch.setenv("OKTOPK_SIZE", "2")
    assert call() == 1
    assert capsys.readouterr().err.startswith("oktopk compare: this command starts its workers ")
    assert trainer.names == []


def test_bytes_of_all_ranks_are_spread_over_the_steps(tmp_path):
    """Rank 0 sent 100 a dense step and 10 a sparse one; all three ranks 400 and 45 a step."""
    sums = {"dense": runlogs.phase_sums(2, 800, 800), "sparse": runlogs.phase_sums(6, 270, 2400)}
    entries = [*runlogs.whole_run(sent=10, ranks=3)[:-1], runlogs.end(**sums)]
    runlog = read_runlog(runlogs.write(tmp_path / "a", entries))
    assert cumulative_bytes(runlog) == [400, 800, 845, 890, 935, 980, 1025, 1070]
    killed = read_runlog(runlogs.write(tmp_path / "b", entries[:4]))
    assert cumulative_bytes(killed) == [300, 600, 630]  # no end: rank 0's times the ranks
    assert row(killed).state == "unfinished"


def test_table_and_figure_have_the_same_times(tmp_path):
    """Steps that take long, such as those that connect, are in both or in neither."""
    run = runlogs.whole_run()
    slow = {0: 5.0, 2: 3.0, 6: 4.0, 7: 0.2}
    steps = [runlogs.step(i) | {"whole": slow.get(i, 0.1)} for i in range(8)]
    totals = runlogs.phase_sums(8, 100, 800) | {"microseconds": 12_600_000}
    entries = [run[0], *steps, runlogs.end(sparse=totals)]
    runlog = read_runlog(runlogs.write(tmp_path / "a", entries))
    found = row(runlog)
    assert found.ms_per_step == pytest.approx(12_600 / 8)
    assert found.minutes == pytest.approx(12.6 / 60)
    assert cumulative_minutes(runlog)[-1] == pytest.approx(found.minutes)
    empty = row(read_runlog(runlogs.write(tmp_path / "b", entries[:1])))
    assert empty.ms_per_step is None and "-" in as_table([empty], METRICS)[1]


@pytest.mark.skipif(browser.BROWSER is None, reason="needs chromium: apt-get install chromium")
def test_a_browser_draws_the_comparison_and_asks_nobody(trainer, call, tmp_path):
    trainer.fails = {"topka-0.01"}
    call("--methods", "dense,topka,oktopk", "--densities", "0.01,0.05")
    path = Path("runs/compare/compare.html")
    seen = browser.look(path, tmp_path)
    assert seen.console == []
    assert seen.number("drawn") == browser.figures(path) == 7
    assert seen.drawn == 7 and seen.number("requests") == 0


def test_curves_have_a_point_for_every_validation(tmp_path):
    runs = [tmp_path / "dense", tmp_path / "oktopk-0.1", tmp_path / "killed"]
    entries = runlogs.whole_run(wer=0.4)
    for folder, stored in zip(runs, (entries, entries, entries[:3]), strict=True):
        runlogs.write(folder, stored)
    loaded = [read_runlog(folder) for folder in runs]
    figures = curves(loaded, MetricInfo("wer", "WER"), None)
    assert [trace["y"] for trace in figures[0].traces] == [[0.8, 0.4], [0.8, 0.4], []]
    assert [figure.traces[0]["x"] for figure in figures[1:]] == [[440, 520], [3, 7]]
    assert figures[0].traces[0]["x"] == pytest.approx([0.4 / 60, 0.8 / 60], rel=1e-3)
    assert [len(figure.traces[0]["y"]) for figure in losses(loaded)] == [8, 8, 8]


def test_columns_that_nobody_fills_are_left_out(tmp_path):
    entries = runlogs.whole_run()
    plain = row(read_runlog(runlogs.write(tmp_path / "a", entries)))
    probe = {"kind": "probe", "step": 5, "xi": 0.25}
    probed = row(read_runlog(runlogs.write(tmp_path / "b", [*entries, probe])))
    assert (
        "xi" not in as_table([plain], METRICS)[0]
        and "to dense" not in as_table([plain], METRICS)[0]
    )
    assert (
        as_table([plain, probed], METRICS)[2][as_table([plain, probed], METRICS)[0].index("xi")]
        == "0.250"
    )


def test_a_table_is_markdown_in_columns():
    text = markdown([["setting", "WER"], ["dense", "0.5"]])
    assert text == "| setting | WER |\n|---------|----:|\n| dense   | 0.5 |\n"


@pytest.mark.timeout(240)  # two processes that import torch
def test_a_real_run_from_the_command_line(call, corpus, tmp_path):
    small = [*SMALL, "--data", corpus, "--workers", "1", "--max-steps", "3"]
    at = small.index("--density")
    flags = [*small[:at], *small[at + 2 :], "--methods", "oktopk", "--densities", "0.2"]
    assert call(*flags) == 0
    rows = json.loads((tmp_path / "runs" / "compare" / "table.json").read_text())
    assert [(one["setting"], one["steps"]) for one in rows] == [("oktopk-0.2", 3)]
    assert all(one["state"] == "finished" and one["metrics"]["wer"] is not None for one in rows)
    assert (tmp_path / "runs" / "compare" / "compare.html").stat().st_size > 1e6


def test_the_outcome_is_beside_the_dense_run(tmp_path):
    """Without a target: the best metric of the others, its bytes and its time."""
    wer = MetricInfo("wer", "WER")

    def of(method: str, value: float, sent: int):
        entries = runlogs.whole_run(value, sent=sent)
        runlog = read_runlog(
            runlogs.write(tmp_path / f"{method}{value}", entries, Config(method=method))
        )
        return runlog, row(runlog, None)

    pairs = [of("dense", 0.25, 100), of("oktopk", 0.3, 10), of("oktopk", 0.5, 10)]
    runs, rows = zip(*pairs, strict=True)
    text = outcome(runs, rows, wer)
    assert text.startswith("oktopk") and "ended with WER 0.300, and dense" in text
    assert "with 0.250; it sent " in text and "times fewer bytes" in text
    assert outcome(runs[:1], rows[:1], wer) == ""
    runs, rows = zip(pairs[0], of("topka", 0.3, 300), strict=True)
    assert "it sent 2.5 times as many bytes, and a step took" in outcome(runs, rows, wer)


def test_a_narrow_table_has_the_important_columns_and_cuts_none(tmp_path):
    target = Target(Metric("wer"), 0.5)
    rows = [
        row(read_runlog(runlogs.write(tmp_path / name, runlogs.whole_run(wer=0.2))), target)
        for name in ("ddp_dense", "local_steps-0.1-every5")
    ]
    rows[1] = compared(rows[1], rows[0], "wer")
    cells = as_table(rows, [MetricInfo("wer", "validation loss"), MetricInfo("cer", "CER")])
    text = aligned(fitting(cells, "validation loss", 80))
    assert [part.strip() for part in text.splitlines()[0].split("  ") if part.strip()] == [
        *("setting", "to target", "speed-up", "sent to target", "validation loss")
    ]
    assert max(map(len, text.splitlines())) <= 80 and "local_steps-0.1-every5      0.4 s" in text
    assert fitting(cells, "validation loss", 1000) == cells
    assert fitting(cells, "validation loss", 5)[1] == ["ddp_dense"]


def test_a_density_that_the_run_chooses():
    base = Config(density="auto", wire="auto")
    runs = plan(base, ["dense", "oktopk", "oktopk@0.05", "local_steps:5@auto"], [base.density], [0])
    assert [(run.name, run.density) for run in runs] == [
        ("dense", Config().density),
        ("oktopk-auto", "auto"),
        ("oktopk-0.05", 0.05),
        ("local_steps-auto-every5", "auto"),
    ]
