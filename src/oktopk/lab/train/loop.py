# SPDX-License-Identifier: Apache-2.0
"""The training loop: epochs of steps, validation, checkpoints."""

from __future__ import annotations

import time
from contextlib import nullcontext
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from oktopk.comm.torch_transport import monitored
from oktopk.errors import DivergedError, RunError
from oktopk.lab.runlog.schema import (
    OVERLAPPED_PARTS,
    STEP_PARTS,
    EpochRecord,
    StepRecord,
    ValidationRecord,
    step_record,
)
from oktopk.lab.tasks.base import described, to_device
from oktopk.lab.train.checkpoint import agreed_model
from oktopk.lab.train.checkpoint import save_run as save
from oktopk.lab.train.recorder import Recorder, StopRequest
from oktopk.lab.train.setup import Run, learning_rate
from oktopk.lab.train.validate import Validation, check_same_weights, is_validated, validate

# One optimizer step, with the seconds of its parts.


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


def train(run: Run, recorder: Recorder, stop: StopRequest, directory: Path) -> Validation | None:
    """Train all epochs that are left. Returns the last validation; None when none was left."""
    last = None
    with monitored():
        while run.progress.epoch < run.config.epochs and not finished(run):
            last = train_epoch(run, recorder, stop, directory) or last
    if last is None:
        recorder.print(f"nothing was left to do: {why_finished(run)}")
    return last


def finished(run: Run) -> bool:
    """Whether the run has reached its target or a limit. All ranks find the same."""
    return bool(reached(run))


def reached(run: Run) -> list[str]:
    """The target and the limits that the run has reached, and what to change to train longer."""
    config, progress = run.config, run.progress
    ends = {
        f"{run.target} was reached (--until)": progress.target_reached,
        f"{config.max_steps} steps were the limit (--max-steps)": (
            0 < config.max_steps <= progress.step
        ),
        f"{config.max_minutes:g} minutes of training were the limit (--max-minutes)": (
            0 < 60 * config.max_minutes <= progress.seconds
        ),
    }
    return [why for why, is_reached in ends.items() if is_reached]


def why_finished(run: Run) -> str:
    """Why a run that takes no step has nothing to do."""
    all_epochs = f"all {run.config.epochs} epochs were trained (--epochs)"
    return " and ".join(reached(run)) or all_epochs


def train_epoch(
    run: Run, recorder: Recorder, stop: StopRequest, directory: Path
) -> Validation | None:
    """Train what is left of an epoch, validate if it is due, and save a checkpoint."""
    config, progress = run.config, run.progress
    micro = config.accumulate
    batches = run.task.steps(progress.epoch, config.batch, run.comm.size)
    seconds = dict.fromkeys((*STEP_PARTS, *OVERLAPPED_PARTS), 0.0)
    began_at = progress.index
    while _has_steps_left(run):
        turn = batches[progress.index * micro : (progress.index + 1) * micro]
        record = take_step(run, [ranks[run.comm.rank] for ranks in turn])
        seconds = {part: total + getattr(record, part) for part, total in seconds.items()}
        recorder.step(record)
        if config.validate_steps and progress.step % config.validate_steps == 0:
            validate_run(run, recorder)
        if _is_histogram_due(run):
            recorder.histograms(record.step)
        if _has_steps_left(run):  # after the last step, the end of the epoch saves
            due = config.checkpoint_every and progress.step % config.checkpoint_every == 0
            saved = False
            if due or stop.agreed:
                _check_weights(run)
                saved = save(run, recorder, directory)
            stop.raise_if_agreed(progress.step, saved)
    return _end_epoch(run, recorder, stop, directory, _mean(seconds, progress.index - began_at))


def _has_steps_left(run: Run) -> bool:
    """Whether the epoch has another step."""
    return run.progress.index < run.steps_per_epoch and not finished(run)


def _mean(seconds: dict[str, float], steps: int) -> dict[str, float | None] | None:
    """Seconds per step; None when no step was taken."""
    return {part: total / steps for part, total in seconds.items()} if steps else None


def _is_histogram_due(run: Run) -> bool:
    """At the last dense step, the first two sparse steps, the ends of epochs and of the run; and as
    configured, or else when the number of steps has doubled, so that the last one is not old."""
    step, every = run.progress.step, run.config.histogram_every  # finished steps
    around = (run.warmup_steps, run.warmup_steps + 1, run.warmup_steps + 2)
    regular = step % every == 0 if every else step.bit_count() == 1
    return step in around or regular or not _has_steps_left(run)


def _end_epoch(
    run: Run,
    recorder: Recorder,
    stop: StopRequest,
    directory: Path,
    seconds: dict[str, float | None] | None,
) -> Validation | None:
    config, progress = run.config, run.progress
    recorder.flush()
    _check_weights(run)  # before they are validated and saved
    complete = progress.index == run.steps_per_epoch  # a limit may end the epoch early
    recorder.epoch(
        EpochRecord(
            epoch=progress.epoch,
            step=progress.step - 1,
            train_loss=_train_loss(run),
            seconds=seconds,
            complete=complete,
        )
    )
    result = run.validation
    due = is_validated(progress.epoch, config.epochs, config.validate_every) or finished(run)
    if due and run.validated_at != progress.step:
        result = validate_run(run, recorder)
    if complete:
        progress.epoch, progress.index = progress.epoch + 1, 0
        progress.loss_sum, progress.loss_count = 0.0, 0
    saved = save(run, recorder, directory)
    stop.raise_if_agreed(progress.step, saved)
    return result


def validate_run(run: Run, recorder: Recorder) -> Validation:
    """Evaluate the test examples with the present weights, and see if the target is reached."""
    config, progress = run.config, run.progress
    recorder.flush()  # brings the training time up to date
    result = validate(
        run.task,
        agreed_model(run),
        run.comm,
        run.device,
        batch=config.validate_batch,
        samples=config.samples,
    )
    run.validation, run.validated_at = result, progress.step
    if run.target is not None and run.target.is_reached(result.metrics):
        progress.target_reached = True
    recorder.validation(
        ValidationRecord(
            epoch=progress.epoch,
            step=progress.step - 1,
            metrics=dict(result.metrics),
            examples=result.examples,
            samples=result.samples,
            seconds=progress.seconds,
        )
    )
    return result


def _check_weights(run: Run) -> None:
    """Raise on every rank if one has different weights, unless the exchange lets them differ."""
    if run.exchange.weights_agree:
        check_same_weights(run.model, run.comm, run.progress.step)


def _train_loss(run: Run) -> float | None:
    """Mean loss of the epoch over all ranks and batches; None when all steps were skipped."""
    own = torch.tensor([run.progress.loss_sum, run.progress.loss_count], dtype=torch.float64)
    loss, count = run.comm.all_gather_header(own.to(run.device), stage="run").sum(0).tolist()
    return loss / count if count else None
