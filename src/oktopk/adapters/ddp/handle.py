"""`Handle`: what `attach` returns."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from msgspec import to_builtins
from torch import Tensor

from oktopk.adapters.ddp.communication_thread import CommunicationThread, ReadyBucket, reading
from oktopk.adapters.ddp.driver import OnStep, StepDriver
from oktopk.adapters.ddp.gathered_state import GatheredState, gather_states
from oktopk.comm.communicator import Comm
from oktopk.comm.failure_detector import FailureDetector
from oktopk.engine import saved_state
from oktopk.errors import ExchangeError, NonfiniteError, StateError
from oktopk.optim.staleness import StalenessCorrection
from oktopk.settings import Settings
from oktopk.sparse import acc_dtype
from oktopk.stats import StepStats

AgreeToLoad = Callable[[dict[str, Any], int], None]
"""Compares values of all ranks that load a state after a number of steps."""


class Handle:
    """The statistics and the state of an attached model, and a way to detach it."""

    def __init__(
        self,
        driver: StepDriver,
        failure_detector: FailureDetector,
        *,
        agree_to_load: AgreeToLoad,
        method_is_auto: bool,
        owns_comm: bool = True,
    ) -> None:
        self.driver = driver
        self._failure_detector = failure_detector
        self._agree_to_load = agree_to_load
        self._method_is_auto = method_is_auto
        self._owns_comm = owns_comm
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
        self._finalizer = weakref.finalize(self, _end_threads, failure_detector, self.thread)

    @property
    def comm(self) -> Comm:
        """The communicator of the exchange; its ledger counts all bytes."""
        return self.driver.comm

    @property
    def settings(self) -> Settings:
        """The settings in effect, the optimizer's preset included."""
        return self.driver.engine.settings

    @property
    def stats(self) -> StepStats | None:
        """Of the last finished step; None before the first. Never half-filled."""
        return self.driver.stats

    @property
    def on_step(self) -> OnStep | None:
        """The callback for every finished step. It may be replaced at any time."""
        return self.driver.on_step

    @on_step.setter
    def on_step(self, on_step: OnStep | None) -> None:
        self.driver.on_step = on_step

    @property
    def step(self) -> int:
        """Finished steps."""
        return self.driver.engine.step

    @property
    def skipped_steps(self) -> int:
        """Steps that no rank applied because some rank had a NaN or Inf."""
        return self.driver.engine.skipped

    @property
    def failure(self) -> Exception | None:
        """The error that ended the exchange; DDP wraps it in a RuntimeError of its own."""
        return self.thread.failure

    @property
    def residuals(self) -> dict[str, Tensor]:
        """This rank's residual by parameter name, in the parameter's shape.

        Of the last finished step, and valid until the next one ends; empty before the sparse phase.
        """
        return self.driver.residuals

    @property
    def dense_parameters(self) -> list[str]:
        """Names of the parameters that travel dense: biases, norms, tiny ones, and as asked."""
        return [n for n in self.driver.parameters.parameters if self.driver.parameters.is_dense(n)]

    @property
    def gathered(self) -> GatheredState:
        """The states of all ranks as one, for frameworks that save what one rank has.

        `accelerator.register_for_checkpointing(handle.gathered)`
        """
        return GatheredState(self)

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
            metadata = saved_state.SavedMetadata(
                format=saved_state.FORMAT,
                method=self.settings.method,
                world_size=self.comm.size,
                rank=self.comm.rank,
                frozen=self.driver.parameters.frozen,
                layout=self.driver.layout,
                settled_layout=self.driver.buckets.settled,
                engine=engine.save(),
                residual_scaling=self.driver.scaling.save(),
            )
            text = json.dumps(to_builtins(metadata))  # not msgspec's JSON, which has no Infinity
            views = self.residuals
            with reading(engine.residual):
                residuals = {
                    name: views[name].clone(memory_format=torch.contiguous_format)
                    if name in views
                    else torch.zeros(p.shape, dtype=acc_dtype(p), device=p.device)
                    for name, p in self.driver.parameters.parameters.items()
                }
            arrived = self._staleness.state_dict()
            return {"residuals": residuals, "arrived": arrived, "metadata": text}

    def gathered_state_dict(self) -> dict[str, Any]:
        """The states of all ranks, on every rank. A collective: all ranks must call it.

        For frameworks that save what one rank has. It takes the memory of all ranks' residuals.
        """
        state, device = self.state_dict(), self.driver.parameters.device

        def gather() -> dict[str, Any]:
            try:
                return gather_states(state, self.comm, device)
            except ExchangeError as error:
                self._failure_detector.abort(error, self.comm)  # raises one that names the rank
                raise

        return self.thread.call(gather)

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Continue where `state_dict` was taken: the same bits as a run that never stopped.

        Takes this rank's own state, what `gathered_state_dict` returned, or a list of all ranks'
        states. The last two may be of another world size: rank r then takes over the residuals of
        ranks r, r+P, ... The method must be the same; one that `auto` picked gives way to that of
        the state, whatever the network is like now. Every rank must call it; in the middle of
        training the ranks wait for each other.
        """
        saved = self._read(state)
        metadata, engine = saved.metadata, self.driver.engine
        has_residual = any(bool(part.any()) for part in saved.residuals.values())
        with engine.lock:
            engine.settings = replace(self.settings, method=metadata.method)
            self.driver.set_layout(metadata.layout, saved.residuals if has_residual else {})
            engine.load(metadata.engine)
            self.driver.scaling.load(metadata.residual_scaling)
            self._staleness.load_state_dict(saved.arrived)
            self.driver.restart(metadata.settled_layout)

    def _read(self, state: dict[str, Any] | list[dict[str, Any]]) -> saved_state.Saved:
        """Check a state. In the middle of training all ranks load one, or none does.

        A rank that loads alone would begin its next step with a consistency check that no other
        rank expects. Before the first step all ranks do expect it, so no rank has to wait there.
        """
        saved, problem = None, None
        try:
            saved = saved_state.load(
                state,
                rank=self.comm.rank,
                world_size=self.comm.size,
                method=None if self._method_is_auto else self.settings.method,
                parameters=self.driver.parameters.parameters,
                frozen=self.driver.parameters.frozen,
            )
        except StateError as error:
            problem = error
        if self.driver.is_checked:
            loaded = "refused" if saved is None else f"of step {saved.metadata.engine.step}"
            try:
                self._agree_to_load({"the loaded state": loaded}, self.step)
            except ValueError as error:
                problem = problem or error
        if saved is None or problem is not None:
            raise problem or AssertionError("no state was read")
        return saved

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
        self.comm.is_attached = False
        if self._owns_comm:
            self.comm.close()

    def _take(self, ready: ReadyBucket) -> None:
        """One bucket, on the communication thread."""
        self._failure_detector.step = self.step
        try:
            if self._failure_detector.diagnosis is not None:
                raise ExchangeError("another rank reported a failure")
            self.driver.take(ready)
        except NonfiniteError:
            raise
        except (
            BaseException
        ) as error:  # sys.exit() in on_step too: the other ranks must learn of it
            self.driver.discard_step()
            self._failure_detector.abort(error, self.comm)
            raise


def _end_threads(failure_detector: FailureDetector, thread: CommunicationThread) -> None:
    thread.close()
    failure_detector.close()
