"""TensorBoard: scalars of every step and epoch, histograms around the change of phase."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from oktopk.runlog.reader import TIMES

log = logging.getLogger("oktopk")

# what is drawn, by group; a value that is not there (no validation, a skipped loss) is left out
STEP_SCALARS = {
    "train": ("loss", "lr"),
    "compression": ("sparsity", "compression_ratio", "k", "local", "result", "imbalance"),
    "thresholds": ("local_threshold", "global_threshold"),
    "traffic": ("bytes_sent", "bytes_dense", "messages"),
    "seconds": TIMES,
}
PROBE_SCALARS = {"quality": ("recall", "energy", "best_energy", "xi", "age_mean", "age_most")}
EPOCH_SCALARS = {
    "epoch": ("train_loss", "val_loss", "wer", "cer", "mean_utterance_wer", "pseudo_accuracy"),
}


class Board:
    """Events of one run; a resumed one hides what it writes anew.

    They are a copy of what the journal has: when they cannot be written (a full disk), that is
    said once, and training goes on without them.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._excepthook = threading.excepthook
        threading.excepthook = self._on_thread_error
        with self._writing():
            self._writer = SummaryWriter(str(folder), purge_step=step or None)

    def _on_thread_error(self, args: threading.ExceptHookArgs) -> None:
        """TensorBoard's thread raises its error again at the next call: no traceback of it here."""
        if not type(args.thread).__module__.startswith("tensorboard"):
            self._excepthook(args)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._writer = None
            log.warning(
                "TensorBoard's events in %s cannot be written, training goes on without them: %s",
                self._folder,
                error,
            )

    def steps(self, entries: list[dict[str, Any]]) -> None:
        self._write(STEP_SCALARS, entries)

    def probes(self, entries: list[dict[str, Any]]) -> None:
        self._write(PROBE_SCALARS, entries)

    def _write(self, groups: dict[str, tuple[str, ...]], entries: list[dict[str, Any]]) -> None:
        if self._writer is None:
            return
        with self._writing():
            for entry in entries:
                self._scalars(self._writer, groups, entry)
            self._writer.flush()  # else a live TensorBoard lags by two minutes

    def epoch(self, entry: dict[str, Any]) -> None:
        if self._writer is None:
            return
        with self._writing():
            self._scalars(self._writer, EPOCH_SCALARS, entry)
            for rank, memory in enumerate(entry["memory"]):
                for name, value in memory.items():
                    self._writer.add_scalar(f"memory/{name}/rank{rank}", value, entry["step"])
            self._writer.flush()

    @staticmethod
    def _scalars(writer: SummaryWriter, groups: dict[str, tuple[str, ...]], entry: dict) -> None:
        for group, names in groups.items():
            for name in names:
                if entry.get(name) is not None:
                    writer.add_scalar(f"{group}/{name}", entry[name], entry["step"])

    def histograms(self, group: str, tensors: dict[str, Tensor], step: int) -> None:
        """One histogram per tensor, and one of all of them together."""
        if self._writer is None:
            return
        with self._writing():
            for name, tensor in tensors.items():
                self._writer.add_histogram(f"{group}/{name}", tensor, step)
            if tensors:
                whole = torch.cat([tensor.flatten() for tensor in tensors.values()])
                self._writer.add_histogram(f"{group}/all", whole, step)
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            with self._writing():
                self._writer.close()
        threading.excepthook = self._excepthook
