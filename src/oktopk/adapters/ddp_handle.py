# SPDX-License-Identifier: Apache-2.0
"""`Handle`: what `attach` returns."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from oktopk.adapters.announcement import describe_optimizer, tell_resumed
from oktopk.adapters.ddp_driver import StepDriver
from oktopk.adapters.handle import BaseHandle, Connection
from oktopk.adapters.saved_states import NoStatesError, has_states, is_complete, write_state
from oktopk.adapters.thread import CommunicationThread, ReadyBucket, reading
from oktopk.comm.failure import FailureDetector
from oktopk.errors import ExchangeError, NonfiniteError
from oktopk.optim.presets import Choices, name_of, suited, warn_if_unknown
from oktopk.optim.staleness import StalenessCorrection
from oktopk.utils.arguments import format_bytes, integer
from oktopk.utils.console import announce
from oktopk.utils.files import file_error

# `PeriodicCheckpoint`: every rank saves its own state every so many steps.
#
# Many programs write their checkpoint on rank 0 alone, where no other rank takes part. The number
# of steps is the same on all ranks, so each rank can save by itself what belongs to that
# checkpoint.


class PeriodicCheckpoint:
    """Saves after the optimizer's step: only then do weights, moments and residuals belong
    together. A scaler may skip that step; then the state is saved before the next exchange."""

    def __init__(self, folder: Path, every: int, keep: int) -> None:
        self._folder, self._every, self._keep = folder, every, keep
        self._due: int | None = None
        """The number of finished steps whose state is still to be saved."""

    def folder_of(self, step: int) -> Path:
        """Where the states after so many steps are."""
        return self._folder / f"step-{step}"

    def saved_steps(self) -> list[int]:
        """The numbers of steps that have a folder, ascending."""
        names = [path.name.removeprefix("step-") for path in self._folder.glob("step-*")]
        return sorted(int(name) for name in names if name.isdecimal())

    def check(self, step: int) -> None:
        """Raise `FileError` if no rank has saved a state after so many steps."""
        if not has_states(self.folder_of(step)):
            known = ", ".join(map(str, self.saved_steps())) or "none"
            raise file_error(
                self.folder_of(step),
                f"no rank has saved its state after step {step}",
                advice=f"states were saved after steps: {known}; save the weights at one of them",
            )

    def after_exchange(self, step: int) -> None:
        """An exchange has ended, the `step`-th."""
        self._due = step if step % self._every == 0 else None

    def save_if_due(self, state: Callable[[], dict[str, Any]], rank: int, world_size: int) -> None:
        """Save, if the last exchange was one to save after and that has not happened yet."""
        if self._due is None:
            return
        step, self._due = self._due, None
        write_state(self.folder_of(step), state(), rank, world_size, (step, 0))
        older = [known for known in self.saved_steps() if known < step]
        # one more as long as other ranks may still fail to write theirs; the last one removes it
        kept = self._keep - is_complete(self.folder_of(step), world_size)
        for old in older[: max(len(older) - kept, 0)]:
            shutil.rmtree(self.folder_of(old), ignore_errors=True)


T = TypeVar("T")


class Handle(BaseHandle[StepDriver]):
    """What `attach` returns: the statistics and the state of an attached model, and `close`.

    Its properties may be read from any thread, also while an exchange is under way.
    """

    def __init__(
        self,
        driver: StepDriver,
        connection: Connection,
        choices: Choices,
        *,
        method_is_auto: bool,
    ) -> None:
        super().__init__(driver, connection, method_is_auto=method_is_auto)
        self._choices = choices
        self._checkpoint: PeriodicCheckpoint | None = None
        self._step_hook: RemovableHandle | None = None
        self._staleness = self._staleness_correction()
        self.thread = CommunicationThread(weakref.WeakMethod(self._take))
        self._finalizer = weakref.finalize(
            self, _end_threads, connection.failure_detector, self.thread
        )

    def _staleness_correction(self) -> StalenessCorrection:
        parameters, this = self.driver.parameters, weakref.ref(self)
        return StalenessCorrection(
            self.driver.scaling.optimizer,
            {name: p for name, p in parameters.parameters.items() if not parameters.is_dense(name)},
            self.settings,
            # the optimizer must not keep a handle alive
            last=lambda: handle.stats if (handle := this()) else None,
            logs=self.comm.rank == 0,
        )

    def bind(self, optimizer: Optimizer | LRScheduler) -> Handle:
        """Use the preset of an optimizer, or of that of a scheduler, that was made after `attach`.

        The same as `attach(..., optimizer=optimizer)`. Every rank must call it, before the first
        backward and before `load_state_dict`. Returns the handle.

        Raises:
            ValueError: an optimizer is bound already, or the exchange has begun.
            TypeError: this is neither an optimizer nor a scheduler.
        """
        scaling = self.driver.scaling
        if scaling.optimizer is not None:
            raise ValueError(f"this handle is bound to {name_of(scaling.optimizer)} already")
        if self.step or self.driver.is_checked:
            raise ValueError(
                f"rank {self.comm.global_rank}: bind was called after {self.step} steps: call it "
                "before the first backward and before load_state_dict, or pass optimizer= to attach"
            )
        scaling.bind(optimizer)
        self.driver.engine.settings = suited(self.settings, scaling.optimizer, self._choices)
        self._staleness = self._staleness_correction()
        if self._checkpoint is not None:
            self._save_after_steps()
        if self.comm.rank == 0:
            warn_if_unknown(self.settings, scaling.optimizer)
            if self.driver.options.verbose:
                announce(describe_optimizer(self.settings, scaling.optimizer))
        return self

    def checkpoint_every(
        self,
        steps: int,
        folder: str | os.PathLike[str],
        *,
        resume: int = 0,
        keep: int = 2,
    ) -> Handle:
        """Save this rank's state every so many steps, and resume from what was saved.

        For programs that write their checkpoint on rank 0 alone: their line of `torch.save` is not
        reached by other ranks, but the number of steps is the same on all. Every rank must call it,
        before training. The state after step N is written to `folder/step-N` when the optimizer has
        stepped, so that it belongs to the weights. Returns the handle.

        Args:
            steps: steps between two saved states; those after which the program saves its weights.
            folder: a folder for the states of all ranks; one that all hosts share, or one on each.
            resume: the number of steps that the program resumes after; 0 is a new run.
            keep: how many saved states are kept.

        Raises:
            FileError: the state to resume from was not saved, or not by all ranks.
        """
        every, keep = integer("steps", steps, least=1), integer("keep", keep, least=1)
        resume = integer("resume", resume, least=0)
        checkpoint = PeriodicCheckpoint(Path(folder), every, keep)
        if resume:
            try:
                self.load(checkpoint.folder_of(resume))
            except NoStatesError:
                checkpoint.check(resume)  # it knows which steps were saved
                raise
        self._checkpoint = checkpoint
        self._save_after_steps()
        return self

    def _save_after_steps(self) -> None:
        """Save in the optimizer's step, or after the exchange if no optimizer is known."""
        optimizer, this = self.driver.scaling.optimizer, weakref.ref(self)
        if optimizer is not None and self._step_hook is None:
            self._step_hook = optimizer.register_step_post_hook(
                lambda *_: handle._save_if_due() if (handle := this()) else None
            )

    def _save_if_due(self) -> None:
        """Save the state that `checkpoint_every` asks for, if it is not saved yet."""
        if self._checkpoint is not None:
            self._checkpoint.save_if_due(self.state_dict, *self._place)

    def __repr__(self) -> str:
        settings, optimizer = self.settings, self.driver.scaling.optimizer
        stats = self.stats
        sent = "nothing sent yet"
        if stats is not None:
            sent = f"last {stats.phase}, {format_bytes(stats.bytes_sent)} sent instead of "
            sent += format_bytes(stats.bytes_dense)
        parts = [
            f"{settings.method} at density {settings.density:g}, {settings.wire}",
            f"rank {self.comm.rank} of {self.comm.size}",
            f"{self.step} steps ({sent})",
            f"{settings.warmup_steps} dense and {settings.falling_steps} ramp steps at first",
            describe_optimizer(settings, optimizer) if optimizer else "no optimizer",
            *(["closed"] if self.closed else []),
        ]
        return f"<oktopk.Handle: {'; '.join(parts)}>"

    @property
    def failure(self) -> Exception | None:
        """The error that ended the exchange; DDP wraps it in a RuntimeError of its own."""
        return self.thread.failure

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-exact resume needs: residuals by name, and thresholds, bounds, counters.

        Of the last exchange that ended, also while another one is under way, and from any thread.
        It belongs to the weights after `optimizer.step()`: between backward and that step, what was
        delivered is in neither (docs/pitfalls.md). The keys are the same on every rank and at any
        time; frozen parameters have no keys. The residuals are this rank's own: save one file per
        rank, or use `by_rank` or `gathered_state_dict`.
        """
        self._refuse_shared_names()
        engine = self.driver.engine
        with engine.lock.reading():
            text = self._metadata(self.driver.buckets.settled, self.driver.scaling.save())
            with reading(engine.residual):
                residuals = self.driver.copied_residuals()
            arrived = self._staleness.state_dict()
            return {"residuals": residuals, "arrived": arrived, "metadata": text}

    def gathered_state_dict(self) -> dict[str, Any]:
        """The states of all ranks, on every rank. A collective: all ranks must call it.

        For frameworks that save what one rank has. It takes the memory of all ranks' residuals.

        Raises:
            ExchangeError: another rank did not call it in time, or died.
            RuntimeError: it was called from `on_step`, or the handle was closed.
        """
        return super().gathered_state_dict()

    def _collective(self, act: Callable[[], T]) -> T:
        collective = super()._collective
        return self.thread.call(lambda: collective(act))

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Continue where `state_dict` was taken: the same bits as a run that never stopped.

        Takes this rank's own state, what `gathered_state_dict` returned, or a list of all ranks'
        states. The last two may be of another world size: rank r then takes over the residuals of
        ranks r, r+P, ... The method must be the same; one that `auto` picked gives way to that of
        the state, whatever the network is like now. Every rank must call it; in the middle of
        training the ranks wait for each other.

        Args:
            state: one of the three.

        Raises:
            ValueError: the state cannot be read, is of another rank, model or method, or the ranks
                load states of different steps. The handle is unchanged then.
            ExchangeError: in the middle of training, another rank did not call it in time.
        """
        saved = self._read(state)
        metadata = saved.metadata
        with self.driver.engine.lock.changing():
            self._load_exchange(saved, metadata.layout)
            self.driver.scaling.load(metadata.residual_scaling)
            self._staleness.load_state_dict(saved.arrived)
            self.driver.restart(metadata.settled_layout)
        tell_resumed(self.driver)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._finalizer.alive

    def close(self) -> None:
        """End the communication thread and its process group.

        DDP cannot remove a hook, so backward raises afterwards until the model is attached again.
        Close before `destroy_process_group`. A communicator that was passed to `attach` stays open.
        """
        self._save_if_due()
        if self._step_hook is not None:
            self._step_hook.remove()
        self._staleness.close()
        self.driver.buffers.close()
        self._finalizer()
        self._close_comm()

    def _take(self, ready: ReadyBucket) -> None:
        """One bucket, on the communication thread."""
        detector = self._connection.failure_detector
        detector.step = self.step
        try:
            if detector.diagnosis is not None:
                raise ExchangeError("another rank reported a failure")
            if ready.index == 0:
                self._save_if_due()
            self.driver.take(ready)
            if ready.is_last and self._checkpoint is not None:
                self._checkpoint.after_exchange(self.step)
                if self._step_hook is None:
                    self._save_if_due()
        except NonfiniteError:
            raise
        except (
            BaseException
        ) as error:  # sys.exit() in on_step too: the other ranks must learn of it
            self.driver.discard_step()
            detector.abort(error, self._everyone)
            raise


