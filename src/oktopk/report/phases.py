# SPDX-License-Identifier: Apache-2.0
"""A dense and a sparse step side by side, and on which links the sparse one pays."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from oktopk.report.colours import PARTS
from oktopk.report.page import Figure, rounded
from oktopk.runlog.aggregates import steady_steps
from oktopk.runlog.reader import RunLog
from oktopk.runlog.schema import STEP_PARTS, TIMED_PARTS, StepRecord
from oktopk.stats import PHASES
from oktopk.utils.units import format_bytes, format_rate

SAME = 0.03
"""A smaller difference of two medians, as a share of the larger one, is called none."""
ABOUT = (
    "Medians of rank 0, without the first step of each phase, which connects. Exposed is the time "
    "spent waiting for the exchange; the rest of the exchange is hidden behind backward. Medians "
    "of the parts do not add up to that of the whole step exactly."
)


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Medians over the steps of one phase, of rank 0."""

    seconds: dict[str, float]
    """By part, and of the whole step. A part without times is left out."""

    bytes_sent: float
    bytes_dense: float


def phase_times(runlog: RunLog) -> dict[str, PhaseTimes]:
    """The medians of each phase that has steps with times."""
    found = {}
    for phase in PHASES:
        steps = [step for step in steady_steps(runlog) if step.phase == phase]
        steps = [step for step in steps if step.whole is not None]
        if steps:
            found[phase] = PhaseTimes(
                {part: _median(steps, part) for part in TIMED_PARTS if _has(steps, part)},
                statistics.median(step.bytes_sent for step in steps),
                statistics.median(step.bytes_dense for step in steps),
            )
    return found


def _has(steps: list[StepRecord], part: str) -> bool:
    return any(getattr(step, part) is not None for step in steps)


def _median(steps: list[StepRecord], part: str) -> float:
    return statistics.median(getattr(step, part) or 0.0 for step in steps)


def side_by_side(runlog: RunLog) -> list[Figure]:
    """One bar for a dense step and one for a sparse step, by part."""
    times = phase_times(runlog)
    if not times:
        return []
    names = [f"{phase}: {1e3 * found.seconds['whole']:.0f} ms" for phase, found in times.items()]
    traces = [
        {"type": "bar", "orientation": "h", "name": part, "y": names}
        | {"x": rounded(1e3 * found.seconds.get(part, 0.0) for found in times.values())}
        | {"marker": {"color": PARTS[part]}}
        for part in STEP_PARTS
    ]
    layout = {
        "barmode": "stack",
        "height": 170 + 44 * len(times),
        "xaxis": {"title": {"text": "ms"}},
        "yaxis": {"autorange": "reversed"},
        "hovermode": "closest",
    }
    title = "A dense and a sparse step" if len(times) > 1 else "A step"
    return [Figure(title, traces, ABOUT, layout)]


def cost_sentences(runlog: RunLog) -> list[str]:
    """What the sparse exchange cost or saved here, and on which links it pays."""
    times = phase_times(runlog)
    made: tuple[Callable[[RunLog, dict[str, PhaseTimes]], str], ...] = (_difference, _pays_below)
    return [text for make in made if (text := make(runlog, times))]


def _difference(runlog: RunLog, times: dict[str, PhaseTimes]) -> str:
    if len(times) < len(PHASES) or any("exposed" not in times[phase].seconds for phase in PHASES):
        return ""
    dense, sparse = (times[phase].seconds for phase in PHASES)
    rest, dense_rest = (1e3 * (found["whole"] - found["exposed"]) for found in (sparse, dense))
    network = runlog.info.network
    link = f"at {network}" if network else "on this link"
    return (
        f"A sparse step waited {1e3 * sparse['exposed']:.0f} ms for the exchange and a dense one "
        f"{1e3 * dense['exposed']:.0f} ms (medians): {link} the sparse exchange "
        f"{_verdict(sparse['exposed'], dense['exposed'], dense['whole'])}. The rest of a step took "
        f"{rest:.0f} ms and {dense_rest:.0f} ms: there batches differ, and not what is exchanged."
    )


def _verdict(sparse: float, dense: float, whole: float) -> str:
    """What waits for the exchange cost or saved, also as a share of a whole dense step."""
    difference = abs(sparse - dense)
    if difference <= SAME * max(sparse, dense):
        return "cost no time and saved none"
    verb = "cost" if sparse > dense else "saved"
    return f"{verb} {1e3 * difference:.0f} ms, {difference / whole:.0%} of a dense step"


def _pays_below(_: RunLog, times: dict[str, PhaseTimes]) -> str:
    """The rate at which the bytes that were saved take as long as the work of selecting."""
    sparse = times.get("sparse")
    if sparse is None or "select" not in sparse.seconds:
        return ""
    extra = sparse.seconds["select"] + sparse.seconds.get("scatter", 0.0)
    if "dense" in times:
        optimizer = [found.seconds.get("optimizer", 0.0) for found in times.values()]
        extra += max(0.0, optimizer[-1] - optimizer[0])
    saved = sparse.bytes_dense - sparse.bytes_sent
    if saved <= 0 or extra <= 0:
        return ""
    return (
        f"For a sparse step a worker computed {1e3 * extra:.1f} ms more (selecting entries, adding "
        f"them up) and sent {format_bytes(saved)} less. By this estimate it pays on links that "
        f"give a worker less than about {format_rate(8 * saved / extra)}."
    )
