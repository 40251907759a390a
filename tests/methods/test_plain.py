# SPDX-License-Identifier: Apache-2.0
"""The readable Ok-Topk and the fast one do the same."""

from __future__ import annotations

import pytest
import torch

from oktopk import Reducer, simulate
from oktopk.methods.plain import ok_topk

NUMEL, K, STEPS = 1000, 50, 6


def gradients(kind: str, rank: int, step: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(NUMEL, generator=chance)
    if kind == "shared":  # what is large is large on all ranks
        return x + 4 * torch.randn(NUMEL, generator=torch.Generator().manual_seed(step))
    if kind == "clustered":  # most of what is large lies in one region: shares must be balanced
        x[: NUMEL // 4] *= 1 + 10 * (torch.arange(NUMEL // 4) % (rank + 2) == 0)
    if kind == "ties":
        return x.sign() * (1 + (torch.arange(NUMEL) % 7 == 0))
    return x


@pytest.mark.parametrize("kind", ["independent", "shared", "clustered", "ties"])
@pytest.mark.parametrize("P", [1, 2, 3, 4, 5, 8])
def test_the_fast_exchange_has_the_bits_of_the_plain_one(P, kind):
    def main(comm):
        exact = {"exact_every": 1, "bounds_every": 1, "wire": "plain", "short_bytes": 0}
        reducer = Reducer(NUMEL, comm=comm, density=K / NUMEL, **exact)
        done = []
        for step in range(STEPS):
            grad = gradients(kind, comm.rank, step)
            stats = reducer.reduce_(grad)
            done.append((grad, reducer.residual.clone(), stats.entries_sent))
        return done

    ranks = simulate(P, main)
    residuals = [torch.zeros(NUMEL) for _ in range(P)]
    for step in range(STEPS):
        plain = ok_topk([gradients(kind, rank, step) for rank in range(P)], residuals, K)
        residuals = plain.residuals
        for rank in range(P):
            average, residual, num_sent = ranks[rank][step]
            assert average.equal(plain.average), (rank, step)
            assert residual.equal(residuals[rank]), (rank, step)
            assert num_sent == plain.num_sent[rank] <= 3 * K * (P - 1) / P
