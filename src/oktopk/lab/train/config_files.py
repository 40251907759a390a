# SPDX-License-Identifier: Apache-2.0
"""Configs as TOML files, and flags of the command line for their fields."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field
from pathlib import Path
from typing import Any

from oktopk.lab.tasks.base import number_or_auto, shown, specs_of
from oktopk.lab.tasks.registry import DEFAULT_TASK, default_config, task_type
from oktopk.lab.train.config import (
    COMMON,
    RENAMED,
    USUAL,
    Config,
    as_dict,
    make_config,
    nearest,
    specs,
    with_settings,
)
from oktopk.utils.arguments import UsageError, did_you_mean, list_some
from oktopk.utils.files import FileError, file_error, is_file, parse_toml, read_text

# Configs as TOML files: those in `train/configs/`, those of users, and the one in a run directory.
#
# A file in `train/configs/` holds only what it changes. The one in a run directory has all
# settings.


SHIPPED = Path(__file__).parent / "configs"
MOST_BYTES = 2**20
"""Largest size of a config file."""

AS_IT_WAS = "resume with the version that started the run, or start another with --name"


def shipped() -> list[str]:
    """Names of the configs in the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def load(name: str = "", task: str = "") -> Config:
    """Load a config of the package by name, or a TOML file by path.

    Without a name it is the default config of the task, or the defaults of a task in a file.
    """
    name = name or default_config(task or DEFAULT_TASK)
    if not name:
        return _load_defaults(task)
    path = Path(name) if name.endswith(".toml") else SHIPPED / f"{name}.toml"
    if not is_file(path):
        raise ValueError(
            f"no config {shown(name)}: give a file that ends in .toml, or one of "
            f"{', '.join(shipped())}{did_you_mean(name, shipped())}"
        )
    config = parse(read_text(path, MOST_BYTES), path.stem, str(path))
    if task and config.task != task:
        raise ValueError(f"the config {name} is for the task {config.task}, not for {task}")
    return config


def _load_defaults(task: str) -> Config:
    """The config of a task in a file: what its class has as `defaults`."""
    kind = task_type(task)
    taken = sorted(COMMON.keys() & specs_of(kind.options_type).keys())
    if taken:
        raise file_error(
            task, f"the option {taken[0]} has the name of a setting of the trainer: rename it"
        )
    name = re.sub(r"[^\w.-]", "-", Path(task).stem)
    try:
        return make_config(**({"task": task, "name": name} | dict(kind.defaults)))
    except (TypeError, ValueError) as error:
        problem = str(error).replace(f"task {task} has no", "there is no")  # the path comes first
        raise file_error(task, f"defaults: {problem}") from error


def task_in(name: str) -> str:
    """The task that a config file is for, without checking anything else in it."""
    path = Path(name) if name.endswith(".toml") else SHIPPED / f"{name}.toml"
    return str(parse_toml(read_text(path, MOST_BYTES), path).get("task", DEFAULT_TASK))


def load_run(path: Path) -> Config:
    """Load the settings in a run directory. If one is missing, the file is damaged."""
    return parse(read_text(path, MOST_BYTES), path.stem, str(path), whole=True)


def parse(text: str, name: str, path: str, whole: bool = False) -> Config:
    """The config of a TOML text. Its name is `name`, unless the text has one.

    With `whole` no field may be missing: the default would train something else.
    """
    values: dict[str, Any] = parse_toml(text, path)
    task = values.get("task", DEFAULT_TASK)
    try:
        known = specs(task if isinstance(task, str) else DEFAULT_TASK)
    except ValueError as error:
        raise file_error(path, str(error)) from error
    for key in values:
        if key in RENAMED:
            advice = AS_IT_WAS if whole else "rename it"
            raise file_error(path, f"{key} is now {RENAMED[key]}", advice=advice)
        if key not in known:
            raise file_error(path, f"unknown key {shown(key)}{nearest(key, known)}")
    missing = [name for name in known if name not in values]
    if whole and missing:
        raise file_error(
            path,
            f"{len(missing)} of {len(known)} settings are missing ({list_some(missing, 3)})",
            advice="add them, or start another run with --name",
        )
    values.setdefault("name", name)
    try:
        return make_config(**values)
    except ValueError as error:
        raise file_error(path, str(error)) from error


def to_toml(config: Config) -> str:
    """All settings as TOML, with the help texts as comments."""
    known: Mapping[str, Any] = as_dict(config)
    return "".join(
        f"# {spec.metadata['help']}\n{name} = {_literal(known[name])}\n"
        for name, spec in specs(config.task).items()
    )


def _literal(value: Any) -> str:
    """A value as JSON, which is also TOML. Not in ASCII, because TOML has no surrogate pairs."""
    return json.dumps(value, ensure_ascii=False)


# Flags of the command line for the fields of a config.


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
