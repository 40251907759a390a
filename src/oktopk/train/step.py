"""One optimizer step, timed in parts that add up."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

from torch.nn.utils import clip_grad_norm_

from oktopk.errors import DivergedError
from oktopk.runlog.reader import PARTS
from oktopk.train.data.batches import collate
from oktopk.train.models.lstman4 import ctc_loss
from oktopk.train.schedule import learning_rate
from oktopk.train.setup import Run

PATIENCE = 20


def take_step(run: Run, batches: list[list[int]]) -> dict[str, Any]:
    """Average the gradients of some batches over all ranks and apply them; the step's metrics.

    `loss` is this rank's. A step with a NaN on any rank is applied by none.
    """
    config, progress = run.config, run.progress
    rate = learning_rate(config, progress.epoch, progress.step, run.planned_steps)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    seconds = dict.fromkeys((*PARTS, "probe"), 0.0)
    if run.probe is not None:
        run.probe.before(progress.step)
    started = time.perf_counter()
    run.optimizer.zero_grad()
    losses = []
    for i, indices in enumerate(batches):
        synced = i == len(batches) - 1
        losses.append(_backward(run, indices, synced, len(batches), seconds))
    stats = run.handle.stats
    assert stats is not None and stats.step == progress.step, (stats, progress)
    seconds["exposed"] = stats.exposed
    seconds["backward"] = max(0.0, seconds["backward"] - stats.exposed)
    with _timed(seconds, "probe"):
        run.probed = run.probe.after(stats) if run.probe is not None else None
    with _timed(seconds, "optimizer"):
        if not stats.skipped:
            if config.clip_after:
                clip_grad_norm_(run.model.parameters(), config.clip_after)
            run.optimizer.step()
    whole = time.perf_counter() - started - seconds.pop("probe")  # a run without has none
    _watch(run, stats.skipped)
    run.totals.add(stats, whole)
    if not stats.skipped:  # one NaN must not be the epoch's mean
        progress.loss_sum += sum(losses)
        progress.loss_count += len(losses)
    progress.step += 1
    progress.index += 1
    found = {"kind": "step", "epoch": progress.epoch, "loss": sum(losses) / len(losses), "lr": rate}
    return found | stats.as_dict() | seconds | {"whole": whole}


def _backward(
    run: Run, indices: list[int], synced: bool, parts: int, seconds: dict[str, float]
) -> float:
    config, corpus = run.config, run.corpus
    with _timed(seconds, "data"):
        batch = collate(
            corpus.train_spectra,
            corpus.train,
            indices,
            epoch=run.progress.epoch,
            seed=config.seed,
            augment=config.augment,
        )
        inputs, lengths = batch.inputs.to(run.device), batch.lengths.to(run.device)
        targets = batch.targets.to(run.device)
        target_lengths = batch.target_lengths.to(run.device)
    with nullcontext() if synced else run.ddp.no_sync():
        with _timed(seconds, "forward"):
            log_probs, lengths = run.ddp(inputs, lengths)
            loss = ctc_loss(log_probs, lengths, targets, target_lengths).mean()
        with _timed(seconds, "backward"):
            (loss / parts).backward()
    return loss.item()


class _timed:  # noqa: N801 - reads as a statement
    """Add the seconds of a block to a part."""

    def __init__(self, seconds: dict[str, float], part: str) -> None:
        self._seconds, self._part = seconds, part

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._part] += time.perf_counter() - self._since


def _watch(run: Run, skipped: bool) -> None:
    """All ranks skip together, so all of them give up together."""
    run.skipped_in_a_row = run.skipped_in_a_row + 1 if skipped else 0
    if run.skipped_in_a_row >= PATIENCE:
        raise DivergedError(
            f"rank {run.comm.rank}: no finite gradient in the last {PATIENCE} steps, up to step "
            f"{run.progress.step}: lower lr ({run.config.lr:g}) or set clip_before, and start "
            "again, with --resume if the run has a checkpoint"
        )
