"""The command line. Each command has its own help with an example."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from oktopk.errors import ExchangeError
from oktopk.launch.parent_watchdog import watch_parent
from oktopk.methods import METHODS
from oktopk.train.config import nearest, shipped, specs
from oktopk.train.flags import add_flags as add_train_flags
from oktopk.train.flags import task_of
from oktopk.train.tasks.registry import DEFAULT_TASK, TASKS
from oktopk.utils import signals
from oktopk.utils.extras import (
    EXTRAS,
    NEEDED,
    MissingPackageError,
    missing_packages,
    require,
)
from oktopk.utils.files import FileError, single_line
from oktopk.utils.flags import MOST_SECONDS, MOST_WORKERS, number_in_range
from oktopk.version import __version__


def methods(_: argparse.Namespace) -> int:
    """Print the table of methods."""
    rows = [("method", "words sent per rank and step", "what it does")]
    rows += [(name, method.words, method.summary) for name, method in METHODS.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, words, summary in rows:
        sys.stdout.write(f"{name:{widths[0]}}  {words:{widths[1]}}  {summary}\n")
    sys.stdout.write("n elements, k kept, P ranks; headers apart (docs/algorithms.md)\n")
    return 0


def check(args: argparse.Namespace) -> int:
    """Run the self-test."""
    from oktopk.check import check

    return check(args.workers, args.timeout, args.quick, sys.argv[1:])


def bench(args: argparse.Namespace) -> int:
    """Measure every method and its peers on a network."""
    from oktopk.bench.command import command

    return command(args, sys.argv[1:])


def data(args: argparse.Namespace) -> int:
    """Synthesize, convert, check or repair data for the speech trainer."""
    from oktopk.train.tasks.speech.data.commands import run

    if args.action == "speak":
        require("oktopk data speak", "espeakng_loader")
    return run(args)


def train(args: argparse.Namespace) -> int:
    """Train a task, and write a report at the end."""
    from oktopk.report.command import report
    from oktopk.train.command import command

    return command(args, sys.argv[1:], report)


def parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of all commands; each has its own help with an example.

    The command line `argv` is needed beforehand: which flags a training has depends on its task.
    """
    task = task_of(argv)
    main = argparse.ArgumentParser(prog="oktopk", description=__doc__)
    main.add_argument("--version", action="version", version=__version__)
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND")
    table = commands.add_parser(
        "methods", help="the methods and what they send", epilog="example: oktopk methods"
    )
    table.set_defaults(run=methods)
    test = commands.add_parser(
        "check",
        help="a self-test of these machines: the network, and exchanges of small gradients",
        epilog="examples: oktopk check --workers 4; torchrun --nproc-per-node 2 -m oktopk check",
    )
    test.add_argument(
        "--workers",
        type=number_in_range(int, 1, MOST_WORKERS),
        help="processes to start, without launcher (2)",
    )
    test.add_argument("--quick", action="store_true", help="four steps of each method, not 36")
    test.add_argument(
        "--timeout",
        type=number_in_range(float, 0.1, MOST_SECONDS),
        default=60.0,
        help="seconds to wait for a rank",
    )
    test.set_defaults(run=check)
    _add_bench(commands)
    _add_data(commands)
    _add_train(commands, task)
    _add_runs(commands, task)
    return main


def _add_bench(commands: argparse._SubParsersAction) -> None:
    from oktopk.bench.command import add_flags

    cluster = commands.add_parser(
        "bench",
        help="a cluster in a box: every method and PyTorch's own, on networks of any speed",
        epilog="examples: oktopk bench; oktopk bench --workers 4 --rates none,1gbit --json b.json",
        allow_abbrev=False,
    )
    add_flags(cluster)
    cluster.set_defaults(run=bench)


def _add_data(commands: argparse._SubParsersAction) -> None:
    data_parser = commands.add_parser(
        "data",
        help="recordings to train on: get them, check them, repair their manifests",
        epilog="examples: oktopk data speak; oktopk data an4 an4_raw.bigendian.tar.gz",
    )
    actions = data_parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    data_parser.set_defaults(run=data)
    an4 = actions.add_parser(
        "an4",
        help="AN4 as CMU distributes it: check it, write WAV files and manifests",
        epilog="example: oktopk data an4 an4_raw.bigendian.tar.gz --prune",
    )
    an4.add_argument("path", type=Path, help="the folder with etc/ and wav/, or the tarball")
    an4.add_argument("--out", type=Path, default=Path("data/an4"), help="default: %(default)s")
    an4.add_argument(
        "--prune",
        action="store_true",
        help="train on recordings of 1 to 15 s, as the original code does",
    )
    speak = actions.add_parser(
        "speak",
        help="a corpus like AN4 from a speech synthesizer, in seconds",
        epilog="example: oktopk data speak --train 2000 --seed 7 --out data/mine",
    )
    speak.add_argument("--out", type=Path, default=Path("data/spoken"), help="default: %(default)s")
    for name, default, what in (
        ("--train", 800, "utterances to train on"),
        ("--test", 100, "utterances of other speakers"),
        ("--seed", 1, "the same seed gives the same bytes"),
    ):
        speak.add_argument(name, type=int, default=default, help=f"{what}; default: %(default)s")
    _add_lists(actions)


