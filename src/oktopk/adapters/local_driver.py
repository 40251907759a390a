# SPDX-License-Identifier: Apache-2.0
"""`RoundDriver`: counts the optimizer steps of a round and exchanges the weight changes at its end.

A round is the optimizer steps between two exchanges. The anchor holds the weights after the last
exchange, the same bits on every rank; the weights of a rank leave it by as much as its own
optimizer moves them. With 16-bit parameters the anchor is fp32, so outer steps that are smaller
than a 16-bit rounding error add up in it.

With a `delay` the exchange is launched at the end of a round and lands in the next one. What is
collective of it runs on a background thread, which changes the anchor, the outer momentum and the
engine; the thread that trains reads none of them until it has waited.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from oktopk.adapters.budget import Budget
from oktopk.adapters.buffers import RoundBuffers
from oktopk.adapters.driver import Driver, OnStep
from oktopk.adapters.local_notices import Notice, by_value, tell
from oktopk.adapters.local_writes import Watch, Written, compare, listed
from oktopk.adapters.parameters import ParameterLayout
from oktopk.adapters.thread import Job, share
from oktopk.comm.communicator import Comm
from oktopk.comm.consistency import check_replicas, checksum
from oktopk.exchange.layout import UNSHARDED, Shards
from oktopk.exchange.step import Step
from oktopk.settings import Settings
from oktopk.stats import StepStats
from oktopk.utils.arguments import integer, number

# The outer step: how the mean weight change of all ranks moves the weights.


SHARED_METHOD = "topkdsa"
"""What `method="auto"` exchanges by: it delivers all that any rank has selected, by the owners of
regions, and the ranks share the density. The largest weight changes of different ranks are at
different places: 4 ranks found 3.5 to 3.9 times as many as one rank selects (docs/experiments.md).
`oktopk` keeps the k largest sums of k entries from each rank, so most of what was sent would return
to the residuals. Here each rank selects k/P entries and all of them arrive: the bytes still hardly
grow with the number of ranks, and none of them are wasted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterOptions:
    """Options of `local_steps` beside `Settings`."""

    every: int
    """Optimizer steps between two exchanges."""

    outer_lr: float = 1.0
    """Learning rate of the outer step."""

    outer_momentum: float = 0.0
    """Nesterov momentum of the outer step; 0 is none."""

    check_every: int = 10
    """Exchanges between comparisons of the weights of all ranks; 0 is never."""

    delay: int = 0
    """Optimizer steps from the launch of an exchange until its result is applied; 0 is at once."""

    mixing: float = 1.0
    """Share of this rank's moves since the launch that is kept when the result is applied."""

    fragments: int = 1
    """Parts of the model that are exchanged one after the other."""

    def __post_init__(self) -> None:
        integer("every", self.every, least=1)
        self._check_streaming()
        integer("check_every", self.check_every, least=0)
        lr = number("outer_lr", self.outer_lr, "more than 0")
        if not 0 < lr < float("inf"):
            raise ValueError(f"outer_lr must be more than 0 and finite, got {lr}")
        momentum = number("outer_momentum", self.outer_momentum, "in [0, 1)")
        if not 0 <= momentum < 1:
            raise ValueError(f"outer_momentum must be in [0, 1), got {momentum}")

    def _check_streaming(self) -> None:
        if integer("delay", self.delay, least=0) >= self.every:
            raise ValueError(f"delay must be less than every={self.every}, got {self.delay}")
        mixing = number("mixing", self.mixing, "in [0, 1]")
        if not 0 <= mixing <= 1:
            raise ValueError(f"mixing must be in [0, 1], got {mixing}")
        if mixing != 1 and not self.delay:
            raise ValueError(f"mixing={mixing} has no effect with delay=0: set a delay")
        if integer("fragments", self.fragments, least=1) > self.every:
            raise ValueError(f"fragments must be at most every={self.every}, got {self.fragments}")


def outer_step(
    anchor: Tensor, change: Tensor, momentum: Tensor | None, options: OuterOptions
) -> tuple[Tensor, Tensor | None]:
    """The anchor moved by the mean change, as SGD(nesterov=True) does with a gradient (DiLoCo), and
    the momentum after it.

    Products and sums are rounded one by one: `add_(x, alpha=...)` may round once for both, on some
    processors only, and the ranks may have different ones. The new anchor is in the memory of
    `change`; the old anchor and the old momentum are left as they were.
    """
    if momentum is not None:
        momentum = (momentum * options.outer_momentum).add_(change)
        change.add_(momentum * options.outer_momentum)
    return torch.sub(anchor, change.mul_(options.outer_lr), out=change), momentum


