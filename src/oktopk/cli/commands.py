# SPDX-License-Identifier: Apache-2.0
"""The commands by name. What a command needs is imported when it is used: torch takes seconds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from oktopk.cli import data
from oktopk.launch.rank_environment import launcher_of_this_process
from oktopk.utils.flags import MOST_SECONDS, MOST_WORKERS, number_in_range
from oktopk.utils.progress import said_if_slow

if TYPE_CHECKING:
    from oktopk.train.config import Config

Run = Callable[[argparse.Namespace], int]
"""Runs a command and returns its exit code."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its place in the overview, its help, and how its parser is filled."""

    group: str
    help: str
    examples: tuple[str, ...]
    fill: Callable[[argparse.ArgumentParser, list[str]], Run]
    """Adds the flags for a command line, which may decide which flags there are.

    It also imports what takes long: until a command runs, a signal ends the process at once.
    """


def _methods(_: argparse.ArgumentParser, __: list[str]) -> Run:
    from oktopk.methods import METHODS
    from oktopk.utils.tables import print_table

    def run(_: argparse.Namespace) -> int:
        head = ["method", "words sent per rank and step", "what it does"]
        print_table(head, [[name, m.words, m.summary] for name, m in METHODS.items()])
        sys.stdout.write("n elements, k kept, P ranks; headers apart (docs/algorithms.md)\n")
        return 0

    return run


def _check(parser: argparse.ArgumentParser, argv: list[str]) -> Run:
    from oktopk.check import check

    parser.add_argument(
        "--workers",
        type=number_in_range(int, 1, MOST_WORKERS),
        metavar="N",
        help="processes to start, without a launcher (2)",
    )
    parser.add_argument("--quick", action="store_true", help="four steps of each method, not 36")
    parser.add_argument(
        "--timeout",
        type=number_in_range(float, 0.1, MOST_SECONDS),
        default=60.0,
        metavar="SECONDS",
        help="how long to wait for a rank (%(default)g)",
    )

    return lambda args: check(args.workers, args.timeout, args.quick, argv)


def _bench(parser: argparse.ArgumentParser, argv: list[str]) -> Run:
    from oktopk.bench.command import add_flags, command

    add_flags(parser)
    return lambda args: command(args, argv)


def _data(parser: argparse.ArgumentParser, _: list[str]) -> Run:
    data.add_flags(parser)
    return data.run


def _completion(parser: argparse.ArgumentParser, _: list[str]) -> Run:
    from oktopk.cli import completion

    completion.add_flags(parser)
    return completion.run


def _loading() -> AbstractContextManager[None]:
    """Say what takes so long, if it does; of ranks, the process that started them has said more."""
    return nullcontext() if launcher_of_this_process() else said_if_slow("loading PyTorch")


def _train(parser: argparse.ArgumentParser, argv: list[str]) -> Run:
    with _loading():
        from oktopk.train.flags import add_all_flags, config_of

    add_all_flags(parser, config_of(argv))

    def run(args: argparse.Namespace) -> int:
        from oktopk.report.command import report
        from oktopk.train.command import command

        return command(args, argv, report)

    return run


def _training(name: str) -> Callable[[argparse.ArgumentParser, list[str]], Run]:
    """A command that trains several runs: it has the flags of `oktopk train` too."""

    def fill(parser: argparse.ArgumentParser, argv: list[str]) -> Run:
        with _loading():
            from oktopk.train.flags import config_of

            module = import_module(f"oktopk.{name}.command")
        add: Callable[[argparse.ArgumentParser, Config], None] = module.add_flags
        add(parser, config_of(argv))
        return module.command

    return fill


def _looking(name: str) -> Callable[[argparse.ArgumentParser, list[str]], Run]:
    """A command that reads a run."""

    def fill(parser: argparse.ArgumentParser, _: list[str]) -> Run:
        module = import_module(f"oktopk.{name}.command")
        module.add_flags(parser)
        return module.command

    return fill


COMMANDS: dict[str, Command] = {
    "train": Command(
        "training",
        "train a task: speech, text, images, or one of your own",
        (
            "oktopk train",
            "oktopk train --task text --data book.txt",
            "oktopk train --task text --network 100mbit --until 'loss<2.4'",
            "torchrun --nproc-per-node 4 -m oktopk train --resume",
        ),
        _train,
    ),
    "compare": Command(
        "training",
        "train the same under several methods and densities: a table and a page",
        (
            "oktopk compare --task text --until 'loss<2.4' --network 50mbit --validate-steps 25",
            "oktopk compare --methods dense,topka,oktopk --densities 0.01,0.05 --epochs 5",
        ),
        _training("compare"),
    ),
    "sweep": Command(
        "training",
        "search learning rate, density, warm-up and thresholds (Optuna)",
        ("oktopk sweep --trials 20 --lr 1e-3:1e-2 --density 0.01:0.1 --epochs 5",),
        _training("sweep"),
    ),
    "report": Command(
        "runs",
        "write one page about a run: what it learned, what it sent, and its times",
        ("oktopk report runs/quickstart",),
        _looking("report"),
    ),
    "watch": Command(
        "runs",
        "show a run in the terminal while it is running",
        ("oktopk watch quickstart", "oktopk watch runs/compare/dense --once"),
        _looking("watch"),
    ),
    "check": Command(
        "this machine and its network",
        "test these machines: the network, and exchanges of small gradients",
        ("oktopk check --workers 4", "torchrun --nproc-per-node 2 -m oktopk check"),
        _check,
    ),
    "bench": Command(
        "this machine and its network",
        "measure every method and PyTorch's own, on networks of any speed",
        (
            "oktopk bench --advise --model-size 124e6 --rates 1gbit",
            "oktopk bench --workers 4 --rates none,1gbit --json b.json",
        ),
        _bench,
    ),
    "methods": Command(
        "more", "list the methods and what they send", ("oktopk methods",), _methods
    ),
    "data": Command(
        "more",
        "get recordings to train on, check them, repair their manifests",
        ("oktopk data speak", "oktopk data an4 an4_raw.bigendian.tar.gz"),
        _data,
    ),
    "completion": Command(
        "more",
        "print a script that completes commands and flags in your shell",
        ("oktopk completion bash > ~/.local/share/bash-completion/completions/oktopk",),
        _completion,
    ),
}
