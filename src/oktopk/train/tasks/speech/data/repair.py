# SPDX-License-Identifier: Apache-2.0
"""Repair manifests that have the absolute paths of another machine."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

from oktopk.train.tasks.speech.data.audio import duration
from oktopk.train.tasks.speech.data.manifest import (
    Utterance,
    clean,
    pruned,
    rows,
    write_manifest,
)
from oktopk.train.tasks.speech.data.problems import DataError
from oktopk.utils.files import FileError, read_text


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
