# SPDX-License-Identifier: Apache-2.0
"""`Budget`: keeps the exchange under a share of the step, by density and codec (`density="auto"`).

Every rank notes how long it computed between two exchanges and how long an exchange took. At
exchanges whose numbers all ranks know, the ranks compare these seconds and all make the same
choice, which holds from the next exchange on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import torch

from oktopk.comm.communicator import Comm
from oktopk.exchange.budget import (
    NEARLY_AS_FAST,
    WIRES,
    Choice,
    Exchanged,
    Speeds,
    choose,
    corrected,
    probe_speeds,
)
from oktopk.exchange.saved_state import SavedBudget
from oktopk.settings import Settings
from oktopk.sparse import common_acc_dtype
from oktopk.utils.arguments import number, short_repr
from oktopk.utils.console import announce
from oktopk.utils.device import to_device
from oktopk.wire import CodecName

log = logging.getLogger("oktopk")

AUTO = "auto"
FIRST_REVISIONS = (2, 4, 8)
EVERY = 16
"""Exchanges between two revisions, after the first ones."""


@dataclass(frozen=True, slots=True)
class BudgetOptions:
    """What `density="auto"` may choose from, and how much time an exchange may take."""

    share: float
    """Of the time from one exchange to the end of the next."""

    wires: tuple[CodecName, ...]

    def __post_init__(self) -> None:
        share = number("exchange_share", self.share, "in (0, 1)")
        if not 0 < share < 1:
            raise ValueError(f"exchange_share must be in (0, 1), got {share}")


def budget_options(
    density: Any, wire: CodecName | None, share: float, method: str
) -> BudgetOptions | None:
    """The options if the density is `auto`, else None. ValueError if nothing can be chosen."""
    if isinstance(wire, str) and wire == AUTO:
        raise ValueError("wire='auto' is wire=None with density='auto', which chooses both")
    options = BudgetOptions(share, WIRES if wire is None else (wire,))
    if not isinstance(density, str):
        return None
    if density != AUTO:
        raise ValueError(f"density must be a number in (0, 1] or 'auto', got {short_repr(density)}")
    if method == "dense":
        raise ValueError("density='auto' has no effect with method='dense': use another method")
    return options


class Budget:
    """The choice in effect, and what was measured since it was last revised."""

    def __init__(
        self,
        options: BudgetOptions,
        what: Exchanged,
        now: Choice,
        speeds: Speeds,
        first: int,
        verbose: bool = True,
    ) -> None:
        self.options, self.what, self.verbose = options, what, verbose
        self.now, self.speeds = now, speeds
        self.first = first
        """The first exchange that has the chosen density: warm-up and ramp come before it."""

        self.measured: list[tuple[float, float]] = []
        """Seconds of computing and of exchanging, for each exchange since the last revision."""

        self._has_warned = False

    def note(self, step: int, compute: float, exchange: float) -> None:
        """Note what one exchange took on this rank, and the computing before it.

        Only where it had the choice in effect: not in warm-up and ramp, nor in a revision, which
        already has the next choice. So all ranks note the same exchanges.
        """
        if step >= self.first and not self.is_due(step):
            self.measured.append((compute, exchange))

    def is_due(self, step: int) -> bool:
        """Whether all ranks revise the choice in this exchange."""
        number = step - self.first
        return number in FIRST_REVISIONS or (number > 0 and number % EVERY == 0)

    def revise(self, step: int, comm: Comm, device: torch.device) -> Choice:
        """Compare the seconds of all ranks and choose anew: the same on every rank. Collective.

        The rank that computes longest waits least in the exchange: its seconds there are those of
        the exchange alone.
        """
        columns = zip(*self.measured, strict=True) if self.measured else ((math.nan,),) * 2
        own = to_device([median_low(column) for column in columns], torch.float64, device)
        seconds = comm.all_gather_header(own, stage="budget")
        compute, exchange = seconds[:, 0].amax().item(), seconds[:, 1].amin().item()
        self.measured = []
        if math.isnan(compute) or math.isnan(exchange):  # a rank has measured nothing
            return self.now
        share = self.options.share
        limit = compute * share / (1 - share)
        speeds = corrected(self.speeds, self.now, self.what, exchange)
        before = self.now
        self.now = choose(speeds, self.what, self.options.wires, limit=limit, now=before)
        if comm.rank == 0 and self.verbose and self.now != before:
            announce(
                f"exchange {step}: density {_shown(self.now)} instead of {_shown(before)}: an "
                f"exchange took {1e3 * exchange:.1f} ms, and may take {1e3 * limit:.1f} ms beside "
                f"{1e3 * compute:.1f} ms of computing"
            )
        if comm.rank == 0:
            self._warn_if_long(speeds.predict(self.now, self.what), limit)
        return self.now

    def _warn_if_long(self, seconds: float, limit: float) -> None:
        if seconds > NEARLY_AS_FAST * limit and not self._has_warned:
            self._has_warned = True
            log.warning(
                "no density keeps the exchange under exchange_share=%g: it takes %.1f ms at "
                "density %s, %.1f ms would be allowed, and a lower density is hardly faster; let "
                "more steps pass between exchanges (`every` of local_steps), or raise "
                "exchange_share",
                self.options.share,
                1e3 * seconds,
                _shown(self.now),
                1e3 * limit,
            )

    def save(self) -> SavedBudget:
        """All that later choices depend on, beside what will be measured."""
        return SavedBudget(
            density=self.now.density,
            wire=self.now.wire,
            speeds=self.speeds,
            measured=list(self.measured),
        )

    def load(self, saved: SavedBudget) -> None:
        """Take over a choice, and the measurements it will be revised by."""
        # else another codec is asked for than when the state was saved
        if saved.speeds.codecs.keys() >= {*self.options.wires, saved.wire}:
            self.speeds = saved.speeds
        known = saved.wire in self.speeds.codecs
        self.now = Choice(saved.density, saved.wire if known else self.now.wire)
        self.measured = list(saved.measured)


def _shown(chosen: Choice) -> str:
    return f"{chosen.density:g} as {chosen.wire}"


def start_budget(
    options: BudgetOptions | None,
    settings: Settings,
    parameters: Sequence[torch.Tensor],
    comm: Comm,
    *,
    verbose: bool,
) -> Budget | None:
    """Probe network, kernels and codecs; None without options, or if all is dense. Collective."""
    if options is None or settings.method == "dense":
        return None
    numel, device = sum(p.numel() for p in parameters), parameters[0].device
    dtype = common_acc_dtype(parameters)
    what = Exchanged(numel, comm.size, settings.method, dtype, settings.shared_by)
    wires = tuple(dict.fromkeys((*options.wires, settings.wire)))
    first = settings.warmup_steps + settings.falling_steps
    now = Choice(settings.density, settings.wire)
    return Budget(options, what, now, probe_speeds(comm, device, wires), first, verbose)
