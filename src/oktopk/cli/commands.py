# SPDX-License-Identifier: Apache-2.0
"""The commands by name. What a command needs is imported when it is used: torch takes seconds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from oktopk.cli.parser import examples
from oktopk.launch.ranks import launcher_of_this_process
from oktopk.utils.arguments import MOST_SECONDS, MOST_WORKERS, number_in_range
from oktopk.utils.console import said_if_slow
from oktopk.utils.extras import require

# The flags of `oktopk data` and its actions.


ORIGINAL_LENGTHS = "recordings of 1 to 15 s, as the original code does"


def run_data(args: argparse.Namespace) -> int:
    """Synthesize, convert, check or repair data for the speech trainer."""
    if args.action == "speak":
        require("oktopk data speak", "espeakng_loader")
    from oktopk.lab.tasks.speech.an4 import run

    return run(args)


def add_data_flags(parser: argparse.ArgumentParser) -> None:
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


def _check_flags(parser: argparse.ArgumentParser) -> None:
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
        _check_flags,
    ),
}
"""The actions: help, an example, and the function that adds the flags."""


if TYPE_CHECKING:
    from oktopk.lab.train.config import Config

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
    from oktopk.utils.console import print_table

    def run(_: argparse.Namespace) -> int:
        head = ["method", "words sent per rank and step", "what it does"]
        print_table(head, [[name, m.words, m.summary] for name, m in METHODS.items()])
        sys.stdout.write("n elements, k kept, P ranks; headers apart (docs/algorithms.md)\n")
        return 0

    return run


def _check(parser: argparse.ArgumentParser, argv: list[str]) -> Run:
    from oktopk.lab.check import check

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
    from oktopk.lab.bench.bench import add_flags, command

    add_flags(parser)
    return lambda args: command(args, argv)


def _data(parser: argparse.ArgumentParser, _: list[str]) -> Run:
    add_data_flags(parser)
    return run_data


def _completion(parser: argparse.ArgumentParser, _: list[str]) -> Run:
    add_completion_flags(parser)
    return run_completion


def _loading() -> AbstractContextManager[None]:
    """Say what takes so long, if it does; of ranks, the process that started them has said more."""
    return nullcontext() if launcher_of_this_process() else said_if_slow("loading PyTorch")


def _train(parser: argparse.ArgumentParser, argv: list[str]) -> Run:
    with _loading():
        from oktopk.lab.train.config_files import add_all_flags, config_of

    add_all_flags(parser, config_of(argv))

    def run(args: argparse.Namespace) -> int:
        from oktopk.lab.report.report import report
        from oktopk.lab.train.run import command

        return command(args, argv, report)

    return run


def _training(name: str) -> Callable[[argparse.ArgumentParser, list[str]], Run]:
    """A command that trains several runs: it has the flags of `oktopk train` too."""

    def fill(parser: argparse.ArgumentParser, argv: list[str]) -> Run:
        with _loading():
            from oktopk.lab.train.config_files import config_of

            module = import_module(f"oktopk.lab.{name}")
        add: Callable[[argparse.ArgumentParser, Config], None] = module.add_flags
        add(parser, config_of(argv))
        return module.command

    return fill


def _looking(name: str) -> Callable[[argparse.ArgumentParser, list[str]], Run]:
    """A command that reads a run."""

    def fill(parser: argparse.ArgumentParser, _: list[str]) -> Run:
        module = import_module(f"oktopk.lab.{name}")
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
        _training("compare.compare"),
    ),
    "sweep": Command(
        "training",
        "search learning rate, density, warm-up and thresholds (Optuna)",
        ("oktopk sweep --trials 20 --lr 1e-3:1e-2 --density 0.01:0.1 --epochs 5",),
        _training("sweep.sweep"),
    ),
    "report": Command(
        "runs",
        "write one page about a run: what it learned, what it sent, and its times",
        ("oktopk report runs/quickstart",),
        _looking("report.report"),
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


# `oktopk completion SHELL`: a script that completes commands, flags and their values.


SHELLS = ("bash", "zsh", "fish", "tcsh", "powershell")
PLACES = """\
where the script goes:
  bash  oktopk completion bash > ~/.local/share/bash-completion/completions/oktopk
  zsh   oktopk completion zsh > DIRECTORY/_oktopk   (a directory in $fpath)
  fish  oktopk completion fish > ~/.config/fish/completions/oktopk.fish
A shell that is started afterwards completes: oktopk tr[TAB]"""


def add_completion_flags(parser: argparse.ArgumentParser) -> None:
    """Add the argument of `oktopk completion`."""
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    parser.epilog = f"example: oktopk completion bash\n\n{PLACES}"


def run_completion(args: argparse.Namespace) -> int:
    """Print the script, which has the flags of all commands: using it starts no Python."""
    import shtab

    from oktopk.cli import parser

    whole = parser([])
    _describe(whole)
    sys.stdout.write(shtab.complete(whole, args.shell) + "\n")
    return 0


def _describe(parser: argparse.ArgumentParser) -> None:
    """Tell shtab which arguments are files, which are runs, and which configs there are."""
    import shtab

    from oktopk.cli.parser import subparsers_of
    from oktopk.lab.train.config_files import shipped

    for action in parser._actions:
        if action.type is Path or action.dest in ("task", "data", "folder"):
            action.complete = shtab.FILE  # type: ignore[attr-defined] - how shtab is told
        if action.dest == "command":
            action.help = None  # the overview has it, but shtab leaves out what has no help
        if action.dest == "config":
            action.choices = shipped()
    for below in subparsers_of(parser).values():
        _describe(below)