def landed(anchor: Tensor, now: Tensor, launched: Tensor, mixing: float) -> Tensor:
    """The weights after a delayed exchange: the new anchor, and on top what this rank has moved
    since the launch. In the dtype of the anchor; without a move they are the anchor, to the bit."""
    moves = now.to(anchor.dtype) - launched.to(anchor.dtype)
    return anchor + moves.mul_(mixing)


log = logging.getLogger("oktopk")


SAME_MOVES = (
    "all %d ranks have moved their weights by the same, to the bit: either something else keeps "
    "them equal in every step, such as DistributedDataParallel or an all-reduce of gradients, and "
    "local_steps saves nothing: leave that out; or they train on the same batches: give each rank "
    "its own share of the data (DistributedSampler)"
)

MOVES = (
    "rank %d: the weights of %s were written between two steps of the optimizer, not the same on "
    "all ranks: they count as moves of each rank, as those of the optimizer do (said once); to go "
    "on from other weights, load the same ones on every rank by load_state_dict"
)

Submit = Callable[[Callable[[], StepStats], Tensor], Job[StepStats]]
"""Runs a function in the background, on the device of a tensor."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What this rank brings to an exchange, at the end of a round."""

    weights: dict[str, Tensor]
    change: Tensor
    """What they have changed by since the last exchange, flat. The exchange writes to it."""

    written: Written
    notice: Notice


@dataclass(frozen=True, slots=True)
class InFlight:
    """An exchange that was launched, and whose result is not applied yet."""

    weights: dict[str, Tensor]
    """This rank's weights at the launch."""

    counts: tuple[int, int]
    """Exchanges that were applied or skipped before, and those that were skipped."""

    job: Job[StepStats]
    local_steps: int
    """Optimizer steps of the round that it ended."""


