# SPDX-License-Identifier: Apache-2.0
"""Odd files: run folders, journals, checkpoints, manifests, recordings, archives."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from oktopk.errors import RunError
from oktopk.exchange.reducer import default_comm
from oktopk.lab.compare.results import write_tables
from oktopk.lab.tasks.speech.an4 import convert, repair
from oktopk.lab.tasks.speech.features import open_spectra
from oktopk.lab.tasks.speech.recordings import (
    DataError,
    check,
    duration,
    find_manifests,
    read_audio,
    read_manifest,
    read_raw,
)
from oktopk.lab.train.config_files import load
from oktopk.lab.train.run import find_and_restore
from oktopk.lab.train.setup import set_up
from oktopk.launch.ranks import SINGLE_RANK
from oktopk.utils.files import FileError
from torture import odd
from torture.desk import DATA, Desk, Input, LostError, command, group


def journal(desk: Desk) -> Input:
    """A journal with damaged or odd lines, read by report, watch and compare."""
    path, rng = desk.folder / "run" / "metrics.jsonl", desk.rng
    path.parent.mkdir()
    shutil.copy(desk.base / "runs/tiny/config.toml", path.parent)
    lines = (desk.base / "runs/tiny/metrics.jsonl").read_bytes().splitlines()
    if rng.random() < 0.2:
        path.write_bytes(odd.spoilt(rng, b"\n".join(lines)))
        return _reader(desk)
    notes = []
    for at in rng.sample(range(len(lines)), rng.randint(1, 3)):
        new, what = odd.changed(rng, json.loads(lines[at]), odd.plain)
        lines[at], notes = json.dumps(new).encode(), [*notes, f"line {at}: {what}"]
    path.write_bytes(b"\n".join(lines))
    read = _reader(desk)
    read.what = f"{read.what}: {notes}"
    return read


def _reader(desk: Desk) -> Input:
    """One of the commands that read a run's folder."""
    words = desk.rng.choice((["report", "run"], ["watch", "run", "--once"], ["watch", "."], []))
    if words:
        return command([*words, "--once"] if words == ["watch", "."] else words)
    return Input(
        "compare", lambda: write_tables(desk.folder, "wer", None), (ValueError, RunError, OSError)
    )


def run_folder(desk: Desk) -> Input:
    """A run's folder in which something is missing or something else."""
    folder, rng = desk.folder / "run", desk.rng
    shutil.copytree(
        desk.base / "runs/tiny", folder, ignore=shutil.ignore_patterns("*.html", "*.pt")
    )
    path = folder / rng.choice(("config.toml", "metrics.jsonl", "checkpoints", "."))
    how = rng.choice(("gone", "empty", "folder", "binary", "loop"))
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if how in ("empty", "binary"):
        path.write_bytes(b"" if how == "empty" else rng.randbytes(999))
    elif how == "folder":
        path.mkdir()
    elif how == "loop":
        path.symlink_to(path)
    read = _reader(desk)
    if rng.random() < 0.3:
        read = command(["train", "--resume", "--runs", ".", "--name", "run", "--workers", "2"])
    read.what = f"{read.what}: {path.name} {how}"
    return read


def checkpoint_file(desk: Desk) -> Input:
    """The newest checkpoint is damaged: the one before it is taken."""
    rng, folder = desk.rng, desk.folder / "checkpoints"
    shutil.copytree(desk.base / "runs/tiny/checkpoints", folder)
    path = max(folder.iterdir()) / rng.choice(
        ("complete.json", "complete.json", "common.pt", "rank-0.pt")
    )
    what = "spoilt"
    if path.suffix == ".json" and rng.random() < 0.7:
        new, what = odd.changed(rng, json.loads(path.read_text()), odd.plain)
        path.write_text(json.dumps(new))
    else:
        path.write_bytes(odd.spoilt(rng, path.read_bytes()))

    def call() -> None:
        try:
            find_and_restore(_run(desk.base), desk.folder, ())
        except RunError as error:
            raise LostError(f"the older checkpoint was not taken: {error}") from error
        if _run(desk.base).progress.step not in (3, 6):
            raise LostError(f"it went on from step {_run(desk.base).progress.step}")

    return Input(f"{path.name}: {what}", call, ())


