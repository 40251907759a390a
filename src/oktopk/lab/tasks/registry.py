# SPDX-License-Identifier: Apache-2.0
"""The tasks by name, and tasks in Python files of users."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from inspect import isabstract
from pathlib import Path
from types import ModuleType
from typing import Any

from oktopk.lab.tasks.base import Metric, Task, TaskOptions
from oktopk.utils.arguments import did_you_mean
from oktopk.utils.files import FileError, error_summary, file_error, is_file

DEFAULT_TASK = "speech"
USER_MODULE = "oktopk_user_task_"


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a task is, without importing it: some need packages that not everybody has."""

    options: str
    """`module:class` of its options, which must import without extra packages."""

    task: str
    config: str
    """The shipped config that is used without --config."""

    packages: tuple[str, ...]
    """What must be installed to train it."""


_HERE = "oktopk.lab.tasks"
TASKS: dict[str, Entry] = {
    "speech": Entry(
        f"{_HERE}.options:SpeechOptions",
        f"{_HERE}.speech.task:Speech",
        "quickstart",
        ("soundfile", "jiwer"),
    ),
    "text": Entry(
        f"{_HERE}.options:TextOptions",
        f"{_HERE}.text:Text",
        "text",
        (),
    ),
    "images": Entry(
        f"{_HERE}.options:ImagesOptions",
        f"{_HERE}.images.task:Images",
        "images",
        (),  # it depends on the data, and the task checks it
    ),
}


def is_path(name: str) -> bool:
    """Whether a task is a file of the user."""
    return name.endswith(".py")


def options_type(name: str) -> type[TaskOptions]:
    """The options of a task. ValueError if there is no such task."""
    return task_type(name).options_type if is_path(name) else _load(_entry(name).options)


def task_type(name: str) -> type[Task]:
    """The class of a task, by its name or by the path of its file."""
    return load_user_task(name) if is_path(name) else _load(_entry(name).task)


def find_metric(task: str, asked: str | None) -> Metric:
    """The metric of that name, or the first of the task. ValueError if the task has no such."""
    known = {metric.name: metric for metric in task_type(task).metrics}
    if asked is None:
        return next(iter(known.values()))
    if asked not in known:
        names = ", ".join(known)
        raise ValueError(
            f"--metric {asked}: the task {task} has {names}{did_you_mean(asked, known)}"
        )
    return known[asked]


def default_config(name: str) -> str:
    """The shipped config of a task; empty for a task of a user, which has defaults of its own."""
    return "" if is_path(name) else _entry(name).config


def packages_of(name: str) -> tuple[str, ...]:
    """The packages that training a task needs, beside those of the trainer."""
    return () if is_path(name) else _entry(name).packages


def _entry(name: str) -> Entry:
    if name not in TASKS:
        hint = did_you_mean(name, TASKS)
        raise ValueError(f"no task {name!r}: it is {', '.join(TASKS)}, or a Python file{hint}")
    return TASKS[name]


def _load(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


@cache
def load_user_task(path: str) -> type[Task]:
    """The one class in a file of a user that derives from `Task`."""
    file = Path(path)
    if not is_file(file):
        raise file_error(path, "there is no such file", advice="give the path of a task to --task")
    module = _import(file)
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Task)
        and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        names = ", ".join(kind.__name__ for kind in found) or "none"
        raise file_error(
            path, f"must define one class that derives from oktopk's Task; it defines {names}"
        )
    _check(path, found[0])
    return found[0]


def _import(file: Path) -> ModuleType:
    """Import the file under a name of its own, with its folder on the path, as `python` would."""
    name = f"{USER_MODULE}{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise file_error(file, "cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    folder = str(file.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        line = _line_in(file, error)
        raise file_error(file, f"cannot be imported: {error_summary(error)}", place=line) from error
    return module


def task_error(path: str, what: str, error: Exception) -> FileError:
    """The error for what a method of a task in a file raised, with the line of the file."""
    return file_error(path, f"{what}: {error_summary(error)}", place=_line_in(Path(path), error))


def _line_in(file: Path, error: Exception) -> str:
    """The line of the file at which an error was raised."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f"line {error.lineno}"
    lines: list[int] = []
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(file.absolute()):
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f"line {lines[-1]}" if lines else ""


def _check(path: str, task: type[Task]) -> None:
    """Raise if the class lacks something that the trainer needs."""
    name = task.__name__
    if isabstract(task):
        missing = ", ".join(sorted(task.__abstractmethods__))
        raise file_error(path, f"{name} lacks {missing}")
    metrics: object = getattr(task, "metrics", ())
    if not isinstance(metrics, tuple) or not metrics or {type(m) for m in metrics} != {Metric}:
        raise file_error(path, f"{name}.metrics must be a tuple of at least one Metric")
    names = [metric.name for metric in metrics]
    twice = [metric for metric in names if names.count(metric) > 1]
    if twice:
        raise file_error(path, f"{name}.metrics has {twice[0]} twice")
    if not isinstance(task.defaults, Mapping):
        raise file_error(path, f'{name}.defaults must be a dict, as in {{"lr": 0.01}}')
    kind: object = task.options_type
    if not isinstance(kind, type) or not issubclass(kind, TaskOptions):
        raise file_error(path, f"{name}.options_type must derive from oktopk's TaskOptions")
    if "__dataclass_fields__" not in vars(kind):
        raise file_error(
            path,
            f"{kind.__name__} is not a dataclass",
            advice="add @dataclass(frozen=True, kw_only=True, slots=True) above it",
        )
