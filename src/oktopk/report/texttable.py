# SPDX-License-Identifier: Apache-2.0
"""Text tables: readable in a terminal and valid Markdown, or as narrow as they can be."""

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
