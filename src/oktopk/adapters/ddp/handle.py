# SPDX-License-Identifier: Apache-2.0
"""`Handle`: what `attach` returns."""

from __future__ import annotations

import weakref
from typing import Any

from oktopk.adapters.ddp.communication_thread import CommunicationThread, ReadyBucket, reading
from oktopk.adapters.ddp.driver import StepDriver
from oktopk.adapters.handle import BaseHandle, Connection
from oktopk.comm.failure_detector import FailureDetector
from oktopk.errors import ExchangeError, NonfiniteError
from oktopk.optim.staleness import StalenessCorrection


class Handle(BaseHandle[StepDriver]):
    """The statistics and the state of an attached model, and a way to detach it."""

    def __init__(self, driver: StepDriver, connection: Connection, *, method_is_auto: bool) -> None:
        super().__init__(driver, connection, method_is_auto=method_is_auto)
        parameters = driver.parameters
        this = weakref.ref(self)  # the optimizer must not keep a handle alive
        self._staleness = StalenessCorrection(
            driver.scaling.optimizer,
            {name: p for name, p in parameters.parameters.items() if not parameters.is_dense(name)},
            self.settings,
            last=lambda: handle.stats if (handle := this()) else None,
            logs=driver.comm.rank == 0,
        )
        self.thread = CommunicationThread(weakref.WeakMethod(self._take))
        self._finalizer = weakref.finalize(
            self, _end_threads, connection.failure_detector, self.thread
        )

    @property
    def failure(self) -> Exception | None:
        """The error that ended the exchange; DDP wraps it in a RuntimeError of its own."""
        return self.thread.failure

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-exact resume needs: residuals by name, and thresholds, bounds, counters.

        Of the last exchange that ended, also while another one is under way, and from any thread.
        It belongs to the weights after `optimizer.step()`: between backward and that step, what was
        delivered is in neither (docs/footguns.md). The keys are the same on every rank and at any
        time, so a fresh handle's state is a template for `torch.distributed.checkpoint`; frozen
        parameters have no keys. The residuals are this rank's own: save one file per rank, or use
        `gathered_state_dict`.
        """
        engine = self.driver.engine
        with engine.lock:
            text = self._metadata(self.driver.buckets.settled, self.driver.scaling.save())
            with reading(engine.residual):
                residuals = self._copied_residuals()
            arrived = self._staleness.state_dict()
            return {"residuals": residuals, "arrived": arrived, "metadata": text}

    def gathered_state_dict(self) -> dict[str, Any]:
        """The states of all ranks, on every rank. A collective: all ranks must call it.

        For frameworks that save what one rank has. It takes the memory of all ranks' residuals.
        """
        state = self.state_dict()
        return self.thread.call(lambda: self._gather(state))

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Continue where `state_dict` was taken: the same bits as a run that never stopped.

        Takes this rank's own state, what `gathered_state_dict` returned, or a list of all ranks'
        states. The last two may be of another world size: rank r then takes over the residuals of
        ranks r, r+P, ... The method must be the same; one that `auto` picked gives way to that of
        the state, whatever the network is like now. Every rank must call it; in the middle of
        training the ranks wait for each other.
        """
        saved = self._read(state)
        metadata = saved.metadata
        with self.driver.engine.lock:
            self._load_exchange(saved, metadata.layout)
            self.driver.scaling.load(metadata.residual_scaling)
            self._staleness.load_state_dict(saved.arrived)
            self.driver.restart(metadata.settled_layout)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._finalizer.alive

    def close(self) -> None:
        """End the communication thread and its process group. To train on, attach again.

        A communicator that was passed to `attach` stays open.
        """
        self._staleness.close()
        self._finalizer()
        self._close_comm()

    def _take(self, ready: ReadyBucket) -> None:
        """One bucket, on the communication thread."""
        detector = self._connection.failure_detector
        detector.step = self.step
        try:
            if detector.diagnosis is not None:
                raise ExchangeError("another rank reported a failure")
            self.driver.take(ready)
        except NonfiniteError:
            raise
        except (
            BaseException
        ) as error:  # sys.exit() in on_step too: the other ranks must learn of it
            self.driver.discard_step()
            detector.abort(error, self.comm)
            raise


def _end_threads(failure_detector: FailureDetector, thread: CommunicationThread) -> None:
    thread.close()
    failure_detector.close()
