# SPDX-License-Identifier: Apache-2.0
"""`FSDPHandle`: what `attach_fsdp` returns."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor

from oktopk.adapters.announcement import tell_resumed
from oktopk.adapters.fsdp_driver import ShardDriver, ShardLayout, refuse_backward
from oktopk.adapters.handle import BaseHandle, Connection
from oktopk.comm.communicator import Comm, Traffic
from oktopk.errors import ExchangeError, NonfiniteError, StateError
from oktopk.exchange.saved_state import (
    Saved,
    SavedMetadata,
    parse_metadata,
    taken_over,
    without_thresholds,
    write_metadata,
)
from oktopk.optim.staleness import StalenessCorrection, local_shard

# The state of an FSDP model's exchange, as `torch.distributed.checkpoint` saves and reshards it.
#
# Residuals are DTensors in the parameters' shapes, sharded as the parameters are. Every replica
# has residuals of its own, so their keys have the number of the replica. When entries last arrived
# is the same on every replica. What is not a tensor is text, one for each rank:
#
#     {"residuals": {"0": {name: DTensor}}, "arrived": {name: DTensor}, "metadata": {"0-1": text}}
#
# is the state of the rank with shard 1 of replica 0.


KEYS = ("residuals", "arrived", "metadata")


def place(replica: int, shard: int) -> str:
    """The key of a rank's text."""
    return f"{replica}-{shard}"


def as_dtensor(shard: Tensor, like: Tensor) -> DTensor:
    """A shard as a DTensor in the shape of a parameter, sharded as it is."""
    assert isinstance(like, DTensor)
    mesh, placements = like.device_mesh, like.placements
    shape, stride = like.shape, like.stride()
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride)


def as_dtensors(shards: dict[str, Tensor], layout: ShardLayout) -> dict[str, DTensor]:
    return {name: as_dtensor(x, layout.parameters[name]) for name, x in shards.items()}


def saved_mesh(keys: Iterable[str], key: str) -> tuple[int, int]:
    """How many replicas and shards a checkpoint is of, by the names of what it has."""
    pattern = re.compile(re.escape(key) + r"\.metadata\.(\d+)-(\d+)")
    places = [
        tuple(map(int, found.groups())) for name in keys if (found := pattern.fullmatch(name))
    ]
    if not places:
        raise StateError(
            f"the checkpoint has no state of attach_fsdp under {key!r}: save it as "
            f"{{{key!r}: handle.state_dict()}}"
        )
    return max(replica for replica, _ in places) + 1, max(shard for _, shard in places) + 1


def of_this_rank(state: Any, replicas: Comm, shards: Comm) -> dict[str, Any]:
    """One rank's state with this rank's shards as plain tensors, from a state of any mesh.

    If the mesh has changed, the residuals of replicas r, r+R, ... are added up, so sums over
    replicas stay what they were; thresholds and shares of k are found anew.
    """
    if not isinstance(state, dict) or not set(KEYS) <= set(state):
        raise StateError(f"not a state of attach_fsdp: expected one with {sorted(KEYS)}")
    texts, here = state["metadata"], place(replicas.rank, shards.rank)
    if not isinstance(state["residuals"], dict):
        raise StateError("'residuals' of the state must have those of a replica, by its number")
    if not isinstance(texts, dict) or not texts:
        raise StateError("'metadata' of the state must have the text of a rank")
    metadata = parse_metadata(texts.get(here, next(iter(texts.values()))))
    _check_tensors("arrived", state["arrived"])
    for replica, tensors in state["residuals"].items():
        _check_tensors(f"residuals of replica {replica}", tensors)
    arrived = {name: local_shard(x) for name, x in state["arrived"].items()}
    if metadata.shards == shards.size and metadata.replicas == replicas.size:
        if place(metadata.replica, metadata.shard) != here:
            raise StateError(
                f"the state is of shard {metadata.shard} of replica {metadata.replica}, and this "
                f"rank has shard {shards.rank} of replica {replicas.rank}: load each rank's own"
            )
        own = state["residuals"].get(str(replicas.rank))
        if own is None:
            raise StateError(f"the state has no residuals of replica {replicas.rank}")
        residuals = {name: local_shard(x) for name, x in own.items()}
    else:
        residuals = _taken_over(state["residuals"], metadata, replicas)
        metadata = _moved(metadata, replicas, shards)
    return {"residuals": residuals, "arrived": arrived, "metadata": write_metadata(metadata)}


