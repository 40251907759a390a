# SPDX-License-Identifier: Apache-2.0
"""Weights that something else than the optimizer writes, after `local_steps` was called."""

from __future__ import annotations

import pytest

from oktopk import simulate
from oktopk.adapters.local_steps.agreement import Notice
from rounds import start, take_steps


def bytes_of_agreements(comm) -> list[int]:
    seen = []
    net, optimizer, _ = start(comm, on_step=seen.append)
    take_steps(net, optimizer, comm.rank, range(8))
    return [stats.stages["agreement"].sent for stats in seen if comm.size > 1]


@pytest.mark.parametrize("P", [1, 2, 5])
def test_each_exchange_tells_a_few_numbers_to_every_other_rank(P):
    each = 8 * len(Notice.__dataclass_fields__) * (P - 1)
    assert simulate(P, bytes_of_agreements) == [[each] * 2 * (P > 1)] * P
