# SPDX-License-Identifier: Apache-2.0
"""TensorBoard: scalars of every step and epoch, and histograms."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from oktopk.runlog.schema import (
    TIMED_PARTS,
    EpochRecord,
    PhaseTotals,
    ProbeRecord,
    StepRecord,
    ValidationRecord,
)

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
