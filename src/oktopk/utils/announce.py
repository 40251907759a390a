# SPDX-License-Identifier: Apache-2.0
"""Lines that a person sees whether or not the program has configured logging."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger("oktopk")


def announce(text: str) -> None:
    """Log a line at INFO under the name `oktopk`; write it to stderr if no handler would show it.

    Python shows only warnings until a program configures logging, and most training scripts never
    do. A program that raised the level of this logger, or disabled it, has asked for silence.
    """
    if _has_handler():
        log.info("%s", text)
    elif not _is_silenced():
        sys.stderr.write(f"oktopk: {text}\n")
        sys.stderr.flush()


def _has_handler() -> bool:
    """Whether some handler of the logger, or of one above it, takes lines at INFO."""
    if not log.isEnabledFor(logging.INFO):
        return False
    logger: logging.Logger | None = log
    while logger is not None:
        if any(handler.level <= logging.INFO for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def _is_silenced() -> bool:
    return log.disabled or log.level > logging.INFO or log.manager.disable >= logging.INFO
