# SPDX-License-Identifier: Apache-2.0
"""The argument parser: errors of one line with the nearest known name, and help with examples."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from oktopk.utils.arguments import did_you_mean

WIDEST = 100
"""The most columns that a help text takes; a narrower terminal takes fewer."""
FLAGS_WIDTH = 28
"""Columns for the flags, left of their help texts."""


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Leaves descriptions and examples as they are written, and prints headings in bold."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, WIDEST)
        super().__init__(prog, max_help_position=FLAGS_WIDTH, width=width)

    def start_section(self, heading: str | None) -> None:
        super().start_section(heading and bold(heading))


def bold(text: str) -> str:
    """Return the text in bold if stdout is a terminal that shows it."""
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return text if plain or not sys.stdout.isatty() else f"\033[1m{text}\033[0m"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with exit code 2."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**{"formatter_class": Formatter, "allow_abbrev": False} | more)

    def format_help(self) -> str:
        """Return the help, under a usage line that does not repeat all flags."""
        needed = [a for a in self._actions if a.required or not a.option_strings]
        words = [" ".join([*a.option_strings[-1:], str(a.metavar or a.dest)]) for a in needed]
        self.usage = self.usage or " ".join([self.prog, *words, "[FLAGS]"])
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Exit with one line that says what is wrong and where the help is."""
        line = " ".join(message.removeprefix("argument ").split())
        self.exit(2, f"{self.prog}: {line} ({self.prog} --help)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is none of the choices, with the nearest of them."""
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        hint = did_you_mean(str(value), known) or f": it is one of {', '.join(known)}"
        raise argparse.ArgumentError(action, f"there is no {str(value)[:100]!r}{hint}")


def examples(lines: Sequence[str]) -> str:
    """Return the epilog of a help text: one example in its line, several below each other."""
    if len(lines) == 1:
        return f"example: {lines[0]}"
    return "\n".join(["examples:", *(f"  {line}" for line in lines)])


def subparsers_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the commands below a parser, by name."""
    found = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return {name: below for action in found for name, below in action.choices.items()}


def innermost(parser: argparse.ArgumentParser, words: Iterable[str]) -> argparse.ArgumentParser:
    """Return the parser of the command that the words name."""
    for word in words:
        parser = subparsers_of(parser).get(word, parser)
    return parser


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the flags that a parser knows."""
    return [flag for action in parser._actions for flag in action.option_strings]
