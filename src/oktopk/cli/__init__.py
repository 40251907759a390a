# SPDX-License-Identifier: Apache-2.0
"""The command line.

Exit codes are the same for all commands: 0 when it is done, 1 when it failed, 2 when the command
line or an installed package is wrong, 128 + number after a signal. An error is one line on stderr
that begins with the command.
"""

from __future__ import annotations

import io
import os
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Collection, Sequence

from oktopk.cli.commands import COMMANDS
from oktopk.cli.parser import Parser, bold, examples, flags_of, innermost, subparsers_of
from oktopk.errors import ExchangeError, LaunchError
from oktopk.launch.child_process import watch_parent
from oktopk.launch.ranks import read_rank_environment
from oktopk.utils import signals
from oktopk.utils.arguments import UsageError, did_you_mean
from oktopk.utils.extras import EXTRAS, NEEDED, MissingPackageError, missing_packages, require
from oktopk.utils.files import FileError, single_line
from oktopk.version import __version__

INTRODUCTION = "Data-parallel PyTorch training over links that are too slow for dense gradients."


def parser(argv: Sequence[str], filled: Collection[str] = COMMANDS) -> Parser:
    """Return the parser of all commands; those that are in `filled` have their flags.

    The command line `argv` is needed beforehand: which flags a training has depends on its task.
    """
    main = Parser(
        prog="oktopk",
        usage="oktopk COMMAND [FLAGS]",
        description=overview(),
        epilog="oktopk COMMAND --help shows the flags of a command, with examples.",
    )
    main.add_argument("-V", "--version", action="version", version=f"oktopk {__version__}")
    # the overview lists the commands, in groups, which argparse does not know
    commands = main.add_subparsers(prog="oktopk", dest="command", metavar="COMMAND", help=SUPPRESS)
    for name, command in COMMANDS.items():
        below = commands.add_parser(
            name,
            help=command.help,
            description=_sentence(command.help),
            epilog=examples(command.examples),
        )
        if name in filled:
            below.set_defaults(run=command.fill(below, list(argv)))
    return main


def overview() -> str:
    """Return the commands in groups, each with its help."""
    width = max(map(len, COMMANDS))
    lines, group = [INTRODUCTION], ""
    for name, command in COMMANDS.items():
        if command.group != group:
            group = command.group
            lines += ["", bold(f"{group}:")]
        lines.append(f"  {name:{width}}  {command.help}")
    return "\n".join(lines)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def parse(argv: Sequence[str]) -> Namespace:
    """Return the arguments of a command line. Exits with one line if it is wrong."""
    named = [word for word in argv if not word.startswith("-")][:1]
    whole = parser(argv, filled=named)
    args, unknown = whole.parse_known_args(argv)
    own = innermost(whole, [*named, getattr(args, "action", None) or ""])
    if subparsers_of(own):  # `oktopk` alone, or `oktopk data`
        if unknown:
            own.error(_unknown(unknown, flags_of(own)))
        own.print_help()
        sys.exit(0)
    if unknown:
        _check_config(own, args)
        own.error(_unknown(unknown, flags_of(own)))
    return args


def _unknown(words: list[str], known: Sequence[str]) -> str:
    name, hint = words[0].split("=")[0], did_you_mean
    if "--config" in known:  # settings of a training, some of which had other names
        from oktopk.lab.train.config import nearest as hint
    return f"unrecognized arguments: {' '.join(words)}{hint(name, known)}"


def _check_config(own: ArgumentParser, args: Namespace) -> None:
    """Exit if config or task cannot be loaded: that is why flags are unknown."""
    if not hasattr(args, "config"):
        return
    from oktopk.lab.train.config_files import load

    try:
        load(args.config or "", getattr(args, "task", ""))
    except (ValueError, OSError) as error:
        own.exit(2, f"{own.prog}: {error}\n")


def main() -> None:
    """Run the command of this process, and exit with its code."""
    watch_parent()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path may have bytes that are not text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        sys.exit(run(parse(sys.argv[1:])))
    except BrokenPipeError:  # the reader has closed the pipe, as in `oktopk methods | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt as error:
        sys.exit(signals.report_interrupt(error))


def run(args: Namespace) -> int:
    """Run a command if the packages that it needs are installed; return its exit code."""
    what = f"oktopk {args.command}"
    try:
        require(what, *NEEDED.get(args.command, ()))
        is_rank = read_rank_environment() is not None
        with signals.default_on_signals() if is_rank else signals.raise_on_signals():
            return args.run(args)
    except MissingPackageError as error:
        return _fail(2, str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in EXTRAS:
            raise
        return _fail(2, str(missing_packages(what, package)))
    except UsageError as error:
        return _fail(2, f"{what}: {single_line(error)} ({what} --help)")
    except ExchangeError as error:  # the launcher knows it by its name
        return _fail(1, f"{what}: {type(error).__name__}: {error}")
    except BrokenPipeError:
        raise
    except (LaunchError, FileError, OSError) as error:
        text = str(error) if isinstance(error, LaunchError) else single_line(error)
        return _fail(1, f"{what}: {text}")


def _fail(code: int, line: str) -> int:
    sys.stderr.write(f"{line}\n")
    return code