class Canary:
    """What a pickle can do when it is loaded without care."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("../canary",)


def checkpoint_content(desk: Desk) -> Input:
    """The only checkpoint has odd content with a right hash: refused by name, and no code runs."""
    rng, folder = desk.rng, desk.folder / "checkpoints"
    newest = max((desk.base / "runs/tiny/checkpoints").iterdir())
    shutil.copytree(newest, folder / newest.name)
    path = folder / newest.name / rng.choice(("common.pt", "rank-0.pt"))
    new, what = odd.changed(rng, torch.load(path, weights_only=True))
    new, what = (Canary(), "code") if rng.random() < 0.1 else (new, what)
    try:
        torch.save(new, path)
    except Exception:  # noqa: BLE001 - what cannot be saved is replaced by what can
        torch.save([1, 2], path)
    facts = json.loads((path.parent / "complete.json").read_text())
    content = path.read_bytes()
    facts["files"][path.name] = {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    (path.parent / "complete.json").write_text(json.dumps(facts))
    what = f"{path.name}: {what}"
    call = lambda: find_and_restore(_run(desk.base), desk.folder, ())  # noqa: E731
    return Input(what, call, (RunError, FileError), (newest.name, path.name))


@cache
def _run(base: Path) -> Any:
    """A run of this process alone, to be resumed again and again."""
    group()
    config = load(str(base / "runs/tiny/config.toml"))
    return set_up(config, default_comm(), torch.device("cpu"), SINGLE_RANK)


def manifest(desk: Desk) -> Input:
    source = find_manifests(desk.base / "corpus")[0]
    path = desk.spoilt(str(source.relative_to(desk.base)))
    text = path.read_bytes()
    # its paths are relative to the base
    path.write_bytes(text.replace(b"train/", f"{desk.base}/corpus/train/".encode()))
    if desk.rng.random() < 0.3:
        call = lambda: repair(path, desk.base / "corpus", desk.folder / "out.csv")  # noqa: E731
    else:
        call = lambda: check(read_manifest(path), [])  # noqa: E731
    return Input("a manifest", call, DATA)


def an4_list(desk: Desk) -> Input:
    """AN4 with one odd list or recording."""
    root, rng = desk.folder / "an4", desk.rng
    shutil.copytree(desk.base / "an4", root)
    path = rng.choice(sorted(path for path in root.rglob("*") if path.is_file()))
    if rng.random() < 0.3 and path.suffix in (".fileids", ".transcription"):
        path.write_text(rng.choice(("../../x\n", "/etc/passwd\n", "a" * 5000, "\x00\n", "(x)\n")))
    else:
        path.write_bytes(odd.spoilt(rng, path.read_bytes()))
    return Input(str(path), lambda: convert(root, desk.folder / "out"), DATA)


def archive(desk: Desk) -> Input:
    path = desk.spoilt(desk.rng.choice(("an4.tar", "an4.tar.gz", "an4.tar.xz", "an4.tar.bz2")))
    return Input(path.name, lambda: convert(path, desk.folder / "out"), DATA)


def audio(desk: Desk) -> Input:
    path = desk.spoilt(desk.rng.choice(("one.wav", "one.flac", "one.sph", "one.raw")))
    reads = (
        (lambda: read_raw(path, "big"),)
        if path.suffix == ".raw"
        else (
            lambda: read_audio(path),
            lambda: duration(path),
        )
    )
    return Input(path.name, desk.rng.choice(reads), (DataError,), (path.name,))


def spectra(desk: Desk) -> Input:
    """A damaged cache of spectrograms."""
    path = find_manifests(desk.base / "corpus")[0]
    listed = read_manifest(path)
    cached = desk.rng.choice(sorted((desk.base / "corpus/cache").glob("*.spectra")))
    spoilt = desk.spoilt(str(cached.relative_to(desk.base)))
    return Input("spectra", lambda: open_spectra(listed, desk.folder), (DataError,), (spoilt.name,))


KINDS: dict[str, Callable[[Desk], Input]] = {
    "journal": journal,
    "run-folder": run_folder,
    "checkpoint-file": checkpoint_file,
    "checkpoint-content": checkpoint_content,
    "manifest": manifest,
    "an4": an4_list,
    "archive": archive,
    "audio": audio,
    "spectra": spectra,
}
