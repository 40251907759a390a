# SPDX-License-Identifier: Apache-2.0
"""Commands of the documentation: which file they start, and whether they could be run at all."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
import tomllib
from pathlib import Path

from torch.distributed.run import get_args_parser

from oktopk.cli import parser
from oktopk.lab.train.config_files import load

ROOT = Path(__file__).parents[2]


def command_lines(text: str) -> list[list[str]]:
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def script_of(words: list[str]) -> tuple[int, str, list[str]]:
    """How many processes (0: without a launcher), which file, and its arguments."""
    if words[0] == "torchrun":
        args = torchrun_args(words)
        return int(args.nproc_per_node), args.training_script, args.training_script_args
    if words[0] == "python" and len(words) > 1:
        return 0, words[1], words[2:]
    return 0, "", []


def is_command(word: str) -> bool:
    return word in CHECKS or bool(re.match(r"[A-Z_]+=", word))


def check(words: list[str]) -> None:
    """Whether a command that is not run could be: its flags and files exist."""
    assert words[0] in CHECKS, f"nobody knows how to check {words[0]}"
    CHECKS[words[0]](words)


def check_oktopk(words: list[str]) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            args = parser(words[1:]).parse_args(words[1:])
        except SystemExit:
            raise AssertionError(said.getvalue()) from None
    if getattr(args, "config", None):
        load(args.config)


def torchrun_args(words: list[str]) -> argparse.Namespace:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            return get_args_parser().parse_args(words[1:])
        except SystemExit:
            raise AssertionError(said.getvalue()) from None


def check_torchrun(words: list[str]) -> None:
    args = torchrun_args(words)
    started = [args.training_script, *args.training_script_args]
    check_python(["python", *["-m"] * args.module, *started])


def check_python(words: list[str]) -> None:
    if words[1:3] == ["-m", "oktopk"]:
        check_oktopk(words[2:])
    elif words[1] == "-m":
        check_file(f"{words[2]}/__main__.py")
    else:
        check_file(words[1])


def check_launcher(words: list[str]) -> None:
    """Of another launcher only what it starts is known here."""
    assert "python" in words, "it starts no Python"
    check_python(words[words.index("python") :])


def check_file(name: str) -> None:
    assert (ROOT / name).exists(), f"there is no {name}"


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(words) == 2, "expected one target"
    assert words[1] in targets, f"no such target; there are {targets}"


def check_pip(words: list[str]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert words[1] == "install", "expected pip install"
    wanted = re.fullmatch(r"(?:\.|oktopk)(?:\[([\w,]+)\])?", words[-1])
    assert wanted, "expected oktopk itself, from here or by name"
    missing = set(filter(None, (wanted[1] or "").split(","))) - set(known["optional-dependencies"])
    assert not missing, f"no such extra: {missing}"


CHECKS = {
    "oktopk": check_oktopk,
    "torchrun": check_torchrun,
    "python": check_python,
    "make": check_make,
    "pip": check_pip,
    **dict.fromkeys(("mpirun", "mpiexec", "srun"), check_launcher),
    **dict.fromkeys(("sbatch", "qsub", "kubectl"), lambda words: check_file(words[-1])),
}


def check_flags(words: list[str]) -> None:
    """Every flag of a command that may lack its other arguments."""
    commands = parser([])
    flags: set[str] = set()
    for word in words[1:]:
        actions = commands._actions
        below = [a.choices for a in actions if isinstance(a, argparse._SubParsersAction)]
        if below and not word.startswith("-"):
            assert word in below[0], f"{shlex.join(words)}: {word} is none of {list(below[0])}"
            commands = below[0][word]
        flags |= {flag for action in commands._actions for flag in action.option_strings}
        if word.startswith("--"):
            assert word in flags, f"{shlex.join(words)}: there is no {word}"
