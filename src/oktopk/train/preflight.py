# SPDX-License-Identifier: Apache-2.0
"""What is checked before any worker starts, and needs no other rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from oktopk.errors import RunError
from oktopk.launch.network import refuse_delay
from oktopk.runlog.run_directory import check_writable
from oktopk.train.config import Config
from oktopk.train.console import LineHandler
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


def _call(config: Config, method: Callable[[TaskOptions], None]) -> None:
    """Call a method of the task; a mistake in a file of a user is one line with its number."""
    try:
        method(config.options)
    except Exception as error:
        if isinstance(error, ValueError | OSError | RunError) or not is_path(config.task):
            raise
        raise task_error(config.task, method.__name__, error) from error
