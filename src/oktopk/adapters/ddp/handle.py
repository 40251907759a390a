# SPDX-License-Identifier: Apache-2.0
"""`Handle`: what `attach` returns."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from oktopk.adapters.announcement import describe_optimizer, tell_resumed
from oktopk.adapters.ddp.communication_thread import CommunicationThread, ReadyBucket
from oktopk.adapters.ddp.driver import StepDriver
from oktopk.adapters.ddp.periodic_checkpoint import PeriodicCheckpoint
from oktopk.adapters.handle import BaseHandle, Connection
from oktopk.adapters.rank_files import NoStatesError
from oktopk.adapters.side_stream import reading
from oktopk.comm.failure_detector import FailureDetector
from oktopk.errors import ExchangeError, NonfiniteError
from oktopk.optim.presets import Choices, name_of, suited, warn_if_unknown
from oktopk.optim.staleness import StalenessCorrection
from oktopk.utils.announce import announce
from oktopk.utils.arguments import integer
from oktopk.utils.units import format_bytes

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
