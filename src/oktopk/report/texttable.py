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


def show(cells: list[list[str]]) -> None:
    """Print headings and rows: drawn on a terminal, as Markdown in a pipe or a file."""
    if is_drawn():
        print_table(cells[0], cells[1:], right=True)
    else:
        sys.stdout.write(f"{markdown(cells)}\n")


def _line(row: list[str], widths: list[int]) -> str:
    first, *rest = zip(row, widths, strict=True)
    padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
    return f"| {' | '.join(padded)} |"
