# SPDX-License-Identifier: Apache-2.0
"""The figures of a report: curves, phases, parameters, times and traffic."""

from __future__ import annotations

import statistics
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from oktopk.lab.report.page import (
    PARTS,
    THINGS,
    Block,
    Figure,
    colour_of_metric,
    colour_of_stage,
    folded,
    paragraph,
    rounded,
    table,
    transparent,
)
from oktopk.lab.runlog.reader import RunLog
from oktopk.lab.runlog.schema import (
    OVERLAPPED_PARTS,
    STEP_PARTS,
    TIMED_PARTS,
    EpochRecord,
    Histogram,
    MessagesRecord,
    ProbeRecord,
    RanksRecord,
    RunRecord,
    StepRecord,
    TensorsRecord,
)
from oktopk.lab.runlog.writer import bin_edges, steady_steps
from oktopk.stats import PHASES
from oktopk.utils.arguments import format_bytes, format_rate

# Fewer points for curves: the records of 100,000 steps as at most a thousand windows.


MAX_POINTS = 1000
FEW_POINTS = 60
"""Windows of a figure that shows medians: a spike is one of many steps in a window."""

Timed = StepRecord | EpochRecord | ProbeRecord
"""Records that belong to a step."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Consecutive records, cut into windows. No window spans two phases."""

    steps: list[int]
    """The last step of each window."""

    slices: list[slice]
    records: Sequence[Timed]

    @property
    def width(self) -> int:
        """Records in the widest window; 1 when every step has a point of its own."""
        return max((part.stop - part.start for part in self.slices), default=1)

    def mean(self, name: str) -> list[float | None]:
        """The mean of a field in each window; None where no record has a value."""
        return self.mean_of(getattr(record, name) for record in self.records)

    def mean_of(self, values: Iterable[float | None]) -> list[float | None]:
        """The mean in each window of a value for every record."""
        column = self._column(values)
        found = []
        for part in self.slices:
            known = column[part][~np.isnan(column[part])]
            found.append(float(known.mean()) if len(known) else None)
        return found

    def quantiles(self, name: str, *shares: float) -> list[list[float | None]]:
        """Quantiles of a field in each window, such as the median for 0.5: one list for each."""
        column = self._column(getattr(record, name) for record in self.records)
        found: list[list[float | None]] = [[] for _ in shares]
        for part in self.slices:
            known = column[part][~np.isnan(column[part])]
            for values, share in zip(found, shares, strict=True):
                values.append(float(np.quantile(known, share)) if len(known) else None)
        return found

    def median(self, name: str) -> list[float | None]:
        """The median of a field in each window; None where no record has a value."""
        return self.quantiles(name, 0.5)[0]

    def cumulative(self, name: str) -> list[float]:
        """The sum of a field up to the end of each window; a missing value counts as 0."""
        sums = np.cumsum(np.nan_to_num(self._column(getattr(r, name) for r in self.records)))
        return [float(sums[part.stop - 1]) for part in self.slices]

    def _column(self, values: Iterable[float | None]) -> np.ndarray:
        numbers = (np.nan if value is None else value for value in values)
        return np.fromiter(numbers, dtype=np.float64, count=len(self.records))


