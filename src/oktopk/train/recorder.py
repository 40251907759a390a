# SPDX-License-Identifier: Apache-2.0
"""Where the metrics of a run go: `metrics.jsonl`, TensorBoard and the progress bar.

Every rank has a recorder, because the loss of a step is the mean over ranks; only rank 0 writes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from oktopk.errors import RunError, StoppedError
from oktopk.runlog.aggregates import RunTotals
from oktopk.runlog.histogram import tensors_record
from oktopk.runlog.run_directory import METRICS_FILE
from oktopk.runlog.schema import (
    TIMED_PARTS,
    EndRecord,
    EpochRecord,
    MemoryRecord,
    MessagesRecord,
    ProbeRecord,
    RankMemory,
    RanksRecord,
    StepRecord,
    ValidationRecord,
)
from oktopk.runlog.writer import RunLogWriter
from oktopk.train.all_or_raise import all_or_raise
from oktopk.train.config import as_dict
from oktopk.train.console import ProgressBar, epoch_line, validation_lines
from oktopk.train.memory import memory_usage
from oktopk.train.run_info import run_record
from oktopk.train.setup import Run
from oktopk.train.stop import StopRequest, steps_between_checks
from oktopk.train.tensorboard import TensorBoardWriter
from oktopk.train.warning_collector import WarningCollector

log = logging.getLogger("oktopk")


@dataclass(frozen=True, slots=True)
class Sinks:
    """What rank 0 writes to."""

    runlog: RunLogWriter
    tensorboard: TensorBoardWriter
    progress: ProgressBar

    def close(self, ignore_errors: bool) -> None:
        for sink in (self.runlog, self.tensorboard, self.progress):
            with suppress(OSError) if ignore_errors else nullcontext():
                sink.close()


class Recorder:
    """Collects records between two writes. Methods that write are collective."""

    def __init__(
        self,
        run: Run,
        directory: Path,
        metrics_bytes: int,
        warnings: WarningCollector,
        stop: StopRequest,
    ) -> None:
        self._run = run
        self._steps: list[StepRecord] = []
        self._probes: list[ProbeRecord] = []
        self._warnings = warnings
        self._stop = stop
        self._steps_to_flush = 1  # the same on all ranks
        self._memory: list[RankMemory] = []
        self._sinks: Sinks | None = None
        self._write(lambda: self._open(directory, metrics_bytes))

    def _open(self, directory: Path, metrics_bytes: int) -> None:
        if self._run.comm.rank != 0:
            return
        done = self._run.progress.step
        runlog = RunLogWriter(directory / METRICS_FILE, metrics_bytes)
        runlog.write(run_record(self._run))
        tensorboard = TensorBoardWriter(directory, done, self._run.totals.whole)
        if not done:
            metrics = [metric.name for metric in self._run.task.metrics]
            tensorboard.write_hparams(as_dict(self._run.config), metrics)
        self._sinks = Sinks(
            runlog,
            tensorboard,
            ProgressBar(self._run.total_steps, done, self._run.config, self._run.totals),
        )

    @property
    def metrics_bytes(self) -> int:
        """Bytes in `metrics.jsonl`; 0 on ranks that do not write it."""
        return self._sinks.runlog.num_bytes if self._sinks else 0

    def print(self, text: str) -> None:
        """Print a line above the progress bar, on rank 0."""
        if self._sinks:
            self._sinks.progress.print(text)

    def step(self, record: StepRecord) -> None:
        """Take the record of a finished step. Every few of them are written."""
        self._steps.append(record)
        if self._run.probed is not None:
            self._probes.append(self._run.probed)
        if self._sinks:
            self._sinks.progress.step(record)
        if len(self._steps) >= self._steps_to_flush:
            self.flush()

    def flush(self) -> None:
        """Write the collected records, with the loss averaged over ranks.

        The same collective tells every rank the times and memory of all, and whether one of them
        was asked to stop.
        """
        steps, probes = self._steps, self._probes
        self._steps, self._probes = [], []
        if not steps:
            return
        times, losses = self._gather(steps)

        def write() -> None:
            if self._sinks:
                last = steps[-1].step
                written = [
                    msgspec.structs.replace(step, loss=loss)
                    for step, loss in zip(steps, losses, strict=True)
                ]
                self._sinks.runlog.write(
                    *written,
                    MemoryRecord(ranks=self._memory, step=last),
                    RanksRecord(steps=len(steps), seconds=times, step=last),
                    *probes,
                    *self._warnings.take(last),
                )
                self._sinks.tensorboard.write_steps(written)
                self._sinks.tensorboard.write_probes(probes)

        self._write(write)

    def _gather(self, steps: list[StepRecord]) -> tuple[list[dict[str, float | None]], list[float]]:
        """Mean seconds of the parts of a step by rank, and the mean loss of each step."""
        run, fields = self._run, RankMemory.__struct_fields__
        row = [float(self._stop.requested)]
        row += [sum(getattr(step, part) for step in steps) / len(steps) for part in TIMED_PARTS]
        row += [float(value) for value in msgspec.structs.astuple(memory_usage(run.device))]
        row += [step.loss if step.loss is not None else float("nan") for step in steps]
        own = torch.tensor(row, dtype=torch.float64, device=run.device)
        rows = run.comm.all_gather_header(own, stage="run")
        sizes = [1, len(TIMED_PARTS), len(fields), len(steps)]
        stop, seconds, memory, losses = rows.split(sizes, 1)
        self._stop.share(stop.max().item() > 0)
        slowest = seconds[:, -1].max().item()
        run.progress.seconds += len(steps) * seconds[0, -1].item()
        self._steps_to_flush = steps_between_checks(slowest, most=run.config.log_every)
        self._memory = [RankMemory(*values) for values in memory.long().tolist()]
        times: list[dict[str, float | None]] = [
            dict(zip(TIMED_PARTS, values, strict=True)) for values in seconds.tolist()
        ]
        return times, losses.mean(0).tolist()

    def _write(self, write: Callable[[], None]) -> None:
        def with_advice() -> None:
            try:
                write()
            except OSError as error:
                raise RunError(
                    f"the metrics could not be written: {error}. Make room and start again, with "
                    "--resume if the run has a checkpoint"
                ) from error

        all_or_raise(self._run.comm, self._run.device, "writing the metrics", with_advice)

    def epoch(self, record: EpochRecord) -> None:
        """Write the record of a finished epoch, with the memory of every rank."""
        record = msgspec.structs.replace(record, memory=self._memory)

        def write() -> None:
            if self._sinks:
                self._sinks.runlog.write(record)
                self._sinks.tensorboard.write_epoch(record)

        self._write(write)
        self.print(epoch_line(record))

    def validation(self, record: ValidationRecord) -> None:
        """Write the record of a validation."""

        def write() -> None:
            if self._sinks:
                self._sinks.runlog.write(record)
                self._sinks.tensorboard.write_validation(record)

        self._write(write)
        self.print(validation_lines(record, self._run.task.metrics))

    def histograms(self, step: int) -> None:
        """Write gradients and residuals of rank 0 as histograms, and its message sizes."""

        def write() -> None:
            if self._sinks:
                gradients = {
                    name: parameter.grad
                    for name, parameter in self._run.model.named_parameters()
                    if parameter.grad is not None
                }
                residuals = self._run.exchange.residuals
                sent = self._run.exchange.message_sizes
                self._sinks.runlog.write(
                    tensors_record(step, gradients, residuals),
                    MessagesRecord(step=step, sent=sent),
                )
                self._sinks.tensorboard.write_histograms("gradient", gradients, step)
                self._sinks.tensorboard.write_histograms("residual", residuals, step)

        self._write(write)

    def end(self, totals: RunTotals, seconds: float) -> None:
        """Write that the run finished, the totals over all ranks, and how long it took."""
        record = EndRecord(how="finished", text="", seconds=seconds, totals=dict(totals))
        self._write(lambda: self._sinks.runlog.write(record) if self._sinks else None)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        """Close everything. A full disk must not hide the error that ended the run."""
        if self._sinks is None:
            return
        if kind is not None:
            stopped = issubclass(kind, StoppedError | KeyboardInterrupt)
            text = str(self._run.exchange.failure or error) or kind.__name__
            end = EndRecord(how="stopped" if stopped else "failed", text=text)
            with suppress(OSError):
                self._sinks.runlog.write(*self._warnings.take(self._run.progress.step), end)
        self._sinks.close(ignore_errors=kind is not None)