def _check_tensors(what: str, tensors: Any) -> None:
    if not isinstance(tensors, dict) or not all(isinstance(x, Tensor) for x in tensors.values()):
        raise StateError(f"the {what} in the state must be tensors by name")


def _taken_over(
    by_replica: dict[str, dict[str, Tensor]], metadata: SavedMetadata, replicas: Comm
) -> dict[str, Tensor]:
    """The sums of the residuals that this replica takes over."""
    mine = [
        str(each) for each in taken_over(range(metadata.replicas), replicas.rank, replicas.size)
    ]
    if not set(mine) <= set(by_replica) or not by_replica:
        raise StateError(
            f"the state is of {metadata.replicas} replicas of {metadata.shards} shards; for "
            f"{replicas.size} replicas this one needs the residuals of replicas {mine}, and has "
            f"only those of {sorted(by_replica)}: load it with handle.load_checkpoint"
        )
    like = next(iter(by_replica.values()))
    return {
        name: sum((local_shard(by_replica[each][name]) for each in mine), torch.zeros_like(zero))
        for name, zero in ((name, local_shard(x)) for name, x in like.items())
    }


def _moved(metadata: SavedMetadata, replicas: Comm, shards: Comm) -> SavedMetadata:
    """For a rank of another mesh; thresholds, bounds and shares of k were for other shards."""
    return msgspec.structs.replace(
        metadata,
        rank=replicas.rank * shards.size + shards.rank,
        world_size=replicas.size * shards.size,
        shards=shards.size,
        engine=without_thresholds(metadata.engine),
        layout=[],
        settled_layout=[],
    )


USE_DCP = (
    "save handle.state_dict() with torch.distributed.checkpoint, and load it with "
    "handle.load_checkpoint"
)


