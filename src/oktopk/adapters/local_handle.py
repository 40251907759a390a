# SPDX-License-Identifier: Apache-2.0
"""`LocalSteps`: what `local_steps` returns."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from oktopk.adapters import local_state
from oktopk.adapters.announcement import describe_adopted, describe_loaded
from oktopk.adapters.driver import OnStep
from oktopk.adapters.handle import BaseHandle, Connection
from oktopk.adapters.link import Ranks
from oktopk.adapters.local_driver import RoundDriver
from oktopk.adapters.local_notices import Outside, UncountedSteps, by_value, hook_steps, is_stepping
from oktopk.adapters.local_state import Fragment
from oktopk.adapters.local_writes import Moments, hook_loads, listed
from oktopk.adapters.thread import BackgroundThread, Job
from oktopk.comm.communicator import Comm
from oktopk.comm.consistency import ranks_text
from oktopk.comm.failure import FailureDetector
from oktopk.errors import ExchangeError
from oktopk.exchange.saved_state import Exchanged, Saved
from oktopk.stats import StepStats
from oktopk.utils.console import announce

log = logging.getLogger("oktopk")

T = TypeVar("T")
Finished = tuple[RoundDriver, StepStats]
"""An exchange that was applied or skipped, with its number among those of all fragments."""

ENDED = (
    "it ended, by close() or with its script, while an exchange was in flight that another rank "
    "had not begun: call exchange() on every rank at the end of training"
)
CLOSED = "the handle of local_steps was closed: call local_steps again"


class LocalSteps(BaseHandle[RoundDriver]):
    """The statistics and the state of a model that is trained by local steps.

    A step of this handle is an exchange: `step`, `stats` and `on_step` count exchanges, not steps
    of the optimizer. With several fragments each of them has exchanges of its own, and all count.
    """

    exchanged: Exchanged = "weight changes"

    def __init__(
        self,
        drivers: Sequence[RoundDriver],
        connection: Connection,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        ranks: Ranks,
        *,
        verbose: bool,
    ) -> None:
        super().__init__(drivers[0], connection)
        self._ranks = ranks
        self._announces = verbose and self.driver.rank == 0
        self.fragments = [Fragment(driver, connection) for driver in drivers]
        for number, driver in enumerate(drivers):
            driver.number = number
        self.failure: BaseException | None = None
        """The error that ended the exchange for good; None while it is well."""

        self._is_uneven = False
        """Whether it was said that the ranks have taken different numbers of steps."""

        self._all_have_finished = False
        """Whether all ranks were in `finish` in the exchange that was finished last."""

        self._last = drivers[0]
        """The driver that finished an exchange last."""

        # the optimizer keeps this handle alive: the user may drop what local_steps returned
        self._remove_hooks = hook_steps(optimizers, self._before_step, self._after_step)
        self._load_hooks = hook_loads(model, [driver.watch for driver in drivers])
        for driver in drivers:  # SAM writes the weights between its steps, and puts them back
            driver.watch.sees_all = len(optimizers) == 1
        self._moments = Moments(partial(is_stepping, [id(each) for each in optimizers]))
        layouts = [driver.parameters for driver in drivers]
        trained = [p for layout in layouts for p in layout.parameters.values()]
        self._uncounted = UncountedSteps(optimizers, trained, warns=drivers[0].rank == 0)
        self._outside = Outside(model, optimizers[-1], layouts)
        self._check_outside()
        self._thread = BackgroundThread() if self.driver.options.delay else None
        self._finalizer = weakref.finalize(
            self, _end_threads, connection.failure_detector, self._thread, self._everyone
        )

    @property
    def drivers(self) -> list[RoundDriver]:
        """The drivers of the fragments, in the order of the model."""
        return [fragment.driver for fragment in self.fragments]

    @property
    def local_steps(self) -> int:
        """Optimizer steps since an exchange was last begun."""
        return min(driver.local_steps for driver in self.drivers)

    @property
    def stats(self) -> StepStats | None:
        """What the last finished exchange did; None before the first. Never half-filled."""
        return self._last.stats

    @property
    def on_step(self) -> OnStep | None:
        """The callback for every finished exchange. It may be replaced at any time."""
        return self.driver.on_step

    @on_step.setter
    def on_step(self, on_step: OnStep | None) -> None:
        for driver in self.drivers:
            driver.on_step = on_step

    @property
    def step(self) -> int:
        """The number of finished exchanges, skipped ones included and one in flight not."""
        return sum(driver.counts[0] for driver in self.drivers)

    @property
    def skipped_steps(self) -> int:
        """Exchanges that no rank applied because some rank had a NaN or Inf."""
        return sum(driver.counts[1] for driver in self.drivers)

    @property
    def residuals(self) -> dict[str, Tensor]:
        """This rank's residual by parameter name, in the parameter's shape.

        It waits for an exchange in flight, and is valid until the next one ends; empty before the
        first.
        """
        self._wait()
        parts = [driver.residuals for driver in self.drivers]
        return {name: residual for part in parts for name, residual in part.items()}

    @property
    def dense_parameters(self) -> list[str]:
        """Names of the parameters that travel dense: biases, norms, tiny ones, and as asked."""
        return [name for driver in self.drivers for name in driver.parameters.dense]

    def exchange(self) -> StepStats:
        """Exchange now, in the middle of a round. A collective: all ranks must call it.

        For the end of training, where the number of steps is no multiple of `every`: until the next
        exchange every rank has weights of its own. An exchange in flight is applied first; then all
        fragments are exchanged and applied at once, so that all ranks have the same weights. A new
        round begins. Returns the statistics of the last fragment. Where ranks may have taken
        different numbers of steps, call `finish`.
        """
        finished: list[Finished] = []
        with self._changing():
            for driver in self.drivers:
                if driver.in_flight is not None:
                    finished += self._attempt(self._land, driver)
            for driver in self.drivers:
                finished += self._attempt(self._exchange_early, driver)
        self._report(finished)
        return finished[-1][1]

    def finish(self) -> StepStats:
        """Take part in the exchanges of the other ranks until all of them have called this.

        For the end of training, or of an epoch, where ranks may have taken different numbers of
        steps. A rank that is there first keeps exchanging as if its optimizer went on without
        moving: it delivers its last weight changes, then what is left in its residual, and takes
        over what the others send. When the last rank has come, all have the same weights and a new
        round begins; training may go on. A rank waits for each exchange of the others at most
        `timeout`. Returns the statistics of the last exchange.
        """
        self._all_have_finished = False
        for driver in self.drivers:
            driver.has_finished = True
        try:
            while not self._all_have_finished:
                with self._changing():
                    finished = self._advance()
                self._report(finished)
            if self._thread is not None or len(self.drivers) > 1:
                self.exchange()  # what is in flight, and the other fragments
        finally:
            for driver in self.drivers:
                driver.has_finished, driver.num_steps = False, 0
        assert self.stats is not None
        return self.stats

    def __enter__(self) -> Self:
        if self.closed:  # the block would train alone
            raise RuntimeError(CLOSED)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish together with the other ranks, unless an error ended the block; then close."""
        try:
            if kind is None and not self.closed:
                self.finish()
        finally:
            self.close()

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-exact resume needs, between exchanges as well as right after one.

        It has this rank's weights and float buffers, those after the last exchange (`anchor`), the
        residual, the outer momentum, thresholds, bounds and counters. It waits for an exchange in
        flight, and has the weights at its launch (`launched`) and its statistics too, so that it is
        applied at the same step as in a run that never stopped. The keys are the same on every rank
        and at any time; with several fragments `fragments` has the states of all. Inside a round
        the weights and the residual are this rank's own: save one file per rank, or use
        `gathered_state_dict`. The optimizer's state is each rank's own too, and is not part of it.

        Any thread may call it: it waits for the end of an optimizer step. A signal handler that
        interrupts one cannot wait, and gets a RuntimeError. After an exchange has failed, it is the
        state before that exchange.
        """
        self._refuse_shared_names()
        states = None
        while states is None:  # another thread may launch an exchange meanwhile
            self._settle()
            states = self._states()
        return states[0] if len(states) == 1 else {local_state.FRAGMENTS: states}

    def _states(self) -> list[dict[str, Any]] | None:
        """Those of all fragments; None while an exchange is running."""
        with self._moments.reading():
            if any(driver.is_running for driver in self.drivers):
                return None
            for driver in self.drivers:
                driver.look()
            return [fragment.state_dict() for fragment in self.fragments]

    def gathered_state_dict(self) -> dict[str, Any]:
        """The states of all ranks, on every rank. A collective; not for a model of FSDP2."""
        if self.driver.engine.shards.size > 1:
            raise TypeError(
                "the state of a model that FSDP2 shards is not gathered on one rank: let every "
                "rank save its own, by state_dict() or save(folder)"
            )
        return super().gathered_state_dict()

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Continue where `state_dict` was taken: the same bits as a run that never stopped.

        Sets the weights and float buffers of the model too. Takes this rank's own state, what
        `gathered_state_dict` returned, or a list of all ranks' states. The last two may be of
        another world size: rank r then takes over the residuals of ranks r, r+P, ..., and an
        exchange in flight is applied while loading. Every rank must call it; in the middle of
        training the ranks wait for each other. What this handle has in flight is dropped.
        """
        self._wait()
        saved = self._read(state)
        assert isinstance(saved, local_state.SavedFragments)
        with self._changing():
            for fragment, each in zip(self.fragments, saved.fragments, strict=True):
                fragment.load_saved(each)
        if self._announces:
            left = min(driver.options.every - driver.local_steps for driver in self.drivers)
            announce(describe_loaded(self.step, max(left, 1)))  # `every` may be smaller now

    def _parse(self, state: dict[str, Any] | list[dict[str, Any]]) -> local_state.SavedFragments:
        parts = local_state.by_fragment(state, len(self.fragments), self.comm.rank)
        pairs = list(zip(self.fragments, parts, strict=True))
        saved = [fragment.parse(part) for fragment, part in pairs]
        if local_state.is_skipped_in_flight(parts):
            saved = [fragment.parse(part, roll_back=True) for fragment, part in pairs]
        return local_state.joined(saved)

    def _moment(self, saved: Saved) -> str:
        assert isinstance(saved, local_state.SavedFragments)
        exchanges = sum(each.metadata.engine.step for each in saved.fragments)
        local_steps = min(each.round.local_steps for each in saved.fragments)
        return f"of exchange {exchanges}, local step {local_steps}"

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Stop exchanging: remove the hook of the optimizer and close the process group.

        An exchange in flight is waited for, at most 5 s, and not applied: call `exchange` before to
        have the same weights on all ranks. A communicator that was passed to `local_steps` stays
        open.
        """
        self._remove_hooks()
        for hook in self._load_hooks:
            hook.remove()
        self._uncounted.close()
        self._connection.failure_detector.hint = ""  # it may be that of the whole job
        self._finalizer()
        for driver in self.drivers:
            driver.in_flight = None
        self._close_comm()

    def _before_step(self) -> None:
        self._moments.begin_step()
        for driver in self.drivers:
            driver.look()

    def _after_step(self) -> None:
        try:
            self._uncounted.after_step()
            self._outside.after_step()
            for driver in self.drivers:
                driver.num_steps += 1
            finished = self._advance()
        finally:
            self._note_writes()
            self._moments.end_step()
        self._report(finished)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """The block changes the state outside of a step. What it writes is no write of others."""
        with self._moments.changing():
            for driver in self.drivers:
                driver.look()
            try:
                yield
            finally:
                self._note_writes()

    def _note_writes(self) -> None:
        for driver in self.drivers:
            driver.note()

    def _advance(self) -> list[Finished]:
        """Do what is due after a step; one of a rank that has finished moves nothing."""
        for driver in self.drivers:  # all of them, before one raises
            driver.after_step()
        finished: list[Finished] = []
        for driver in self.drivers:
            if driver.is_landing_due:
                finished += self._attempt(self._land, driver)
            if driver.is_due:
                finished += self._attempt(self._end_round, driver)
        return finished

    def _attempt(self, act: Callable[[RoundDriver], T], driver: RoundDriver) -> T:
        """Do something with a driver; an error ends the exchange on all ranks."""
        if self.closed:
            raise RuntimeError(CLOSED)
        detector = self._connection.failure_detector
        detector.step = self.step
        detector.hint = (
            "has not called finish()"
            if driver.has_finished
            else f"called optimizer.step() less often ({self.local_steps} local steps here)"
        )
        try:
            if self.failure is not None:
                raise RuntimeError(f"an exchange failed before: {self.failure}") from self.failure
            value = act(driver)
        except BaseException as error:  # Ctrl-C too: the other ranks must learn of it
            if self.failure is None:
                self.failure = error
                detector.abort(error, self._everyone)
            raise
        detector.step = self.step
        return value

    def _end_round(self, driver: RoundDriver) -> list[Finished]:
        self._check_before_exchange()
        if self._thread is None:
            return self._finish(driver, driver.exchange(self.step))
        driver.launch(self._in_background)
        return []

    def _exchange_early(self, driver: RoundDriver) -> list[Finished]:
        self._check_before_exchange()
        stats = driver.exchange(self.step)
        driver.local_steps = driver.head_start
        return self._finish(driver, stats)

    def _land(self, driver: RoundDriver) -> list[Finished]:
        return self._finish(driver, driver.land(self.step))

    def _finish(self, driver: RoundDriver, stats: StepStats) -> list[Finished]:
        """Roll all fragments back with one that was not finite, on all ranks.

        Else a NaN would go from fragment to fragment: with weights that are not finite in one of
        them, the next step gives every other one such gradients too.
        """
        self._compare_steps(driver, stats)
        finished = [(driver, stats)]
        for other in self.drivers if stats.skipped else ():
            if other is not driver:
                if other.in_flight is not None:
                    finished += self._land(other)
                other.return_to_anchor()
        return finished

    def _compare_steps(self, driver: RoundDriver, stats: StepStats) -> None:
        """Look whether the ranks are at the same step, and at the end, as all of them told."""
        notices = driver.notices  # none of an exchange that was in flight in a loaded state
        self._all_have_finished = bool(notices) and all(each.has_finished for each in notices)
        steps = [each.num_steps for each in notices]
        if self._is_uneven or len(set(steps)) <= 1:
            return
        self._is_uneven = True
        text = f"exchange {stats.step}: the ranks have taken different numbers of steps, "
        ranks = self.comm.global_ranks
        text += by_value(steps, ranks)
        if ended := [r for r, each in zip(ranks, notices, strict=True) if each.has_finished]:
            text += f"; {ranks_text(ended)} called finish() and will answer until all have"
            if self._announces:
                announce(text)
        elif self.driver.rank == 0:
            log.warning("%s: let every rank end by finish(), or one will wait in vain", text)

    def _report(self, finished: list[Finished]) -> None:
        """Tell of exchanges. After all else that a step does: a callback may save the state."""
        for driver, stats in finished:
            self._last = driver
            self._tell_adopted(driver, stats)
            driver.tell(stats, self.skipped_steps)
        for driver, stats in finished:
            if stats.skipped:
                self._last = driver  # others may have landed: `stats` tells of the skip
                driver.raise_if_asked(stats)

    def _collective(self, act: Callable[[], T]) -> T:
        self._wait()  # collectives leave one after the other
        return super()._collective(act)

    def _tell_adopted(self, driver: RoundDriver, stats: StepStats) -> None:
        names, driver.adopted = driver.adopted, []
        if names and self._announces:
            announce(describe_adopted(stats.step, listed(names)))

    def _settle(self) -> None:
        """Wait for what is in flight, without applying it. What failed is raised by the next
        exchange: a state can be taken all the same."""
        for driver in self.drivers:
            error = driver.settle()
            self.failure = self.failure or error

    def _wait(self) -> None:
        """Wait for what is in flight, without applying it."""
        for driver in self.drivers:
            if driver.in_flight is not None:
                self._attempt(_result, driver)

    def _check_before_exchange(self) -> None:
        if self._connection.failure_detector.diagnosis is not None:
            raise ExchangeError("another rank reported a failure")
        self._ranks.refuse_late_group()
        self.driver.parameters.stored()  # lets FSDP2 register its shards, not whole parameters
        self._check_outside()

    def _check_outside(self) -> None:
        where = f"rank {self.comm.global_rank}, exchange {self.step}"
        self._outside.check(where, warns=self.comm.size > 1 and self.driver.rank == 0)

    def _in_background(self, act: Callable[[], StepStats], like: Tensor) -> Job[StepStats]:
        detector, comm = self._connection.failure_detector, self._everyone

        def watched() -> StepStats:
            try:
                return act()
            except BaseException as error:
                detector.abort(error, comm)  # now: other ranks wait, and this one lands later
                raise

        assert self._thread is not None
        return self._thread.submit(watched, like)


def _result(driver: RoundDriver) -> StepStats:
    assert driver.in_flight is not None
    return driver.in_flight.job.result()


def _end_threads(
    detector: FailureDetector, thread: BackgroundThread | None, everyone: Comm
) -> None:
    """At the end of a script too, where an exchange in flight is waited for as well."""
    if thread is not None and not thread.close():
        detector.abort(RuntimeError(ENDED), everyone)
    detector.close()