def downsample(records: Sequence[Timed], max_points: int = MAX_POINTS) -> Windows:
    """Cut records into windows of equal width, and also where the phase changes."""
    width = max(1, -(-len(records) // max_points))
    slices, start = [], 0
    for i in range(1, len(records) + 1):
        ends = i == len(records) or _phase(records[i]) != _phase(records[i - 1])
        if ends or i - start == width:
            slices.append(slice(start, i))
            start = i
    return Windows([records[part.stop - 1].step for part in slices], slices, records)


def _phase(record: Timed) -> str:
    return record.phase if isinstance(record, StepRecord) else ""


# Figures over the steps of a run: learning, compression, thresholds, quality of selection.


LOSS = "val_loss"
"""The metric that is drawn beside the training loss."""
LOG = {"type": "log", "tickformat": "~g"}
FEW_TICKS = {"dtick": "D2"}  # ticks at 1, 2 and 5 only

ABOUT_KEPT = "Of all entries of the gradient. One minus the result's share is the sparsity."
NORMAL_KEPT = (
    "the three lines lie on each other: from the third sparse step on they differ by at most "
    "10 % from k. Methods that keep the union of all selections have more in the result."
)
NORMAL_RATIO = (
    "it is 1 in the dense phase, rises while the density falls, and is level afterwards. "
    "Every few steps it dips, when exact thresholds or region bounds are exchanged as well."
)
NORMAL_THRESHOLD = (
    "both rise while the residuals grow, and then follow the size of the gradients. That of the "
    "result is higher, because it is one of sums over ranks."
)
ABOUT_QUALITY = (
    "Compared with the dense sum of the accumulated gradients of all ranks: how many of its "
    "largest entries were selected, and how much of its energy (sum of squares) they hold. "
    "A result with more than k entries may hold more energy than the exact top k."
)
NORMAL_QUALITY = (
    "all three fall with the density, because residuals add noise: in the quickstart recall falls "
    "from 0.8 at 25 % to 0.4 at 4 %. The captured energy stays close below that of the exact top "
    "k; a widening gap means that the ranks select different entries."
)
ABOUT_XI = (
    "Distance of the result from the exact top k, over the norm of the gradient: what the "
    "convergence proof of Ok-Topk assumes to be bounded."
)
NORMAL_XI = (
    "it rises after the start of the sparse phase and levels off: in the quickstart near 1, and "
    "near 0.5 with methods that deliver more than k entries."
)
ABOUT_AGE = "Steps since an entry of the residual was last part of a result."
NORMAL_AGE = (
    "the mean levels off at one to some times one over the density (50 steps at 2 %). The oldest "
    "entries are as old as the sparse phase: gradients that stay near 0 are never selected."
)


def line(name: str, x: list[Any], y: list[float | None], **more: Any) -> dict[str, Any]:
    """A trace of lines, with markers if there are few points."""
    known = sum(value is not None for value in y)
    mode = "lines" if known > 60 else "lines+markers"
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": rounded(y)} | more


def colour(thing: str) -> dict[str, Any]:
    """The colour of a thing, for a line and its markers."""
    return {"line": {"color": THINGS[thing]}, "marker": {"color": THINGS[thing]}}


def median_band(name: str, steps: Windows, field: str, thing: str) -> list[dict[str, Any]]:
    """The median of a field in each window, and the area of the middle half of its values."""
    low, middle, high = steps.quantiles(field, 0.25, 0.5, 0.75)
    edge = {"mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
    shade = {"fill": "tonexty", "fillcolor": transparent(THINGS[thing])}
    return [
        line(name, steps.steps, low, **edge),
        line(name, steps.steps, high, **edge, **shade),
        line(name, steps.steps, middle, **colour(thing)) | {"mode": "lines"},
    ]


def over_steps(title: str, **layout: Any) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": title}}} | layout


def with_phases(layout: dict[str, Any], runlog: RunLog) -> dict[str, Any]:
    """The layout with the dense phase shaded and its end marked."""
    changes = phase_changes(runlog)
    dense = [(start, end) for phase, start, end in changes if phase == "dense"]
    whole = len(dense) == len(changes)
    shade = {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 0}}
    shapes = [shade | {"x0": a, "x1": b, "layer": "below"} for a, b in dense]
    last = changes[-1][2] if changes else 0
    notes = [
        {"x": b, "y": 1, "yref": "paper", "text": f"sparse from step {b}", "showarrow": False}
        # above the plot, on the side that has more room
        | {"xanchor": "left" if 2 * b < last else "right", "yanchor": "bottom"}
        for _, b in (dense if not whole else [])
    ]
    rest = {k: v for k, v in layout.items() if k not in ("shapes", "annotations")}
    return rest | {"shapes": shapes, "annotations": notes}


def phase_changes(runlog: RunLog) -> list[tuple[str, int, int]]:
    """Phases in order: name, first step, step after the last."""
    found: list[tuple[str, int, int]] = []
    for record in runlog.steps:
        step, phase = record.step, record.phase
        if found and found[-1][0] == phase:
            found[-1] = (phase, found[-1][1], step + 1)
        else:
            found.append((phase, step, step + 1))
    return found


def learning(runlog: RunLog) -> list[Figure]:
    """Loss and error rates, training and validation."""
    epochs, validated = downsample(runlog.epochs), runlog.validations
    at = epochs.steps
    few = downsample(runlog.steps, FEW_POINTS)
    traces = median_band("training, median of steps", few, "loss", "training")
    whole = line("training, whole epochs", at, epochs.mean("train_loss"), **colour("training"))
    traces.append(whole | {"mode": "markers"})
    at_validation = [record.step for record in validated]
    if any(metric.name == LOSS for metric in runlog.metrics):
        values = [record.metrics.get(LOSS) for record in validated]
        traces.append(line("validation", at_validation, values, **colour("validation")))
    loss = Figure("Loss", traces, _window_note(few), _logarithmic("loss", runlog))
    rates = [metric for metric in runlog.metrics if metric.shown and metric.name != LOSS]
    if not validated or not rates:
        return [loss]
    traces = [
        line(metric.label, at_validation, [record.metrics.get(metric.name) for record in validated])
        | {
            "line": {"color": colour_of_metric(number)},
            "marker": {"color": colour_of_metric(number)},
        }
        for number, metric in enumerate(rates)
    ]
    layout = over_steps(", ".join(metric.label for metric in rates))
    layout["yaxis"] |= {"rangemode": "tozero"}
    return [loss, Figure("Metrics on the test set", traces, "", with_phases(layout, runlog))]


def compression(runlog: RunLog, steps: Windows) -> list[Figure]:
    """Entries kept compared with k, the compression ratio, and the thresholds."""
    numel = max(1, runlog.steps[-1].numel or 1)
    names = {
        "asked for (k)": ("k", "asked"),
        "kept by rank 0": ("local", "rank 0"),
        "in the result": ("result", "result"),
    }
    kept = [
        line(name, steps.steps, [v and v / numel for v in steps.mean(field)], **colour(thing))
        for name, (field, thing) in names.items()
    ]
    ratios = steps.mean("compression_ratio")
    ratio = [line("dense bytes over bytes sent", steps.steps, ratios, **colour("sparse"))]
    thresholds = {
        "of rank 0": ("local_threshold", "rank 0"),
        "of the result": ("global_threshold", "result"),
    }
    limits = [
        line(name, steps.steps, [v or None for v in steps.mean(field)], **colour(thing))
        for name, (field, thing) in thresholds.items()
    ]
    shares = _logarithmic("share", runlog, tickformat="~%", **FEW_TICKS)
    times = _logarithmic("times fewer bytes", runlog, **FEW_TICKS)
    sizes = _logarithmic("magnitude", runlog, **FEW_TICKS)
    return [
        Figure("Entries kept", kept, ABOUT_KEPT, shares, NORMAL_KEPT),
        Figure("Compression ratio of each step", ratio, "", times, NORMAL_RATIO),
        Figure("Thresholds: the smallest magnitude kept", limits, "", sizes, NORMAL_THRESHOLD),
    ]


def quality(runlog: RunLog) -> list[Figure]:
    """What the probes measured; empty without probes."""
    if not runlog.of(ProbeRecord):
        return []
    probes = downsample(runlog.of(ProbeRecord))
    at = probes.steps
    shares = {
        "recall of the exact top k": ("recall", "recall"),
        "captured energy": ("energy", "result"),
        "energy of the exact top k": ("best_energy", "best"),
    }
    found = [
        line(name, at, probes.mean(field), **colour(thing))
        for name, (field, thing) in shares.items()
    ]
    layout = over_steps("share") | {"yaxis": {"range": [0, 1.02], "tickformat": "~%"}}
    xi = [line("xi", at, probes.mean("xi"), **colour("result"))]
    ages = {
        "mean": ("age_mean", "rank 0"),
        "nine of ten are below": ("age_90", "asked"),
        "oldest": ("age_most", "best"),
    }
    old = [
        line(name, at, probes.mean(field), **colour(thing)) for name, (field, thing) in ages.items()
    ]
    return [
        Figure("Quality of selection", found, ABOUT_QUALITY, layout, NORMAL_QUALITY),
        Figure("xi of the convergence assumption", xi, ABOUT_XI, over_steps("xi"), NORMAL_XI),
        Figure("Age of the residual", old, ABOUT_AGE, over_steps("steps"), NORMAL_AGE),
    ]


def _logarithmic(title: str, runlog: RunLog, **more: Any) -> dict[str, Any]:
    layout = over_steps(title)
    layout["yaxis"] |= LOG | more
    return with_phases(layout, runlog)


def _window_note(steps: Windows) -> str:
    if steps.width == 1:
        return ""
    return f"Each point is the median of {steps.width} steps; the area has the middle half of them."


# A dense and a sparse step side by side, and on which links the sparse one pays.


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

    rest: float
    """Seconds of a step but for what waits for the exchange."""

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
                statistics.median((step.whole or 0.0) - (step.exposed or 0.0) for step in steps),
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
    rest, dense_rest = (1e3 * times[phase].rest for phase in reversed(PHASES))
    network = runlog.info.network
    link = f"at {network}" if network else "on this link"
    return (
        f"A sparse step waited {1e3 * sparse['exposed']:.0f} ms for the exchange and a dense one "
        f"{1e3 * dense['exposed']:.0f} ms (medians): {link} the sparse exchange "
        f"{_verdict(sparse['exposed'], dense['exposed'], dense['whole'])}. The rest of a step took "
        f"{rest:.0f} ms and {dense_rest:.0f} ms: batches differ there, and selection and packing "
        "run beside the backward pass."
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


# Figures of the parameters: kept fractions, residuals, and histograms of magnitudes.


MAX_BARS = 60
BY_MAGNITUDE = {
    "xaxis": {"type": "log", "tickformat": "~e", "title": {"text": "magnitude"}},
    "yaxis": {"title": {"text": "share of the nonzero entries"}, "tickformat": "~%"},
}


NORMAL_KEPT_BY_LAYER = (
    "biases, norms and tiny tensors are at 100 %, as they travel dense, and convolutions and "
    "output layers keep more than large matrices."
)
NORMAL_TENSOR = "tensors differ: one threshold holds for the whole model, and gradients differ."
NORMAL_NORM = "large matrices have the largest; a tensor that travels dense has none."
NORMAL_SHARE = (
    "it is between 1 and some tens: the residual holds the gradients of many steps, which largely "
    "cancel out. If it is in the hundreds, try a higher density or a longer ramp."
)
NORMAL_AGES = "the age is highest in tensors that keep the smallest fraction."
NORMAL_MAGNITUDES = {
    "gradient": (
        "in the sparse phase nearly all entries are zero, and the others begin at the threshold."
    ),
    "residual": (
        "it has no entries far above the threshold, and moves to the right while it fills."
    ),
}
PHASE_COLOURS = {"dense": "dense", "first sparse": "best", "last": "sparse"}


def tensors(runlog: RunLog) -> list[Block]:
    """Kept fraction by tensor and by kind of layer, norms and ages of residuals."""
    counted = [record for record in runlog.of(TensorsRecord) if sum(record.kept.values())]
    sparse = [record for record in counted if _kept_share(record) < 1]
    if not sparse:
        return []
    last = sparse[-1]
    note = f"Nonzero entries of the result at step {last.step}. Tensors at 100 % are sent dense."
    kinds, fractions = _by_kind(runlog, last), _kept_fractions(last)
    blocks: list[Block] = [
        _bars("Kept fraction by kind of layer", kinds, note, "result", NORMAL_KEPT_BY_LAYER, True),
        _bars("Kept fraction by tensor", fractions, "", "result", NORMAL_TENSOR, True),
    ]
    all_norms, applied = last.residual_norm or {}, last.norm or {}
    norms = {name: norm for name in last.kept if (norm := all_norms.get(name))}
    if norms:
        text = (
            "Norm of the residual of rank 0, divided by that of the gradient applied in that step."
        )
        shares = {n: norm / size for n, norm in norms.items() if (size := applied.get(n))}
        norm_text = "Norm of the residual of rank 0."
        blocks += [
            _bars("Residual norm by tensor", norms, norm_text, "rank 0", NORMAL_NORM),
            _bars("Residual over gradient, by tensor", shares, text, "rank 0", NORMAL_SHARE),
        ]
    ages = [probe.ages for probe in runlog.of(ProbeRecord) if probe.ages]
    if ages:
        text = "Mean steps since an entry was last part of a result, at the last probe."
        known = {name: age for name, age in ages[-1].items() if age is not None}
        blocks.append(_bars("Age of residuals by tensor", known, text, "rank 0", NORMAL_AGES))
    return blocks


def histograms(runlog: RunLog) -> list[Block]:
    """Gradients and residuals by magnitude, before and after the sparse phase began."""
    blocks: list[Block] = []
    for name, what in {"gradient": "applied gradient", "residual": "residual of rank 0"}.items():
        found = _around_activation(runlog, name)
        if found:
            traces = [_trace(values, label) for label, values in found.items()]
            zeros = ", ".join(f"{label} {_zeros(values):.1%}" for label, values in found.items())
            title, note = f"Magnitudes of the {what}", f"Zero: {zeros}."
            blocks.append(Figure(title, traces, note, BY_MAGNITUDE, NORMAL_MAGNITUDES[name]))
    return blocks


def _around_activation(runlog: RunLog, name: str) -> dict[str, Histogram]:
    """The last histogram of the dense phase, the first of the sparse phase, and the last of all."""
    sparse = {step.step for step in runlog.steps if step.phase == "sparse"}
    recorded = ((r.step, (r.spread or {}).get(name)) for r in runlog.of(TensorsRecord))
    found = [(step, values) for step, values in recorded if values is not None]
    before = [pair for pair in found if pair[0] not in sparse]
    after = [pair for pair in found if pair[0] in sparse]
    picked = {"dense": before[-1:], "first sparse": after[:1], "last": after[1:][-1:]}
    return {
        f"{label}, step {step}": values for label, pairs in picked.items() for step, values in pairs
    }


def _trace(values: Histogram, name: str) -> dict[str, Any]:
    edges = bin_edges(values.first, len(values.counts))
    whole = sum(values.counts) or 1
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "line": {"shape": "hvh", "color": THINGS[PHASE_COLOURS[name.partition(",")[0]]]},
        "x": rounded((a * b) ** 0.5 for a, b in pairwise(edges)),
        "y": rounded(count / whole for count in values.counts),
    }


def _zeros(values: Histogram) -> float:
    return values.zeros / ((values.zeros + sum(values.counts)) or 1)


def _kept_share(record: TensorsRecord) -> float:
    return sum(record.kept.values()) / (sum(record.of.values()) or 1)


def _kept_fractions(record: TensorsRecord) -> dict[str, float]:
    return {name: kept / (record.of.get(name) or 1) for name, kept in record.kept.items()}


def _by_kind(runlog: RunLog, last: TensorsRecord) -> dict[str, float]:
    kinds = {name: info.kind for name, info in (runlog.info.tensors or {}).items()}
    kept: dict[str, int] = {}
    whole: dict[str, int] = {}
    for name, num in last.kept.items():
        kind = kinds.get(name, "unknown")
        kept[kind] = kept.get(kind, 0) + num
        whole[kind] = whole.get(kind, 0) + last.of.get(name, 0)
    return {kind: kept[kind] / (whole[kind] or 1) for kind in kept}


def _bars(
    title: str,
    values: dict[str, float],
    note: str,
    thing: str,
    normal: str,
    percent: bool = False,
) -> Figure:
    """Horizontal bars with the first name on top. If there are too many, the largest are shown."""
    if len(values) > MAX_BARS:
        values = dict(sorted(values.items(), key=lambda item: -item[1])[:MAX_BARS])
        note = f"{note} The {MAX_BARS} largest.".strip()
    names = list(values)[::-1]
    shown = rounded(values[name] for name in names)
    text = [f"{v:.2%}" if percent else f"{v:.3g}" for v in (values[name] for name in names)]
    trace = {"type": "bar", "orientation": "h", "x": shown, "y": names, "text": text}
    axis = {"tickformat": "~%"} if percent else {}
    layout = {"xaxis": axis, "height": 90 + 22 * len(names), "hovermode": "closest"}
    trace |= {"textposition": "auto", "textangle": 0, "showlegend": False}
    return Figure(title, [trace | {"marker": {"color": THINGS[thing]}}], note, layout, normal)


# The time of a step by part: figures and tables of rank 0 and of every rank.


OWN_PARTS = ("data", "forward", "backward", "optimizer")
"""Parts in which a rank does not wait for others."""


ABOUT_PARTS = (
    "The parts of a step of rank 0, stacked. Exposed is the time spent waiting for the exchange. "
    "Select, exchange and scatter overlap with backward; click a name to show it."
)


def times(runlog: RunLog) -> list[Block]:
    """Dense and sparse steps side by side, steps over time, percentiles, and all ranks."""
    sentences = [*cost_sentences(runlog), *_first_and_tenth(runlog)]
    blocks: list[Block] = [paragraph(text, "summary") for text in sentences]
    percentiles = folded("Means and percentiles of every part", _percentiles(runlog))
    return [*blocks, *side_by_side(runlog), _over_time(runlog), percentiles, *_ranks(runlog)]


def _first_and_tenth(runlog: RunLog) -> list[str]:
    """The first step beside one by which everything is connected and allocated."""
    seconds = [step.whole for step in runlog.steps if step.step in (0, 9)]
    if len(seconds) != 2 or None in seconds:
        return []
    first, tenth = (1e3 * (whole or 0.0) for whole in seconds)
    return [f"The first step took {first:.0f} ms, and the tenth {tenth:.0f} ms."]


def _over_time(runlog: RunLog) -> Figure:
    """The medians of the parts in windows of steps, as areas: a slow step is not a spike."""
    steps = downsample(runlog.steps, FEW_POINTS)
    last = runlog.steps[-1]
    stacked = [
        line(part, steps.steps, _milliseconds(steps, part), stackgroup="step", **_area(part))
        for part in STEP_PARTS
        if getattr(last, part) is not None
    ]
    overlapped = [
        line(f"{part} (overlapped)", steps.steps, _milliseconds(steps, part), visible="legendonly")
        | {"line": {"color": PARTS[part]}, "marker": {"color": PARTS[part]}}
        for part in OVERLAPPED_PARTS
        if getattr(last, part) is not None
    ]
    width = f" Each point is the median of {steps.width} steps." if steps.width > 1 else ""
    layout = with_phases(over_steps("ms"), runlog)
    layout["yaxis"] |= {"rangemode": "tozero"}
    title = "Where the time of a step goes"
    return Figure(title, [*stacked, *overlapped], f"{ABOUT_PARTS}{width}", layout)


def _area(part: str) -> dict[str, Any]:
    colour = PARTS[part]
    return {
        "mode": "lines",
        "line": {"color": colour, "width": 0.5},
        "fillcolor": transparent(colour, 0.75),
    }


def _milliseconds(steps: Windows, part: str) -> list[float | None]:
    return [None if value is None else value * 1e3 for value in steps.median(part)]


def _column(steps: list[StepRecord], part: str) -> np.ndarray:
    """The milliseconds of a part in each step; NaN where it was not recorded."""
    seconds = [getattr(step, part) for step in steps]
    return np.array([np.nan if value is None else value * 1e3 for value in seconds])


def _percentiles(runlog: RunLog) -> str:
    rows = []
    for phase in PHASES:
        steps = [step for step in steady_steps(runlog) if step.phase == phase]
        for part in (*STEP_PARTS, "whole", *OVERLAPPED_PARTS):
            values = _column(steps, part)
            values = values[~np.isnan(values)]
            if len(values):
                found = [values.mean(), *np.percentile(values, (50, 90, 99)), values.max()]
                name = f"{part} (overlapped)" if part in OVERLAPPED_PARTS else part
                rows.append([f"{phase}: {name}", *(f"{value:.1f}" for value in found)])
    note = (
        "Milliseconds of a step of rank 0 by phase, without the first step of each, which connects."
    )
    return table(["part", "mean", "median", "90 %", "99 %", "most"], rows, note)


def _ranks(runlog: RunLog) -> list[Block]:
    means = rank_means(runlog)
    if not means:
        return []
    names = [f"rank {rank}" for rank in range(len(means))]
    traces: list[dict[str, Any]] = [
        {"type": "bar", "name": part, "x": names, "marker": {"color": PARTS[part]}}
        | {"y": rounded((own.get(part) or 0.0) * 1e3 for own in means)}
        for part in STEP_PARTS
    ]
    slowest, ahead = slowest_rank(means)
    note = "Mean milliseconds of a step, without the first."
    if len(means) > 1:
        note += (
            f" The slowest is rank {slowest}: its own work takes {ahead * 1e3:.0f} ms more than "
            "the mean of the others, which wait for it (exposed)."
        )
    layout = {"barmode": "stack", "yaxis": {"title": {"text": "ms"}}}
    return [Figure("Every rank's time", traces, note, layout)]


def rank_means(runlog: RunLog) -> list[dict[str, float]]:
    """Mean seconds of each part by rank; empty when none were recorded.

    If a resumed run has changed its world size, only the last world size counts.
    """
    records = [r for r in runlog.of(RanksRecord) if r.step > 0 and r.steps > 0]
    if not records:
        return []
    size = len(records[-1].seconds)
    records = [record for record in records if len(record.seconds) == size]
    steps = sum(record.steps for record in records)
    return [
        {
            part: sum((r.seconds[rank].get(part) or 0.0) * r.steps for r in records) / steps
            for part in records[-1].seconds[rank]
        }
        for rank in range(size)
    ]


def slowest_rank(means: list[dict[str, float]]) -> tuple[int, float]:
    """The rank with the most work of its own, and the seconds by which it exceeds the others."""
    own = [sum(mean.get(part) or 0.0 for part in OWN_PARTS) for mean in means]
    slowest = int(np.argmax(own))
    others = own[:slowest] + own[slowest + 1 :]
    return slowest, own[slowest] - (sum(others) / len(others) if others else 0.0)


# Figures of the bytes sent: by stage of the exchange, by message size, and in total.


def traffic(runlog: RunLog, steps: Windows) -> list[Figure]:
    """Bytes of rank 0 by step and stage, message sizes, and the total compared with dense."""
    return [_cumulative(runlog, steps), _by_stage(runlog), *_messages(runlog)]


MAX_TICKS = 6
"""Sizes that are named on an axis: more of them overlap on a phone."""

NORMAL_STAGES = (
    "split and gather have most of the bytes; thresholds, counts and bounds are a few percent. "
    "With other methods there are other stages."
)
NORMAL_MESSAGES = (
    "there are two groups: small messages with counts and sizes, and large ones with entries."
)


def _by_stage(runlog: RunLog) -> Figure:
    """Bytes of the sparse steps, or of all if none is: beside a dense step they would be flat."""
    sparse = [step for step in runlog.steps if step.phase == "sparse"]
    records = sparse or runlog.steps
    steps = downsample(records, FEW_POINTS)
    stages = sorted({stage for step in records for stage in step.stages or {}})
    traces = [
        line(stage, steps.steps, steps.mean_of(_sent(step, stage) for step in records))
        | _traffic_area(colour_of_stage(stage))
        for stage in stages
    ]
    layout = over_steps("bytes")
    layout["yaxis"] |= {"exponentformat": "SI", "rangemode": "tozero"}
    what = "sparse step" if sparse else "step"
    title = f"Bytes of a {what}, by stage of the exchange"
    return Figure(title, traces, _by_stage_note(records, bool(sparse)), layout, NORMAL_STAGES)


def _traffic_area(colour: str) -> dict[str, Any]:
    """The looks of a stacked trace with steps."""
    edge = {"shape": "hv", "width": 0.5, "color": colour}
    filled = {"stackgroup": "stages", "fillcolor": transparent(colour, 0.75)}
    return {"mode": "lines", "line": edge, "marker": {"color": colour}} | filled


def _by_stage_note(records: Sequence[StepRecord], sparse: bool) -> str:
    note = "Sent by rank 0, headers included. Double-click a name to see one stage alone."
    sent = statistics.median(step.bytes_sent for step in records)
    dense = statistics.median(step.bytes_dense for step in records)
    if not sparse or not sent:
        return note
    return f"{note} A dense step sends {format_bytes(dense)}, {dense / sent:.0f} times the median."


def _sent(step: StepRecord, stage: str) -> float:
    traffic = (step.stages or {}).get(stage)
    return float(traffic.sent) if traffic else 0.0


def _cumulative(runlog: RunLog, steps: Windows) -> Figure:
    fields = {"a dense run": ("bytes_dense", "dense"), "sent": ("bytes_sent", "sparse")}
    traces = [
        line(name, steps.steps, [*steps.cumulative(field)], **colour(thing))
        for name, (field, thing) in fields.items()
    ]
    layout = over_steps("bytes")
    layout["yaxis"] |= {"exponentformat": "SI"}
    return Figure("Bytes since the beginning", traces, "Of rank 0.", with_phases(layout, runlog))


def _messages(runlog: RunLog) -> list[Figure]:
    counts = {stage: sizes for stage, sizes in message_counts(runlog).items() if sizes}
    if not counts:  # a single rank sends none
        return []
    bits = sorted({length for sizes in counts.values() for length in sizes})
    lengths = list(range(bits[0], bits[-1] + 1))
    traces = [
        {"type": "bar", "name": stage, "x": lengths, "marker": {"color": colour_of_stage(stage)}}
        | {"y": [sizes.get(length, 0) for length in lengths]}
        for stage, sizes in sorted(counts.items())
    ]
    named = lengths[:: -(-len(lengths) // MAX_TICKS)]
    axis = {"title": {"text": "size, at most"}, "tickmode": "array", "tickvals": named}
    axis |= {"ticktext": [_binary(2**length) for length in named]}
    layout = {"barmode": "stack", "xaxis": axis, "yaxis": {"title": {"text": "messages"}}}
    note = "Messages of rank 0 by size and stage, up to the last epoch that ended."
    return [Figure("Message sizes", traces, note, layout, NORMAL_MESSAGES)]


def _binary(num_bytes: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes} {unit}"
        num_bytes //= 1024
    return f"{num_bytes} GiB"


def message_counts(runlog: RunLog) -> dict[str, Counter[int]]:
    """Number of messages by stage and by the bit length of their size.

    Counts start over when a run is resumed, so the last count before each resume is added up.
    """
    began = [run.step for run in runlog.of(RunRecord)]
    last = {bisect(began, record.step): record for record in runlog.of(MessagesRecord)}
    counts: dict[str, Counter[int]] = {}
    for record in last.values():
        for stage, sizes in record.sent.items():
            counts.setdefault(stage, Counter()).update(sizes)
    return counts
