"""`Handle`: one model's exchange as DDP drives it: layout, residuals by name, state."""

from __future__ import annotations

import json
import logging
import traceback
import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from oktopk.comm import Comm, ExchangeError
from oktopk.engine import Engine, NonfiniteError
from oktopk.exchanger import Arrived, Exchanger
from oktopk.followed import Followed
from oktopk.handshake import agree
from oktopk.layout import Bucket
from oktopk.policy import Policy
from oktopk.rollcall import RollCall
from oktopk.settings import Settings
from oktopk.sparse import acc_dtype
from oktopk.stats import StepStats
from oktopk.weights import check_replicas

log = logging.getLogger("oktopk")

# DDP rebuilds its buckets once, after the first step or (static graph) the second. Asking it
# whether it has would take a lock that backward holds, so a few equal steps must tell.
STEADY = 2


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
        self.policy = policy
        self.on_step: Callable[[StepStats], None] | None = None
        self.clip_before: float | None = None
        self.check_every = 0
        self.stats: StepStats | None = None
        """Of the last finished step; None before the first. Never half-filled."""

        managed = {id(parameter) for parameter in model._module_parameters}
        self._names: dict[Tensor, str] = {
            parameter: name
            for name, parameter in model.module.named_parameters()
            if id(parameter) in managed
        }
        self._finds_unused = model.find_unused_parameters
        self._parameters = {name: parameter for parameter, name in self._names.items()}
        self._engine = Engine(settings, comm, [])
        self._followed = followed
        self._layout: list[list[str]] = []
        self._loaded = False  # the layout came from a state, not from DDP
        self._agreed = False
        self._seen: list[tuple[int, ...]] = []  # signatures of the last step's buckets
        self._steady = 0  # steps for which they have been the same
        self._waiting: list[Arrived] = []
        self._staged: list[Tensor] | None = None
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
        """What this rank still owes, by parameter name, in the parameter's shape."""
        owed = {}
        for bucket, names in enumerate(self._layout):
            residual = self._engine.residual_of(bucket)
            if residual is None:
                return {}
            owed |= self._by_name(residual, names)
        return owed

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-exact resume needs: residuals by name, and thresholds, bounds, counters.

        The keys are the same on every rank and at any time, so a fresh handle's state is a template
        for `torch.distributed.checkpoint`; the residuals are this rank's own.
        """
        self._engine.abandon()
        facts = {
            "method": self.settings.method,
            "world_size": self.comm.size,
            "rank": self.comm.rank,
            "layout": self._layout,
            "engine": self._engine.state_dict(),
            "followed": self._followed.state_dict(),
        }
        owed = self.residuals
        return {
            "residuals": {
                name: owed[name].clone()
                if name in owed
                else torch.zeros_like(p, dtype=acc_dtype(p))
                for name, p in self._parameters.items()
            },
            "facts": json.dumps(facts),
        }

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Go on where `state_dict` was taken: the same bits as a run that never stopped.

        A list of all ranks' states, saved by another number of ranks, is loaded too: rank r takes
        over what ranks r, r+P, ... owed, so the sum over ranks stays what it was.
        """
        mine = state if isinstance(state, dict) else taken_over(state, self.comm)
        facts, owed = json.loads(mine["facts"]), mine["residuals"]
        if facts["world_size"] != self.comm.size:
            raise ValueError(
                f"rank {self.comm.rank}: the state was saved by {facts['world_size']} ranks and "
                f"there are {self.comm.size}: pass the list of all ranks' states"
            )
        if set(owed) != set(self._parameters):
            raise ValueError(
                f"rank {self.comm.rank}: the state is of another model; only one of them has "
                f"{sorted(set(owed) ^ set(self._parameters))}"
            )
        owes = any(bool(part.any()) for part in owed.values())
        self._lay_out(facts["layout"], owed if owes else {})
        self._engine.load_state_dict(facts["engine"])
        self._followed.load_state_dict(facts["followed"])
        self._loaded, self._steady, self._seen = bool(facts["layout"]), 0, []
        self._agreed = False

    def close(self) -> None:
        """End the exchange thread and its process group. The model must not be trained any more."""
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
        except Exception as error:
            self._give_up(error)
            raise

    def _give_up(self, error: Exception) -> None:
        """Leave a last word, close the connections so that nobody waits for us, hear the verdict.

        An error of this rank alone is raised as it is; after one of the exchange, who is missing.
        """
        alone = not isinstance(error, ExchangeError)
        self._roll_call.tell(f"{type(error).__name__}: {error}" if alone else None)
        free_frames(error)
        self.comm.close()
        if not alone:
            where = f"rank {self.comm.rank}, step {self.step}"
            raise ExchangeError(f"{where}: {self._roll_call.hear()} ({error})") from error

    def _feed(self, arrived: Arrived) -> None:
        if arrived.index == 0:
            self._waiting = []
        self._waiting.append(arrived)
        early = self._steady >= STEADY and self.clip_before is None
        if early:
            known = self._seen[arrived.index : arrived.index + 1]
            if known != [arrived.signature()]:
                raise RuntimeError("DDP changed its buckets in the middle of training")
            if arrived.index == 0:
                self._begin()
            self._engine.feed(arrived.index, arrived.buffer)
        if arrived.is_last:
            if not early:
                self._feed_all()
            self._finish(arrived)

    def _begin(self) -> None:
        if self.check_every and self.step and self.step % self.check_every == 0:
            check_replicas(dict(self._parameters), self.comm, self.step)
        self._follow()
        if self._engine.phase == "sparse" and self._engine.step == self.settings.warmup_steps:
            log.info(
                "step %d: the sparse phase begins, %s at density %g: %d of %d entries, %d dense",
                self._engine.step,
                self.settings.method,
                self.settings.density_at(self._engine.step),
                self._engine.k,
                self._engine.numel,
                self._engine.num_dense,
            )
        self._engine.begin()

    def _follow(self) -> None:
        """Bring what is owed to the present loss scale and learning rates."""
        scale = self._followed.scale_factor()
        if scale != 1.0:
            self._engine.rescale(scale)
        factors = self._followed.rate_factors(self._parameters)
        for name, residual in self.residuals.items() if factors else ():
            residual.mul_(factors.get(name, 1.0))

    def _feed_all(self) -> None:
        """All buckets at once: while DDP may still change them, and to clip before the exchange."""
        signatures = [arrived.signature() for arrived in self._waiting]
        layout = [[self._names[p] for p in arrived.parameters] for arrived in self._waiting]
        self._steady = self._steady + 1 if signatures == self._seen else 0
        self._seen = signatures
        # a loaded layout is kept until DDP comes to it, or has settled on another
        if layout != self._layout and (not self._loaded or self._steady >= STEADY):
            self._lay_out(layout, self.residuals)
        self._loaded = self._loaded and layout != self._layout
        if not self._agreed:
            self._agree()
        staged = self._stage() if layout != self._layout else None
        grads = staged or [arrived.buffer for arrived in self._waiting]
        if self.clip_before is not None:
            clip_(grads, self.clip_before)
        self._begin()
        for bucket, grad in enumerate(grads):
            self._engine.feed(bucket, grad)
        self._staged = staged

    def _finish(self, last: Arrived) -> None:
        stats = self._engine.finish(waited_since=last.at)
        if self._staged is not None:
            self._unstage(self._staged)
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

    def _lay_out(self, layout: list[list[str]], owed: dict[str, Tensor]) -> None:
        """Cut the engine's buckets as given and carry over what is owed."""
        self._engine.lay_out([self._bucket(names) for names in layout])
        self._layout = layout
        if owed:
            like = next(iter(owed.values()))
            self._engine.residual = like.new_zeros(self._engine.numel)
            for name, residual in self.residuals.items():
                if name in owed:
                    residual.copy_(owed[name])

    def _bucket(self, names: list[str]) -> Bucket:
        start, dense, sparse = 0, [], []
        for name in names:
            parameter = self._parameters[name]
            ranges = dense if self.policy.is_dense(name, parameter) else sparse
            ranges.append((start, start + parameter.numel()))
            start += parameter.numel()
        return Bucket(start, tuple(dense), tuple(sparse) if self._finds_unused else ())

    def _views(self) -> dict[str, Tensor]:
        """The gradient of every parameter in DDP's buckets of this step."""
        views = {}
        for arrived in self._waiting:
            views |= self._by_name(arrived.buffer, [self._names[p] for p in arrived.parameters])
        return views

    def _by_name(self, flat: Tensor, names: list[str]) -> dict[str, Tensor]:
        """Views of a bucket's parameters, each in its shape."""
        parameters = [self._parameters[name] for name in names]
        parts = flat.split([parameter.numel() for parameter in parameters])
        return {
            name: part.view(parameter.shape)
            for name, part, parameter in zip(names, parts, parameters, strict=True)
        }

    def _stage(self) -> list[Tensor]:
        """The gradients in the order of the loaded layout, while DDP still has another."""
        views = self._views()
        return [torch.cat([views[name].view(-1) for name in names]) for names in self._layout]

    def _unstage(self, staged: list[Tensor]) -> None:
        """Copy what was staged back into DDP's buckets."""
        views = self._views()
        for names, grad in zip(self._layout, staged, strict=True):
            for name, part in self._by_name(grad, names).items():
                views[name].copy_(part)

    def _agree(self) -> None:
        names = [name for bucket in self._layout for name in bucket]
        facts = asdict(self.settings) | {
            "step": self.step,
            "parameters": len(names),
            "numel": self._engine.numel,
            "numel dense": self._engine.num_dense,
            "buckets": len(self._layout),
            "gradient dtype": str(self._waiting[0].buffer.dtype),
        }
        agree(self.comm, self._waiting[0].buffer.device, facts)
        self._agreed = True


