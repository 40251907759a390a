# SPDX-License-Identifier: Apache-2.0
"""`Trial`: one fault with its seed, its folder, and the same run without a fault."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import oktopk
from torture import world
from torture.ranks import Job, Plant
from torture.verdicts import Finding

STEPS = 12

WARMUP = 3

EVERY = 4
"""Of `local_steps`: every checkpoint but the last is inside a round."""


class SkippedError(Exception):
    """The kind cannot be tried on this machine; the message says why."""


@dataclass
class Trial:
    """One fault: its random numbers, its folder, and what was done."""

    rng: Random
    folder: Path
    what: str = ""
    references: dict[str, list[world.Ended]] = field(default_factory=dict)
    """Runs without a fault, by their settings; shared by all trials."""

    lock: Any = field(default_factory=threading.Lock)
    is_local: bool = False
    """Whether its runs train by `local_steps`, else by `attach`."""

    def reference(self, jobs: list[Job]) -> list[world.Ended]:
        """The same run without a fault."""
        job = jobs[0]
        key = repr((job.size, job.steps, job.without, job.attached, job.extra))
        with self.lock:
            if key not in self.references:
                folder = self.folder.parent / f"reference-{len(self.references)}"
                ends = world.run(
                    world.jobs_of(
                        folder,
                        job.size,
                        job.attached,
                        steps=job.steps,
                        without=job.without,
                        extra=job.extra,
                    )
                )
                bad = world.unfinished(ends)
                assert not bad, f"the run without a fault failed: {bad}"
                assert len({one.weights for one in ends}) == 1, "ranks differ without a fault"
                self.references[key] = ends
            return self.references[key]

    def jobs(self, methods: tuple[str, ...] = (), **more: Any) -> list[Job]:
        """A small run with a method and a number of ranks drawn at random."""
        methods = methods or ("oktopk", "oktopk", *oktopk.METHODS)
        method = self.rng.choice((*methods, "auto", "auto") if self.is_local else methods)
        own = {"every": EVERY} if self.is_local else {"warmup_steps": WARMUP, "check_every": 4}
        attached = {"method": method, "density": 0.1} | own
        size = self.rng.choice((2, 3, 3))
        self.what = f"{size} ranks, {'local steps, ' * self.is_local}{method}"
        return world.jobs_of(self.folder, size, attached, **({"steps": STEPS} | more))

    def victim(self, jobs: list[Job]) -> int:
        rank = self.rng.randrange(len(jobs))
        self.what += f", rank {rank}"
        return rank

    def plant(self, act: str, *places: str, **more: Any) -> Plant:
        """An act at one of the places, in a step after which others still need the rank."""
        place = self.rng.choice(places)
        step = {"save": self.rng.choice((2, 5, 8)), "join": 0, "attach": 0, "leave": 0}
        if self.is_local:  # only some steps end with an exchange
            step["on_step"] = self.rng.choice((EVERY - 1, 2 * EVERY - 1))
        plant = Plant(act, place, step.get(place, self.rng.randrange(STEPS - 1)), **more)
        self.what += f": {act} in {place} of step {plant.step}"
        return plant


Kind = Callable[[Trial], list[Finding]]