class FSDPHandle(BaseHandle[ShardDriver]):
    """The statistics and the state of an attached FSDP model, and a way to detach it.

    Statistics and residuals are those of this rank's shard.
    """

    def __init__(self, driver: ShardDriver, connection: Connection) -> None:
        super().__init__(driver, connection)
        self.failure: BaseException | None = None
        """The error that ended the exchange for good; None while it is well."""

        parameters = driver.parameters
        this = weakref.ref(self)  # the optimizer must not keep a handle alive
        self._staleness = StalenessCorrection(
            driver.scaling.optimizer,
            {name: p for name, p in parameters.parameters.items() if not parameters.is_dense(name)},
            self.settings,
            last=lambda: handle.stats if (handle := this()) else None,
            logs=self._everyone.rank == 0,
        )
        self._backward = -1
        """The number that autograd gave to the backward whose end is awaited; -1 if none is. One
        that raised never ends."""

        self._finalizer = weakref.finalize(self, connection.failure_detector.close)
        for number, module in enumerate(parameters.modules):
            module.hook(partial(self._take, number))

    @property
    def traffic(self) -> dict[str, Traffic]:
        """What this rank sent and received since the start, by axis.

        `replicate` is what goes between sites. `shard` is what the exchange adds inside a site:
        flags and counts. `reduce-scatter` is what FSDP itself sends of gradients inside a site, by
        the formula of a reduce-scatter; its all-gathers of parameters are not counted.
        """
        return super().traffic | {"reduce-scatter": self.driver.reduce_scattered}

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-exact resume needs, for `torch.distributed.checkpoint`.

        Residuals are DTensors by name, those of this rank's replica; so are the steps in which
        entries last arrived. It belongs to the weights after `optimizer.step()`. The keys are the
        same at any time, so the state of a fresh handle is a template to load into, on the same
        mesh. `load_checkpoint` loads a checkpoint of any mesh.
        """
        layout = self.driver.parameters
        replica, shard = self.comm.rank, self.driver.shard_comm.rank
        with self.driver.engine.lock.reading():
            text = self._metadata(layout.layout, self.driver.scaling.save())
            residuals = self.driver.copied_residuals()
            arrived = self._staleness.state_dict()
        return {
            "residuals": {str(replica): as_dtensors(residuals, layout)},
            "arrived": as_dtensors(arrived, layout),
            "metadata": {place(replica, shard): text},
        }

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Continue where `state_dict` was taken: the same bits as a run that never stopped.

        On another mesh the residuals must be those that `load_checkpoint` asks for: with R
        replicas, replica r takes over the residuals of replicas r, r+R, ... Every rank must call
        it, and they wait for each other: where one of them refuses its state, all of them raise.
        """
        saved = self._read(state)
        with self.driver.engine.lock.changing():
            self._load_exchange(saved, self.driver.layout)
            self.driver.scaling.load(saved.metadata.residual_scaling)
            self._staleness.load_state_dict(saved.arrived)
            self.driver.is_checked = False
        tell_resumed(self.driver)

    def load_checkpoint(
        self,
        checkpoint_id: Any = None,
        *,
        key: str = "oktopk",
        storage_reader: StorageReader | None = None,
    ) -> None:
        """Load a state that `torch.distributed.checkpoint` saved under `key`, on any mesh.

        Every rank must call it. The arguments are those of `dcp.load`.
        """
        reader = storage_reader or FileSystemReader(checkpoint_id)
        keys = reader.read_metadata().state_dict_metadata
        template = {key: self._template(*saved_mesh(keys, key))}
        load_distributed(template, storage_reader=reader)
        self.load_state_dict(template[key])

    @property
    def by_rank(self) -> NoReturn:
        """Not for a sharded model, whose state `torch.distributed.checkpoint` saves as it is."""
        raise TypeError(f"the state of a sharded model is not saved by rank: {USE_DCP}")

    def gathered_state_dict(self) -> dict[str, Any]:
        """Not for a sharded model, whose state does not fit one rank."""
        raise TypeError(f"the state of a sharded model is not gathered on one rank: {USE_DCP}")

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Not for a sharded model, whose state is of DTensors."""
        raise TypeError(f"the state of a sharded model is not saved by rank: {USE_DCP}")

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Not for a sharded model: use `load_checkpoint`."""
        raise TypeError(f"the state of a sharded model is not saved by rank: {USE_DCP}")

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Close the process groups. A later backward of the model raises, until `attach_fsdp` is
        called again: the replicas would drift apart."""
        for module in self.driver.parameters.modules:
            module.hook(refuse_backward)
        self._staleness.close()
        self.driver.buffers.close()
        self._finalizer()
        self._close_comm()

    def _template(self, replicas: int, shards: int) -> dict[str, Any]:
        """What this rank needs of a checkpoint of so many replicas and shards, to load into."""
        mine = self.state_dict()
        if (replicas, shards) == (self.comm.size, self.driver.shard_comm.size):
            return mine
        layout = self.driver.parameters
        # one replica at least, for the shapes
        needed = taken_over(range(replicas), self.comm.rank, self.comm.size) or [0]
        residuals = {
            str(each): as_dtensors({name: layout.zeros(name) for name in layout.parameters}, layout)
            for each in needed
        }
        return mine | {"residuals": residuals, "metadata": {place(0, 0): ""}}

    def _parse(self, state: dict[str, Any] | list[dict[str, Any]]) -> Saved:
        own = of_this_rank(state, self.comm, self.driver.shard_comm)
        return super()._parse(own)

    def _take(self, number: int, flat: Tensor) -> None:
        """The hook of an FSDP module, in backward."""
        with self._failing_together():
            backward = torch._C._current_graph_task_id()
            if backward != self._backward:  # the first of this backward
                if self._backward >= 0:
                    self.driver.forget()
                self._backward = backward
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            self.driver.take(number, flat)

    def _end_backward(self) -> None:
        """Called by autograd after FSDP's own callback, which has reduced what was left."""
        with self._failing_together():
            self._backward = -1
            self.driver.exchange()

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """An error in the block ends the exchange on all ranks; a skipped step does not."""
        detector = self._connection.failure_detector
        detector.step = self.step
        try:
            if self.failure is not None:
                raise RuntimeError(f"an exchange failed before: {self.failure}") from self.failure
            if detector.diagnosis is not None:
                raise ExchangeError("another rank reported a failure")
            yield
        except NonfiniteError:
            raise
        except BaseException as error:  # Ctrl-C too: the other ranks must learn of it
            if self.failure is None:
                self.failure = error
                detector.abort(error, self._everyone)  # raises one that names the rank at fault
            raise
