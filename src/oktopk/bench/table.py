# SPDX-License-Identifier: Apache-2.0
"""The results of a bench for people: a table line by line, and a bar chart."""

from __future__ import annotations

import math
from pathlib import Path

from oktopk.bench.baselines import NOOP
from oktopk.bench.measure import Row

COLUMNS = (
    ("method", 16),
    ("ms/step", 9),
    ("middle half", 15),
    ("above noop", 11),
    ("to dense", 9),
    ("MB sent", 9),
    ("MB/step", 9),
    ("MB on wire", 11),
    ("bits/entry", 11),
)


def head() -> str:
    return " ".join(f"{title:>{width}}" for title, width in COLUMNS)


def line(row: Row) -> str:
    cells = (
        row.method,
        f"{row.ms_per_step:.0f}",
        f"{row.ms_low:.0f} - {row.ms_high:.0f}",
        "" if row.method == NOOP else f"{row.ms_above_noop:.0f}",
        "" if row.ratio_to_dense is None else f"{row.ratio_to_dense:.3f}",
        f"{row.bytes_sent / 1e6:.2f}",
        f"{row.bytes_sent / row.every / 1e6:.3f}",
        "" if row.bytes_on_interface is None else f"{row.bytes_on_interface / 1e6:.2f}",
        "" if row.bits_per_kept is None else f"{row.bits_per_kept:.1f}",
    )
    return " ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True))


def plot(rows: list[Row], path: Path) -> None:
    """Draw milliseconds above the no-op on a logarithmic scale, a group of bars per rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rates = list(dict.fromkeys(row.rate for row in rows))
    names = list(dict.fromkeys(row.method for row in rows if row.method != NOOP))
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.2 * len(names) * len(rates)))
    height = 0.8 / len(rates)
    for i, rate in enumerate(rates):
        found = {row.method: row for row in rows if row.rate == rate}
        times = [max(found[name].ms_above_noop, 0.1) if name in found else 0 for name in names]
        places = [place + height * (i - (len(rates) - 1) / 2) for place in range(len(names))]
        label = "unshaped" if rate == "none" else rate
        bars = axes.barh(places, times, height=height * 0.92, label=label)
        axes.bar_label(
            bars, [f"{time:.0f}" if time else "" for time in times], fontsize=7, padding=2
        )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.08)
    shown = [row.ms_above_noop for row in rows if row.method != NOOP and row.ms_above_noop > 0]
    axes.set_xlim(left=10 ** math.floor(math.log10(min(shown, default=1))))
    first = rows[0]
    axes.set_title(
        f"{first.workers} workers, {first.numel:,} gradients, density {first.density:g}",
        fontsize=10,
    )
    axes.set_xlabel("milliseconds per step above a no-op exchange (less is better)")
    axes.grid(axis="x", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
