# SPDX-License-Identifier: Apache-2.0
"""One optimizer step, with the seconds of its parts."""

from __future__ import annotations

import time
from contextlib import nullcontext
from math import isfinite

from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from oktopk.errors import DivergedError, RunError
from oktopk.runlog.schema import STEP_PARTS, StepRecord, step_record
from oktopk.train.schedule import learning_rate
from oktopk.train.setup import Run
from oktopk.train.tasks.base import described, to_device

MAX_SKIPPED = 20
"""Steps without a finite gradient in a row after which a run ends."""


def take_step(run: Run, batches: list[list[int]]) -> StepRecord:
    """Average the gradients of some batches over all ranks and apply them.

    The loss in the record is that of this rank. If a gradient has a NaN on any rank, no rank
    applies the step.
    """
    config, progress = run.config, run.progress
    rate = learning_rate(config, progress.epoch, progress.step, run.planned_steps)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    seconds = dict.fromkeys((*STEP_PARTS, "probe"), 0.0)
    if run.probe is not None:
        run.probe.before(progress.step)
    started = time.perf_counter()
    run.optimizer.zero_grad()
    losses = []
    for i, indices in enumerate(batches):
        synced = i == len(batches) - 1
        losses.append(_backward(run, indices, synced, len(batches), seconds))
    skipped = run.exchange.after_backward()
    with _Timer(seconds, "probe"):
        run.probed = run.probe.after() if run.probe is not None else None
    with _Timer(seconds, "optimizer"):
        if not skipped:
            if config.clip_after:
                clip_grad_norm_(run.model.parameters(), config.clip_after)
            run.optimizer.step()
    stats = run.exchange.finish_step()
    assert stats.step == progress.step, (stats, progress)
    _count_waits(seconds, run.exchange.waits)
    whole = time.perf_counter() - started - seconds.pop("probe")  # probes do not count
    if run.exchange.exchanged:  # between two exchanges nothing can be skipped
        _check_diverged(run, stats.skipped)
    record = step_record(
        stats,
        epoch=progress.epoch,
        loss=sum(losses) / len(losses),
        lr=rate,
        seconds=seconds | {"whole": whole},
    )
    run.totals.add(record)
    if not stats.skipped:
        finite = [loss for loss in losses if isfinite(loss)]  # a NaN would make the mean NaN
        progress.loss_sum += sum(finite)
        progress.loss_count += len(finite)
    progress.step += 1
    progress.index += 1
    return record


def _backward(
    run: Run, indices: list[int], synced: bool, parts: int, seconds: dict[str, float]
) -> float:
    with _Timer(seconds, "data"):
        batch = to_device(run.task.train_batch(indices, run.progress.epoch), run.device)
    with nullcontext() if synced else run.exchange.no_sync():
        with _Timer(seconds, "forward"):
            loss = run.task.loss(run.exchange.module, batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise RunError(
                    f"{type(run.task).__name__}.loss must return a tensor with one value, got "
                    f"{described(loss)}"
                )
            if not loss.requires_grad:
                raise RunError(
                    f"{type(run.task).__name__}.loss returns a tensor without a gradient: compute "
                    "it from what the model returns, without detach, item or no_grad"
                )
        with _Timer(seconds, "backward"):
            (loss / parts).backward()
    return loss.item()


def _count_waits(seconds: dict[str, float], waits: dict[str, float]) -> None:
    """Take the time spent waiting for the exchange out of the parts in which it was spent."""
    for part, wait in waits.items():
        waited = min(wait, seconds[part])
        seconds[part] -= waited
        seconds["exposed"] += waited


class _Timer:
    """Adds the seconds of its block to a part."""

    def __init__(self, seconds: dict[str, float], part: str) -> None:
        self._seconds, self._part = seconds, part

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._part] += time.perf_counter() - self._since


def _check_diverged(run: Run, skipped: bool) -> None:
    """End the run after too many skipped steps. All ranks skip the same steps, so all end."""
    run.skipped_in_a_row = run.skipped_in_a_row + 1 if skipped else 0
    if run.skipped_in_a_row >= MAX_SKIPPED:
        raise DivergedError(
            f"rank {run.comm.rank}: no finite gradient in the last {MAX_SKIPPED} steps, up to step "
            f"{run.progress.step}: lower lr ({run.config.lr:g}) or set clip_before, and start "
            "again, with --resume if the run has a checkpoint"
        )
