# SPDX-License-Identifier: Apache-2.0
"""Figures over the steps of a run: learning, compression, thresholds, quality of selection."""

from __future__ import annotations

from typing import Any

from oktopk.report.colours import THINGS, colour_of_metric, transparent
from oktopk.report.downsample import FEW_POINTS, Windows, downsample
from oktopk.report.page import Figure, rounded
from oktopk.runlog.reader import RunLog
from oktopk.runlog.schema import ProbeRecord

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
