"""What a run has sent so far, dense and sparse phase apart."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from oktopk.comm.communicator import Comm
from oktopk.stats import PHASES, Phase, StepStats


@dataclass(slots=True)
class PhaseTotals:
    """Sums over the steps of one phase."""

    steps: int = 0
    skipped: int = 0
    bytes_sent: int = 0
    bytes_dense: int = 0
    result: int = 0
    """Entries of the results, of `numel` that there were."""

    numel: int = 0
    microseconds: int = 0


class Totals(dict[Phase, PhaseTotals]):
    """Sums of this rank, by phase."""

    def __init__(self) -> None:
        super().__init__({phase: PhaseTotals() for phase in PHASES})

    def add(self, stats: StepStats, seconds: float) -> None:
        sums = self[stats.phase]
        sums.steps += 1
        sums.skipped += stats.skipped
        sums.bytes_sent += stats.bytes_sent
        sums.bytes_dense += stats.bytes_dense
        sums.result += stats.result
        sums.numel += stats.numel
        sums.microseconds += round(seconds * 1e6)

    def state(self) -> list[list[int]]:
        return [[getattr(sums, f.name) for f in fields(sums)] for sums in self.values()]

    def load(self, state: list[list[int]]) -> None:
        for phase, values in zip(PHASES, state, strict=True):
            self[phase] = PhaseTotals(*values)

    def take_over(self, states: list[list[list[int]]], rank: int, size: int) -> None:
        """What other ranks had sent, so that the sum over ranks stays: rank r takes r, r+P, ..."""
        self.load(states[0])
        mine = states[rank::size]
        for i, phase in enumerate(PHASES):
            past = [PhaseTotals(*state[i]) for state in mine]
            self[phase].bytes_sent = sum(sums.bytes_sent for sums in past)
            self[phase].bytes_dense = sum(sums.bytes_dense for sums in past)

    def of_all(self, comm: Comm, device: torch.device) -> Totals:
        """Bytes of all ranks together; steps and seconds are every rank's own."""
        state = torch.tensor(self.state(), dtype=torch.int64, device=device)
        whole = comm.all_gather(state, stage="run").sum(0).tolist()
        total = Totals()
        total.load(self.state())
        for phase, values in zip(PHASES, whole, strict=True):
            sums = PhaseTotals(*values)
            total[phase].bytes_sent, total[phase].bytes_dense = sums.bytes_sent, sums.bytes_dense
        return total
