# SPDX-License-Identifier: Apache-2.0
"""The state of an FSDP model's exchange, as `torch.distributed.checkpoint` saves and reshards it.

Residuals are DTensors in the parameters' shapes, sharded as the parameters are. Every replica has
residuals of its own, so their keys have the number of the replica. When entries last arrived is the
same on every replica. What is not a tensor is text, one for each rank:

    {"residuals": {"0": {name: DTensor}}, "arrived": {name: DTensor}, "metadata": {"0-1": text}}

is the state of the rank with shard 1 of replica 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from oktopk.adapters.fsdp.parameters import ShardLayout
from oktopk.comm.communicator import Comm
from oktopk.engine.saved_state import (
    SavedMetadata,
    parse_metadata,
    taken_over,
    without_thresholds,
    write_metadata,
)
from oktopk.errors import StateError
from oktopk.optim.flat_views import local_shard

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
