# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML file: text, tables and interactive figures."""

from __future__ import annotations

import base64
import gzip
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib.resources import files
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Any
from zlib import crc32

from oktopk.utils.console import is_drawn, print_table
from oktopk.utils.files import write_atomically

SIGNIFICANT_DIGITS = 5


@dataclass(frozen=True, slots=True)
class Figure:
    """Traces and layout for plotly.js. The page sets colours and margins."""

    title: str
    traces: list[dict[str, Any]]
    note: str = ""
    layout: dict[str, Any] = field(default_factory=dict)
    normal: str = ""
    """What a reader may expect to see, as the rest of a sentence that begins "Normal is that"."""


Block = Figure | str  # a string is HTML


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page. A section without blocks is left out."""

    title: str
    blocks: Sequence[Block]


def write_page(path: Path, title: str, opening: str, sections: Iterable[Section]) -> None:
    """Write a page to a temporary file and rename it. `opening` is HTML."""
    write_atomically(path, page(title, opening, sections))


def page(title: str, opening: str, sections: Iterable[Section]) -> str:
    """The whole file as text."""
    figures: list[Figure] = []
    shown = [section for section in sections if section.blocks]
    body = [_section(section, number, figures) for number, section in enumerate(shown)]
    links = [f'<a href="#s{n}">{escape(section.title)}</a>' for n, section in enumerate(shown)]
    drawn = [{"data": f.traces, "layout": f.layout} for f in figures]
    parts = {
        "TITLE": escape(title),
        "STYLE": _asset("page.css"),
        "OPENING": opening,
        "LINKS": "\n".join(links),
        "BODY": "\n".join(body),
        "FIGURES": _json(drawn),
        "SCRIPT": _asset("page.js"),
        "PLOTLY": _plotly() if figures else "",
    }
    # in one pass, because inserted text may contain such marks
    return re.sub(r"@([A-Z]+)@", lambda mark: parts[mark[1]], _asset("page.html"))


def _section(section: Section, number: int, figures: list[Figure]) -> str:
    parts = [f'<section id="s{number}"><h2>{escape(section.title)}</h2>']
    for block in section.blocks:
        if isinstance(block, Figure):
            figures.append(block)
            note = f"<p class=note>{escape(block.note)}</p>" if block.note else ""
            normal = f"Normal is that {block.normal}"
            below = f"<p class=note>{escape(normal)}</p>" if block.normal else ""
            parts.append(f"<figure><figcaption>{escape(block.title)}</figcaption>{note}")
            parts.append(f'<div class=plot id="f{len(figures) - 1}"></div>{below}</figure>')
        else:
            parts.append(block)
    return "\n".join([*parts, "</section>"])


def table(
    header: Sequence[str], rows: Iterable[Sequence[Any]], note: str = "", *, left: bool = False
) -> str:
    """An HTML table that scrolls if it is wide. Numbers are aligned right, unless they are beside
    words in one column: then all is aligned `left`."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    text = f"<p class=note>{escape(note)}</p>" if note else ""
    kind = "wide left" if left else "wide"
    whole = f"<table><thead><tr>{head}</tr></thead>{body}</table>"
    return f'{text}<div class="{kind}">{whole}</div>'


