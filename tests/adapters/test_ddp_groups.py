# SPDX-License-Identifier: Apache-2.0
"""`attach(group_numel="auto")`: all ranks choose the same groups, by a clock that is not real."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import oktopk
from idioms import Net, batch
from oktopk.exchange.engine import FIRST_STEPS, TRIAL_STEPS

WARMUP = 2
TRIALS_BEGIN = WARMUP + FIRST_STEPS
CHOSEN_AT = TRIALS_BEGIN + 3 * TRIAL_STEPS
STEPS = CHOSEN_AT + 3


class Run:
    """A training run of one rank, whose clock tells a time for each number of groups."""

    def __init__(self, group, seconds: dict[int, float], **more) -> None:
        torch.manual_seed(0)
        self.rank, self.now = torch.distributed.get_rank(group), 0.0
        ddp = {"process_group": group, "bucket_cap_mb": 0.01}
        self.model = DistributedDataParallel(Net(), **ddp)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        asked = {"density": 0.05, "warmup_steps": WARMUP, "group_numel": "auto"} | more
        self.handle = oktopk.attach(self.model, **asked)
        self.handle.driver.clock = self.clock
        self.seconds, self.groups = seconds, []

    def clock(self) -> float:
        """Every call is that much later than the one before."""
        self.now += self.seconds.get(len(self.handle.driver.engine.buckets.groups), 9.0)
        return self.now

    def train(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            x, y = batch(self.rank, step)
            cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            self.groups.append(len(self.handle.driver.engine.buckets.groups))

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().view(-1) for p in self.model.parameters()])


def chosen(group, seconds: list[dict[int, float]], more: dict) -> dict:
    """What a whole run chose, and whether a run that was resumed after that has the same bits."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("oktopk").addHandler(handler)
    logging.getLogger("oktopk").setLevel(logging.INFO)
    whole = Run(group, seconds[torch.distributed.get_rank(group)], **more)
    whole.train(range(CHOSEN_AT + 1))
    state, weights = whole.handle.state_dict(), whole.weights()
    whole.train(range(CHOSEN_AT + 1, STEPS))
    again = Run(group, {}, **more)  # whose own clock would choose otherwise
    torch.nn.utils.vector_to_parameters(weights, again.model.parameters())
    again.handle.load_state_dict(state)
    again.train(range(CHOSEN_AT + 1, STEPS))
    for run in (whole, again):
        run.handle.close()
    logging.getLogger("oktopk").removeHandler(handler)
    return {
        "groups": whole.groups,
        "resumed groups": again.groups,
        "weights": whole.weights(),
        "same bits": whole.weights().equal(again.weights()),
        "told": [line for line in told if "group_numel is" in line],
        "sent": whole.handle.comm.ledger.stages.get("groups"),
    }


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([{1: 3.0, 2: 1.0}, {1: 1.0, 2: 2.0}], 2),  # the sum over ranks decides
        ([{1: 1.0, 2: 2.0}, {1: 1.0, 2: 1.5}], 1),
    ],
)
def test_all_ranks_keep_the_fastest_groups_and_a_resumed_run_keeps_them(worlds, seconds, expected):
    ranks = worlds.run(2, chosen, seconds, {})
    for rank, found in enumerate(ranks):
        trials = found["groups"][TRIALS_BEGIN:CHOSEN_AT:TRIAL_STEPS]
        assert trials[:2] == [1, 2] and trials[2] > 2, found["groups"]
        assert found["groups"][:TRIALS_BEGIN] == [1] * TRIALS_BEGIN
        assert found["groups"][CHOSEN_AT:] == [expected] * (STEPS - CHOSEN_AT)
        assert found["resumed groups"] == [expected] * (STEPS - CHOSEN_AT - 1)
        assert found["same bits"] and found["weights"].equal(ranks[0]["weights"])
        assert len(found["told"]) == (rank == 0), found["told"]
        assert found["sent"].header_sent == 2 * 8 * 2  # 3 numbers, as 2 for each rank; two rounds


@pytest.mark.parametrize("more", [{"clip_before": 1e9}, {"scope": "bucket"}, {"method": "topka"}])
def test_without_overlap_or_groups_nothing_is_tried(worlds, more):
    for found in worlds.run(2, chosen, [{1: 3.0, 2: 1.0}] * 2, more):
        assert len(set(found["groups"][-STEPS + 5 :])) == 1
        assert found["sent"] is None and found["told"] == [] and found["same bits"]
