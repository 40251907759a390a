# SPDX-License-Identifier: Apache-2.0
"""Training by local steps as people write it: a plain module, any optimizer, one more line."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import oktopk
from idioms import Net, batch
from oktopk.adapters import thread

LOCAL = {"every": 4, "density": 0.05, "outer_momentum": 0.5, "outer_lr": 0.7, "check_every": 2}


def start(where, seed: int = 0, dtype=torch.float32, **more):
    """A model, its optimizer and the handle; `where` is a process group or a `Comm`."""
    torch.manual_seed(seed)
    net = Net().to(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    place = {"comm": where} if isinstance(where, oktopk.Comm) else {"group": where}
    return net, optimizer, oktopk.local_steps(net, optimizer, **place, **(LOCAL | more))


def take_steps(net, optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        x, y = batch(rank, step)
        dtype = next(net.parameters()).dtype
        cross_entropy(net(x.to(dtype)).float(), y).backward()
        optimizer.step()


def weights_of(net) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def changes_of(state: dict) -> dict[str, torch.Tensor]:
    """What a rank has not exchanged yet: its residual, and its weight change since the anchor, or
    since the launch of the exchange that is in flight."""
    since = state["launched"] or state["anchor"]
    return {name: state["residuals"][name] + since[name] - state["weights"][name] for name in since}


def fragments_of(state: dict) -> list[dict]:
    return state.get("fragments", [state])


def same_state(a: dict, b: dict) -> bool:
    """Whether two states are equal to the bit."""
    tensors = ("residuals", "anchor", "weights", "momentum", "launched")
    return all(
        all(same(x[key], y[key]) for key in tensors)
        and all(x[key] == y[key] for key in ("metadata", "local_steps", "launched_stats"))
        for x, y in zip(fragments_of(a), fragments_of(b), strict=True)
    )


def two_levels(rank: int, folder: str) -> None:
    """One of 4 ranks on 2 sites: DDP inside a site, local steps across; saves what it saw."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    where = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": 4}
    dist.init_process_group("gloo", timeout=timedelta(seconds=30), **where)
    sites = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), process_group=sites[rank // 2])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = oktopk.local_steps(model, optimizer, group=across[rank % 2], **LOCAL)
    seen = []
    for step in range(9):
        take_steps(model, optimizer, rank, range(step, step + 1))
        seen.append((weights_of(model.module), handle.local_steps))
    dist.barrier()
    handle.close()
    torch.save((seen, handle.comm.size, handle.stats.bytes_sent), f"{folder}/rank-{rank}")
    dist.barrier()


def ends_in_flight(rank: int, folder: str, how: str) -> None:
    """One of 2 ranks: rank 0 ends with an exchange in flight that rank 1 begins much later."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    where = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", timeout=timedelta(seconds=30), **where)
    net, optimizer, handle = start(None, delay=3, timeout=20.0)
    take_steps(net, optimizer, rank, range(7))  # the first exchange has been applied
    if rank == 0:
        take_steps(net, optimizer, rank, range(7, 9))
        if how == "soon":
            thread.CLOSE_SECONDS = 0.5
        if how != "exit":
            dist.destroy_process_group()
        return
    time.sleep(2)
    said = ""
    try:
        take_steps(net, optimizer, rank, range(7, 11))
    except oktopk.ExchangeError as error:
        said = str(error)
    torch.save((said, handle.step), f"{folder}/said")