def _cell(value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    shown = f"{value:,}" if isinstance(value, int) and number else str(value)
    return f"<td{' class=number' if number or _looks_numeric(shown) else ''}>{escape(shown)}</td>"


def _looks_numeric(text: str) -> bool:
    return text.lstrip("+-")[:1].isdigit() or text in ("-", "")


def folded(title: str, content: str) -> str:
    """HTML that is hidden until the reader clicks the title."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def code(text: str) -> str:
    """A command, as a block that scrolls."""
    return f"<pre class=wide>{escape(text)}</pre>"


def paragraph(text: str, kind: str = "") -> str:
    return f"<p{f' class={kind}' if kind else ''}>{escape(text)}</p>"


def tiles(values: Iterable[tuple[str, str, str]]) -> str:
    """Large numbers, each with a name and a remark."""
    shown = (
        f"<div class=tile><b>{escape(value)}</b><span>{escape(name)}</span>"
        f"<small>{escape(remark)}</small></div>"
        for name, value, remark in values
    )
    return f"<div class=tiles>{''.join(shown)}</div>"


def rounded(values: Iterable[float | None]) -> list[float | None]:
    """Round for a figure, which keeps the file small. What is not finite becomes None."""
    return [
        float(f"{v:.{SIGNIFICANT_DIGITS}g}") if v is not None and isfinite(v) else None
        for v in values
    ]


def _json(value: Any) -> str:
    """JSON that cannot close the script element that contains it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return files("oktopk.lab.report").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    packed = gzip.compress(get_plotlyjs().encode(), 9, mtime=0)
    return base64.b64encode(packed).decode()


# One colour for one thing, in all figures of a report.


BLUE, ORANGE, GREEN, PINK = "#3b82d6", "#e08214", "#2a9d6f", "#c2439a"
VIOLET, BROWN, CYAN, RED = "#8c6bd1", "#b0892b", "#4db6c9", "#d6554c"

THINGS = {
    # the two ways to exchange, and what is compared with them
    "dense": GREEN,
    "sparse": BLUE,
    # who holds something
    "rank 0": ORANGE,
    "result": BLUE,
    "asked": "#9aa4b0",
    "best": VIOLET,
    "recall": PINK,
    # data
    "training": BLUE,
    "validation": ORANGE,
}
PARTS = {
    "data": BROWN,
    "forward": CYAN,
    "backward": "#5b6fa8",
    "exposed": RED,
    "optimizer": "#c9a9d6",
    "select": VIOLET,
    "exchange": PINK,
    "scatter": "#7a5c46",
}
"""The parts of a step."""
STAGES = {
    "dense": GREEN,
    "split": BLUE,
    "gather": ORANGE,
    "threshold": VIOLET,
    "counts": BROWN,
    "bounds": CYAN,
    "reduce": PINK,
    "broadcast": "#6f8f3f",
    "balance": RED,
}
"""The stages of an exchange."""
# for other stages
OTHERS = ("#9aa4b0", "#7a5c46", "#5b6fa8", "#c9a9d6", "#2f6f73", "#d9b44a")


METRICS = (ORANGE, PINK, VIOLET, BROWN)
"""Metrics of the validation: the first has its colour."""


def colour_of_metric(number: int) -> str:
    """The colour of the metric with this number among those that are drawn together."""
    return METRICS[number % len(METRICS)]


def colour_of_stage(stage: str) -> str:
    """The colour of a stage. A hash of the name chooses it for stages without one of their own."""
    return STAGES.get(stage) or OTHERS[crc32(stage.encode()) % len(OTHERS)]


def transparent(colour: str, opacity: float = 0.18) -> str:
    """The colour for an area under a line."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


# Text tables: readable in a terminal and valid Markdown, or as narrow as they can be.


def markdown(cells: list[list[str]]) -> str:
    """Format headings and rows in aligned columns; all but the first are aligned right."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    head, *body = (_line(row, widths) for row in cells)
    rule = "|".join("-" * (width + 1) + ("-" if i == 0 else ":") for i, width in enumerate(widths))
    return "\n".join([head, f"|{rule}|", *body]) + "\n"


def aligned(cells: list[list[str]], gap: str = "  ") -> str:
    """Format headings and rows in columns with nothing but a gap between them."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    head, *body = (gap.join(_padded(row, widths)).rstrip() for row in cells)
    return "\n".join([head, gap.join("-" * width for width in widths), *body]) + "\n"


def show(text: str) -> None:
    """Print a text with such tables in it, which are drawn if stdout is a terminal."""
    if not is_drawn():
        sys.stdout.write(f"{text}\n")
        return
    for is_table, lines in groupby(text.splitlines(), lambda one: one[:1] == "|"):
        if is_table:
            head, _, *rows = ([cell.strip() for cell in one[1:-1].split("|")] for one in lines)
            print_table(head, rows, right=True)
        else:
            sys.stdout.write("".join(f"{one}\n" for one in lines))


def _line(row: list[str], widths: list[int]) -> str:
    return f"| {' | '.join(_padded(row, widths))} |"


def _padded(row: list[str], widths: list[int]) -> list[str]:
    first, *rest = zip(row, widths, strict=True)
    return [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
