# SPDX-License-Identifier: Apache-2.0
"""Damaged files of every kind: one kind of error or success, in bounded memory, never a traceback.

The damage is random with fixed seeds; a failure names its seed.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import tarfile
from pathlib import Path

import pytest
import torch

import runlogs
from launchers import openmpi, pbs, srun
from mutations import ODD_VALUES, bounded_memory, damaged, odd, only
from oktopk.errors import LaunchError
from oktopk.lab.compare import results
from oktopk.lab.compare.results import write_tables
from oktopk.lab.report.page import page
from oktopk.lab.report.report import sections, summary
from oktopk.lab.runlog.reader import read_runlog
from oktopk.lab.runlog.writer import cumulative_bytes, cumulative_minutes
from oktopk.lab.tasks.base import Metric
from oktopk.lab.tasks.speech.an4 import convert
from oktopk.lab.tasks.speech.features import open_spectra
from oktopk.lab.tasks.speech.recordings import (
    check,
    duration,
    find_manifests,
    read_audio,
    read_manifest,
)
from oktopk.lab.train import checkpoint
from oktopk.lab.train.checkpoint import CommonState, RankState
from oktopk.lab.train.config import Config, as_dict, make_config
from oktopk.lab.train.config_files import load, load_run, to_toml
from oktopk.lab.train.setup import Target
from oktopk.lab.watch_screen import RunWatcher, line, rows
from oktopk.launch.ranks import master_endpoint, read_rank_environment
from oktopk.utils import files
from oktopk.utils.files import FileError
from recordings import an4_like, save, sphere, tone

SEEDS = range(int(os.environ.get("OKTOPK_TEST_SEEDS", "300")))


@pytest.fixture(autouse=True)
def little_room():
    with bounded_memory():
        yield


def test_configs(tmp_path):
    path = tmp_path / "mine.toml"
    content = to_toml(Config()).encode()
    for seed in SEEDS:
        path.write_bytes(damaged(content, seed))
        for reader in (lambda: load(str(path)), lambda: load_run(path)):
            told = only(FileError, reader)
            assert told is None or str(path) in told, seed


def test_settings_of_odd_types():
    good = as_dict(Config())
    for seed in SEEDS:
        only(ValueError, lambda seed=seed: make_config(**odd(good, seed)))
    for name in good:
        for value in ODD_VALUES:
            only(ValueError, lambda name=name, value=value: make_config(**{name: value}))


METRICS = [
    runlogs.opening()
    | {"time": "now", "machine": {"memory": 5, "system": "x"}, "versions": {"torch": "2"}}
    | {"tensors": {"a": {"numel": 5, "kind": "Linear weight"}}, "changed": {"lr": [0.1, 0.2]}},
    *(
        runlogs.step(i) | {"numel": 50, "stages": {"dense": {"payload_sent": 5, "header_sent": 1}}}
        for i in range(6)
    ),
    runlogs.epoch(0, 3),
    runlogs.validation(0.5, 3, samples=[{"said": "A", "heard": "B"}]),
    runlogs.epoch(1, 5),
    runlogs.validation(0.4, 5),
    {"kind": "probe", "step": 3, "recall": 0.5, "xi": 1.0, "ages": {"a": 3.0}},
    {"kind": "tensors", "step": 3, "kept": {"a": 2}, "of": {"a": 5}, "norm": {"a": 1.0}}
    | {
        "residual_norm": {"a": 1.0},
        "spread": {"gradient": {"zeros": 1, "first": 3, "counts": [1]}},
    },
    {"kind": "messages", "step": 3, "sent": {"dense": {"4": 5}}},
    {"kind": "ranks", "step": 3, "steps": 2, "seconds": [{"data": 1.0}, {"data": 2.0}]},
    {"kind": "memory", "step": 3, "ranks": [{"rss": 5, "rss_peak": 6, "gpu_allocated_peak": 0}]},
    {"kind": "warning", "step": 3, "text": "careful"},
    runlogs.end(dense=runlogs.phase_sums(2, 5, 5), sparse=runlogs.phase_sums(4, 5, 50)),
]


TARGET = Target(Metric("wer"), 0.45)


def look(folder: Path, seed: int = 0) -> None:
    """All that reads a run log: report, watch and, now and then, compare, which writes files."""
    runlog = read_runlog(folder)
    page("title", summary(runlog), sections(runlog)).encode()
    state = RunWatcher(folder).refresh()
    line(state, 500.0)
    rows(state, 500.0)
    if seed % 10 == 0:
        write_tables(folder.parent, "wer", TARGET)
    else:
        results.row(runlog, TARGET)
        cumulative_bytes(runlog)
        cumulative_minutes(runlog)


@pytest.fixture
def no_plots(monkeypatch):
    """The library of plots is the same in every page, and takes a second to pack."""
    monkeypatch.setattr("oktopk.lab.report.page._plotly", lambda: "")


def test_metrics_with_damaged_bytes(tmp_path, no_plots):
    folder = runlogs.write(tmp_path / "runs" / "a", METRICS, Config(name="a"))
    content = (folder / "metrics.jsonl").read_bytes()
    settings = (folder / "config.toml").read_bytes()
    look(folder)
    assert not read_runlog(folder).problems
    for seed in SEEDS[::2]:
        (folder / "metrics.jsonl").write_bytes(damaged(content, seed))
        (folder / "config.toml").write_bytes(damaged(settings, seed) if seed % 3 else settings)
        look(folder, seed)


def test_metrics_with_odd_values(tmp_path, no_plots):
    """A line that does not fit is passed over, and its number is told."""
    folder = tmp_path / "runs" / "a"
    for seed in SEEDS[::2]:
        entries = odd(METRICS, seed)
        folder.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(entry) + "\n" for entry in entries)
        (folder / "metrics.jsonl").write_text(text)
        look(folder, seed)


@pytest.mark.parametrize(
    ("name", "value"),
    [("phase", "warm"), ("bytes_sent", "12"), ("loss", "low"), ("whole", "1"), ("step", None)],
)
def test_an_odd_step_is_told_with_its_line(tmp_path, name, value):
    entries = [runlogs.step(0), runlogs.step(1) | {name: value}, runlogs.step(2)]
    runlog = read_runlog(runlogs.write(tmp_path / "a", entries))
    assert [step.step for step in runlog.steps] == [0, 2]
    assert runlog.problems == ["metrics.jsonl: line 2 could not be read and was skipped"]


def complete(step: int = 3) -> dict:
    names = ["common.pt", "rank-0.pt", "rank-1.pt"]
    written = {name: {"bytes": 5, "sha256": "ab" * 32} for name in names}
    return {"format": checkpoint.FORMAT, "step": step, "world_size": 2, "files": written}


def test_complete_json(tmp_path):
    folder = tmp_path / "step-00000003"
    folder.mkdir()
    path = folder / "complete.json"
    content = json.dumps(complete()).encode()
    for seed in SEEDS:
        path.write_bytes(
            damaged(content, seed) if seed % 2 else json.dumps(odd(complete(), seed)).encode()
        )
        only(FileError, lambda: checkpoint.read_info(folder))
    path.write_text(json.dumps(complete(4)))
    told = only(FileError, lambda: checkpoint.read_info(folder))
    assert told is not None and "is of step 4, and the folder is called step-00000003" in told


def test_checkpoint_files(tmp_path):
    path = tmp_path / "rank-0.pt"
    own = {
        "handle": {"x": torch.ones(3)},
        "buffers": {"y": torch.ones(2)},
        "random": torch.get_rng_state()[:40].clone(),
        "progress": {"epoch": 0, "index": 0, "step": 3, "loss_sum": 0.0, "loss_count": 1},
        "totals": [[1] * 7, [2] * 7],
        "skipped_in_a_row": 0,
    }
    torch.save(own, path)
    content = path.read_bytes()
    files.convert(files.read_tensors(path), RankState, path)
    for seed in SEEDS:
        path.write_bytes(damaged(content, seed))
        told = only(FileError, lambda: files.convert(files.read_tensors(path), RankState, path))
        assert told is None or str(path) in told, seed
        for kind in (RankState, CommonState):
            only(FileError, lambda kind=kind, seed=seed: files.convert(odd(own, seed), kind, path))


@pytest.fixture
def corpus_folder(tmp_path):
    """A folder with manifests that are right."""
    convert(an4_like(tmp_path / "an4", "wav"), tmp_path / "out")
    return tmp_path / "out"


def test_manifests_and_transcripts(corpus_folder):
    path = find_manifests(corpus_folder)[0]
    text = corpus_folder / "train" / "an1-fash-b.txt"
    contents = {path: path.read_bytes(), text: text.read_bytes()}
    for seed in SEEDS:
        target = text if seed % 3 == 0 else path
        target.write_bytes(damaged(contents[target], seed))
        only(FileError, lambda: check(*map(read_manifest, find_manifests(corpus_folder))))
        target.write_bytes(contents[target])


@pytest.mark.parametrize("kind", ["sph", "wav", "flac"])
def test_recordings(tmp_path, kind):
    path = save(tmp_path / "a", tone(0.2), kind)
    content = path.read_bytes()
    for seed in SEEDS:
        head = damaged(content[:1024], seed)  # the header, mostly
        path.write_bytes(head + content[1024:])
        only(FileError, lambda: read_audio(path))
        only(FileError, lambda: duration(path))


@pytest.mark.parametrize(
    "field",
    [
        *("NIST_1A", "NIST_1A\n", "NIST_1A\nx\n"),
        "NIST_1A\n   1024\nsample_count -i 99999999999999\n",
        f"NIST_1A\n{'9' * 5000}\nsample_count -i 1\nend_head\n",
        f"NIST_1A\n   1024\nsample_count -i {'9' * 5000}\nend_head\n",
    ],
)
def test_odd_sphere_headers(tmp_path, field):
    path = tmp_path / "a.sph"
    path.write_bytes(field.encode() + sphere(tone(0.1)))
    only(FileError, lambda: read_audio(path))


def test_lists_of_an4(tmp_path):
    root = an4_like(tmp_path / "an4", "wav")
    lists = {path: path.read_bytes() for path in sorted((root / "etc").iterdir())}
    for seed in range(150):
        path = list(lists)[seed % len(lists)]
        path.write_bytes(damaged(lists[path], seed))
        told = only(FileError, lambda: convert(root, tmp_path / "out"))
        path.write_bytes(lists[path])
        if told is None:
            check(*map(read_manifest, find_manifests(tmp_path / "out")))
            for manifest in find_manifests(tmp_path / "out"):
                manifest.unlink()
        assert not list((tmp_path / "out").glob("*.csv")), seed
        assert not list(tmp_path.glob(".out*")), seed


@pytest.mark.parametrize("packed", ["gz", "bz2", "xz", ""])
def test_tarballs(tmp_path, packed):
    an4_like(tmp_path / "an4", "sph")
    path = tmp_path / f"an4.tar.{packed}"
    with tarfile.open(path, f"w:{packed}") as archive:
        archive.add(tmp_path / "an4", "an4")
    content = path.read_bytes()
    for seed in range(60):
        path.write_bytes(damaged(content, seed))
        out = tmp_path / f"out{seed}"
        told = only(FileError, lambda out=out: convert(path, out))
        assert told is None or not list(out.glob("*.csv")), seed


def test_a_tarball_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("oktopk.lab.tasks.speech.an4.MOST_UNPACKED", 10**6)
    path = tmp_path / "bomb.tar.xz"
    with lzma.open(path, "wb") as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo("an4/etc/an4_train.fileids")
        member.size = 10**7
        archive.addfile(member, io.BytesIO(bytes(10**7)))
    told = only(FileError, lambda: convert(path, tmp_path / "out"))
    assert told is not None and "unpacks to more than" in told


def test_a_refused_tarball_leaves_nothing(tmp_path):
    """What the check of both lists would refuse, such as too much text for the time."""
    root = an4_like(tmp_path / "an4", "wav")
    path = root / "etc" / "an4_train.transcription"
    path.write_text(path.read_text().replace("GO", "G O" * 50))
    told = only(FileError, lambda: convert(root, tmp_path / "out"))
    assert told is not None and f"{tmp_path}/out/train/an1-fash-b.wav" in told
    assert sorted(p.name for p in tmp_path.iterdir()) == ["an4"]


def test_cached_spectra(corpus_folder, tmp_path):
    utterances = read_manifest(find_manifests(corpus_folder)[0])
    open_spectra(utterances, tmp_path / "cache")
    [path] = (tmp_path / "cache").iterdir()
    content = path.read_bytes()
    for seed in SEEDS:
        path.write_bytes(damaged(content[:48], seed) + content[48:])
        if only(FileError, lambda: open_spectra(utterances, tmp_path / "cache")) is None:
            spectra = open_spectra(utterances, tmp_path / "cache")
            assert all(len(spectra.magnitudes(i)) == spectra.frames[i] > 0 for i in range(3))


@pytest.mark.parametrize(
    "text",
    [
        "4(x99999999999)",
        "9" * 5000,
        "\u00b2",
        "4(x2),3(x99999999)",
        "1,2,",
        "-1",
        "1e3",
        " 1",
        "1\n",
    ],
)
@pytest.mark.parametrize(
    "name", ["RANK", "WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"]
)
def test_numbers_of_launchers(environ, name, text):
    of_torchrun = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    environ(**((of_torchrun if "SLURM" not in name else srun(0, 1)) | {name: text}))
    told = only(LaunchError, read_rank_environment)
    assert told is None or len(told) < 600


def test_environments_of_launchers(environ, monkeypatch, tmp_path):
    nodes = tmp_path / "nodes"
    texts = ["", "0", "1", "x", "9" * 30, "4(x2),3", "a\udcffb", "node[01-03", "\u0663", "../.."]
    for number, base in enumerate((openmpi(1, 4, 1, 2), srun(1, 2), pbs(1, nodes))):
        nodes.write_bytes(b"gpu1\ngpu2\n" if number else b"\xff\n")
        for name in [*base, "MASTER_PORT", "MASTER_ADDR", "SLURM_JOB_NODELIST"]:
            for text in texts:
                environ(**base)
                monkeypatch.setenv(name, text)
                place = None

                def find():
                    nonlocal place
                    place = read_rank_environment()

                only(LaunchError, find)
                if place is not None:
                    only(LaunchError, lambda place=place: master_endpoint(place))
    assert "PBS_NODEFILE" in os.environ
