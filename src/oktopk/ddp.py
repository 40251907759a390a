"""`attach`: two lines for a `DistributedDataParallel` model.

DDP calls the hook for every bucket while backward goes on. The hook puts the bucket on a queue and
returns a future; one thread per model exchanges the buckets in order, on a process group of its
own. So the collectives of a rank leave from one thread in one order, and backward waits only at its
end, as with plain DDP.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from oktopk.comm import Comm, TorchTransport
from oktopk.engine import Engine
from oktopk.exchanger import Arrived, Exchanger
from oktopk.followed import Followed
from oktopk.handshake import agree
from oktopk.layout import Bucket
from oktopk.policy import Policy
from oktopk.settings import Settings
from oktopk.stats import StepStats
from oktopk.weights import check_replicas

log = logging.getLogger("oktopk")

# DDP rebuilds its buckets once, after the first step or (static graph) the second. Asking it
# whether it has would take a lock that backward holds, so a few equal steps must tell.
STEADY = 2


def attach(
    model: DistributedDataParallel,
    *,
    method: str = "oktopk",
    density: float = 0.02,
    warmup_steps: int = 128,
    policy: Policy | None = None,
    on_step: Callable[[StepStats], None] | None = None,
    optimizer: Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    clip_before: float | None = None,
    total_steps: int | None = None,
    timeout: float = 300.0,
    check_every: int = 100,
    **more: Any,
) -> Handle:
    """Compress the gradient exchange of a DDP model. Every rank must call it, before training.

    Args:
        method: a name of `oktopk.METHODS`.
        density: fraction of the entries that is kept, in (0, 1].
        warmup_steps: dense steps before the sparse phase.
        policy: which parameters travel dense; biases, norms and tiny ones by default.
        on_step: called with the `StepStats` of every finished step, from the exchange thread.
        optimizer: residuals follow its learning rate: what was saved up under a large rate is
            applied as that rate would have. Off when None.
        scaler: residuals follow its loss scale, and a NaN is delivered for it to see.
        clip_before: clip this rank's gradient to this norm before the exchange. The norm needs the
            last bucket, so nothing overlaps with backward. To clip after the exchange, call
            `clip_grad_norm_` as always.
        total_steps: how long the run will be, to warn when it ends before the sparse phase.
        timeout: seconds a rank waits for the others before it raises.
        check_every: steps between comparisons of the weights of all ranks; 0 is never.
        more: the other fields of `oktopk.settings.Settings`.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"attach needs a DistributedDataParallel model, got {type(model).__name__}")
    if scaler is not None:
        more.setdefault("on_nonfinite", "deliver")
    settings = Settings(method=method, density=density, warmup_steps=warmup_steps, **more)
    if total_steps is not None and total_steps <= warmup_steps and method != "dense":
        log.warning(
            "the run has %d steps and the warm-up %d: it will never be sparse; lower warmup_steps",
            total_steps,
            warmup_steps,
        )
    comm = _own_comm(model.process_group, timeout)
    followed = Followed(optimizer, scaler)
    handle = Handle(model, settings, comm, policy or Policy(), followed)
    handle.on_step, handle.clip_before, handle.check_every = on_step, clip_before, check_every
    model.register_comm_hook(handle, _hook)
    return handle


