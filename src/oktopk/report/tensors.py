# SPDX-License-Identifier: Apache-2.0
"""Figures of the parameters: kept fractions, residuals, and histograms of magnitudes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from oktopk.report.colours import THINGS
from oktopk.report.page import Block, Figure, rounded
from oktopk.runlog.histogram import bin_edges
from oktopk.runlog.reader import RunLog
from oktopk.runlog.schema import Histogram, ProbeRecord, TensorsRecord

MAX_BARS = 60
BY_MAGNITUDE = {
    "xaxis": {"type": "log", "tickformat": "~e", "title": {"text": "magnitude"}},
    "yaxis": {"title": {"text": "share of the nonzero entries"}, "tickformat": "~%"},
}


NORMAL_KEPT = (
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
        _bars("Kept fraction by kind of layer", kinds, note, "result", NORMAL_KEPT, True),
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
