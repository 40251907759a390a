# SPDX-License-Identifier: Apache-2.0
"""`BaseHandle`: statistics and state of a model's exchange, whichever adapter drives it."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

from oktopk.adapters.driver import Driver, OnStep
from oktopk.adapters.saved_states import (
    GatheredState,
    NoStatesError,
    Offer,
    StateByRank,
    gather_states,
    moment_of,
    name_of,
    names_to_load,
    nothing_to_load,
    offers,
    read_states,
    refuse_shared_names,
    write_state,
)
from oktopk.comm.communicator import Comm, Traffic
from oktopk.comm.consistency import newest_on_all
from oktopk.comm.failure import FailureDetector
from oktopk.errors import ExchangeError, StateError
from oktopk.exchange import saved_state
from oktopk.exchange.layout import Layout
from oktopk.exchange.saved_state import Exchanged, SavedRates
from oktopk.settings import Settings
from oktopk.stats import StepStats
from oktopk.utils.files import FileError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

log = logging.getLogger("oktopk")

AgreeToLoad = Callable[[dict[str, Any], int], None]
"""Compares values of all ranks that load a state after a number of steps."""

AnyDriver = TypeVar("AnyDriver", bound=Driver[Any])
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """How a handle finds the other ranks, beside its communicator."""

    failure_detector: FailureDetector
    agree_to_load: AgreeToLoad
    owns_comm: bool
    """Whether the communicator was made for this handle, and is closed with it."""

    everyone: Comm | None = None
    """All ranks, where the communicator of the exchange has only some of them. Closing it closes
    that one too."""


class BaseHandle(ABC, Generic[AnyDriver]):
    """What all handles have. `driver` runs the steps."""

    exchanged: Exchanged = "gradients"
    """What the residuals are of: a state of another kind is refused."""

    method_advice = "attach with the method it was saved with"
    """What to do with a state of another method."""

    def __init__(
        self, driver: AnyDriver, connection: Connection, *, method_is_auto: bool = False
    ) -> None:
        self.driver = driver
        self._connection = connection
        self._method_is_auto = method_is_auto

    def __reduce__(self) -> str:
        """Refuse to be saved or copied: connections cannot be."""
        raise TypeError(
            f"{type(self).__name__} holds connections to other ranks, which cannot be saved or "
            "copied: save handle.state_dict() on every rank, or call handle.save(folder), and save "
            "or copy the bare module (model.module), not the DistributedDataParallel around it"
        )

    @property
    def comm(self) -> Comm:
        """The communicator of the exchange; its ledger counts all bytes."""
        return self.driver.comm

    @property
    def _everyone(self) -> Comm:
        """The communicator of all ranks."""
        return self._connection.everyone or self.comm

    @property
    def _place(self) -> tuple[int, int]:
        """The number of this rank among all, shard by shard of replica by replica, and how many."""
        return self.driver.rank, self.comm.size * self.driver.engine.shards.size

    @property
    def settings(self) -> Settings:
        """The settings in effect, the optimizer's preset included."""
        return self.driver.engine.settings

    @property
    def stats(self) -> StepStats | None:
        """What the last finished step did; None before the first. Never half-filled."""
        return self.driver.stats

    @property
    def traffic(self) -> dict[str, Traffic]:
        """What this rank sent and received since the start, by axis.

        `replicate` is what goes to other replicas. Where several ranks share a replica
        (`local_group`, or FSDP), `shard` is what the exchange sends among them.
        """
        shards = self.driver.engine.shards
        axes = {"replicate": self.comm.ledger.total()}
        return axes | ({"shard": shards.comm.ledger.total()} if shards.comm else {})

    @property
    def on_step(self) -> OnStep | None:
        """The callback for every finished step. It may be replaced at any time."""
        return self.driver.on_step

    @on_step.setter
    def on_step(self, on_step: OnStep | None) -> None:
        self.driver.on_step = on_step

    @property
    def step(self) -> int:
        """The number of finished exchanges, those of the warm-up and skipped ones included."""
        return self.driver.engine.step

    @property
    def skipped_steps(self) -> int:
        """Steps that no rank applied because some rank had a NaN or Inf."""
        return self.driver.engine.skipped

    @property
    def residuals(self) -> dict[str, Tensor]:
        """This rank's residual by parameter name, in the parameter's shape.

        Of the last finished step, and valid until the next one ends; empty before the sparse phase.
        """
        return self.driver.residuals

    @property
    def dense_parameters(self) -> list[str]:
        """Names of the parameters that travel dense: biases, norms, tiny ones, and as asked."""
        return self.driver.parameters.dense

    @property
    def gathered(self) -> GatheredState:
        """The states of all ranks as one, for frameworks that save what one rank has.

        `accelerator.register_for_checkpointing(handle.gathered)`
        """
        return GatheredState(self)

    @property
    def by_rank(self) -> StateByRank:
        """The state of this rank under its number, for `torch.distributed.checkpoint`.

            dcp.save({"oktopk": handle.by_rank}, checkpoint_id=folder)
            dcp.load({"oktopk": handle.by_rank}, checkpoint_id=folder)

        `load_checkpoint` loads that of another number of ranks too.
        """
        return StateByRank(self, *self._place)

    def load_checkpoint(
        self,
        checkpoint_id: Any = None,
        *,
        key: str = "oktopk",
        storage_reader: StorageReader | None = None,
    ) -> None:
        """Load a state that `torch.distributed.checkpoint` saved under `key`, of any number of
        ranks.

        Every rank of the job must call it. The arguments are those of `dcp.load`.
        """
        # half a second, for those who need it
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        reader = storage_reader or FileSystemReader(checkpoint_id)
        found = reader.read_metadata().state_dict_metadata
        names = names_to_load(found, key, *self._place)
        template: dict[str, Any] = {key: dict.fromkeys(names)}
        load(template, storage_reader=reader)
        states = [state for (state,) in template[key].values()]
        is_own = names == [name_of(*self._place)]
        self.load_state_dict(states[0] if is_own else states)

    def _refuse_shared_names(self) -> None:
        """Raise StateError where `torch.distributed.checkpoint` asks for the state of this rank."""
        allowed = StateByRank.state_dict, BaseHandle.gathered_state_dict
        refuse_shared_names(self.comm.global_rank, self._place[1], *allowed)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that a bit-exact resume needs."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Continue where `state_dict` was taken."""

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write this rank's state into a folder, beside those of the other ranks.

        Every rank must call it; none waits for another. The file is
        `oktopk-RANK-of-WORLD.step-N.pt` after N exchanges, or `.step-N-M.pt` M local steps later.
        The last two are kept, so that there is one of every rank if one of them cannot write.

        Raises:
            OSError: the file cannot be written; it is named. Earlier ones are still there.
        """
        state = self.state_dict()
        write_state(Path(folder), state, *self._place, moment_of(state))

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Continue from what `save` wrote into a folder, on this or another number of ranks.

        Every rank must call it, and they wait for each other: where one of them cannot read its
        state, all of them raise. The newest state that all ranks can read is loaded; a warning
        names a newer file that one of them cannot. A rank reads its own file; with another world
        size it reads those of all ranks, and `load_state_dict` says who takes over which residuals.

        Raises:
            FileError: the folder does not have the states that are needed.
            StateError: a state is of another model, method or version.
            ExchangeError: another rank did not call it in time.
        """
        self.load_state_dict(self._read_together(Path(folder)))

    def _read_together(self, folder: Path) -> dict[str, Any] | list[dict[str, Any]]:
        """The states of a folder that this rank needs. Collective: if a rank cannot read or use
        them, or there is no step whose state all have, all raise `FileError` or `StateError`. Only
        if no rank has found any state, it is `NoStatesError`."""
        states, problem = None, None
        self._connection.agree_to_load({}, self.step)  # names a rank that did not call it
        found = offers(folder, *self._place)
        try:
            states = self._read_newest(folder, found)
            outcome = self._moment(self._parse(states))
        except NoStatesError as error:
            problem, outcome = error, "not there"
        except FileError as error:
            problem, outcome = error, _listed(found)
        except StateError as error:
            problem, outcome = error, "refused"
        try:
            self._connection.agree_to_load({"their state": outcome}, self.step)
        except ValueError as error:
            reason = problem or (
                f"{folder}: a rank cannot use its state, or has that of another step than its name "
                "says"
            )
            kind = StateError if isinstance(problem, StateError) else FileError
            problem = kind(f"{reason} ({error})")
        if states is None or problem is not None:
            raise problem or AssertionError("no state was read")
        return states

    def _read_newest(
        self, folder: Path, found: list[Offer]
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """The newest states of a folder that all ranks can read. Collective: a rank takes those it
        cannot read from what it has `found`, and all choose again, until all have read them."""
        device, states = self.driver.parameters.device, None
        chosen: Offer | None = None
        unreadable: list[FileError] = []
        while True:
            before = chosen
            chosen = self._collective(lambda: newest_on_all(found, 4, self._everyone, device))
            if chosen is None or chosen == before:
                break
            try:
                states = read_states(folder, *self._place, chosen)
            except FileError as error:
                found.remove(chosen)
                unreadable.append(error)
        if chosen is None or states is None:
            raise next(iter(unreadable), None) or nothing_to_load(folder, *self._place, before)
        for error in unreadable:
            log.warning(
                "rank %d: %s; the state %s is loaded instead, and the weights must be those of "
                "that step",
                self.comm.global_rank,
                error,
                _listed([chosen]),
            )
        return states

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return False

    @abstractmethod
    def close(self) -> None:
        """End the exchange and release its connections."""

    def gathered_state_dict(self) -> dict[str, Any]:
        """The states of all ranks, on every rank. A collective: all ranks must call it.

        For frameworks that save what one rank has. It takes the memory of all ranks' states.
        """
        state, device = self.state_dict(), self.driver.parameters.device
        return self._collective(lambda: gather_states(state, self._everyone, device))

    def _collective(self, act: Callable[[], T]) -> T:
        """Run a collective of all ranks that is no part of an exchange."""
        try:
            return act()
        except ExchangeError as error:
            # raises one that names the rank
            self._connection.failure_detector.abort(error, self._everyone)
            raise

    def _metadata(self, settled_layout: Layout, rates: SavedRates) -> str:
        """All of the state that is not a tensor, as text."""
        budget = self.driver.budget
        rank, world_size = self._place
        metadata = saved_state.SavedMetadata(
            format=saved_state.FORMAT,
            exchanged=self.exchanged,
            method=self.settings.method,
            world_size=world_size,
            rank=rank,
            frozen=self.driver.parameters.frozen,
            layout=self.driver.layout,
            settled_layout=settled_layout,
            engine=self.driver.engine.save(),
            residual_scaling=rates,
            budget=None if budget is None else budget.save(),
            shards=self.driver.engine.shards.size,
        )
        return saved_state.write_metadata(metadata)

    def _read(self, state: dict[str, Any] | list[dict[str, Any]]) -> saved_state.Saved:
        """Check a state. In the middle of training all ranks load one, or none does.

        A rank that loads alone would begin its next step with a consistency check that no other
        rank expects. Before the first step all ranks do expect it, so no rank has to wait there.
        Shards of a model have collectives in between, in which ranks would wait for one that has
        refused its state, so they agree at any time.
        """
        saved, problem = None, None
        try:
            saved = self._parse(state)
        except StateError as error:
            problem = error
        if self.driver.is_checked or self.driver.engine.shards.size > 1:
            loaded = "refused" if saved is None else self._moment(saved)
            try:
                self._connection.agree_to_load({"the loaded state": loaded}, self.step)
            except ValueError as error:
                problem = problem or error
        if saved is None or problem is not None:
            raise problem or AssertionError("no state was read")
        return saved

    def _parse(self, state: dict[str, Any] | list[dict[str, Any]]) -> saved_state.Saved:
        """This rank's part of a state; StateError if it does not fit."""
        rank, world_size = self._place
        return saved_state.load(
            state,
            rank=rank,
            world_size=world_size,
            method=None if self._method_is_auto else self.settings.method,
            exchanged=self.exchanged,
            advice=self.method_advice,
            parameters=self.driver.parameters.stored(),
            frozen=self.driver.parameters.frozen,
        )

    def _moment(self, saved: saved_state.Saved) -> str:
        """When a state was saved, which must be the same on every rank, for messages."""
        return f"of step {saved.metadata.engine.step}"

    def _load_exchange(self, saved: saved_state.Saved, layout: Layout) -> None:
        """Take over method, buckets, residuals, thresholds and counters."""
        engine, metadata = self.driver.engine, saved.metadata
        has_residual = any(bool(part.any()) for part in saved.residuals.values())
        engine.settings = replace(self.settings, method=metadata.method)
        self.driver.load_budget(metadata.budget)
        self.driver.set_layout(layout, saved.residuals if has_residual else {})
        engine.load(metadata.engine)
        self.driver.start_is_known = True

    def _close_comm(self) -> None:
        self.comm.is_attached = False
        if self._connection.owns_comm:
            self._everyone.close()


def _listed(found: list[Offer]) -> str:
    """The steps of the states that a rank could load, for a message; "not readable" for none."""
    steps = [f"{step}" if not local else f"{step}-{local}" for _, step, local, _ in sorted(found)]
    return f"of step {' and '.join(steps)}" if steps else "not readable"


# Which handles exchange which parameters with which ranks.
#
# `attach` and `local_steps` may share a model, dense or sparse gradients inside a site and local
# steps across sites. Over the same ranks one of them would only repeat what the other has done.


@dataclass(frozen=True, slots=True)
class _Reach:
    """What a handle exchanges, and with which ranks of the job."""

    parameters: frozenset[int]
    """Their ids: the handle keeps them alive."""

    ranks: frozenset[int]


_OPEN: WeakKeyDictionary[BaseHandle, _Reach] = WeakKeyDictionary()


def note_open(handle: BaseHandle, parameters: Iterable[Tensor], ranks: Collection[int]) -> None:
    """Remember a handle until it is closed or dropped."""
    _OPEN[handle] = _Reach(frozenset(map(id, parameters)), frozenset(ranks))


def refuse_other_exchange(
    parameters: Iterable[Tensor], ranks: Collection[int], exchanged: Exchanged
) -> None:
    """Raise ValueError where the other kind of handle has these parameters and two of the ranks."""
    ids = set(map(id, parameters))
    for handle, reach in list(_OPEN.items()):
        shared = sorted(reach.ranks.intersection(ranks))
        if handle.exchanged != exchanged and len(shared) > 1 and not handle.closed:
            if reach.parameters.isdisjoint(ids):
                continue
            raise ValueError(
                f"ranks {shared} exchange the {handle.exchanged} of this model already, so they "
                f"cannot exchange its {exchanged} too: close() the other handle first, or let one "
                "work inside a site and the other across sites (docs/guides/local_steps.md)"
            )
