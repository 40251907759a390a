# SPDX-License-Identifier: Apache-2.0
"""Configs as TOML files: those in `train/configs/`, those of users, and the one in a run directory.

A file in `train/configs/` holds only what it changes. The one in a run directory has all settings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oktopk.train.bounds import shown
from oktopk.train.config import COMMON, RENAMED, Config, as_dict, make_config, nearest, specs
from oktopk.train.option import specs_of
from oktopk.train.tasks.registry import DEFAULT_TASK, default_config, task_type
from oktopk.utils.files import file_error, is_file, parse_toml, read_text
from oktopk.utils.flags import did_you_mean
from oktopk.utils.units import list_some

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
