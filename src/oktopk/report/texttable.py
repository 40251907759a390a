# SPDX-License-Identifier: Apache-2.0
"""A text table that is readable in a terminal and valid Markdown."""

from __future__ import annotations

import sys
from itertools import groupby

from oktopk.utils.tables import is_drawn, print_table


def markdown(cells: list[list[str]]) -> str:
    """Format headings and rows in aligned columns; all but the first are aligned right."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    head, *body = (_line(row, widths) for row in cells)
    rule = "|".join("-" * (width + 1) + ("-" if i == 0 else ":") for i, width in enumerate(widths))
    return "\n".join([head, f"|{rule}|", *body]) + "\n"


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
    first, *rest = zip(row, widths, strict=True)
    padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
    return f"| {' | '.join(padded)} |"