def _own_comm(group: Any, timeout: float) -> Comm:
    """A group of the same ranks, so that no collective of DDP's or the user's mixes with ours.

    For a model of only some ranks, the others need not take part; but torch then asks that its
    ranks have made the same groups before.
    """
    ranks = dist.get_process_group_ranks(group)
    own = dist.new_group(
        ranks,
        timeout=timedelta(seconds=timeout),
        backend=dist.get_backend(group),
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
    return Comm(TorchTransport(own, owned=True))


def _hook(handle: Handle, bucket):  # noqa: ANN001, ANN202 - DDP refuses annotations kept as text
    buffer, ready = bucket.buffer(), None
    if buffer.is_cuda:
        ready = torch.cuda.Event()
        ready.record()
    arrived = Arrived(bucket.index(), buffer, bucket.parameters(), bucket.is_last(), ready)
    return handle.exchanger.submit(arrived)


class Handle:
    """What `attach` returns: the statistics, the state, and a way to let go."""

    def __init__(
        self,
        model: DistributedDataParallel,
        settings: Settings,
        comm: Comm,
        policy: Policy,
        followed: Followed,
    ) -> None:
        self.settings = settings
        self.comm = comm
        self.policy = policy
        self.on_step: Callable[[StepStats], None] | None = None
        self.clip_before: float | None = None
        self.check_every = 0
        self.stats: StepStats | None = None
        """Of the last finished step; None before the first. Never half-filled."""

        self._names: dict[Tensor, str] = {
            parameter: name
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad
        }
        self._parameters = {name: parameter for parameter, name in self._names.items()}
        self._engine = Engine(settings, comm, [])
        self._followed = followed
        self._layout: list[list[str]] = []
        self._loaded = False  # the layout came from a state, not from DDP
        self._seen: list[tuple[int, ...]] = []  # signatures of the last step's buckets
        self._steady = 0  # steps for which they have been the same
        self._waiting: list[Arrived] = []
        self._staged: list[Tensor] | None = None
        self.exchanger = Exchanger(weakref.WeakMethod(self._take))
        self._finalizer = weakref.finalize(self, self.exchanger.close)

    @property
    def step(self) -> int:
        """Finished steps."""
        return self._engine.step

    @property
    def skipped_steps(self) -> int:
        """Steps that no rank applied because some rank had a NaN or Inf."""
        return self._engine.skipped

    @property
    def residuals(self) -> dict[str, Tensor]:
        """What this rank still owes, by parameter name, in the parameter's shape."""
        owed = {}
        for bucket, names in enumerate(self._layout):
            residual = self._engine.residual_of(bucket)
            if residual is None:
                return {}
            parts = residual.split([self._parameters[name].numel() for name in names])
            for name, part in zip(names, parts, strict=True):
                owed[name] = part.view(self._parameters[name].shape)
        return owed

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-exact resume needs: residuals by name, thresholds, bounds, counters.

        The keys are the same on every rank; the residuals are this rank's own.
        """
        return {
            "method": self.settings.method,
            "world_size": self.comm.size,
            "rank": self.comm.rank,
            "layout": [list(names) for names in self._layout],
            "residuals": {name: owed.clone() for name, owed in self.residuals.items()},
            "engine": self._engine.state_dict(),
            "followed": self._followed.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Go on where `state_dict` was taken: the same bits as a run that never stopped.

        A list of all ranks' states, saved by another number of ranks, is loaded too: rank r takes
        over what ranks r, r+P, ... owed, so the sum over ranks stays what it was.
        """
        mine = state if isinstance(state, dict) else _taken_over(state, self.comm)
        if mine["world_size"] != self.comm.size:
            raise ValueError(
                f"rank {self.comm.rank}: the state was saved by {mine['world_size']} ranks and "
                f"there are {self.comm.size}: pass the list of all ranks' states"
            )
        unknown = sorted(set(mine["residuals"]) - set(self._parameters))
        if unknown:
            raise ValueError(f"the state has residuals of parameters this model lacks: {unknown}")
        self._lay_out(mine["layout"], mine["residuals"])
        self._engine.load_state_dict(mine["engine"])
        self._followed.load_state_dict(mine["followed"])
        self._loaded, self._steady, self._seen = True, 0, []

    def close(self) -> None:
        """End the exchange thread and its process group. The model must not be trained any more."""
        self._finalizer()
        self.comm.close()

    def _take(self, arrived: Arrived) -> None:
        """One bucket, on the exchange thread."""
        try:
            self._feed(arrived)
        except Exception as error:
            error.add_note(f"oktopk: rank {self.comm.rank}, step {self.step}")
            raise

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
        self._followed.correct(self._engine, self._layout, self._parameters)
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

    def _feed_all(self) -> None:
        """All buckets at once: while DDP may still change them, and to clip before the exchange."""
        signatures = [arrived.signature() for arrived in self._waiting]
        layout = [[self._names[p] for p in arrived.parameters] for arrived in self._waiting]
        self._steady = self._steady + 1 if signatures == self._seen else 0
        self._seen = signatures
        if layout != self._layout and not self._loaded:
            self._lay_out(layout, self.residuals)
        if self.step == 0 or self._loaded:
            self._agree()
        self._loaded = False
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
        for name, part in self._staged_parts():
            self._views()[name].copy_(part)
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
            self.on_step(stats)

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
        start, dense = 0, []
        for name in names:
            parameter = self._parameters[name]
            if self.policy.is_dense(name, parameter):
                dense.append((start, start + parameter.numel()))
            start += parameter.numel()
        return Bucket(start, tuple(dense))

    def _views(self) -> dict[str, Tensor]:
        """The gradient of every parameter in DDP's buckets of this step."""
        views = {}
        for arrived in self._waiting:
            parts = arrived.buffer.split([p.numel() for p in arrived.parameters])
            views |= {
                self._names[p]: part for p, part in zip(arrived.parameters, parts, strict=True)
            }
        return views

    def _stage(self) -> list[Tensor]:
        """The gradients in the order of the loaded layout, while DDP still has another."""
        views = self._views()
        return [torch.cat([views[name] for name in names]) for names in self._layout]

    def _staged_parts(self) -> list[tuple[str, Tensor]]:
        parts = []
        for names, grad in zip(self._layout, self._staged or [], strict=False):
            sizes = [self._parameters[name].numel() for name in names]
            parts += zip(names, grad.split(sizes), strict=True)
        return parts

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


def clip_(grads: list[Tensor], most: float) -> None:
    """Scale this rank's gradient to a norm of at most `most`."""
    norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads])
    )
    scale = torch.clamp(most / (norm + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.dtype))


def _taken_over(states: list[dict[str, Any]], comm: Comm) -> dict[str, Any]:
    """The state of this rank out of those of another number of ranks."""
    states = sorted(states, key=lambda state: state["rank"])
    if [state["rank"] for state in states] != list(range(states[0]["world_size"])):
        raise ValueError(
            f"expected the states of {states[0]['world_size']} ranks, got those of "
            f"{[state['rank'] for state in states]}"
        )
    mine = states[comm.rank :: comm.size]
    owed = {
        name: sum((state["residuals"][name] for state in mine), torch.zeros_like(like))
        for name, like in states[0]["residuals"].items()
    }
    engine = states[0]["engine"] | {"numels": []}  # thresholds and bounds were for other ranks
    return states[0] | {"world_size": comm.size, "residuals": owed, "engine": engine}
