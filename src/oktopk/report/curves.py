"""Figures over the steps of a run: learning, compression, thresholds, quality of selection."""

from __future__ import annotations

from typing import Any

from oktopk.report.downsample import Columns, columns
from oktopk.report.page import Figure, rounded
from oktopk.runlog.reader import Record

LOG = {"type": "log", "tickformat": "~g"}
FEW = {"dtick": "D2"}  # 1, 2, 5: over two decades or less plotly would name every digit


def line(name: str, x: list[Any], y: list[float | None], **more: Any) -> dict[str, Any]:
    """A curve; one with few points shows them."""
    known = sum(value is not None for value in y)
    mode = "lines" if known > 60 else "lines+markers"
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": rounded(y)} | more


def over_steps(title: str, **layout: Any) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": title}}} | layout


def with_phases(layout: dict[str, Any], record: Record) -> dict[str, Any]:
    """Shade the dense phase and say where it ends."""
    changes = phase_changes(record)
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


def phase_changes(record: Record) -> list[tuple[str, int, int]]:
    """Phases in order: name, first step, step after the last."""
    found: list[tuple[str, int, int]] = []
    for entry in record.steps:
        step, phase = int(entry["step"]), str(entry.get("phase"))
        if found and found[-1][0] == phase:
            found[-1] = (phase, found[-1][1], step + 1)
        else:
            found.append((phase, step, step + 1))
    return found


def learning(record: Record, steps: Columns) -> list[Figure]:
    """Loss and error rates, training and validation."""
    epochs, validated = columns(record.epochs), record.validated
    at = epochs.steps
    traces = [line("training, each step", steps.steps, steps.mean("loss"), opacity=0.55)]
    traces.append(line("training, each epoch", at, epochs.mean("train_loss")))
    seen = [entry["step"] for entry in validated]
    traces.append(line("validation", seen, [entry.get("val_loss") for entry in validated]))
    loss = Figure("Loss", traces, _width(steps), _logarithmic("loss", record))
    rates = {"WER": "wer", "CER": "cer"}
    traces = [line(name, seen, [e.get(key) for e in validated]) for name, key in rates.items()]
    layout = over_steps("errors over words, or characters")
    layout["yaxis"] |= {"rangemode": "tozero"}
    wer = Figure("Error rates on the test set", traces, "", with_phases(layout, record))
    return [loss, wer] if validated else [loss]


def compression(record: Record, steps: Columns) -> list[Figure]:
    """What was kept against what was asked, and what it saved."""
    numel = max(1, int(record.steps[-1].get("numel") or 1))
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
        Figure("Entries kept", kept, note, _logarithmic("share", record, tickformat="~%", **FEW)),
        Figure(
            "Compression ratio of each step",
            ratio,
            "",
            _logarithmic("times fewer bytes", record, **FEW),
        ),
        Figure(
            "Thresholds: the smallest magnitude kept",
            limits,
            "",
            _logarithmic("magnitude", record, **FEW),
        ),
    ]


def quality(record: Record) -> list[Figure]:
    """What the probes found, where there were any."""
    if not record.of("probe"):
        return []
    probes = columns(record.of("probe"))
    at = probes.steps
    shares = {
        "recall of the true top k": "recall",
        "captured energy": "energy",
        "energy of the true top k": "best_energy",
    }
    found = [line(name, at, probes.mean(field)) for name, field in shares.items()]
    layout = over_steps("share") | {"yaxis": {"range": [0, 1.02], "tickformat": "~%"}}
    note = (
        "Against a dense sum of what all ranks had accumulated: how many of its largest entries "
        "were chosen, and how much of its energy (sum of squares) those chosen have. A result of "
        "more than k entries may have more than the true top k."
    )
    xi = [line("xi", at, probes.mean("xi"))]
    ages = {"mean": "age_mean", "nine of ten are below": "age_90", "oldest": "age_most"}
    old = [line(name, at, probes.mean(field)) for name, field in ages.items()]
    about_xi = (
        "Distance of the result from the true top k, over the norm of the gradient: what the "
        "convergence proof of Ok-Topk assumes to be bounded."
    )
    about_age = "Steps since an entry was last part of a result."
    return [
        Figure("Quality of selection", found, note, layout),
        Figure("xi of the convergence assumption", xi, about_xi, over_steps("xi")),
        Figure("Age of what is owed", old, about_age, over_steps("steps")),
    ]


def _logarithmic(title: str, record: Record, **more: Any) -> dict[str, Any]:
    layout = over_steps(title)
    layout["yaxis"] |= LOG | more
    return with_phases(layout, record)


def _width(steps: Columns) -> str:
    return f"Each point is the mean of {steps.width} steps." if steps.width > 1 else ""
