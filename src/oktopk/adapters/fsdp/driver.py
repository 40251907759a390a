# SPDX-License-Identifier: Apache-2.0
"""`ShardDriver`: exchanges this rank's shards of the gradients with the other replicas.

FSDP calls a hook with every flat vector that it has reduced inside the site. The hook only notes
it: a step may be applied only when no rank had a NaN, and the k largest entries are those of the
whole model. The exchange of all of them runs at the end of backward, before `backward()` returns:
so clipping and the optimizer see averages over all replicas, as with torch's own HSDP.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from oktopk.adapters.driver import OnStep
from oktopk.adapters.fsdp.modules import ShardedModule, is_in_backward
from oktopk.adapters.fsdp.parameters import ShardLayout
from oktopk.adapters.gradient_driver import GradientDriver
from oktopk.comm.communicator import Comm
from oktopk.comm.consistency import check_consistency
from oktopk.comm.ledger import Traffic
from oktopk.engine.shards import ShardGroup
from oktopk.errors import ReplicaError
from oktopk.optim.flat_views import local_shard
from oktopk.optim.residual_scaling import ResidualScaling
from oktopk.settings import Settings


@dataclass(slots=True)
class Reduced:
    """What a backward has handed over so far."""

    flats: dict[int, Tensor] = field(default_factory=dict)
    """By number of the FSDP module: its reduced gradient, which `.grad` shows or is a copy of."""

    before: dict[str, Tensor] = field(default_factory=dict)
    """By parameter: the gradient that was there before this backward."""


class ShardDriver(GradientDriver[ShardLayout]):
    """The steps of an FSDP model on this rank."""

    line_to_load = "handle.load_checkpoint(folder)"

    def __init__(
        self,
        settings: Settings,
        comm: Comm,
        parameters: ShardLayout,
        scaling: ResidualScaling,
        check_every: int,
        on_step: OnStep | None,
        shards: ShardGroup,
        *,
        verbose: bool,
    ) -> None:
        super().__init__(
            settings, comm, parameters, scaling, check_every, on_step, verbose, shards=shards
        )
        self.shard_comm = shards.comm
        self.reduce_scattered = Traffic()
        """What FSDP's reduce-scatters of the gradients had this rank send, by their formula."""

        self._reduced = Reduced()
        self._partial: dict[int, Tensor] = {}
        """By number of the FSDP module: sums of backwards that do not all-reduce."""

        self.set_layout(parameters.layout, {})

    def copied_residuals(self) -> dict[str, Tensor]:
        """A copy of this rank's residuals by name, zero before the first sparse step."""
        views, layout = self.residuals, self.parameters
        return {
            name: views[name].clone() if name in views else layout.zeros(name)
            for name in layout.parameters
        }

    def take(self, number: int, flat: Tensor) -> None:
        """Note the reduced gradient of an FSDP module. FSDP makes `.grad` of it afterwards."""
        module = self.parameters.modules[number]
        self._check(module, flat)
        self._count_reduce_scatter(flat)
        if module.divides_by_hand:  # then HSDP sums over replicas, and the exchange averages
            flat *= self.comm.size
        if not module.all_reduces:
            self._accumulate(number, flat)
            return
        if number in self._reduced.flats:
            raise ValueError(
                f"step {self.engine.step}: FSDP has reduced the gradients of module "
                f"{module.name!r} twice in one backward, as with a module that is called twice and "
                "has checkpoint(..., use_reentrant=True) inside: attach_fsdp needs "
                "use_reentrant=False there"
            )
        if number in self._partial:
            flat += self._partial.pop(number)
        self._reduced.flats[number] = flat
        for name, parameter in module.parameters.items():
            if parameter.sharded_param.grad is not None:  # let FSDP make a new one
                self._reduced.before[name] = local_shard(parameter.sharded_param.grad)
                parameter.sharded_param.grad = None

    def exchange(self) -> None:
        """End a backward: exchange what FSDP has reduced, and let `.grad` be the averages."""
        reduced, self._reduced = self._reduced, Reduced()
        if is_in_backward(self.parameters.modules[0]):
            raise ValueError(
                "a backward has ended inside another one, as with activation checkpointing by "
                "checkpoint(..., use_reentrant=True) around an FSDP module: attach_fsdp needs "
                "use_reentrant=False there"
            )
        if not reduced.flats:  # a backward without all-reduce
            return
        self._check_complete(reduced)
        flats = [reduced.flats[number] for number in range(len(self.parameters.modules))]
        if not self.is_checked:
            self._check_first(flats[0])
        step = self.begin(flats[0])
        try:
            for number, flat in enumerate(flats):
                step.add_bucket(number, flat)
            stats = self.engine.finish(step)
        except BaseException:
            step.discard()
            raise
        self._deliver(reduced)
        self.report(stats)

    def forget(self) -> None:
        """Forget what backwards have handed over since the last exchange: the last one raised, and
        gradients that were accumulated before it are incomplete with it."""
        self._reduced, self._partial = Reduced(), {}

    def _check_first(self, like: Tensor) -> None:
        """Compare what only the first step shows, on both axes, and the weights."""
        if self.parameters.is_inside_another:
            raise ValueError(
                "attach_fsdp was called with a part of a model that fully_shard was called with as "
                "a whole: the parameters outside of that part would not be exchanged. Call it with "
                "the outermost one"
            )
        self.check_consistency(like, check_every=self.check_every)
        values = {"step": self.engine.step, "shares of k": self.engine.shares}
        check_consistency(self.shard_comm, like.device, values)
        self._check_replicas(self.engine.step)

    def _check_replicas(self, step: int) -> None:
        try:
            super()._check_replicas(step)
        except ReplicaError as error:
            raise ReplicaError(
                f"{error}. FSDP does not copy weights between replicas: give all of them the same "
                "seed, or load the same checkpoint"
            ) from None

    def _accumulate(self, number: int, flat: Tensor) -> None:
        """Add to the sum of backwards without all-reduce, as HSDP does; `.grad` becomes zero."""
        before = self._partial.get(number)
        self._partial[number] = flat.clone() if before is None else before.add_(flat)
        flat.zero_()

    def _deliver(self, reduced: Reduced) -> None:
        """Let `.grad` show the averages where it is a copy, and add what was there before."""
        for number, flat in reduced.flats.items():
            module = self.parameters.modules[number]
            views = self.parameters.views(flat, list(module.parameters))
            for name, average in views.items():
                grad = local_shard(module.parameters[name].sharded_param.grad)
                if grad.data_ptr() != average.data_ptr():  # of another dtype, or offloaded
                    grad.copy_(average)
                if name in reduced.before:
                    grad += reduced.before[name]

    def _count_reduce_scatter(self, flat: Tensor) -> None:
        peers = self.shard_comm.size - 1
        sent = peers * flat.nbytes
        self.reduce_scattered += Traffic(
            payload_sent=sent,
            payload_received=sent,
            messages_sent=peers,
            messages_received=peers,
        )

    def _check(self, module: ShardedModule, flat: Tensor) -> None:
        """Raise where FSDP's flat vector does not have exactly the parameters that it had."""
        where = f"step {self.engine.step}: FSDP module {module.name!r}"
        trained = [each for each in module.group.fsdp_params if each.sharded_param.requires_grad]
        if trained != list(module.parameters.values()):
            raise ValueError(
                f"{where}: requires_grad of its parameters was changed after attach_fsdp; close() "
                "the handle and call attach_fsdp again"
            )
        if flat.numel() != module.numel:
            raise ValueError(
                f"{where}: only {flat.numel()} of the {module.numel} entries of "
                f"{list(module.parameters)} have a gradient: some of these parameters took no part "
                "in the loss; call model.set_reduce_scatter_unused_params(True), or freeze them "
                "before attach_fsdp"
            )
        for name, each in module.parameters.items():
            if getattr(each.sharded_param, "_post_accumulate_grad_hooks", None):
                raise ValueError(
                    f"{where}: parameter {name!r} has a hook that runs when its gradient is "
                    "accumulated (register_post_accumulate_grad_hook), before the exchange between "
                    "replicas: use the gradient after backward instead"
                )

    def _check_complete(self, reduced: Reduced) -> None:
        missing = [
            module.name
            for number, module in enumerate(self.parameters.modules)
            if number not in reduced.flats
        ]
        if missing:
            raise ValueError(
                f"step {self.engine.step}: the FSDP modules {missing} have reduced no gradient in "
                "this backward, and others have: all of them must take part in every step, with "
                "the same set_requires_gradient_sync and set_requires_all_reduce"
            )
