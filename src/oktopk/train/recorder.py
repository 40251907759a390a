"""Where the metrics of a run go: the journal, TensorBoard and the person watching.

Every rank has a recorder, because the loss of a step is the mean over ranks; rank 0 writes.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from oktopk.train.board import Board
from oktopk.train.console import Bar
from oktopk.train.errors import RunError
from oktopk.train.journal import Journal
from oktopk.train.memory import FIELDS, memory
from oktopk.train.setup import Run
from oktopk.train.step import OVERLAPPED, PARTS
from oktopk.train.together import together

STOPS = (signal.SIGTERM, signal.SIGINT)
MOST_SECONDS = 5.0  # between two looks whether somebody asked to stop


class Recorder:
    """Collects the steps between two writes. `flush` and `epoch` are collective."""

    def __init__(self, run: Run, folder: Path, journal_bytes: int) -> None:
        self._run = run
        self._pending: list[dict[str, Any]] = []
        self._asked_to_stop = False
        self.stops = False
        """Whether some rank was asked to stop, as all ranks knew at the last flush."""
        self._handlers = {number: signal.signal(number, self._note) for number in STOPS}
        self._every = 1  # steps to the next flush: known alike by all ranks
        self._memory: list[dict[str, int]] = []
        self._sinks: tuple[Journal, Board, Bar] | None = None
        if run.comm.rank == 0:
            done = run.progress.step
            self._sinks = (
                Journal(folder / "metrics.jsonl", journal_bytes),
                Board(folder / "tensorboard", done),
                Bar(run.total_steps, done, run.config.log_every),
            )

    def _note(self, *_: object) -> None:
        """Asked once, it saves first; asked twice, it ends as it would have."""
        self._asked_to_stop = True
        self._give_signals_back()

    def _give_signals_back(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @property
    def journal_bytes(self) -> int:
        """How much of the journal is written, on rank 0."""
        return self._sinks[0].bytes if self._sinks else 0

    def say(self, text: str) -> None:
        if self._sinks:
            self._sinks[2].say(text)

    def step(self, entry: dict[str, Any]) -> None:
        """Take the metrics of a finished step; every few of them are written."""
        self._pending.append(entry)
        if self._sinks:
            self._sinks[2].step(entry)
        if len(self._pending) >= self._every:
            self.flush()

    def flush(self) -> None:
        """Write what is pending, with the loss averaged over ranks and the memory of each."""
        run, entries = self._run, self._pending
        self._pending = []
        if not entries:
            return
        told = [float(self._asked_to_stop), sum(entry["whole"] for entry in entries)]
        told += [float(value) for value in memory(run.device).values()]
        told += [entry["loss"] for entry in entries]
        own = torch.tensor(told, dtype=torch.float64, device=run.device)
        rows = run.comm.all_gather(own, stage="run")
        stop, seconds, *_ = rows.amax(0).tolist()
        self.stops = self.stops or stop > 0
        self._every = max(1, min(run.config.log_every, int(MOST_SECONDS * len(entries) / seconds)))
        sizes = rows[:, 2 : 2 + len(FIELDS)].long().tolist()
        self._memory = [dict(zip(FIELDS, row, strict=True)) for row in sizes]
        losses = rows[:, 2 + len(FIELDS) :].mean(0).tolist()

        def write() -> None:
            if self._sinks:
                written = [e | {"loss": loss} for e, loss in zip(entries, losses, strict=True)]
                usage = {"kind": "memory", "step": entries[-1]["step"], "ranks": self._memory}
                self._sinks[0].write(*written, usage)
                self._sinks[1].steps(written)

        self._write(write)

    def _write(self, write: Callable[[], None]) -> None:
        def with_advice() -> None:
            try:
                write()
            except OSError as error:
                raise RunError(
                    f"the metrics could not be written: {error}. Make room and go on with --resume"
                ) from error

        together(self._run.comm, self._run.device, "writing the metrics", with_advice)

    def epoch(self, entry: dict[str, Any]) -> None:
        """Write the metrics of a finished epoch, with the memory every rank had at its end."""
        entry = entry | {"memory": self._memory}

        def write() -> None:
            if self._sinks:
                self._sinks[0].write(entry)
                self._sinks[1].epoch(entry)

        self._write(write)
        self.say(epoch_line(entry))

    def histograms(self, step: int) -> None:
        """Gradients and residuals of rank 0 and how much of each tensor travelled. Collective."""

        def write() -> None:
            if self._sinks:
                grads = {
                    name: parameter.grad
                    for name, parameter in self._run.model.named_parameters()
                    if parameter.grad is not None
                }
                kept = {name: int(torch.count_nonzero(grad)) for name, grad in grads.items()}
                sizes = {name: grad.numel() for name, grad in grads.items()}
                self._sinks[0].write({"kind": "tensors", "step": step, "kept": kept, "of": sizes})
                self._sinks[1].histograms("gradient", grads, step)
                self._sinks[1].histograms("residual", self._run.handle.residuals, step)

        self._write(write)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close all; when the run failed already, a full disk is not the news."""
        self._give_signals_back()
        with suppress(OSError) if kind else nullcontext():
            for sink in self._sinks or ():
                sink.close()


def epoch_line(entry: dict[str, Any]) -> str:
    """An epoch in one line: losses, error rates where validated, and where a step's time goes."""
    names = {"train loss": "train_loss", "val loss": "val_loss", "WER": "wer", "CER": "cer"}
    known = {shown: entry[name] for shown, name in names.items() if entry[name] is not None}
    text = f"epoch {entry['epoch']}" + "".join(f"  {k} {v:.3f}" for k, v in known.items())
    if entry["seconds"]:
        shown = [_milliseconds(entry["seconds"], parts) for parts in (PARTS, OVERLAPPED)]
        text += f"  (ms per step: {shown[0]}; meanwhile {shown[1]})"
    return text


def _milliseconds(seconds: dict[str, float], parts: tuple[str, ...]) -> str:
    return ", ".join(f"{part} {seconds[part] * 1e3:.0f}" for part in parts)
