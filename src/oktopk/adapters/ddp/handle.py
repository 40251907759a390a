"""`Handle`: one model's exchange as DDP drives it: layout, residuals by name, state."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from msgspec import to_builtins
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from oktopk.adapters.clipping import clip_
from oktopk.adapters.ddp.bucket_tracker import BucketTracker
from oktopk.adapters.ddp.communication_thread import (
    Arrived,
    Exchanger,
    reading,
    share,
)
from oktopk.adapters.ddp.gathered_state import GatheredState, gather_states
from oktopk.adapters.parameters import Named
from oktopk.adapters.policy import Policy
from oktopk.comm.communicator import Comm
from oktopk.comm.consistency import agree
from oktopk.comm.failure_detector import RollCall
from oktopk.comm.replica_check import check_replicas
from oktopk.engine import saved_state
from oktopk.engine.buckets import Layout
from oktopk.engine.engine import Engine
from oktopk.engine.step import Step
from oktopk.errors import ExchangeError, NonfiniteError
from oktopk.optim.residual_scaling import Followed
from oktopk.optim.staleness import LateMoments
from oktopk.settings import Settings
from oktopk.sparse import acc_dtype
from oktopk.stats import StepStats

log = logging.getLogger("oktopk")


class Handle:
    """What `attach` returns: the statistics, the state, and a way to let go."""

    def __init__(
        self,
        model: DistributedDataParallel,
        settings: Settings,
        comm: Comm,
        roll_call: RollCall,
        policy: Policy,
        followed: Followed,
    ) -> None:
        self.settings = settings
        self.comm = comm
        self._roll_call = roll_call
        self.on_step: Callable[[StepStats], None] | None = None
        self.clip_before: float | None = None
        self.check_every = 0
        self.agree_to_load: Callable[[dict[str, Any], int], None] = lambda facts, step: None
        """Compares facts of all ranks, that load a state after so many steps."""
        self.joined = self.has_joined = False
        """Whether this rank ran out of data in a `join` and shadows the others, now or ever."""
        self.overlaps = True
        """Whether buckets are exchanged while backward goes on; else all after the last of them."""
        self.rate_factors: dict[str, float] = {}
        """What was owed to a parameter was scaled by so much in the last step, as rates changed."""
        self.takes_any_method = False
        """Whether nobody asked for this method (`auto`): then that of a loaded state goes on."""
        self.stats: StepStats | None = None
        """Of the last finished step; None before the first. Never half-filled."""

        self._named = Named(model, policy)
        self._engine = Engine(settings, comm, [])
        self._followed = followed
        mine = weakref.ref(self)  # the optimizer must not keep a handle alive
        self._moments = LateMoments(
            followed.optimizer,
            {n: p for n, p in self._named.parameters.items() if not self._named.is_dense(n)},
            settings,
            last=lambda: handle.stats if (handle := mine()) else None,
            tells=comm.rank == 0,
        )
        self._layout: Layout = []
        self._buckets = BucketTracker()
        self._agreed = False
        self._overlaps: list[tuple[int, ...]] = []
        """Signatures of DDP's buckets, once each is exchanged as it comes; empty before."""
        self._waiting: list[Arrived] = []
        self._staged: list[Tensor] | None = None
        self._step: Step | None = None
        self.exchanger = Exchanger(weakref.WeakMethod(self._take))
        self._finalizer = weakref.finalize(self, _end_threads, roll_call, self.exchanger)

    @property
    def step(self) -> int:
        """Finished steps."""
        return self._engine.step

    @property
    def skipped_steps(self) -> int:
        """Steps that no rank applied because some rank had a NaN or Inf."""
        return self._engine.skipped

    @property
    def failure(self) -> Exception | None:
        """The error that ended the exchange; DDP wraps it in a RuntimeError of its own."""
        return self.exchanger.failure

    @property
    def residuals(self) -> dict[str, Tensor]:
        """What this rank has not applied yet, by parameter name, in the parameter's shape.

        Of the last finished step, and valid until the next one ends; empty before the sparse phase.
        """
        with self._engine.lock:
            owed = {}
            for bucket, names in enumerate(self._layout):
                residual = self._engine.residual_of(bucket)
                if residual is None:
                    return {}
                owed |= self._named.views(residual, names)
            return owed

    @property
    def dense_parameters(self) -> list[str]:
        """Names of the parameters that travel whole: biases, norms, tiny ones, and as asked."""
        return [name for name in self._named.parameters if self._named.is_dense(name)]

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
        with self._engine.lock:
            facts = {
                "format": saved_state.FORMAT,
                "method": self.settings.method,
                "world_size": self.comm.size,
                "rank": self.comm.rank,
                "frozen": self._named.frozen,
                "layout": self._layout,
                "settled_layout": self._buckets.settled,
                "engine": self._engine.state_dict(),
                "followed": self._followed.state_dict(),
            }
            owed = self.residuals
            with reading(self._engine.residual):
                residuals = {
                    name: owed[name].clone(memory_format=torch.contiguous_format)
                    if name in owed
                    else torch.zeros(p.shape, dtype=acc_dtype(p), device=p.device)
                    for name, p in self._named.parameters.items()
                }
            arrived = self._moments.state_dict()
            return {"residuals": residuals, "arrived": arrived, "facts": json.dumps(facts)}

    def gathered_state_dict(self) -> dict[str, Any]:
        """The states of all ranks, on every rank. A collective: all ranks must call it.

        For frameworks that save what one rank has. It takes the memory of all ranks' residuals.
        """
        mine, device = self.state_dict(), next(iter(self._named.parameters.values())).device

        def gather() -> dict[str, Any]:
            try:
                return gather_states(mine, self.comm, device)
            except ExchangeError as error:
                self._roll_call.give_up(error, self.comm)  # raises one that names the rank
                raise

        return self.exchanger.call(gather)

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Continue where `state_dict` was taken: the same bits as a run that never stopped.

        Takes this rank's own state, what `gathered_state_dict` gave, or a list of all ranks'
        states. The last two may be of another number of ranks: rank r then takes over the
        residuals of ranks r, r+P, ... The method must be the same; one that `auto` picked gives
        way to that of the state, whatever the network is like now. Every rank must call it; in
        the middle of training the ranks wait for each other.
        """
        saved = self._read(state)
        facts = saved.facts
        has_residual = any(bool(part.any()) for part in saved.residuals.values())
        with self._engine.lock:
            self.settings = self._engine.settings = replace(self.settings, method=facts.method)
            self._lay_out(facts.layout, saved.residuals if has_residual else {})
            self._engine.load_state_dict(to_builtins(facts.engine))
            self._followed.load_state_dict(to_builtins(facts.followed))
            self._moments.load_state_dict(saved.arrived)
            self._buckets.restart(facts.settled_layout)
            self._overlaps = []
            self._agreed = False

    def _read(self, state: dict[str, Any] | list[dict[str, Any]]) -> saved_state.Saved:
        """Check a state. In the middle of training all ranks load one, or none does.

        A rank that loads alone would begin its next step with a handshake that no other expects.
        Before the first step all do expect it, so there no rank has to wait for the others.
        """
        saved, problem = None, None
        try:
            saved = saved_state.load(
                state,
                rank=self.comm.rank,
                world_size=self.comm.size,
                method=None if self.takes_any_method else self.settings.method,
                parameters=self._named.parameters,
                frozen=self._named.frozen,
            )
        except saved_state.StateError as error:
            problem = error
        if self._agreed:
            loaded = "refused" if saved is None else f"of step {saved.facts.engine.step}"
            try:
                self.agree_to_load({"the loaded state": loaded}, self.step)
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
        """End the exchange thread and its process group; train on only after another `attach`."""
        self._moments.close()
        self._finalizer()
        self.comm.close()

    def _take(self, arrived: Arrived) -> None:
        """One bucket, on the exchange thread."""
        self._roll_call.step = self.step
        try:
            if self._roll_call.verdict is not None:
                raise ExchangeError("another rank called the roll")
            self._feed(arrived)
        except NonfiniteError:
            raise
        except BaseException as error:  # sys.exit() in on_step too: the others must hear of it
            self._discard_step()
            self._roll_call.give_up(error, self.comm)
            raise

    def _feed(self, arrived: Arrived) -> None:
        if arrived.index == 0:
            self._waiting = []
            self._discard_step()  # of a backward that raised before its last bucket
        self._waiting.append(arrived)
        overlaps = bool(self._overlaps)
        if overlaps:
            known = self._overlaps[arrived.index : arrived.index + 1]
            if known != [arrived.signature()]:
                raise RuntimeError("DDP changed its buckets in the middle of training")
            if arrived.index == 0:
                self._step = self._begin(arrived.buffer)
            assert self._step is not None
            self._step.add_bucket(arrived.index, arrived.buffer)
        if arrived.is_last:
            if not overlaps:
                self._feed_all()
            self._finish(arrived)

    def _begin(self, like: Tensor) -> Step:
        self._follow()
        step = self._engine.begin(like)  # from here on all traffic is of this step
        first_sparse = step.plan.step == self.settings.warmup_steps
        if step.plan.phase == "sparse" and first_sparse and self.comm.rank == 0:
            log.info(
                "step %d: the sparse phase begins, %s at density %g: %d of %d entries, %d dense",
                step.plan.step,
                self.settings.method,
                step.plan.density,
                step.plan.k,
                self._engine.buckets.numel,
                self._engine.buckets.num_dense,
            )
        if self.check_every and self.step and self.step % self.check_every == 0:
            flags = {"joined": self.joined, "has_joined": self.has_joined}
            check_replicas(self._named.parameters, self.comm, self.step, **flags)
        return step

    def _discard_step(self) -> None:
        if self._step is not None:
            self._step.discard()
            self._step = None

    def _follow(self) -> None:
        """Bring what is owed to the present loss scale and learning rates."""
        with self._engine.lock:  # a state must not have new rates beside old residuals
            scale = self._followed.scale_factor()
            if scale != 1.0:
                self._engine.rescale(scale)
            factors = self._followed.rate_factors(self._named.parameters)  # it must see every rate
            self.rate_factors = factors if self.settings.follow_rate else {}
            for name, residual in self.residuals.items() if self.rate_factors else ():
                residual.mul_(self.rate_factors.get(name, 1.0))

    def _feed_all(self) -> None:
        """All buckets at once: while DDP may still change them, and to clip before the exchange."""
        ddp = self._named.layout_of(self._waiting)
        self._named.check_sizes(self._waiting, ddp)
        layout = self._buckets.observe(self.step, self._layout, ddp)
        if layout != self._layout:
            with self._engine.lock:
                self._lay_out(layout, self.residuals)
        if not self._agreed:
            self._agree()
        copied = layout != ddp
        may_overlap = self.overlaps and self.clip_before is None
        if self._buckets.is_steady and not copied and may_overlap:
            self._overlaps = [arrived.signature() for arrived in self._waiting]
        staged = self._named.staged(self._waiting, self._layout) if copied else None
        grads = staged or [arrived.buffer for arrived in self._waiting]
        if self.clip_before is not None:
            clip_(grads, self.clip_before * self._followed.scale)
        self._step = self._begin(grads[0])
        for bucket, grad in enumerate(grads):
            self._step.add_bucket(bucket, grad)
        self._staged = staged

    def _finish(self, last: Arrived) -> None:
        assert self._step is not None
        stats = self._engine.finish(self._step, waited_since=last.at)
        self._step = None
        if self._staged is not None:
            self._named.unstage(self._staged, self._waiting, self._layout)
            self._staged = None
        if stats.skipped:
            log.warning(
                "rank %d, step %d: a gradient had a NaN or Inf on some rank; no rank applied it "
                "(%d steps skipped so far)",
                self.comm.rank,
                stats.step,
                self.skipped_steps,
            )
        self.stats = stats
        if self.on_step is not None:
            self._call_back(self.on_step, stats)
        self._engine.raise_if_asked(stats)

    def _call_back(self, on_step: Callable[[StepStats], None], stats: StepStats) -> None:
        """The exchange is over and right: an error of the callback must not stop the others."""
        try:
            on_step(stats)
        except Exception:
            log.exception("rank %d, step %d: on_step failed", self.comm.rank, stats.step)

    def _lay_out(self, layout: Layout, owed: dict[str, Tensor]) -> None:
        """Cut the engine's buckets as given and carry over what is owed."""
        self._engine.set_buckets([self._named.bucket(names) for names in layout])
        self._layout = layout
        if owed:
            dtype = next(iter(owed.values())).dtype
            device = next(iter(self._named.parameters.values())).device  # a state may be elsewhere
            self._engine.residual = torch.zeros(
                self._engine.buckets.numel, dtype=dtype, device=device
            )
            share(self._engine.residual)
            for name, residual in self.residuals.items():
                if name in owed:
                    residual.copy_(owed[name])

    def _agree(self) -> None:
        names = [name for bucket in self._layout for name in bucket]
        facts = asdict(self.settings) | {
            "step": self.step,
            "check_every": self.check_every,
            "parameters": len(names),
            "dense parameters": [name for name in names if self._named.is_dense(name)],
            "state": self._engine.shared(),
            "numel": self._engine.buckets.numel,
            "numel dense": self._engine.buckets.num_dense,
            "buckets": self._layout,
            "gradient dtype": str(self._waiting[0].buffer.dtype),
        }
        agree(self.comm, self._waiting[0].buffer.device, facts)
        self._agreed = True


def _end_threads(roll_call: RollCall, exchanger: Exchanger) -> None:
    roll_call.close()
    exchanger.close()
