# SPDX-License-Identifier: Apache-2.0
"""Flags of the command line for the fields of a config."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import Field
from typing import Any

from oktopk.train.config import USUAL, Config, as_dict, specs, with_settings
from oktopk.train.config_files import load, shipped, task_in
from oktopk.train.option import number_or_auto, specs_of
from oktopk.utils.files import FileError
from oktopk.utils.flags import UsageError

GROUPS = {
    "task": "run",
    "epochs": "length and optimizer",
    "method": "exchange",
    "validate_every": "validation",
    "log_every": "log and checkpoints",
}
"""Titles in the help: each group begins with a setting and ends before the next one."""


def config_of(argv: Sequence[str]) -> Config:
    """The config that a command line begins with, by its --task or --config, before other flags.

    It decides which flags exist and which values the help shows. What is wrong with either is found
    later, when the config is loaded.
    """
    words = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    words.add_argument("--task", default="")
    words.add_argument("--config", default="")
    try:
        found, _ = words.parse_known_args(argv)
    except (argparse.ArgumentError, SystemExit):
        return load()
    for config, task in ((found.config, found.task), ("", found.task or _task_in(found))):
        with suppress(ValueError, OSError):
            return load(config, task)
    return load()


def _task_in(found: argparse.Namespace) -> str:
    with suppress(ValueError, OSError):
        return task_in(found.config)
    return ""


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Add --config, with the names that there are."""
    names = ", ".join(shipped())
    parser.add_argument("--config", metavar="NAME", help=f"a TOML file, or one of {names}")


def add_flags(
    parser: argparse.ArgumentParser, config: Config, without: Collection[str] = ()
) -> None:
    """Add a flag for every setting, in groups. A flag that is not given leaves the config's value.

    The help shows the values of this config, with which the command would run.
    """
    values = as_dict(config)
    titles = GROUPS | {next(iter(specs_of(type(config.options))), ""): f"task {config.task}"}
    group = parser
    for name, spec in specs(config.task).items():
        if name in titles:
            group = parser.add_argument_group(titles[name])
        if name not in without:
            _add_flag(group, name, spec, values[name])


def _add_flag(group: argparse._ActionsContainer, name: str, spec: Field[Any], value: Any) -> None:
    kind = spec.metadata["type"]
    parse = number_or_auto(kind) if spec.metadata["or_auto"] else kind
    how: dict[str, Any] = {"type": parse, "choices": spec.metadata["choices"]}
    if kind is bool:
        how = {"action": argparse.BooleanOptionalAction}
    else:
        how["metavar"] = METAVARS.get(kind, name.rsplit("_", 1)[-1].upper())
    text = spec.metadata["help"]
    if how.get("choices"):
        text += f": {', '.join(how['choices'])}"
    group.add_argument(
        f"--{name.replace('_', '-')}",
        default=argparse.SUPPRESS,
        help=f"{text}{_shown(value)}".replace("%", "%%"),
        **how,
    )


METAVARS = {int: "N", float: "X"}
"""What stands for a number in the help; other values have the name of their setting."""


def _shown(value: Any) -> str:
    """A value as the help shows it; nothing for an empty text."""
    if value == "":
        return ""
    words = {True: "on", False: "off"}
    return f" ({words[value] if isinstance(value, bool) else value})"


def add_all_flags(parser: argparse.ArgumentParser, config: Config) -> None:
    """The flags of `oktopk train`, with the values that it would train with."""
    parser.description = (
        "Train a task. In parentheses are the values that it will be trained with: those of\n"
        f"the config {config.name}, for the task {config.task}. Another --config or --task has "
        "others,\nand --help shows them."
    )
    add_config_flag(parser)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the last checkpoint of the run, if it has one",
    )
    add_flags(parser, config)


def as_flag(name: str, value: Any) -> list[str]:
    """The words that set a field on the command line."""
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{dashed}" if value else f"--no-{dashed}"]
    return [f"--{dashed}", str(value)]


def given(args: argparse.Namespace, task: str) -> list[str]:
    """The settings that were set on the command line."""
    return [name for name in specs(task) if name in vars(args)]


def with_flags(config: Config, args: argparse.Namespace) -> Config:
    """The config with the flags of the command line applied.

    A method that is not the config's has its usual settings, where no flag says otherwise.
    """
    chosen = {name: getattr(args, name) for name in given(args, config.task)}
    method = chosen.get("method", config.method)
    usual = USUAL.get(method, {}) if method != config.method else {}
    return with_settings(config, **(usual | chosen))


def load_with_flags(args: argparse.Namespace) -> Config:
    """The config that --config and --task ask for, with all other flags applied.

    A file that they name and that cannot be used is a wrong command line.
    """
    try:
        return with_flags(load(args.config or "", getattr(args, "task", "")), args)
    except FileError as error:
        raise UsageError(str(error)) from error
