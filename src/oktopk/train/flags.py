"""Flags of the command line for the fields of a config."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from typing import Any

from oktopk.train.config import Config, load, specs, task_in, with_settings
from oktopk.train.tasks.registry import DEFAULT_TASK


def task_of(argv: Sequence[str]) -> str:
    """The task that a command line is for, by its --task or --config: it decides which flags exist.

    What is wrong with either is found later, when the config is loaded.
    """
    words = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    words.add_argument("--task")
    words.add_argument("--config")
    try:
        found, _ = words.parse_known_args(argv)
        task = found.task or (task_in(found.config) if found.config else DEFAULT_TASK)
        specs(task)
    except (argparse.ArgumentError, SystemExit, ValueError, OSError):
        return DEFAULT_TASK
    return task


def add_flags(
    parser: argparse.ArgumentParser, task: str = DEFAULT_TASK, without: Collection[str] = ()
) -> None:
    """Add a flag for every setting. A flag that is not given leaves the value of the config."""
    for name, spec in specs(task).items():
        if name in without:
            continue
        kind = type(spec.default)
        how: dict[str, Any] = {"type": kind, "choices": spec.metadata["choices"]}
        if kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        elif how["choices"] is None:
            how["metavar"] = spec.name.rsplit("_", 1)[-1].upper()
        parser.add_argument(
            f"--{spec.name.replace('_', '-')}",
            default=argparse.SUPPRESS,
            help=f"{spec.metadata['help']} ({spec.default!r})".replace("%", "%%"),
            **how,
        )


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
    """The config with the flags of the command line applied."""
    return with_settings(config, **{n: getattr(args, n) for n in given(args, config.task)})


def load_with_flags(args: argparse.Namespace) -> Config:
    """The config that --config and --task ask for, with all other flags applied."""
    return with_flags(load(args.config or "", getattr(args, "task", "")), args)
