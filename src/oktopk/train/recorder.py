"""Where the metrics of a run go: the journal, TensorBoard and the person watching.

Every rank has a recorder, because the loss of a step is the mean over ranks; rank 0 writes.
"""

from __future__ import annotations

import logging
import signal
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oktopk.errors import RunError, StoppedError
from oktopk.report.histogram import spread
from oktopk.runlog.reader import (
    JOURNAL,
    OVERLAPPED,
    PARTS,
    TIMES,
)
from oktopk.runlog.totals import Totals
from oktopk.runlog.writer import Journal
from oktopk.train.all_or_raise import together
from oktopk.train.console import Bar
from oktopk.train.memory import FIELDS, memory
from oktopk.train.run_info import opening_entry
from oktopk.train.setup import Run
from oktopk.train.tensorboard import Board

log = logging.getLogger("oktopk")
STOPS = (signal.SIGTERM, signal.SIGINT)
MOST_SECONDS = 5.0  # between two looks whether somebody asked to stop


class Recorder:
    """Collects the steps between two writes. `flush` and `epoch` are collective."""

    def __init__(self, run: Run, folder: Path, journal_bytes: int, warnings: Warnings) -> None:
        self._run = run
        self._pending: list[dict[str, Any]] = []
        self._asked_to_stop = False
        self.stops = False
        """Whether some rank was asked to stop, as all ranks knew at the last flush."""
        self._every = 1  # steps to the next flush: known alike by all ranks
        self._memory: list[dict[str, int]] = []
        self._probes: list[dict[str, Any]] = []
        self._warnings = warnings
        self._sinks: tuple[Journal, Board, Bar] | None = None
        self._write(lambda: self._open(folder, journal_bytes))
        self._handlers = {number: signal.signal(number, self._note) for number in STOPS}

    def _open(self, folder: Path, journal_bytes: int) -> None:
        if self._run.comm.rank == 0:
            done = self._run.progress.step
            journal = Journal(folder / JOURNAL, journal_bytes)
            journal.write(opening_entry(self._run))
            self._sinks = (
                journal,
                Board(folder / "tensorboard", done),
                Bar(self._run.total_steps, done, self._run.config.log_every),
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
        if self._run.probed is not None:
            self._probes.append(self._run.probed)
        if self._sinks:
            self._sinks[2].step(entry)
        if len(self._pending) >= self._every:
            self.flush()

    def flush(self) -> None:
        """Write what is pending, with the loss averaged over ranks and the memory of each."""
        run, entries, probes = self._run, self._pending, self._probes
        self._pending, self._probes = [], []
        if not entries:
            return
        told = [float(self._asked_to_stop)]
        told += [sum(entry[part] for entry in entries) / len(entries) for part in TIMES]
        told += [float(value) for value in memory(run.device).values()]
        told += [entry["loss"] for entry in entries]
        own = torch.tensor(told, dtype=torch.float64, device=run.device)
        rows = run.comm.all_gather(own, stage="run")
        stop, seconds, sizes, losses = rows.split([1, len(TIMES), len(FIELDS), len(entries)], 1)
        self.stops = self.stops or stop.max().item() > 0
        slowest = seconds[:, -1].max().item()
        self._every = max(1, min(run.config.log_every, int(MOST_SECONDS / slowest)))
        self._memory = [dict(zip(FIELDS, row, strict=True)) for row in sizes.long().tolist()]
        times = [dict(zip(TIMES, row, strict=True)) for row in seconds.tolist()]
        means = losses.mean(0).tolist()

        def write() -> None:
            if self._sinks:
                written = [e | {"loss": loss} for e, loss in zip(entries, means, strict=True)]
                last = {"step": entries[-1]["step"]}
                usage = {"kind": "memory", "ranks": self._memory} | last
                spent = {"kind": "ranks", "steps": len(entries), "seconds": times} | last
                warned = self._warnings.taken(entries[-1]["step"])
                self._sinks[0].write(*written, usage, spent, *probes, *warned)
                self._sinks[1].steps(written)
                self._sinks[1].probes(probes)

        self._write(write)

    def _write(self, write: Callable[[], None]) -> None:
        def with_advice() -> None:
            try:
                write()
            except OSError as error:
                raise RunError(
                    f"the metrics could not be written: {error}. Make room and start again, with "
                    "--resume if the run has a checkpoint"
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
        """Gradients and residuals of rank 0, how much of each tensor travelled, and in what.

        Collective.
        """

        def write() -> None:
            if self._sinks:
                grads = {
                    name: parameter.grad
                    for name, parameter in self._run.model.named_parameters()
                    if parameter.grad is not None
                }
                owed = self._run.handle.residuals
                sent = self._run.handle.comm.ledger.sizes
                messages = {"kind": "messages", "step": step, "sent": sent}
                self._sinks[0].write(tensors_entry(step, grads, owed), messages)
                self._sinks[1].histograms("gradient", grads, step)
                self._sinks[1].histograms("residual", owed, step)

        self._write(write)

    def end(self, totals: Totals, seconds: float) -> None:
        """Write that the run finished, what all ranks sent, and how long it took. Collective."""
        sums = {phase: asdict(part) for phase, part in totals.items()}
        entry = {"kind": "end", "how": "finished", "text": "", "seconds": seconds, "totals": sums}
        self._write(lambda: self._sinks[0].write(entry) if self._sinks else None)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        """Close all; when the run failed already, a full disk is not the news."""
        self._give_signals_back()
        with suppress(OSError):
            if self._sinks and kind:
                asked = issubclass(kind, StoppedError | KeyboardInterrupt)
                how = "stopped" if asked else "failed"
                text = str(self._run.handle.failure or error) or kind.__name__
                warned = self._warnings.taken(self._run.progress.step)
                self._sinks[0].write(*warned, {"kind": "end", "how": how, "text": text})
        for sink in self._sinks or ():
            with suppress(OSError) if kind else nullcontext():
                sink.close()


class Warnings(logging.Handler):
    """Keeps what is warned of in its block until it is written; any thread may warn."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: deque[str] = deque(maxlen=100)

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())

    def __enter__(self) -> Warnings:
        log.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        log.removeHandler(self)

    def taken(self, step: int) -> list[dict[str, Any]]:
        """What came since the last call, as objects of the journal."""
        texts = [self._texts.popleft() for _ in range(len(self._texts))]
        return [{"kind": "warning", "step": step, "text": text} for text in texts]


def tensors_entry(step: int, grads: dict[str, Tensor], owed: dict[str, Tensor]) -> dict[str, Any]:
    """What travelled of each tensor, the norms of what came and is owed, and their spreads."""
    norms = {
        "norm": {name: grad.norm().item() for name, grad in grads.items()},
        "residual_norm": {name: residual.norm().item() for name, residual in owed.items()},
    }
    spreads = {
        name: spread(torch.cat([part.flatten() for part in parts.values()]))
        for name, parts in {"gradient": grads, "residual": owed}.items()
        if parts
    }
    kept = {name: int(torch.count_nonzero(grad)) for name, grad in grads.items()}
    sizes = {name: grad.numel() for name, grad in grads.items()}
    found = {"kind": "tensors", "step": step, "kept": kept, "of": sizes, "spread": spreads}
    return found | norms


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
