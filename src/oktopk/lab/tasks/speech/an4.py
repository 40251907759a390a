# SPDX-License-Identifier: Apache-2.0
"""AN4 as CMU distributes it, and `oktopk data`."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from oktopk.lab.tasks.speech.recordings import (
    RATE,
    DataError,
    Utterance,
    byte_order,
    check,
    clean,
    duration,
    find_manifests,
    pruned,
    read_audio,
    read_manifest,
    read_raw,
    rows,
    silent,
    speaker,
    unknown,
    write_manifest,
    write_wav,
)
from oktopk.lab.tasks.speech.synthesis import synthesize_corpus
from oktopk.utils.console import TimeLeft
from oktopk.utils.files import FileError, error_summary, is_file, read_text, single_line

# AN4 as CMU distributes it: lists of files and transcripts in `etc/`, recordings in `wav/`.


KINDS = (".raw", ".sph", ".wav", ".flac")
PARTS = {"train": "train", "test": "val"}  # CMU's names, and those of the reference's manifests
MOST_UNPACKED = 4 * 10**9  # bytes; AN4 has 64 million
LOOKED_AT = 25  # raw files that decide on the byte order


def convert(source: Path, out: Path, prune: bool = False) -> tuple[Path, Path]:
    """Check AN4, write it as WAV with manifests below `out`, and return the two manifests.

    Nothing is written unless every recording and transcript of both lists is valid. The manifests
    are written last: where they exist, everything else does. With `prune`, recordings under 1 s and
    over 15 s are left out of training, as in the original code.
    """
    problems: list[str] = []
    with _opened(source) as root:
        listed = {part: _listed(root, part, problems) for part in PARTS}
        paths = [path for items in listed.values() for path, _ in items]
        # each is read, written and checked
        with TimeLeft("recordings converted, in three passes", 3 * len(paths)) as progress:
            recordings = _load(paths, problems, progress)
            problems += _shared_speakers(listed)
            if problems:
                raise DataError(problems)
            out.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as draft:
                for part, items in listed.items():
                    found = [(path.stem, recordings[path], text) for path, text in items]
                    _write(Path(draft), part, found, prune, progress)
                _check_draft(Path(draft), out, progress)
                return _publish(Path(draft), out)


def _check_draft(draft: Path, out: Path, progress: TimeLeft) -> None:
    """Check both lists as training would. Problems are reported with the final paths."""
    try:
        train, test = map(read_manifest, find_manifests(draft))
        check(train, test, advance=progress.advance)
    except DataError as error:
        raise DataError(text.replace(str(draft), str(out)) for text in error.problems) from error


def _publish(draft: Path, out: Path) -> tuple[Path, Path]:
    """Move all files to their final folder, the manifests last."""
    manifests = find_manifests(draft)
    for path in [*sorted(draft.glob("*/*")), *manifests]:
        target = out / path.relative_to(draft)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
    return out / manifests[0].name, out / manifests[1].name


@contextmanager
def _opened(source: Path) -> Iterator[Path]:
    """The folder with `etc` and `wav`: `source`, a folder in it, or a folder in the tarball."""
    if source.is_dir():
        yield _root(source, source)
        return
    if not source.is_file():
        raise DataError([f"{source} is missing: give AN4's folder or its tarball"])
    with TemporaryDirectory() as folder:
        try:
            with tarfile.open(source) as archive:
                archive.extractall(folder, _of_bounded_size(archive), filter="data")
        except DataError:
            raise
        except Exception as error:  # a damaged archive may raise any of tarfile, gzip, bz2 or lzma
            problem = f"{source} cannot be unpacked ({error_summary(error)}): copy it again"
            raise DataError([problem]) from error
        yield _root(Path(folder), source)


def _of_bounded_size(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The members of the archive. Raise if they unpack to more than AN4 can have."""
    unpacked = 0
    for member in archive:
        unpacked += member.size
        if unpacked > MOST_UNPACKED:
            gigabytes = MOST_UNPACKED / 1e9
            raise DataError([f"{archive.name} unpacks to more than {gigabytes:g} GB: not AN4"])
        yield member


