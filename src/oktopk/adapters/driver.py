# SPDX-License-Identifier: Apache-2.0
"""`Driver`: the engine of one model, its parameters by name, and what is done after each step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from oktopk.adapters.parameters import ParameterLayout
from oktopk.comm.communicator import Comm
from oktopk.comm.consistency import check_consistency
from oktopk.engine.buckets import Layout
from oktopk.engine.engine import Engine
from oktopk.settings import Settings
from oktopk.stats import StepStats

log = logging.getLogger("oktopk")

OnStep = Callable[[StepStats], None]
Parameters = TypeVar("Parameters", bound=ParameterLayout)


class Driver(Generic[Parameters]):
    """One model's steps on this rank. Subclasses say when a step begins and what it exchanges."""

    subject = "a gradient"
    """What a step exchanges, for messages."""

    def __init__(
        self, settings: Settings, comm: Comm, parameters: Parameters, on_step: OnStep | None
    ) -> None:
        self.engine = Engine(settings, comm, [])
        self.comm, self.parameters = comm, parameters
        self.on_step = on_step
        self.layout: Layout = []
        """Names of the parameters in the engine's buckets."""

        self.stats: StepStats | None = None
        self.is_checked = False
        """Whether the ranks have compared their state since the start or the last load."""

    @property
    def residuals(self) -> dict[str, Tensor]:
        """Views of the residual by parameter name; empty before the first sparse step."""
        with self.engine.lock:
            views = {}
            for bucket, names in enumerate(self.layout):
                residual = self.engine.residual_of(bucket)
                if residual is None:
                    return {}
                views |= self.parameters.views(residual, names)
            return views

    def set_layout(self, layout: Layout, residuals: dict[str, Tensor]) -> None:
        """Cut the engine's buckets as given, and carry the residuals over."""
        self.engine.set_buckets([self.parameters.bucket(names) for names in layout])
        self.layout = layout
        if residuals:
            like = next(iter(residuals.values()))
            numel, device = self.engine.buckets.numel, self.parameters.device
            self.engine.residual = torch.zeros(numel, dtype=like.dtype, device=device)
            for name, view in self.residuals.items():
                if name in residuals:
                    view.copy_(residuals[name])

    def check_consistency(self, like: Tensor, **values: Any) -> None:
        """Compare what only the first step shows; ValueError on all ranks if it differs."""
        names = [name for bucket in self.layout for name in bucket]
        check_consistency(
            self.comm,
            like.device,
            asdict(self.engine.settings)
            | {
                "step": self.engine.step,
                "parameters": len(names),
                "dense parameters": [name for name in names if self.parameters.is_dense(name)],
                "state": self.engine.shared(),
                "numel": self.engine.buckets.numel,
                "numel dense": self.engine.buckets.num_dense,
                "buckets": self.layout,
                "gradient dtype": str(like.dtype),
            }
            | values,
        )
        self.is_checked = True

    def report(self, stats: StepStats) -> None:
        """Tell the user of a finished step: a warning if it was skipped, the callback, an error."""
        if stats.skipped:
            log.warning(
                "rank %d, step %d: %s had a NaN or Inf on some rank; no rank applied it "
                "(%d steps skipped so far)",
                self.comm.rank,
                stats.step,
                self.subject,
                self.engine.skipped,
            )
        self.stats = stats
        if self.on_step is not None:
            self._call_back(self.on_step, stats)
        self.engine.raise_if_asked(stats, self.subject)

    def _call_back(self, on_step: OnStep, stats: StepStats) -> None:
        """Call the user's callback. The step is finished: its error must not stop other ranks."""
        try:
            on_step(stats)
        except Exception:
            log.exception("rank %d, step %d: on_step failed", self.comm.rank, stats.step)
