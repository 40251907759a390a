# SPDX-License-Identifier: Apache-2.0
"""`oktopk completion SHELL`: a script that completes commands, flags and their values."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

SHELLS = ("bash", "zsh", "fish", "tcsh", "powershell")
PLACES = """\
where the script goes:
  bash  oktopk completion bash > ~/.local/share/bash-completion/completions/oktopk
  zsh   oktopk completion zsh > DIRECTORY/_oktopk   (a directory in $fpath)
  fish  oktopk completion fish > ~/.config/fish/completions/oktopk.fish
A shell that is started afterwards completes: oktopk tr[TAB]"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the argument of `oktopk completion`."""
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    parser.epilog = f"example: oktopk completion bash\n\n{PLACES}"


def run(args: argparse.Namespace) -> int:
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
    from oktopk.train.config_files import shipped

    for action in parser._actions:
        if action.type is Path or action.dest in ("task", "data", "folder"):
            action.complete = shtab.FILE  # type: ignore[attr-defined] - how shtab is told
        if action.dest == "command":
            action.help = None  # the overview has it, but shtab leaves out what has no help
        if action.dest == "config":
            action.choices = shipped()
    for below in subparsers_of(parser).values():
        _describe(below)
