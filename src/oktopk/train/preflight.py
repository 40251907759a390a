# SPDX-License-Identifier: Apache-2.0
"""What is checked before any worker starts, and needs no other rank."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from oktopk.errors import RunError
from oktopk.kernels.ready import make_ready
from oktopk.launch.network import refuse_delay
from oktopk.runlog.run_directory import check_writable
from oktopk.train.config import Config
from oktopk.train.console import LineHandler, print_line
from oktopk.train.target import parse_target
from oktopk.train.tasks.base import TaskOptions
from oktopk.train.tasks.registry import is_path, packages_of, task_error, task_type
from oktopk.utils.extras import require

log = logging.getLogger("oktopk")


def check_before_start(command: str, config: Config) -> None:
    """Check packages, runs folder, network, target and data; `command` is who needs them."""
    require(f"{command} --task {config.task}", *packages_of(config.task))
    check_writable(Path(config.runs))
    refuse_delay(config.network)
    task = task_type(config.task)
    if config.until:
        parse_target(config.until, task.metrics)
    _call(config, task.check)


def prepare_data(config: Config) -> None:
    """Get, check and cache the data in this process, before any worker starts.

    So what is wrong with it is said once. One rank of every machine does it again: it finds the
    cache, or is the first where a launcher started the ranks.
    """
    handler, level = LineHandler(), log.level
    log.addHandler(handler)  # it may take a while, and says what it does
    log.setLevel(logging.INFO)
    try:
        _call(config, task_type(config.task).prepare)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def prepare_kernels() -> None:
    """Compile the kernels in this process, before any worker starts: then the workers load them.

    So no run has a clock on which they are compiled, whichever is the first.
    """
    if torch.cuda.is_available():  # workers with a GPU use other kernels
        return
    compiled = make_ready([torch.float32], _show_compiling)
    if compiled is not None:
        print_line(f"{_line_start()}{compiled}")


def _show_compiling(done: int, total: int) -> None:
    """Rewrite one line on a terminal; elsewhere print one at the start."""
    if sys.stdout.isatty() or not done:
        end = "" if sys.stdout.isatty() else "\n"
        sys.stdout.write(f"{_line_start()}compiling kernels: {done} of {total}{end}")
        sys.stdout.flush()


def _line_start() -> str:
    return "\r" if sys.stdout.isatty() else ""


def _call(config: Config, method: Callable[[TaskOptions], None]) -> None:
    """Call a method of the task; a mistake in a file of a user is one line with its number."""
    try:
        method(config.options)
    except Exception as error:
        if isinstance(error, ValueError | OSError | RunError) or not is_path(config.task):
            raise
        raise task_error(config.task, method.__name__, error) from error
