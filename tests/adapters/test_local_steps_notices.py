# SPDX-License-Identifier: Apache-2.0
"""What `local_steps` notices, and would otherwise get wrong without a word."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oktopk
from idioms import Net
from oktopk.adapters.link import WORLD_SIZES
from oktopk.launch.ranks import LAUNCHERS
from worlds import forkserver


def local_steps(model, **more):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return optimizer, oktopk.local_steps(model, optimizer, **more)


# A job of several ranks, and no process group.


@pytest.mark.parametrize("name", WORLD_SIZES)
def test_a_job_of_several_ranks_needs_a_process_group_first(environ, name):
    environ(**{name: 1})
    local_steps(Net())[1].close()
    environ(**{name: 2})
    with pytest.raises(ValueError, match=f"{name}=2 says .* call .*init_process_group before"):
        local_steps(Net())
    oktopk.simulate(2, lambda comm: local_steps(Net(), comm=comm)[1].close())


def test_the_world_sizes_are_those_of_the_launchers():
    assert set(WORLD_SIZES) == {name for each in LAUNCHERS.values() for name in each.world_size}


def join(rank: int, size: int, folder: str) -> None:
    where = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": size}
    dist.init_process_group("gloo", timeout=timedelta(seconds=30), **where)


def run_alone(size: int, rank_main, folder) -> None:
    """Run `rank_main(rank, folder)` on ranks of their own, that have not joined a group."""
    context = forkserver()
    ranks = [context.Process(target=rank_main, args=(r, str(folder))) for r in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0] * size


def group_afterwards(rank: int, folder: str) -> None:
    optimizer, handle = local_steps(Net(), every=2)
    join(rank, 2, folder)
    optimizer.step()
    with pytest.raises(ValueError, match="a process group of 2 ranks was made after local_steps"):
        optimizer.step()
    handle.close()
    dist.barrier()


def test_a_process_group_that_is_made_afterwards_is_an_error_in_the_first_exchange(tmp_path):
    run_alone(2, group_afterwards, tmp_path)


# Another exchange of the same ranks.


def refused(act) -> str:
    """The message of the ValueError, empty if there was none; closes what was made."""
    try:
        act().close()
    except ValueError as error:
        return str(error)
    return ""


def on_top_of_dense(group) -> dict[str, str]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DistributedDataParallel(Net(), process_group=group)
    singles = [dist.new_group([rank]) for rank in range(2)]
    alone = DistributedDataParallel(Net(), process_group=singles[dist.get_rank()])
    bare = Net()
    zero = ZeroRedundancyOptimizer(bare.parameters(), torch.optim.SGD, group, lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(zero)
    return {
        "ddp": refused(lambda: local_steps(ddp, group=group)[1]),
        "inside": refused(lambda: local_steps(nn.Sequential(ddp), group=group)[1]),
        "zero": refused(lambda: oktopk.local_steps(bare, zero, group=group)),
        "scheduled": refused(lambda: oktopk.local_steps(bare, scheduler, group=group)),
        "module": refused(lambda: local_steps(ddp.module, group=group)[1]),
        "alone": refused(lambda: local_steps(alone, group=group)[1]),
    }


def test_ddp_and_zero_of_the_same_ranks_are_refused(worlds):
    for said in worlds.run(2, on_top_of_dense):
        for name in ("ddp", "inside"):
            assert (
                "DistributedDataParallel keeps the weights of ranks [0, 1] the same" in said[name]
            )
        for name in ("zero", "scheduled"):
            assert "ZeroRedundancyOptimizer keeps the weights of ranks [0, 1]" in said[name]
        assert said["module"] == said["alone"] == ""


def both(group) -> dict[str, str]:
    ddp = DistributedDataParallel(Net(), process_group=group)
    said = {}
    attached = oktopk.attach(ddp)
    said["attached"] = refused(lambda: local_steps(ddp.module, group=group)[1])
    attached.close()
    _, local = local_steps(ddp.module, group=group)
    said["local"] = refused(lambda: oktopk.attach(ddp))
    local.close()
    said["closed"] = refused(lambda: oktopk.attach(ddp))
    _, local = local_steps(Net(), group=group)
    said["other model"] = refused(lambda: oktopk.attach(ddp))
    local.close()
    return said


def test_attach_and_local_steps_of_the_same_ranks_are_refused_in_either_order(worlds):
    for said in worlds.run(2, both):
        assert "ranks [0, 1] exchange the gradients of this model already" in said["attached"]
        assert "ranks [0, 1] exchange the weight changes of this model" in said["local"]
        assert said["closed"] == said["other model"] == ""


def on_two_sites(rank: int, folder: str) -> None:
    """`attach` inside a site of two ranks, and local steps across."""
    join(rank, 4, folder)
    sites = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    ddp = DistributedDataParallel(Net(), process_group=sites[rank // 2])
    handle = oktopk.attach(ddp)
    _, local = local_steps(ddp, group=across[rank % 2])
    handle.close()
    assert refused(lambda: oktopk.attach(ddp)) == ""
    local.close()
    said = refused(lambda: local_steps(ddp, group=dist.group.WORLD)[1])
    assert f"the weights of ranks {[0, 1] if rank < 2 else [2, 3]} the same" in said
    dist.barrier()


def test_attach_inside_a_site_and_local_steps_across_sites_go_together(tmp_path):
    run_alone(4, on_two_sites, tmp_path)
