# SPDX-License-Identifier: Apache-2.0
"""Ranks of a subgroup, or of sites, have in messages the numbers that they have in the job."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import oktopk
from idioms import Net, batch
from oktopk.comm.communicator import Comm
from oktopk.comm.torch_transport import TorchTransport
from sites import Net as Sharded
from sites import batch as sharded_batch
from sites import mesh_of, shard

MEMBERS = [1, 3]


def attached(group: dist.ProcessGroup, **more):
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), process_group=group)
    return model, oktopk.attach(model, warmup_steps=0, timeout=6, verbose=False, **more)


def backward(model, step: int, *, spoil: bool = False) -> None:
    x, y = batch(dist.get_rank(), step)
    (cross_entropy(model(x), y) * (float("nan") if spoil else 1)).backward()


def different_arguments(group) -> None:
    attached(group, density=0.1 * (1 + dist.get_rank() // 3))


def late_attach(group) -> None:
    if dist.get_rank() == 1:
        model = DistributedDataParallel(Net(), process_group=group, init_sync=False)
        oktopk.attach(model, timeout=1)


def no_message(group) -> None:
    if dist.get_rank() == 1:
        comm = Comm(TorchTransport(group))
        comm.all_gather_header(torch.zeros(1), stage="start")


def different_weights(group) -> None:
    model, handle = attached(group, check_every=1)
    if dist.get_rank() == 3:
        model.module.middle.weight.data += 1
    try:
        for step in range(2):
            backward(model, step)
    finally:
        handle.close()


def nan_on_one_rank(group) -> None:
    model, handle = attached(group, on_nonfinite="raise")
    try:
        backward(model, 0, spoil=dist.get_rank() == 1)
    finally:
        handle.close()


def failing_rank(group) -> None:
    def fail(stats) -> None:
        if dist.get_rank() == 3 and stats.step == 1:  # after DDP has rebuilt its buckets
            raise SystemExit("enough")

    model, handle = attached(group, on_step=fail)
    try:
        for step in range(3):
            backward(model, step)
    finally:
        handle.close()


def different_reducers(group) -> None:
    reducer = oktopk.Reducer(1000 + dist.get_rank(), group=group)
    reducer.reduce_(torch.zeros(reducer.numel))


def even_out(group: dist.ProcessGroup) -> None:
    """Let all ranks be in equally many groups, as torch asks of those that make one alone."""
    named = dist.distributed_c10d._world.pg_names
    counts: list[int] = [0] * dist.get_world_size(group)
    dist.all_gather_object(counts, len(named), group=group)
    while len(named) < max(counts):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


def in_subgroup(group, act, seconds: float) -> str:
    """What a member of a subgroup is told when it does this."""
    own = dist.new_group(MEMBERS, timeout=timedelta(seconds=seconds))
    if dist.get_rank() not in MEMBERS:
        return "no member"
    even_out(own)
    try:
        act(own)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (different_arguments, "density is 0.1 on rank 1 but 0.2 on rank 3"),
        (late_attach, "rank 3 did not call attach within 1 s"),
        (no_message, "no exchange with rank 3"),
        (different_weights, "weights of 'middle.weight' differ between rank 1 and rank 3"),
        (nan_on_one_rank, "rank 1, step 0: a gradient had a NaN"),
        (failing_rank, "rank 3 failed in step 1: SystemExit: enough"),
        (different_reducers, "numel is 1001 on rank 1 but 1003 on rank 3"),
    ],
)
def test_messages_name_ranks_of_the_job(worlds, act, said):
    assert said in worlds.run(4, in_subgroup, act, 1 if act is no_message else 30)[1]


def nan_in_a_shard(group) -> list[str]:
    """Local steps between two sites of two ranks, with a NaN in a shard of the second site."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("oktopk").addHandler(handler)
    mesh = mesh_of(2)
    model = shard(Sharded(), mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    across = mesh["replicate"].get_group()
    handle = oktopk.local_steps(model, optimizer, every=1, group=across, verbose=False)
    model(sharded_batch(dist.get_rank(), 0)[0]).square().mean().backward()
    if dist.get_rank() == 3:
        model.head.weight.grad._local_tensor[0, 0] = float("nan")
    optimizer.step()
    handle.close()
    logging.getLogger("oktopk").removeHandler(handler)
    return told


def test_the_log_names_ranks_of_the_job_and_not_of_the_site(worlds):
    for rank, told in enumerate(worlds.run(4, nan_in_a_shard)):
        assert told and all(line.startswith(f"rank {rank}, ") for line in told)
