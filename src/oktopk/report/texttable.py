# SPDX-License-Identifier: Apache-2.0
"""A text table that is readable in a terminal and valid Markdown."""

from __future__ import annotations

import sys

from oktopk.utils.tables import is_drawn, print_table


def markdown(cells: list[list[str]]) -> str:
    """Format headings and rows in aligned columns; all but the first are aligned right."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    head, *body = (_line(row, widths) for row in cells)
    rule = "|".join("-" * (width + 1) + ("-" if i == 0 else ":") for i, width in enumerate(widths))
    return "\n".join([head, f"|{rule}|", *body]) + "\n"


def show(text: str) -> None:
    """Print a text that begins with such a table, which is drawn if stdout is a terminal."""
    if not is_drawn():
        sys.stdout.write(f"{text}\n")
        return
    lines = text.splitlines()
    head, _, *rows = ([c.strip() for c in one[1:-1].split("|")] for one in lines if one[:1] == "|")
    print_table(head, rows, right=True)
    sys.stdout.write("".join(f"{one}\n" for one in lines if one[:1] != "|"))


def _line(row: list[str], widths: list[int]) -> str:
    first, *rest = zip(row, widths, strict=True)
    padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
    return f"| {' | '.join(padded)} |"
