# SPDX-License-Identifier: Apache-2.0
"""The report of a run says what happened, whatever happened, and a browser can draw it."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

import browser
import runlogs
import speech
from oktopk.cli import main
from oktopk.lab.report.charts import (
    cost_sentences,
    downsample,
    message_counts,
    slowest_rank,
    traffic,
    with_phases,
)
from oktopk.lab.report.page import PARTS, STAGES, Figure, Section, colour_of_stage, page, table
from oktopk.lab.report.report import report, sections
from oktopk.lab.runlog.reader import RunLog, read_runlog
from oktopk.lab.runlog.schema import Histogram, MessagesRecord, RunRecord, StepRecord
from oktopk.lab.runlog.writer import bin_edges, histogram
from oktopk.utils.arguments import format_rate

SECTIONS = [
    "Learning",
    "Where the time went",
    "What was kept",
    "Where the bytes went",
    "Which parameters are sparsified",
    "Gradients and residuals",
    "Quality of selection",
    "Samples",
    "Memory",
    "Settings",
    "Versions and machine",
]


@pytest.fixture(scope="module")
def runs(worlds, corpus, tmp_path_factory):
    """Folders of runs that ended in six ways."""
    root = tmp_path_factory.mktemp("runs")

    def run(name, settings, faults=None):
        folder = str(root / name)
        worlds.run(2, speech.train, corpus, folder, settings, False, faults)
        return Path(folder) / "tiny"

    whole = run("whole", {"epochs": 2, "probe_every": 2})
    found = {
        "whole": whole,
        "dense": run("dense", {"max_steps": 3, "warmup_steps": 50}),
        "skipped": run("skipped", {"epochs": 1}, {"nan_at": (1, 3, 4)}),
    }
    lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    for name in ("killed", "corrupt", "empty"):
        found[name] = root / name
        found[name].mkdir()
    shutil.copy(whole / "config.toml", found["killed"])
    cut = "".join(lines[: len(lines) // 2])
    (found["killed"] / "metrics.jsonl").write_text(cut + lines[len(lines) // 2][:40])
    shutil.copy(whole / "config.toml", found["corrupt"])
    (found["corrupt"] / "metrics.jsonl").write_text("".join([*lines[:4], "?!\n", *lines[4:]]))
    return found


def shown(folder: Path) -> str:
    """The words a person reads at the top."""
    text = report(folder).read_text()
    opening = re.split("<section|</main>", text[text.index("<main>") :], maxsplit=1)[0]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", opening))


def test_a_run_leaves_its_report(runs):
    assert (runs["whole"] / "report.html").is_file()


SEEN = ("whole", "skipped")  # in the browser; the others there only in the slow tests
SAYS = {
    "whole": ["The run finished: 12 steps in", " went from ", "became sparse at step 2."],
    "dense": ["It never reached the sparse phase (warmup_steps is 50), so no bytes were saved."],
    "skipped": ["2 steps were skipped by all ranks because a gradient was not finite: 3, 4."],
    "killed": ["The metrics end at step", "of 12: the run is still running, or it was killed"],
    "empty": ["Nothing was recorded here", "There is no metrics.jsonl"],
    "corrupt": ["The run finished: 12 steps", "metrics.jsonl: line 5 could not be read"],
}


@pytest.mark.parametrize("name", SAYS)
def test_each_says_what_happened(runs, name):
    text = shown(runs[name])
    for words in SAYS[name]:
        assert words in text


def test_the_summary_has_bytes_of_both_kinds_and_the_time(runs):
    text = shown(runs["whole"])
    totals = read_runlog(runs["whole"]).end.totals
    sparse = totals["sparse"].bytes_dense / totals["sparse"].bytes_sent
    dense, sent = (
        sum(getattr(part, name) for part in totals.values())
        for name in ("bytes_dense", "bytes_sent")
    )
    assert f"{dense / sent:.1f}x fewer bytes, the whole run" in text
    assert f"{sparse:.1f}x fewer bytes, the sparse phase" in text
    assert "all ranks" in text
    assert "ms a dense step, median" in text and "ms a sparse step, median" in text


def test_every_section_is_there_and_has_blocks(runs):
    made = sections(read_runlog(runs["whole"]))
    assert [section.title for section in made] == SECTIONS
    assert all(section.blocks for section in made)
    figures = [block for section in made for block in section.blocks if isinstance(block, Figure)]
    assert len(figures) >= 18 and all(figure.traces for figure in figures)


def test_figures_are_what_plotly_knows(runs):
    import plotly.graph_objects as go

    for section in sections(read_runlog(runs["whole"])):
        for block in section.blocks:
            if isinstance(block, Figure):
                go.Figure(block.traces, block.layout)  # raises at an unknown name


def test_the_bytes_in_the_figures_are_those_of_the_metrics(runs):
    runlog = read_runlog(runs["whole"])
    figures = {b.title: b for s in sections(runlog) for b in s.blocks if isinstance(b, Figure)}
    sparse = [step.bytes_sent for step in runlog.steps if step.phase == "sparse"]
    areas = figures["Bytes of a sparse step, by stage of the exchange"].traces
    sent = [sum(trace["y"][i] for trace in areas) for i in range(len(sparse))]
    assert sent == pytest.approx(sparse, rel=1e-4)
    whole = figures["Bytes since the beginning"].traces[1]["y"][-1]
    assert whole == pytest.approx(sum(step.bytes_sent for step in runlog.steps), rel=1e-4)


def test_message_sizes_are_counted_once_per_part_of_a_resumed_run():
    runlog = RunLog(Path())
    runlog.add(RunRecord(step=0), RunRecord(step=8))
    for step, sizes in {3: {5: 2}, 7: {5: 9}, 12: {5: 4, 6: 1}}.items():
        runlog.add(MessagesRecord(step=step, sent={"split": sizes}))
    assert message_counts(runlog) == {"split": {5: 13, 6: 1}}


def test_messages_add_up_to_what_the_steps_sent(runs):
    runlog = read_runlog(runs["whole"])
    counts = {stage: sum(sizes.values()) for stage, sizes in message_counts(runlog).items()}
    sent = Counter()
    for step in runlog.steps:
        sent.update({stage: part.messages_sent for stage, part in step.stages.items()})
    assert sent and all(counts[stage] == num for stage, num in sent.items())


def test_histograms_count_every_value():
    import torch

    values = torch.tensor([0.0, 1e-30, 0.11, -0.11, 5.0, 1e9])
    found = histogram(values)
    assert found.zeros == 1 and sum(found.counts) == 5
    edges = bin_edges(found.first, len(found.counts))
    place = next(i for i, edge in enumerate(edges) if edge > 0.11) - 1
    assert found.counts[place] == 2
    assert histogram(torch.zeros(3)) == Histogram(zeros=3, first=0, counts=[])


def test_the_slowest_rank_has_the_most_work_of_its_own():
    waits = {"data": 0.0, "optimizer": 0.0, "forward": 0.1}
    means = [waits | {"backward": 0.1, "exposed": 0.3}, waits | {"backward": 0.4, "exposed": 0.0}]
    assert slowest_rank(means) == (1, pytest.approx(0.3))


def test_windows_never_span_two_phases():
    phases = ["dense"] * 7 + ["sparse"] * 8
    steps = [
        StepRecord(step=i, phase=phase, loss=float(i), bytes_sent=1, bytes_dense=1)
        for i, phase in enumerate(phases)
    ]
    windows = downsample(steps, max_points=4)
    assert windows.steps == [3, 6, 10, 14] and windows.width == 4
    assert windows.mean("loss") == [1.5, 5.0, 8.5, 12.5]
    assert windows.cumulative("loss")[-1] == sum(range(15))
    steps[0].loss = None
    assert downsample(steps).mean("loss")[:2] == [None, 1.0]


def test_a_hundred_thousand_steps_are_less_than_five_megabytes(runs):
    runlog = read_runlog(runs["whole"])
    sparse = runlog.steps[-1]
    runlog.records[StepRecord] = [
        replace(sparse, step=i, loss=1 / (1 + i) ** 0.3, bytes_sent=1000 + i * 7919 % 997)
        for i in range(100_000)
    ]
    assert len(page("long", "", sections(runlog))) < 5_000_000


def test_what_is_recorded_cannot_break_the_page():
    nasty = "</script><script>alert(1)</script>@BODY@"
    blocks = [table(["a"], [[nasty]]), Figure(nasty, [{"name": nasty}])]
    text = page(nasty, "", [Section("x", blocks)])
    assert "alert(1)</script>" not in text.replace("&lt;", "")
    assert text.count("</section>") == 1


@pytest.mark.skipif(browser.BROWSER is None, reason="needs chromium: apt-get install chromium")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in SEEN else pytest.mark.slow) for n in SAYS]
)
def test_a_browser_draws_every_figure_and_asks_nobody(runs, name, tmp_path):
    path = report(runs[name])
    seen = browser.look(path, tmp_path)
    assert seen.console == []
    figures = len(re.findall("<div class=plot ", path.read_text()))
    assert seen.number("drawn") == figures
    assert seen.number("requests") == 0
    assert len(re.findall(r'class="plot js-plotly-plot"', seen.dom)) == figures
    assert (
        len(re.findall(r'<g class="cartesianlayer">\s*<g class="subplot xy">', seen.dom)) == figures
    )


def test_the_command_finds_runs_by_name_and_names_those_there_are(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs["whole"].parent)
    Path("runs").mkdir()
    Path("runs/mine").symlink_to(runs["whole"])
    assert command(monkeypatch, "mine", "--out", "here.html") == 0
    assert "open it in a browser" in capsys.readouterr().out and Path("here.html").is_file()
    assert command(monkeypatch, "others") == 2
    assert "there is no folder others; runs/ has mine" in capsys.readouterr().err


def command(monkeypatch, *args: str) -> int:
    monkeypatch.setattr("sys.argv", ["oktopk", "report", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_a_folder_of_runs_is_not_a_run(oktopk, capsys):
    runlogs.write(Path("runs/race/dense"), runlogs.whole_run())
    assert oktopk("report", "race") == 2
    said = capsys.readouterr().err
    assert "runs/race is not a run, but has runs in it: report one of runs/race/dense" in said
    assert not Path("runs/race/report.html").exists()


def test_metrics_of_another_program_make_a_page_too(tmp_path):
    """For example lines of `handle.stats.as_dict()`."""
    steps = [
        {"kind": "step", "step": i, "phase": "sparse", "numel": 10, "k": 1, "local": 1, "result": 1}
        | {"bytes_sent": 8, "bytes_dense": 40, "compression_ratio": 5.0, "skipped": False}
        for i in range(3)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in steps))
    text = shown(tmp_path)
    assert "5.0x fewer" in text and "rank 0" in text


def test_every_stage_has_a_colour_of_its_own():
    stages = ["dense", "split", "gather", "threshold", "counts", "bounds", "reduce", "broadcast"]
    stages += ["balance"]  # all that methods send in
    colours = [colour_of_stage(stage) for stage in stages]
    assert len(set(colours)) == len(stages)
    assert colour_of_stage("of another version") not in colours
    assert colour_of_stage("of another version") == colour_of_stage("of another version")


def test_dense_and_sparse_steps_are_compared(tmp_path):
    """A dense step of 200 ms that waits for 70; a sparse one of 150 that waits for 20, selects for
    4 and sends 0.9 MB less."""
    entries = [runlogs.opening()]
    for i in range(10):
        sparse = i >= 5
        sent = {"bytes_sent": 100_000 if sparse else 1_000_000, "bytes_dense": 1_000_000}
        phase = {"phase": "sparse" if sparse else "dense", "whole": 0.15 if sparse else 0.2}
        times = {"select": 0.003 if sparse else 0.0, "scatter": 0.001, "optimizer": 0.01}
        times["exposed"] = 0.02 if sparse else 0.07
        entries.append(runlogs.step(i) | sent | phase | times)
    runlog = read_runlog(runlogs.write(tmp_path / "a", entries))
    saved, pays = cost_sentences(runlog)
    assert "A sparse step waited 20 ms for the exchange and a dense one 70 ms (medians)" in saved
    assert "on this link the sparse exchange saved 50 ms, 25% of a dense step. The rest" in saved
    assert "The rest of a step took 130 ms and 130 ms" in saved
    assert pays.startswith("For a sparse step a worker computed 4.0 ms more")
    assert "and sent 900.0 kB less" in pays
    assert pays.endswith("less than about 1.8 Gbit/s.")  # 8 bits x 0.9 MB / 4 ms
    dense = [record for record in entries if record.get("phase") != "sparse"]
    assert cost_sentences(read_runlog(runlogs.write(tmp_path / "b", dense))) == []


def test_shorter_steps_that_wait_longer_are_not_called_a_saving(tmp_path):
    """Utterances differ in length: sparse steps may be shorter while their exchange is longer."""
    entries = [runlogs.opening()]
    for i in range(10):
        sparse = i >= 5
        times = {"whole": 12.0, "exposed": 1.218} if sparse else {"whole": 18.6, "exposed": 0.7}
        entries.append(runlogs.step(i) | times | {"phase": "sparse" if sparse else "dense"})
    texts = cost_sentences(read_runlog(runlogs.write(tmp_path / "a", entries)))
    assert "the sparse exchange cost 518 ms, 3% of a dense step" in texts[0]
    assert "The rest of a step took 10782 ms and 17900 ms" in texts[0]


def test_the_rest_of_a_step_is_the_median_of_the_rests(tmp_path):
    """A step that waits longer computes for less: medians of the two are of different steps."""
    entries = [runlogs.opening()]
    for i in range(12):
        whole, exposed = [(1.0, 0.1), (1.2, 0.9), (1.3, 0.2), (1.0, 0.8), (1.3, 0.5)][i % 5]
        times = {"whole": whole, "exposed": exposed, "phase": "sparse" if i >= 6 else "dense"}
        entries.append(runlogs.step(i) | times)
    (text, *_) = cost_sentences(read_runlog(runlogs.write(tmp_path / "a", entries)))
    assert "The rest of a step took 800 ms and 800 ms" in text  # of 900, 300, 1100, 200, 800
    assert "selection and packing run beside the backward pass" in text


def test_a_slow_step_is_not_a_spike():
    steps = [
        StepRecord(step=i, phase="dense", bytes_sent=0, bytes_dense=0, whole=9.0 if i == 7 else 1.0)
        for i in range(20)
    ]
    assert downsample(steps, 4).median("whole") == [1.0] * 4
    assert downsample(steps, 4).quantiles("whole", 0.0, 1.0)[1] == [1.0, 9.0, 1.0, 1.0]


def test_settings_show_what_differs_and_fold_the_rest(runs):
    text = (runs["whole"] / "report.html").read_text()
    shown, _, folded = text[text.index(">Settings</h2>") :].partition("<details>")
    assert "What differs from the defaults" in shown and "<td>probe_every</td>" in shown
    assert "<td>momentum</td>" not in shown and "<td>momentum</td>" in folded


def test_the_command_and_the_versions_are_at_the_top(tmp_path):
    opening = runlogs.opening() | {"command": "oktopk train --lr 1e-3", "versions": {"torch": "2"}}
    folder = runlogs.write(tmp_path / "a", [opening, runlogs.step(0)])
    text = report(folder).read_text()
    top = text[: text.index("<section")]
    assert "<pre class=wide>oktopk train --lr 1e-3</pre>" in top and "torch 2" in top


def test_names_on_figures_have_room():
    """A phone shows six sizes of messages, and the note on the phases is above the curves."""
    runlog = RunLog(Path())
    runlog.add(
        *runlogs.records([runlogs.opening(), *(runlogs.step(i, warmup=8) for i in range(10))])
    )
    runlog.add(MessagesRecord(step=9, sent={"split": dict.fromkeys(range(3, 21), 1)}))
    *_, figure = traffic(runlog, downsample(runlog.steps))
    assert figure.title == "Message sizes"
    named = ["8 B", "64 B", "512 B", "4 KiB", "32 KiB", "256 KiB"]
    assert figure.layout["xaxis"]["ticktext"] == named
    (note,) = with_phases({}, runlog)["annotations"]
    assert (note["y"], note["yanchor"], note["xanchor"]) == (1, "bottom", "right")


def test_expert_figures_say_what_is_normal(runs):
    made = sections(read_runlog(runs["whole"]))
    experts = ("What was kept", "Which parameters are sparsified", "Quality of selection")
    figures = [f for s in made if s.title in experts for f in s.blocks if isinstance(f, Figure)]
    assert len(figures) >= 8 and all(figure.normal for figure in figures)


def test_a_thing_has_one_colour(runs):
    """Parts of a step and stages of the exchange, wherever they are drawn."""
    seen: dict[str, set[str]] = {}
    made = sections(read_runlog(runs["whole"]))
    for figure in (f for s in made for f in s.blocks if isinstance(f, Figure)):
        for trace in figure.traces:
            colour = trace.get("marker", {}).get("color") or trace.get("line", {}).get("color")
            seen.setdefault(trace.get("name", "").split(" (")[0], set()).add(str(colour))
    for name in (*PARTS, *STAGES):
        assert len(seen.get(name, set())) <= 1, (name, seen[name])
    assert {"forward", "gather"} <= seen.keys()


@pytest.mark.parametrize(
    ("rate", "text"),
    [(2.13e9, "2.1 Gbit/s"), (999.9e6, "1.0 Gbit/s"), (123e6, "120 Mbit/s"), (5, "5.0 bit/s")],
)
def test_rates_have_two_digits(rate, text):
    assert format_rate(rate) == text
