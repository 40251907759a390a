# SPDX-License-Identifier: Apache-2.0
"""Sums over the records of a run, by phase."""

from __future__ import annotations

from pathlib import Path

import pytest

import runlogs
from oktopk.comm.communicator import Comm
from oktopk.comm.torch_transport import TorchTransport
from oktopk.lab.runlog.reader import RunLog
from oktopk.lab.runlog.schema import PhaseTotals, StepRecord
from oktopk.lab.runlog.writer import (
    RunTotals,
    cumulative_bytes,
    cumulative_minutes,
    estimated_totals,
    load_totals,
    reshard_totals,
    steady_steps,
    sum_over_ranks,
    totals_of_all_ranks,
    totals_of_rank_0,
)


def step(number: int, phase: str = "sparse", **more) -> StepRecord:
    sizes = {"bytes_sent": 10, "bytes_dense": 100}
    return StepRecord(**({"step": number, "phase": phase} | sizes | more))


def runlog_of(entries: list[dict]) -> RunLog:
    runlog = RunLog(Path())
    runlog.add(*runlogs.records(entries))
    return runlog


def test_a_step_counts_in_its_phase_only():
    totals = RunTotals()
    totals.add(step(0, "dense", bytes_sent=100, whole=0.5, numel=50, result=50, skipped=True))
    totals.add(step(1, whole=0.25, numel=50, result=4))
    totals.add(step(2))  # another program may record no more than this
    assert totals["dense"] == PhaseTotals(1, 1, 100, 100, 50, 50, 500_000)
    assert totals["sparse"] == PhaseTotals(2, 0, 20, 200, 4, 50, 250_000)
    assert totals.whole == PhaseTotals(3, 1, 120, 300, 54, 100, 750_000)


def test_totals_survive_a_checkpoint():
    totals = RunTotals()
    totals.add(step(0, "dense", whole=0.5))
    totals.add(step(1, numel=7, result=3))
    assert load_totals(totals.state()) == totals
    assert all(type(value) is int for values in totals.state() for value in values)


@pytest.mark.parametrize("old_size", [1, 2, 3, 5])
@pytest.mark.parametrize("new_size", [1, 2, 3, 4, 8])
def test_a_change_of_world_size_keeps_the_bytes_of_all_ranks(old_size, new_size):
    states = []
    for rank in range(old_size):
        totals = RunTotals()
        for number in range(4):
            totals.add(step(number, bytes_sent=10**rank, bytes_dense=7 * 10**rank, whole=0.1))
        states.append(totals.state())
    new = [reshard_totals(states, rank, new_size) for rank in range(new_size)]
    sent = sum(4 * 10**rank for rank in range(old_size))
    assert sum(totals["sparse"].bytes_sent for totals in new) == sent
    assert sum(totals["sparse"].bytes_dense for totals in new) == 7 * sent
    # every rank has taken all steps
    assert {totals["sparse"].steps for totals in new} == {4}
    assert {totals["sparse"].microseconds for totals in new} == {400_000}


def _sum_over_ranks(group) -> list[list[int]]:
    import torch

    comm = Comm(TorchTransport(group))
    totals = RunTotals()
    totals.add(step(0, bytes_sent=10 ** (comm.rank + 1), whole=0.5))
    return sum_over_ranks(totals, comm, torch.device("cpu")).state()


def test_ranks_add_up_their_bytes_but_not_their_steps(worlds):
    for state in worlds.run(3, _sum_over_ranks):
        sums = load_totals(state)["sparse"]
        assert (sums.steps, sums.bytes_sent, sums.microseconds) == (1, 1110, 500_000)


def test_a_finished_run_has_the_totals_of_all_ranks():
    runlog = runlog_of(runlogs.whole_run(sent=10, ranks=3))
    assert totals_of_rank_0(runlog).whole.bytes_sent == 2 * 100 + 6 * 10
    recorded = totals_of_all_ranks(runlog)
    assert recorded is not None and recorded == estimated_totals(runlog)
    assert recorded.whole.bytes_sent == 3 * (2 * 100 + 6 * 10)


def test_an_unfinished_run_is_estimated_from_rank_0():
    runlog = runlog_of(runlogs.whole_run(sent=10, ranks=3)[:5])
    assert totals_of_all_ranks(runlog) is None
    totals = estimated_totals(runlog)
    assert totals["sparse"].bytes_sent == 3 * 2 * 10 and totals["sparse"].steps == 2
    assert estimated_totals(RunLog(Path())).whole == PhaseTotals()


def test_a_finished_run_may_have_one_phase_only():
    runlog = runlog_of([runlogs.opening(), runlogs.end(dense=runlogs.phase_sums(2, 5, 5))])
    assert estimated_totals(runlog)["sparse"] == PhaseTotals()
    assert estimated_totals(runlog).whole.bytes_sent == 5


def test_cumulative_bytes_end_at_the_total():
    runlog = runlog_of(runlogs.whole_run(sent=10, ranks=2))
    assert cumulative_bytes(runlog)[-1] == pytest.approx(estimated_totals(runlog).whole.bytes_sent)
    assert cumulative_minutes(runlog) == pytest.approx([0.1 * i / 60 for i in range(1, 9)])


def test_steady_steps_leave_out_those_after_a_start_a_resume_and_a_change_of_phase():
    entries = [runlogs.opening(), *(runlogs.step(i) for i in range(5))]
    entries += [runlogs.opening() | {"step": 5}, *(runlogs.step(i) for i in range(5, 8))]
    assert [s.step for s in steady_steps(runlog_of(entries))] == [1, 3, 4, 6, 7]
