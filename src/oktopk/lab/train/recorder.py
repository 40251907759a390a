# SPDX-License-Identifier: Apache-2.0
"""Where the metrics of a run go, what is recorded of it, and how it is asked to stop."""

from __future__ import annotations

import logging
import os
import platform
import resource
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy
import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from oktopk.errors import RunError, StoppedError
from oktopk.lab.runlog.reader import METRICS_FILE
from oktopk.lab.runlog.schema import (
    TIMED_PARTS,
    EndRecord,
    EpochRecord,
    MemoryRecord,
    MessagesRecord,
    MetricInfo,
    PhaseTotals,
    ProbeRecord,
    RankMemory,
    RanksRecord,
    RunRecord,
    StepRecord,
    TaskInfo,
    TensorInfo,
    ValidationRecord,
)
from oktopk.lab.runlog.writer import RunLogWriter, RunTotals, tensors_record
from oktopk.lab.train.config import as_dict
from oktopk.lab.train.console import ProgressBar, WarningCollector, epoch_line, validation_lines
from oktopk.lab.train.setup import Run
from oktopk.lab.train.validate import all_or_raise
from oktopk.launch import network
from oktopk.utils.signals import SignalFlag
from oktopk.version import __version__

# Memory of this process and its GPU.


def memory_usage(device: torch.device) -> RankMemory:
    """Resident memory now and at its peak, and the GPU's; 0 where there is no GPU."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    statm = Path("/proc/self/statm")  # on Linux; elsewhere only the peak is known
    now = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak
    gpu = (0, 0, 0)
    if device.type == "cuda":
        gpu = (
            torch.cuda.memory_allocated(device),
            torch.cuda.max_memory_allocated(device),
            torch.cuda.memory_reserved(device),
        )
    return RankMemory(now, max(now, peak), *gpu)


# What is known when a run begins: its size and settings, versions and the machine.


def run_record(run: Run) -> RunRecord:
    """The first record of `metrics.jsonl`, and the first after each resume."""
    return RunRecord(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        step=run.progress.step,
        size=run.comm.size,
        total_steps=run.total_steps,
        steps_per_epoch=run.steps_per_epoch,
        settings=run.exchange.settings,
        changed={name: list(pair) for name, pair in run.changed.items()},
        task=task_info(run),
        command=shlex.join(["oktopk", *sys.argv[1:]]),
        target=str(run.target) if run.target else None,
        network=network.inside() or None,
        tensors=tensor_info(run.model),
        versions=versions(),
        machine=machine(run.device),
    )


def task_info(run: Run) -> TaskInfo:
    """What is trained, and by which metrics it is judged."""
    task = run.task
    return TaskInfo(
        name=run.config.task,
        metrics=[
            MetricInfo(metric.name, metric.label, metric.higher_is_better, metric.shown)
            for metric in task.metrics
        ],
        unit=task.unit,
        train=task.num_train,
        test=task.num_test,
    )


def tensor_info(model: torch.nn.Module) -> dict[str, TensorInfo]:
    """Size and kind of every parameter, by name."""
    found = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{path}.{name}" if path else name
            kind = f"{type(module).__name__} {name.split('_l')[0]}"  # weight_ih_l0_reverse
            found[full_name] = TensorInfo(parameter.numel(), kind)
    return found


def versions() -> dict[str, str]:
    return {
        "oktopk": __version__,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def machine(device: torch.device) -> dict[str, Any]:
    """The machine of rank 0, without names that tell whose it is."""
    found = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "threads": torch.get_num_threads(),
        "device": device.type,
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def _processor() -> str:
    """The kernel's name for it; `platform.processor()` is empty on most Linux machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


# How a run is asked to stop: SIGTERM or SIGINT to any rank, then all ranks save and leave.
#
# 1. The first signal sets a flag on the rank that receives it. The default handlers are back after
#    that, so a second signal ends the process at once.
# 2. The recorder sends the flag along with the metrics that it gathers from all ranks anyway, at
#    least every `MAX_SECONDS_BETWEEN_CHECKS`. From then on every rank knows that one was asked.
# 3. All ranks save a checkpoint of the same step and raise `StoppedError`.


MAX_SECONDS_BETWEEN_CHECKS = 5.0
"""Longest time, in whole steps, until all ranks know that one was asked to stop."""


class StopRequest:
    """Turns the first stop signal in its block into a flag that ranks share."""

    def __init__(self) -> None:
        self.agreed = False
        """Whether every rank knows that one of them received a signal."""

        self._signal: SignalFlag | None = None

    @property
    def requested(self) -> bool:
        """Whether this rank received a signal."""
        return self._signal is not None and self._signal.received

    def __enter__(self) -> StopRequest:
        self._signal = SignalFlag()
        return self

    def __exit__(self, *_: object) -> None:
        if self._signal is not None:
            self._signal.close()

    def share(self, any_rank: bool) -> None:
        """Take in whether any rank has the flag set. Every rank calls it with the same value."""
        self.agreed = self.agreed or any_rank

    def raise_if_agreed(self, step: int, saved: bool) -> None:
        """End the run, once the checkpoint of this step is saved, if the exchange can be saved."""
        if not self.agreed:
            return
        if saved:
            raise StoppedError(f"stopped and saved at step {step}: continue with --resume")
        raise StoppedError(
            f"stopped at step {step}; a baseline saves no checkpoints, so it starts from the "
            "beginning next time"
        )


