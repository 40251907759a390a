"""Flags of the command line for the fields of a config."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any

from oktopk.train.config import FIELDS, Config


def add_flags(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Add a flag for every field. A flag that is not given leaves the value of the config."""
    for spec in fields(Config):
        if spec.name in without:
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


def given(args: argparse.Namespace) -> list[str]:
    """The fields that were set on the command line."""
    return [name for name in FIELDS if name in vars(args)]


def with_flags(config: Config, args: argparse.Namespace) -> Config:
    """The config with the flags of the command line applied."""
    return replace(config, **{name: getattr(args, name) for name in given(args)})
