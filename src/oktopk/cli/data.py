# SPDX-License-Identifier: Apache-2.0
"""The flags of `oktopk data` and its actions."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from oktopk.cli.parser import examples
from oktopk.utils.extras import require

ORIGINAL_LENGTHS = "recordings of 1 to 15 s, as the original code does"


def run(args: argparse.Namespace) -> int:
    """Synthesize, convert, check or repair data for the speech trainer."""
    if args.action == "speak":
        require("oktopk data speak", "espeakng_loader")
    from oktopk.train.tasks.speech.data.commands import run

    return run(args)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the actions, each with its flags and an example."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions")
    for name, (text, example, add) in ACTIONS.items():
        add(actions.add_parser(name, help=text, description=text, epilog=examples([example])))


def _an4(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="the folder with etc/ and wav/, or the tarball")
    parser.add_argument("--out", type=Path, default=Path("data/an4"), help="(%(default)s)")
    parser.add_argument("--prune", action="store_true", help=f"train on {ORIGINAL_LENGTHS}")


def _speak(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("data/spoken"), help="(%(default)s)")
    for name, default, what in (
        ("--train", 800, "utterances to train on"),
        ("--test", 100, "utterances of other speakers"),
        ("--seed", 1, "the same seed gives the same bytes"),
    ):
        parser.add_argument(name, type=int, default=default, help=f"{what} (%(default)s)")


def _fix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="the manifest")
    parser.add_argument("--root", type=Path, required=True, help="the folder with its files")
    parser.add_argument("--out", type=Path, help="where to write it (the manifest itself)")
    parser.add_argument("--prune", action="store_true", help=f"keep {ORIGINAL_LENGTHS}")


def _check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="the folder with the two manifests")


ACTIONS: dict[str, tuple[str, str, Callable[[argparse.ArgumentParser], None]]] = {
    "an4": (
        "AN4 as CMU distributes it: check it, write WAV files and manifests",
        "oktopk data an4 an4_raw.bigendian.tar.gz --prune",
        _an4,
    ),
    "speak": (
        "a corpus like AN4 from a speech synthesizer, in seconds",
        "oktopk data speak --train 2000 --seed 7 --out data/mine",
        _speak,
    ),
    "fix-manifest": (
        "repair a manifest that has the paths of another machine",
        "oktopk data fix-manifest an4_train_manifest.csv --root data/an4",
        _fix,
    ),
    "check": (
        "list all problems in a data folder that would stop training",
        "oktopk data check data/an4",
        _check,
    ),
}
"""The actions: help, an example, and the function that adds the flags."""