def steps_between_checks(seconds_per_step: float, most: int) -> int:
    """Steps until ranks share their flags again. The slowest rank decides, so that all agree."""
    return max(1, min(most, int(MAX_SECONDS_BETWEEN_CHECKS / seconds_per_step)))


# TensorBoard: scalars of every step and epoch, and histograms.


log = logging.getLogger("oktopk")

Groups = dict[str, tuple[str, ...]]
"""Names of scalars by group. A scalar without a value is not written."""

STEP_SCALARS: Groups = {
    "train": ("loss", "lr"),
    "compression": ("sparsity", "compression_ratio", "k", "local", "result", "imbalance"),
    "thresholds": ("local_threshold", "global_threshold"),
    "traffic": ("bytes_sent", "bytes_dense", "messages"),
    "seconds": TIMED_PARTS,
}
PROBE_SCALARS: Groups = {
    "quality": ("recall", "energy", "best_energy", "xi", "age_mean", "age_most"),
}
EPOCH_SCALARS: Groups = {"epoch": ("train_loss",)}


class TensorBoardWriter:
    """The TensorBoard events of a run. A resumed run hides the events that it writes again.

    The events are a copy of what `metrics.jsonl` has. When they cannot be written, for example on a
    full disk, there is one warning and training continues without them.
    """

    def __init__(self, directory: Path, step: int, sums: PhaseTotals | None = None) -> None:
        """Open the events of a run that has finished `step` steps, with the bytes of `sums`.

        They are in the directory of the run itself, whose name TensorBoard shows.
        """
        self._directory = directory
        self._sent, self._dense = (sums.bytes_sent, sums.bytes_dense) if sums else (0, 0)
        self._writer: SummaryWriter | None = None
        self._excepthook = threading.excepthook
        threading.excepthook = self._on_thread_error
        with self._or_warn():
            self._writer = SummaryWriter(str(directory), purge_step=step or None)

    def _on_thread_error(self, args: threading.ExceptHookArgs) -> None:
        """Print no traceback for TensorBoard's thread: its error is raised at the next call."""
        if not type(args.thread).__module__.startswith("tensorboard"):
            self._excepthook(args)

    @contextmanager
    def _or_warn(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._writer = None
            log.warning(
                "TensorBoard's events in %s cannot be written, training continues without them: %s",
                self._directory,
                error,
            )

    def write_hparams(self, settings: Mapping[str, Any], metrics: Sequence[str]) -> None:
        """Write the settings for TensorBoard's table of runs, beside the metrics of validation."""
        if self._writer is None:
            return
        plain = {name: v for name, v in settings.items() if isinstance(v, bool | int | float | str)}
        # not add_hparams, which makes a second run for them
        summaries = hparams(plain, {f"epoch/{name}": 0.0 for name in metrics})
        with self._or_warn():
            for summary in summaries:
                self._writer._get_file_writer().add_summary(summary)

    def write_steps(self, records: list[StepRecord]) -> None:
        """Write the scalars of steps, and the bytes since the beginning of the run."""
        self._write(STEP_SCALARS, records)
        if self._writer is None:
            return
        with self._or_warn():
            for record in records:
                self._sent += record.bytes_sent
                self._dense += record.bytes_dense
                self._writer.add_scalar("traffic/bytes_sent_total", self._sent, record.step)
                self._writer.add_scalar("traffic/bytes_dense_total", self._dense, record.step)
            self._writer.flush()

    def write_probes(self, records: list[ProbeRecord]) -> None:
        self._write(PROBE_SCALARS, records)

    def _write(
        self, groups: Groups, records: Sequence[StepRecord | ProbeRecord | EpochRecord]
    ) -> None:
        if self._writer is None:
            return
        with self._or_warn():
            for record in records:
                for group, names in groups.items():
                    for name in names:
                        value = getattr(record, name)
                        if value is not None:
                            self._writer.add_scalar(f"{group}/{name}", value, record.step)
            self._writer.flush()  # otherwise a live TensorBoard lags by two minutes

    def write_epoch(self, record: EpochRecord) -> None:
        if self._writer is None:
            return
        with self._or_warn():
            for rank, memory in enumerate(record.memory or ()):
                for name, value in msgspec.structs.asdict(memory).items():
                    if name.startswith("gpu") and not value:  # there is no GPU
                        continue
                    self._writer.add_scalar(f"memory/{name}/rank{rank}", value, record.step)
        self._write(EPOCH_SCALARS, [record])

    def write_validation(self, record: ValidationRecord) -> None:
        if self._writer is None:
            return
        with self._or_warn():
            for name, value in record.metrics.items():
                if value is not None:
                    self._writer.add_scalar(f"epoch/{name}", value, record.step)
            self._writer.flush()

    def write_histograms(self, group: str, tensors: dict[str, Tensor], step: int) -> None:
        """Write a histogram of each tensor, and one of all tensors together."""
        if self._writer is None:
            return
        with self._or_warn():
            for name, tensor in tensors.items():
                self._writer.add_histogram(f"{group}/{name}", tensor, step)
            if tensors:
                whole = torch.cat([tensor.flatten() for tensor in tensors.values()])
                self._writer.add_histogram(f"{group}/all", whole, step)
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            with self._or_warn():
                self._writer.close()
        threading.excepthook = self._excepthook


# Where the metrics of a run go: `metrics.jsonl`, TensorBoard and the progress bar.
#
# Every rank has a recorder, because the loss of a step is the mean over ranks; only rank 0 writes.


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
