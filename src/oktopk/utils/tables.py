# SPDX-License-Identifier: Apache-2.0
"""Tables for people: drawn by rich on a terminal, plain text in a pipe or a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: bool = False) -> None:
    """Print a table; with `right`, all columns but the first are aligned right."""
    if is_drawn():
        _draw(head, rows, right)
        return
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if right and place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def is_drawn() -> bool:
    """Whether tables are drawn: stdout is a terminal, and rich is installed."""
    return sys.stdout.isatty() and find_spec("rich") is not None


def _draw(head: Sequence[str], rows: Sequence[Sequence[str]], right: bool) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for place, title in enumerate(head):
        table.add_column(title, justify="right" if right and place else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table, markup=False, highlight=False)