def _end_threads(roll_call: RollCall, exchanger: Exchanger) -> None:
    roll_call.close()
    exchanger.close()


def free_frames(error: BaseException | None) -> None:
    """Forget the locals of an error's frames: they hold the process group, and so connections."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def clip_(grads: list[Tensor], most: float) -> None:
    """Scale this rank's gradient to a norm of at most `most`."""
    norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads])
    )
    scale = torch.clamp(most / (norm + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.dtype))


def taken_over(states: list[dict[str, Any]], comm: Comm) -> dict[str, Any]:
    """The state of this rank out of those of another number of ranks."""
    if len(states) == comm.size:
        return next(s for s in states if json.loads(s["facts"])["rank"] == comm.rank)
    ordered = sorted(states, key=lambda state: json.loads(state["facts"])["rank"])
    facts = [json.loads(state["facts"]) for state in ordered]
    ranks = [its["rank"] for its in facts]
    if ranks != list(range(facts[0]["world_size"])):
        raise ValueError(
            f"expected the states of {facts[0]['world_size']} ranks, got those of ranks {ranks}"
        )
    mine = ordered[comm.rank :: comm.size]
    owed = {
        name: sum((state["residuals"][name] for state in mine), torch.zeros_like(like))
        for name, like in ordered[0]["residuals"].items()
    }
    engine = facts[0]["engine"] | {"numels": []}  # thresholds and bounds were for other ranks
    return {
        "residuals": owed,
        "facts": json.dumps(facts[0] | {"world_size": comm.size, "engine": engine}),
    }
