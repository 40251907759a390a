# SPDX-License-Identifier: Apache-2.0
"""`WarningCollector`: logged warnings on their way into the metrics."""

from __future__ import annotations

import logging
from collections import deque

from oktopk.runlog.schema import WarningRecord

log = logging.getLogger("oktopk")


class WarningCollector(logging.Handler):
    """Keeps the warnings that are logged in its block until they are written.

    Any thread may log.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: deque[str] = deque(maxlen=100)

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())

    def __enter__(self) -> WarningCollector:
        log.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        log.removeHandler(self)

    def take(self, step: int) -> list[WarningRecord]:
        """The warnings since the last call."""
        texts = [self._texts.popleft() for _ in range(len(self._texts))]
        return [WarningRecord(step=step, text=text) for text in texts]