class RoundDriver(Driver[ParameterLayout]):
    """The rounds of one model on this rank."""

    subject = "a weight change"
    unit = "exchange"

    def __init__(
        self,
        settings: Settings,
        comm: Comm,
        parameters: ParameterLayout,
        options: OuterOptions,
        on_step: OnStep | None,
        budget: Budget | None = None,
        head_start: int = 0,
        shards: Shards = UNSHARDED,
        buffers: RoundBuffers | None = None,
    ) -> None:
        super().__init__(settings, comm, parameters, on_step, budget, shards)
        self.options = options
        self.buffers = RoundBuffers() if buffers is None else buffers
        self.head_start = head_start
        """Optimizer steps by which the first round is shorter, so that fragments take turns."""

        self.local_steps = head_start
        """Optimizer steps since the last exchange was launched."""

        self.loaded_steps = head_start
        """`local_steps` at the start, or when a state was loaded."""

        self.number = 0
        """Of the fragment."""

        self.num_steps = 0
        """Optimizer steps since the start, a load, or the last end of `finish`."""

        self.has_finished = False
        """Whether this rank only answers the others."""

        self.notices: list[Notice] = []
        """What all ranks told in the last finished exchange. Not to be read while one is in flight.
        """

        self._has_compared_moves = comm.size == 1

        self.in_flight: InFlight | None = None
        """The exchange that was launched and has not landed."""

        self.is_at_anchor = True
        """Whether the weights are those of the anchor, unless something else has written them."""

        self.adopted: list[str] = []
        """Parameters of which the last exchange took what was loaded for a new start."""

        self.set_layout([list(parameters.parameters)], {})
        numel, device = self.engine.buckets.numel, parameters.device
        self.anchor = torch.empty(numel, dtype=self.acc_dtype, device=device)
        """The weights after the last exchange, flat."""

        self.momentum = torch.zeros_like(self.anchor) if options.outer_momentum else None
        self.set_anchor()
        self.watch = Watch(parameters)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat vector by parameter name."""
        return self.parameters.views(flat, self.layout[0])

    def set_anchor(self) -> None:
        """Let the present weights be the anchor. They must be the same on every rank."""
        weights = self.parameters.stored()
        for name, view in self.views(self.anchor).items():
            view.copy_(weights[name].detach())
        self.buffers.set_anchor()

    @property
    def is_due(self) -> bool:
        """Whether the round is complete."""
        return self.local_steps >= self.options.every

    @property
    def is_landing_due(self) -> bool:
        """Whether the exchange that was launched is to be applied now."""
        return self.in_flight is not None and self.local_steps >= self.options.delay

    @property
    def is_running(self) -> bool:
        """Whether an exchange runs in the background. Where it has failed, it is not settled."""
        job = None if self.in_flight is None else self.in_flight.job
        return job is not None and (not job.future.done() or job.error() is not None)

    @property
    def counts(self) -> tuple[int, int]:
        """Exchanges that were applied or skipped, and those that were skipped.

        One that is in flight counts when it lands: until then the engine may have counted it.
        """
        if self.in_flight is not None:
            return self.in_flight.counts
        return self.engine.step, self.engine.skipped

    def exchange(self, number: int) -> StepStats:
        """End the round: exchange the weight changes; all ranks apply them, or none.

        It is the exchange of this number among those of all fragments.
        """

        def end_round(skipped: bool) -> None:
            self._set_weights(number, skipped)
            self.local_steps = 0

        offer = self._offer(self.parameters.stored())
        return replace(self._run(offer, end_round), step=number)

    def launch(self, submit: Submit) -> None:
        """End the round, and exchange the weight changes in the background."""
        weights = {name: p.detach().clone() for name, p in self.parameters.stored().items()}
        offer, counts = self._offer(weights), self.counts
        for kept in (self.engine.residual, self.anchor, self.momentum):
            if kept is not None:  # made on this thread, and freed by the other one
                share(kept)
        job = submit(partial(self._run, offer), offer.change)
        self.in_flight = InFlight(weights, counts, job, self.local_steps)
        self.local_steps = 0

    def land(self, number: int) -> StepStats:
        """Wait for the exchange that was launched, and apply it as the one of this number."""
        begun, flight = perf_counter(), self.in_flight
        assert flight is not None
        stats = flight.job.result()
        stats = replace(stats, step=number, exposed=perf_counter() - begun)
        with self.engine.lock.changing():
            self.in_flight = None
            self._set_weights(number, stats.skipped, flight.weights)
        return stats

    def settle(self) -> BaseException | None:
        """Wait for the exchange that was launched, without applying it.

        Where it failed, its round goes on as if it had not been launched. Returns the error.
        """
        flight = self.in_flight
        error = None if flight is None else flight.job.error()
        if flight is not None and error is not None:
            with self.engine.lock.changing():
                if self.in_flight is flight:  # no other thread has settled it
                    self.local_steps += flight.local_steps
                    self.in_flight = None
        return error

    def look(self) -> None:
        """Note what something else than the optimizer has written to the weights until now."""
        with self.engine.lock:  # an exchange in flight may deal with some of it right now
            self.watch.look(self.views(self.anchor) if self.is_at_anchor else None)

    def note(self) -> None:
        """What was written to the weights until now was the optimizer's, or the exchange's."""
        with self.engine.lock:
            self.watch.note()

    def after_step(self) -> None:
        """Count a local step."""
        self.local_steps += 1
        self.is_at_anchor = False

    def _offer(self, weights: dict[str, Tensor]) -> Offer:
        self.buffers.take()
        change = self._weight_change(weights, torch.empty_like(self.anchor))
        written = self.watch.written.copy()
        notice = Notice(
            num_written=len(written.values),
            fragment=self.number,
            num_steps=self.num_steps,
            has_finished=int(self.has_finished),
            moves=0,
        )
        return Offer(weights, change, written, notice)

    def _run(self, offer: Offer, end_round: Callable[[bool], None] | None = None) -> StepStats:
        """All that is collective of an exchange. It moves the anchor and leaves the weights, which
        `end_round` may set; it is told whether the exchange was skipped."""
        begun, change = perf_counter(), offer.change
        if not self.is_checked:
            local = {"local steps as loaded": self.loaded_steps}
            self.check_consistency(change, **(asdict(self.options) | local))
        means: dict[str, Tensor] = {}

        def commit(skipped: bool) -> None:
            if not skipped:
                moved = outer_step(self.anchor, change, self.momentum, self.options)
                self.anchor, self.momentum = moved
                self.buffers.anchor = self.buffers.anchor | means
            if end_round is not None:
                end_round(skipped)

        step = self.engine.begin(change)
        try:
            self._tell(offer.notice, change)
            if any(notice.num_written for notice in self.notices):
                self._agree(offer)
            self._check_replicas(step.plan.step)
            self.revise_budget(step.plan)
            step.add_bucket(0, change)
            means |= self._buffer_means(step)
            stats = self.engine.finish(step, also=commit)
        except BaseException:
            step.discard()
            raise
        self.note_seconds(stats, begun)
        return stats

    def _tell(self, notice: Notice, change: Tensor) -> None:
        """Tell the other ranks, and read what they tell. ValueError on all ranks where they are at
        different fragments; a warning if all have made the same moves."""
        if not self._has_compared_moves and change.any():
            notice = replace(notice, moves=int(checksum(change)))
        self.notices = tell(notice, self.comm, change.device)
        fragments = [each.fragment for each in self.notices]
        if len(set(fragments)) > 1:
            raise ValueError(
                "the ranks exchange different fragments: "
                f"{by_value(fragments, self.comm.global_ranks)}; exchange() must be called after "
                "the same step on every rank, and finish() where ranks may have taken different "
                "numbers of steps"
            )
        moves = {each.moves for each in self.notices}
        if self._has_compared_moves or 0 in moves:
            return
        self._has_compared_moves = True
        if len(moves) == 1 and self.rank == self.number == 0:
            log.warning(SAME_MOVES, self.comm.size)

    def _buffer_means(self, step: Step) -> dict[str, Tensor]:
        """The means of the float buffers, inside a site first where it has several ranks."""
        comms = [comm for comm in (self.engine.shards.comm, self.comm) if comm is not None]
        where = f"rank {self.comm.global_rank}, exchange {step.plan.step}"
        with step.recorder.clock("exchange"):
            return self.buffers.means(comms, self.parameters.device, where)

    def _agree(self, offer: Offer) -> None:
        """Decide with the other ranks about weights that something else has written."""
        written = offer.written
        outcome = compare(written, offer.weights, self.views(self.anchor), self.comm)
        with self.engine.lock.changing():
            self._adopt(outcome.adopted)
            self.watch.forget(written)
        self._weight_change(offer.weights, offer.change, outcome.adopted)
        self.adopted = list(outcome.adopted)
        self.watch.sees_all = self.watch.sees_all and not outcome.moves
        if outcome.moves and self.comm.rank == 0:
            log.warning(MOVES, self.comm.global_rank, listed(outcome.moves))

    def _adopt(self, starts: dict[str, Tensor]) -> None:
        """Let these weights be the anchor: what was unsent of the old ones, and the momentum that
        has led to them, are gone."""
        anchors = self.views(self.anchor)
        momenta = {} if self.momentum is None else self.views(self.momentum)
        for name, start in starts.items():
            anchors[name].copy_(start)
            for kept in (self.residuals, momenta):
                if name in kept:
                    kept[name].zero_()

    def _weight_change(
        self, weights: dict[str, Tensor], change: Tensor, names: Container[str] | None = None
    ) -> Tensor:
        """Weights after the last exchange minus these, flat: the outer gradient of DiLoCo. Written
        to `change`, of some parameters or of all."""
        anchors = self.views(self.anchor)
        for name, view in self.views(change).items():
            if names is None or name in names:
                parameter = weights[name].detach()
                # as this rank had it: rounded, if the parameter has fewer bits than the anchor
                view.copy_(anchors[name].to(parameter.dtype)).sub_(parameter)
        return change

    def _set_weights(
        self, number: int, skipped: bool, launched: dict[str, Tensor] | None = None
    ) -> None:
        """Apply an exchange, on top of the moves since the launch if it was launched."""
        weights = {name: p.detach() for name, p in self.parameters.stored().items()}
        if skipped:
            self._log_nonfinite(number, launched or weights)
        if skipped or launched is None:
            self.return_to_anchor()
            return
        written = self.watch.written
        self.buffers.return_to_anchor()  # means of variances stay such; sums with moves may not
        for name, anchor in self.views(self.anchor).items():
            if name not in written.loaded:  # what was loaded since the launch stays as it is
                now = weights[name]
                now.copy_(landed(anchor, now, launched[name], self.options.mixing))
        if moves := [name for name in written.values if name not in written.loaded]:
            if self.watch.sees_all:
                log.warning(MOVES, self.comm.global_rank, listed(moves))
            self.watch.sees_all = False
            written.forget(moves)

    def return_to_anchor(self) -> None:
        """Set weights and buffers to those after the last exchange, the same on every rank; weights
        that were loaded since, to what was loaded."""
        self.buffers.return_to_anchor()
        weights, written = self.parameters.stored(), self.watch.written
        written.forget([name for name in written.values if name not in written.loaded])
        for name, anchor in self.views(self.anchor).items():
            weights[name].detach().copy_(written.values.get(name, anchor))
        self.is_at_anchor = not written.values

    def _check_replicas(self, step: int) -> None:
        """Compare the anchors: between exchanges the weights themselves differ."""
        every = self.options.check_every
        if every and step and step % every == 0:
            check_replicas(self.views(self.anchor), self.comm, step)

    def _log_nonfinite(self, number: int, weights: dict[str, Tensor]) -> None:
        """Name the parameters of this rank that are not finite, before they are overwritten."""
        bad = [name for name, weight in weights.items() if not torch.isfinite(weight).all()]
        if bad:
            log.warning(
                "rank %d, exchange %d: the weights of this rank are not finite in %s; they are set "
                "back to those of the last exchange, and the optimizer's state is not: if it is "
                "not finite either, reset it",
                self.comm.global_rank,
                number,
                listed(bad),
            )