def _end_threads(failure_detector: FailureDetector, thread: CommunicationThread) -> None:
    thread.close()
    failure_detector.close()


# What DDP's communication hook holds: the handle of its model, and what it sees of a join.


class HookState:
    """DDP keeps one hook for good, so it holds this: a later `attach` may replace the handle."""

    def __init__(self, model: DistributedDataParallel, handle: Handle) -> None:
        self._model = weakref.ref(model)  # DDP's reducer holds this in C++, where no cycle is found
        self.handle = handle

    def __reduce__(self) -> str:
        """Refuse to be saved or copied."""
        return self.handle.__reduce__()

    def note_join(self) -> None:
        """Tell the handle whether this rank has joined. To be called in the hook.

        DDP runs the hook in backward, but for a rank that has joined in `DistributedDataParallel.
        join`: it runs the hook with zeros there, to match what the others do in their backward.
        """
        model = self._model()
        if model is None or not model._join_config.enable:
            self.handle.driver.joined = False
            return
        if not getattr(model, "_divide_by_initial_world_size", True):
            raise ValueError(
                "join(divide_by_initial_world_size=False) does not work with attach: residuals of "
                "the ranks that have joined are still delivered, so averages are over all ranks; "
                "use join(), or give every rank as many batches as the others"
            )
        self.handle.driver.joined = torch._C._current_graph_task_id() < 0  # no backward here
        self.handle.driver.has_joined = self.handle.driver.has_joined or self.handle.driver.joined


def attached_to(model: DistributedDataParallel) -> HookState | None:
    """The state of our hook, if the model has it."""
    states = [state for _, state in model._comm_hooks if isinstance(state, HookState)]
    return states[0] if states else None