def _root(folder: Path, source: Path) -> Path:
    for candidate in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        if (candidate / "etc" / "an4_train.fileids").is_file():
            return candidate
    raise DataError([f"{source} is not AN4: it has no etc/an4_train.fileids"])


def _listed(root: Path, part: str, problems: list[str]) -> list[tuple[Path, str]]:
    """Recording and transcript of every valid line of one list. Problems are appended."""
    etc = root / "etc"
    transcripts = dict(map(_transcript, _lines(etc / f"an4_{part}.transcription")))
    listed = []
    for name in _lines(etc / f"an4_{part}.fileids"):
        stem = Path(name).name
        found = [path for kind in KINDS if is_file(path := root / "wav" / f"{name}{kind}")]
        text = transcripts.get(stem)
        if not found:
            kinds = ", ".join(KINDS)
            shown = single_line(name)
            problems.append(f"wav/{shown} ({kinds}) is missing; an4_{part}.fileids lists it")
        elif text is None:
            problems.append(f"{stem} has no line in an4_{part}.transcription")
        elif not text or unknown(text):
            what = f"no label for {unknown(text)!r} in" if text else "empty"
            problems.append(f"{stem}: {what} transcript {text!r} in an4_{part}.transcription")
        else:
            listed.append((found[0], text))
    return listed


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise DataError([f"{path} is missing"])
    try:
        text = read_text(path)
    except FileError as error:
        raise DataError([str(error)]) from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def _transcript(line: str) -> tuple[str, str]:
    """`<s> GO </s> (an253-fash-b)`: the name in brackets and the words before it."""
    parts = re.fullmatch(r"(?:<s>)?(.*?)(?:</s>)?\s*\(([^()\s]+)\)", line)
    return (parts[2], clean(parts[1])) if parts else (line, "")


def _shared_speakers(listed: dict[str, list[tuple[Path, str]]]) -> list[str]:
    train, test = ({speaker(path) or "" for path, _ in items} - {""} for items in listed.values())
    return [f"speaker {name} is in the training and the test list" for name in sorted(train & test)]


