# SPDX-License-Identifier: Apache-2.0
"""What is checked before any worker starts, and needs no other rank."""

from __future__ import annotations

from pathlib import Path

from oktopk.errors import RunError
from oktopk.runlog.run_directory import check_writable
from oktopk.train.config import Config
from oktopk.train.target import parse_target
from oktopk.train.tasks.registry import is_path, packages_of, task_error, task_type
from oktopk.utils.extras import require


def check_before_start(command: str, config: Config) -> None:
    """Check the packages, the runs folder, the target and the data; `command` is who needs them."""
    require(f"{command} --task {config.task}", *packages_of(config.task))
    check_writable(Path(config.runs))
    task = task_type(config.task)
    if config.until:
        parse_target(config.until, task.metrics)
    try:
        task.check(config.options)
    except Exception as error:
        if isinstance(error, ValueError | OSError | RunError) or not is_path(config.task):
            raise
        raise task_error(config.task, "check", error) from error
