# SPDX-License-Identifier: Apache-2.0
"""Figures over the steps of a run: learning, compression, thresholds, quality of selection."""

from __future__ import annotations

from typing import Any

from oktopk.report.downsample import Windows, downsample
from oktopk.report.page import Figure, rounded
from oktopk.runlog.reader import RunLog
from oktopk.runlog.schema import ProbeRecord

LOSS = "val_loss"
"""The metric that is drawn beside the training loss."""
LOG = {"type": "log", "tickformat": "~g"}
FEW_TICKS = {"dtick": "D2"}  # ticks at 1, 2 and 5 only


def line(name: str, x: list[Any], y: list[float | None], **more: Any) -> dict[str, Any]:
    """A trace of lines, with markers if there are few points."""
    known = sum(value is not None for value in y)
    mode = "lines" if known > 60 else "lines+markers"
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": rounded(y)} | more


def over_steps(title: str, **layout: Any) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": title}}} | layout


def with_phases(layout: dict[str, Any], runlog: RunLog) -> dict[str, Any]:
    """The layout with the dense phase shaded and its end marked."""
    changes = phase_changes(runlog)
    dense = [(start, end) for phase, start, end in changes if phase == "dense"]
    whole = len(dense) == len(changes)
    shade = {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 0}}
    shapes = [shade | {"x0": a, "x1": b, "layer": "below"} for a, b in dense]
    notes = [
        {"x": b, "y": 1, "yref": "paper", "text": f"sparse from step {b}", "showarrow": False}
        | {"xanchor": "left", "yanchor": "top", "bgcolor": "rgba(0,0,0,0)"}
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


def learning(runlog: RunLog, steps: Windows) -> list[Figure]:
    """Loss and error rates, training and validation."""
    epochs, validated = downsample(runlog.epochs), runlog.validations
    at = epochs.steps
    traces = [line("training, each step", steps.steps, steps.mean("loss"), opacity=0.55)]
    traces.append(line("training, each epoch", at, epochs.mean("train_loss")))
    at_validation = [record.step for record in validated]
    if any(metric.name == LOSS for metric in runlog.metrics):
        values = [record.metrics.get(LOSS) for record in validated]
        traces.append(line("validation", at_validation, values))
    loss = Figure("Loss", traces, _window_note(steps), _logarithmic("loss", runlog))
    rates = [metric for metric in runlog.metrics if metric.shown and metric.name != LOSS]
    if not validated or not rates:
        return [loss]
    traces = [
        line(metric.label, at_validation, [record.metrics.get(metric.name) for record in validated])
        for metric in rates
    ]
    layout = over_steps(", ".join(metric.label for metric in rates))
    layout["yaxis"] |= {"rangemode": "tozero"}
    return [loss, Figure("Metrics on the test set", traces, "", with_phases(layout, runlog))]


def compression(runlog: RunLog, steps: Windows) -> list[Figure]:
    """Entries kept compared with k, the compression ratio, and the thresholds."""
    numel = max(1, runlog.steps[-1].numel or 1)
    names = {"asked for (k)": "k", "kept by rank 0": "local", "in the result": "result"}
    kept = [
        line(name, steps.steps, [v and v / numel for v in steps.mean(field)])
        for name, field in names.items()
    ]
    ratio = [line("dense bytes over bytes sent", steps.steps, steps.mean("compression_ratio"))]
    thresholds = {"of this rank": "local_threshold", "of the result": "global_threshold"}
    limits = [
        line(name, steps.steps, [v or None for v in steps.mean(field)])
        for name, field in thresholds.items()
    ]
    note = "Of all entries of the gradient. One minus the result's share is the sparsity."
    return [
        Figure(
            "Entries kept", kept, note, _logarithmic("share", runlog, tickformat="~%", **FEW_TICKS)
        ),
        Figure(
            "Compression ratio of each step",
            ratio,
            "",
            _logarithmic("times fewer bytes", runlog, **FEW_TICKS),
        ),
        Figure(
            "Thresholds: the smallest magnitude kept",
            limits,
            "",
            _logarithmic("magnitude", runlog, **FEW_TICKS),
        ),
    ]


def quality(runlog: RunLog) -> list[Figure]:
    """What the probes measured; empty without probes."""
    if not runlog.of(ProbeRecord):
        return []
    probes = downsample(runlog.of(ProbeRecord))
    at = probes.steps
    shares = {
        "recall of the exact top k": "recall",
        "captured energy": "energy",
        "energy of the exact top k": "best_energy",
    }
    found = [line(name, at, probes.mean(field)) for name, field in shares.items()]
    layout = over_steps("share") | {"yaxis": {"range": [0, 1.02], "tickformat": "~%"}}
    note = (
        "Compared with the dense sum of the accumulated gradients of all ranks: how many of its "
        "largest entries were selected, and how much of its energy (sum of squares) they hold. "
        "A result with more than k entries may hold more energy than the exact top k."
    )
    xi = [line("xi", at, probes.mean("xi"))]
    ages = {"mean": "age_mean", "nine of ten are below": "age_90", "oldest": "age_most"}
    old = [line(name, at, probes.mean(field)) for name, field in ages.items()]
    about_xi = (
        "Distance of the result from the exact top k, over the norm of the gradient: what the "
        "convergence proof of Ok-Topk assumes to be bounded."
    )
    about_age = "Steps since an entry of the residual was last part of a result."
    return [
        Figure("Quality of selection", found, note, layout),
        Figure("xi of the convergence assumption", xi, about_xi, over_steps("xi")),
        Figure("Age of the residual", old, about_age, over_steps("steps")),
    ]


def _logarithmic(title: str, runlog: RunLog, **more: Any) -> dict[str, Any]:
    layout = over_steps(title)
    layout["yaxis"] |= LOG | more
    return with_phases(layout, runlog)


def _window_note(steps: Windows) -> str:
    return f"Each point is the mean of {steps.width} steps." if steps.width > 1 else ""