def _load(paths: list[Path], problems: list[str], progress: TimeLeft) -> dict[Path, np.ndarray]:
    """All recordings that can be decoded. Problems with the others are appended."""
    raw = [path for path in paths if path.suffix == ".raw" and path.stat().st_size]
    order = byte_order(raw[:: len(raw) // LOOKED_AT + 1]) if raw else ""
    recordings = {}
    for path in paths:
        progress.advance()
        try:
            samples = read_raw(path, order) if path.suffix == ".raw" else read_audio(path)
        except DataError as error:
            problems += error.problems
            continue
        if silent(samples):
            problems.append(f"{path} is silent")
        recordings[path] = samples
    return recordings


def _write(
    out: Path,
    part: str,
    items: list[tuple[str, np.ndarray, str]],
    prune: bool,
    progress: TimeLeft,
) -> Path:
    name = PARTS[part]
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    pairs = []
    for stem, samples, text in items:
        audio, transcript = folder / f"{stem}.wav", folder / f"{stem}.txt"
        write_wav(audio, samples)
        transcript.write_text(text + "\n")
        pairs.append((Utterance(audio, text, len(samples) / RATE), transcript))
        progress.advance()
    if prune and part == "train":
        pairs = [pair for pair in pairs if not pruned(pair[0])]
    return write_manifest(out / f"an4_{name}_manifest.csv", pairs)


# Repair manifests that have the absolute paths of another machine.


def repair(manifest: Path, root: Path, out: Path, prune: bool = False) -> Path:
    """Find every file of `manifest` below `root` and write a manifest with relative paths.

    A file is found by its name. If several have that name, the one whose folders agree with most
    of the old path is taken. Nothing is written unless all files are found.
    """
    if not root.is_dir():
        raise DataError([f"{root} is not a folder: give the one that has the recordings"])
    names = _by_name(root)
    pairs, problems = [], []
    for number, row in rows(manifest):
        try:
            pairs.append(_pair(row, root, names))
        except DataError as error:
            problems += [f"{manifest}:{number}: {problem}" for problem in error.problems]
    if problems:
        raise DataError(problems)
    if prune:
        pairs = [pair for pair in pairs if not pruned(pair[0])]
    out.parent.mkdir(parents=True, exist_ok=True)
    return write_manifest(out, pairs)


def _by_name(root: Path) -> dict[str, list[Path]]:
    names = defaultdict(list)
    for folder, _, files in os.walk(root):
        for name in files:
            names[name].append(Path(folder) / name)
    return names


def _pair(row: list[str], root: Path, names: dict[str, list[Path]]) -> tuple[Utterance, Path]:
    if len(row) != 2:
        raise DataError([f"expected `recording,transcript`, found {len(row)} cells"])
    audio, transcript = (_found(cell, root, names) for cell in row)
    try:
        text = clean(read_text(transcript))
    except FileError as error:
        raise DataError([str(error)]) from error
    return Utterance(audio, text, duration(audio)), transcript


def _found(cell: str, root: Path, names: dict[str, list[Path]]) -> Path:
    old = [part for part in cell.replace("\\", "/").split("/") if part]
    ranked = sorted(
        ((_agreement(old, path.parts), path) for path in names.get(old[-1] if old else "", [])),
        reverse=True,
    )
    if not ranked:
        raise DataError([f"no file named {old[-1] if old else cell!r} below {root} (for {cell})"])
    if len(ranked) > 1 and ranked[0][0] == ranked[1][0]:
        both = f"{ranked[1][1]} and {ranked[0][1]}"
        raise DataError([f"{cell} could be {both}: give a --root that has one of them"])
    return ranked[0][1]


def _agreement(old: list[str], parts: tuple[str, ...]) -> int:
    """The number of equal path components, counted from the end."""
    count = 0
    for mine, theirs in zip(reversed(parts), reversed(old), strict=False):
        if mine != theirs:
            break
        count += 1
    return count


# `oktopk data ...`: get data, check it, repair its manifests.


def run(args: argparse.Namespace) -> int:
    """Run the subcommand. Problems with the data are printed to stderr, without a traceback."""
    try:
        ACTIONS[args.action](args)
    except (DataError, OSError) as error:
        sys.stderr.write(f"oktopk data {args.action}: {error}\n")
        return 1
    return 0


def _an4(args: argparse.Namespace) -> None:
    _report(*convert(args.path, args.out, args.prune))


def _speak(args: argparse.Namespace) -> None:
    _report(*synthesize_corpus(args.out, args.train, args.test, args.seed))


def _check(args: argparse.Namespace) -> None:
    _report(*find_manifests(args.folder))


def _fix(args: argparse.Namespace) -> None:
    path = repair(args.file, args.root, args.out or args.file, args.prune)
    sys.stdout.write(f"{len(read_manifest(path))} utterances, paths relative to {path}\n")


ACTIONS: dict[str, Callable[[argparse.Namespace], None]] = {
    "an4": _an4,
    "speak": _speak,
    "check": _check,
    "fix-manifest": _fix,
}


def _report(*manifests: Path) -> None:
    """Check both manifests, then print what is in them."""
    parts = [read_manifest(path) for path in manifests]
    check(*parts)
    for name, path, utterances in zip(("train", "test"), manifests, parts, strict=True):
        hours = sum(utterance.seconds for utterance in utterances) / 3600
        shortest, longest = utterances[0].seconds, utterances[-1].seconds
        voices = len({speaker(utterance.audio) for utterance in utterances} - {None})
        speakers = f"{voices} speakers" if voices else "speakers unknown"
        sys.stdout.write(
            f"{name:5}  {len(utterances)} utterances, {hours:.2f} hours "
            f"({shortest:.1f} to {longest:.1f} s), {speakers}: {path}\n"
        )
