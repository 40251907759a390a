# SPDX-License-Identifier: Apache-2.0
"""A rank of a real job sends damaged messages: all ranks end, and say which rank it was."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import oktopk
from idioms import Net, batch
from rounds import LOCAL

STEP = 4
"""From which on rank 1 sends words of ones instead of entries."""


def damage(transport) -> None:
    whole = transport.exchange

    def damaged(outgoing, incoming):
        spoilt = {peer: torch.full_like(x, -1) for peer, x in outgoing.items() if x.numel() > 4}
        whole(outgoing | spoilt, incoming)

    transport.exchange = damaged


def train_with_damage(group, way: str, method: str) -> tuple[str, str]:
    """The error that ended the training, and its type."""
    rank, net = dist.get_rank(group), Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = net
    if way == "attach":
        model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.02)
        how = {"density": 0.1, "warmup_steps": 2, "method": method, "timeout": 9}
        handle = oktopk.attach(model, **how)
    else:
        how = LOCAL | {"method": method, "density": 0.1, "timeout": 9}
        handle = oktopk.local_steps(net, optimizer, group=group, **how)
    try:
        for step in range(12):
            if step == STEP and rank == 1:
                damage(handle.comm.transport)
            optimizer.zero_grad()
            x, y = batch(rank, step)
            cross_entropy(model(x), y).backward()
            optimizer.step()
    except RuntimeError as error:
        failure = handle.failure if way == "attach" else error
        return str(error), type(failure).__name__
    finally:
        handle.close()
    return "no error", ""


@pytest.mark.parametrize("method", ["oktopk", "topkdsa"])
@pytest.mark.parametrize("way", ["attach", "local_steps"])
def test_a_damaged_message_ends_all_ranks_and_names_its_sender(worlds, way, method):
    ranks = worlds.run(3, train_with_damage, way, method)
    for said, _ in ranks:
        assert "what came from rank 1 is no message of this exchange" in said, ranks
    assert "MessageError" in {kind for _, kind in ranks}