def _add_train(commands: argparse._SubParsersAction, task: str) -> None:
    trainer = commands.add_parser(
        "train",
        help=f"train a task: {', '.join(TASKS)}, or one of your own",
        description="Train a task. Some flags depend on it: these are those of "
        f"--task {task}. In parentheses: values that a config may change; without --config it is "
        "the one of the task.",
        epilog="examples: oktopk train; oktopk train --task text --data book.txt; "
        "oktopk train --network 100mbit --until 'wer<0.5'; "
        "torchrun --nproc-per-node 4 -m oktopk train --resume",
        allow_abbrev=False,
    )
    known = ", ".join(shipped())
    trainer.add_argument("--config", help=f"a TOML file, or one of {known}")
    trainer.add_argument(
        "--resume",
        action="store_true",
        help="continue from the last checkpoint of the run, if it has one",
    )
    add_train_flags(trainer, task)
    known_flags = [flag for action in trainer._actions for flag in action.option_strings]
    trainer.set_defaults(run=train, known=known_flags)


# commands on runs: help and an example; oktopk.NAME.command has their flags and their code
RUNS = {
    "report": (
        "write one page about a run: what it learned, what it sent, and its times",
        "example: oktopk report runs/quickstart",
    ),
    "compare": (
        "the same training under several methods and densities: a table and a report",
        "example: oktopk compare --methods dense,topka,oktopk --densities 0.01,0.05 --epochs 5",
    ),
    "sweep": (
        "search learning rate, density, warm-up and thresholds (optuna)",
        "example: oktopk sweep --trials 20 --lr 1e-3:1e-2 --density 0.01:0.1 --epochs 5",
    ),
    "watch": (
        "show a run in the terminal while it is running",
        "examples: oktopk watch quickstart; oktopk watch runs/compare/dense --once",
    ),
}


def _add_runs(commands: argparse._SubParsersAction, task: str) -> None:
    for name, (text, example) in RUNS.items():
        module = import_module(f"oktopk.{name}.command")
        added = commands.add_parser(name, help=text, epilog=example, allow_abbrev=False)
        module.add_flags(added, task)
        known = [flag for action in added._actions for flag in action.option_strings]
        added.set_defaults(run=module.command, known=known)


def _add_lists(actions: argparse._SubParsersAction) -> None:
    fix = actions.add_parser(
        "fix-manifest",
        help="repair a manifest that has the paths of another machine",
        epilog="example: oktopk data fix-manifest an4_train_manifest.csv --root data/an4",
    )
    fix.add_argument("file", type=Path, help="the manifest")
    fix.add_argument("--root", type=Path, required=True, help="the folder with its files")
    fix.add_argument("--out", type=Path, help="default: the manifest itself")
    fix.add_argument(
        "--prune",
        action="store_true",
        help="keep recordings of 1 to 15 s, as the original code does",
    )
    look = actions.add_parser(
        "check",
        help="list all problems in a data folder that would stop training",
        epilog="example: oktopk data check data/an4",
    )
    look.add_argument("folder", type=Path, help="the folder with the two manifests")


def main() -> None:
    from oktopk.errors import LaunchError
    from oktopk.launch.rank_environment import read_rank_environment

    watch_parent()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path may have bytes that are not text
        sys.stdout.reconfigure(errors="backslashreplace")
    whole = parser(sys.argv[1:])
    args, unknown = whole.parse_known_args()
    if unknown:
        _check_task(whole, args)
        hint = nearest(unknown[0].split("=")[0], getattr(args, "known", []))
        whole.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    try:
        is_rank = read_rank_environment() is not None
        with signals.default_on_signals() if is_rank else signals.raise_on_signals():
            sys.exit(run(args))
    except (LaunchError, ExchangeError) as error:  # the message is enough, without a traceback
        sys.exit(f"oktopk: {type(error).__name__}: {error}")
    except BrokenPipeError:  # the reader has closed the pipe, as in `oktopk methods | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (FileError, OSError) as error:
        sys.exit(f"oktopk {args.command}: {single_line(error)}")
    except KeyboardInterrupt as error:
        sys.exit(signals.report_interrupt(error))


def _check_task(whole: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit if the task cannot be loaded: that is why its flags are unknown."""
    try:
        specs(getattr(args, "task", DEFAULT_TASK))
    except ValueError as error:
        whole.exit(2, f"oktopk {args.command}: {error}\n")


def run(args: argparse.Namespace) -> int:
    """Run a command if the packages that it needs are installed."""
    what = f"oktopk {args.command}"
    try:
        require(what, *NEEDED.get(args.command, ()))
        return args.run(args)
    except MissingPackageError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in EXTRAS:
            raise
        sys.stderr.write(f"{missing_packages(what, package)}\n")
        return 2
