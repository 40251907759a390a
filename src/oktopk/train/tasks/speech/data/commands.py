# SPDX-License-Identifier: Apache-2.0
"""`oktopk data ...`: get data, check it, repair its manifests."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from oktopk.train.tasks.speech.data.an4 import convert
from oktopk.train.tasks.speech.data.manifest import (
    check,
    find_manifests,
    read_manifest,
    speaker,
)
from oktopk.train.tasks.speech.data.problems import DataError
from oktopk.train.tasks.speech.data.repair import repair
from oktopk.train.tasks.speech.data.synthesis import synthesize_corpus


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
