# SPDX-License-Identifier: Apache-2.0
"""The newest of what all ranks have, where each of them found some of it in files."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from oktopk.comm.communicator import Comm

LAST = 8
"""How many a rank tells of: older ones are not looked for."""


def newest_on_all(
    found: Iterable[tuple[int, ...]], width: int, comm: Comm, device: torch.device
) -> tuple[int, ...] | None:
    """The largest tuple that every rank has found; None if there is none. Collective.

    All tuples have `width` numbers, none of which is -2. Header: 64 bytes for each of them.
    """
    nothing = (-2,) * width
    newest = sorted(found)[-LAST:]
    table = torch.tensor(newest + [nothing] * (LAST - len(newest)), dtype=torch.int64)
    heard = comm.all_gather_header(table.to(device), stage="checkpoint").tolist()
    common = set.intersection(*({tuple(row) for row in rows} for rows in heard)) - {nothing}
    return max(common, default=None)
