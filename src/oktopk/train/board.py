"""TensorBoard: scalars of every step and epoch, histograms around the change of phase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from oktopk.report.record import TIMES

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
    """Events of one run; a resumed one hides what it writes anew."""

    def __init__(self, folder: Path, step: int) -> None:
        self._writer = SummaryWriter(str(folder), purge_step=step or None)

    def steps(self, entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            self._scalars(STEP_SCALARS, entry, entry["step"])
        self._writer.flush()  # else a live TensorBoard lags by two minutes

    def probes(self, entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            self._scalars(PROBE_SCALARS, entry, entry["step"])
        self._writer.flush()

    def epoch(self, entry: dict[str, Any]) -> None:
        self._scalars(EPOCH_SCALARS, entry, entry["step"])
        for rank, memory in enumerate(entry["memory"]):
            for name, value in memory.items():
                self._writer.add_scalar(f"memory/{name}/rank{rank}", value, entry["step"])
        self._writer.flush()

    def _scalars(self, groups: dict[str, tuple[str, ...]], entry: dict, step: int) -> None:
        for group, names in groups.items():
            for name in names:
                if entry.get(name) is not None:
                    self._writer.add_scalar(f"{group}/{name}", entry[name], step)

    def histograms(self, group: str, tensors: dict[str, Tensor], step: int) -> None:
        """One histogram per tensor, and one of all of them together."""
        for name, tensor in tensors.items():
            self._writer.add_histogram(f"{group}/{name}", tensor, step)
        if tensors:
            whole = torch.cat([tensor.flatten() for tensor in tensors.values()])
            self._writer.add_histogram(f"{group}/all", whole, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
