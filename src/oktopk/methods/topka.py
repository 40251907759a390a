# SPDX-License-Identifier: Apache-2.0
"""`topka`: exact top k, by all-gather."""

from __future__ import annotations

from oktopk.methods import allgather, selection
from oktopk.methods.base import SparseMethod

METHOD = SparseMethod(
    name="topka",
    summary="exact top k, by allgather",
    words="2k(P-1)",
    cost=allgather.cost,
    select=selection.exact_apart,
    exchange=allgather.all_gather,
)
