"""Figures of the parameters: which are kept, what is owed to them, how values spread."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from oktopk.report.curves import LOG
from oktopk.report.histogram import edges
from oktopk.report.page import Block, Figure, rounded
from oktopk.runlog.reader import Entry, Record

MOST = 60  # tensors with a bar of their own
BY_SIZE = {
    "xaxis": LOG | {"title": {"text": "magnitude"}},
    "yaxis": {"title": {"text": "share of the nonzero entries"}, "tickformat": "~%"},
}


def tensors(record: Record) -> list[Block]:
    """Kept fraction by tensor and by kind of layer, norms of residuals, ages."""
    counted = [entry for entry in record.of("tensors") if sum(entry["kept"].values())]
    sparse = [entry for entry in counted if _share(entry) < 1]
    if not sparse:
        return []
    last = sparse[-1]
    note = f"At step {last['step']}: nonzero entries of the result. Those at 100 % travel dense."
    blocks: list[Block] = [
        _bars("Kept fraction by kind of layer", _by_kind(record, last), note, percent=True),
        _bars("Kept fraction by tensor", _fractions(last), "", percent=True),
    ]
    owed, applied = last.get("residual_norm") or {}, last.get("norm") or {}
    norms = {name: owed[name] for name in last["kept"] if owed.get(name)}  # the others owe nothing
    if norms:
        text = "Norm of what rank 0 still owes, over the norm of what was applied in that step."
        shares = {n: norm / applied[n] for n, norm in norms.items() if applied.get(n)}
        blocks.append(_bars("Residual norm by tensor", norms, "Norm of what rank 0 still owes."))
        blocks.append(_bars("Residual over applied, by tensor", shares, text))
    ages = [entry for entry in record.of("probe") if entry.get("ages")]
    if ages:
        text = "Mean steps since an entry was last part of a result, at the last probe."
        known = {name: age for name, age in ages[-1]["ages"].items() if age is not None}
        blocks.append(_bars("Age of residuals by tensor", known, text))
    return blocks


def spreads(record: Record) -> list[Block]:
    """Gradients and residuals by magnitude, before and after the sparse phase began."""
    entries = [entry for entry in record.of("tensors") if entry.get("spread")]
    blocks: list[Block] = []
    for name, what in {"gradient": "applied gradient", "residual": "residual of rank 0"}.items():
        chosen = _around_activation([e for e in entries if name in e["spread"]], record)
        if chosen:
            found = {label: entry["spread"][name] for entry, label in chosen}
            traces = [_spread(values, label) for label, values in found.items()]
            zeros = ", ".join(f"{label} {_zeros(values):.1%}" for label, values in found.items())
            blocks.append(Figure(f"Magnitudes of the {what}", traces, f"Zero: {zeros}.", BY_SIZE))
    return blocks


def _around_activation(entries: list[Entry], record: Record) -> list[tuple[Entry, str]]:
    """The last before the sparse phase, the first of it, and the last of all."""
    sparse = {entry["step"] for entry in record.steps if entry.get("phase") == "sparse"}
    dense = [entry for entry in entries if entry["step"] not in sparse]
    after = [entry for entry in entries if entry["step"] in sparse]
    picked = {"dense": dense[-1:], "first sparse": after[:1], "last": after[1:][-1:]}
    return [(e, f"{label}, step {e['step']}") for label, found in picked.items() for e in found]


def _spread(found: dict[str, Any], name: str) -> dict[str, Any]:
    counts, borders = found["counts"], edges(found["first"], len(found["counts"]))
    whole = sum(counts) or 1
    middles = [(a * b) ** 0.5 for a, b in pairwise(borders)]
    share = rounded(count / whole for count in counts)
    shape = {"shape": "hvh"}
    return {"type": "scatter", "mode": "lines", "name": name, "line": shape} | {
        "x": rounded(middles),
        "y": share,
    }


def _zeros(found: dict[str, Any]) -> float:
    return found["zeros"] / ((found["zeros"] + sum(found["counts"])) or 1)


def _share(entry: Entry) -> float:
    return sum(entry["kept"].values()) / (sum(entry["of"].values()) or 1)


def _fractions(entry: Entry) -> dict[str, float]:
    return {name: kept / (entry["of"].get(name) or 1) for name, kept in entry["kept"].items()}


def _by_kind(record: Record, last: Entry) -> dict[str, float]:
    known = record.opening.get("tensors") or {}
    kinds = {name: facts["kind"] for name, facts in known.items()}
    kept: dict[str, int] = {}
    whole: dict[str, int] = {}
    for name, num in last["kept"].items():
        kind = kinds.get(name, "unknown")
        kept[kind] = kept.get(kind, 0) + num
        whole[kind] = whole.get(kind, 0) + last["of"].get(name, 0)
    return {kind: kept[kind] / (whole[kind] or 1) for kind in kept}


def _bars(title: str, values: dict[str, float], note: str, percent: bool = False) -> Figure:
    """Bars that lie, longest name first on top; of very many tensors the largest values."""
    if len(values) > MOST:
        values = dict(sorted(values.items(), key=lambda item: -item[1])[:MOST])
        note = f"{note} The {MOST} largest.".strip()
    names = list(values)[::-1]
    shown = rounded(values[name] for name in names)
    text = [f"{v:.2%}" if percent else f"{v:.3g}" for v in (values[name] for name in names)]
    trace = {"type": "bar", "orientation": "h", "x": shown, "y": names, "text": text}
    axis = {"tickformat": "~%"} if percent else {}
    layout = {"xaxis": axis, "height": 90 + 22 * len(names), "hovermode": "closest"}
    return Figure(
        title, [trace | {"textposition": "auto", "textangle": 0, "showlegend": False}], note, layout
    )
