# SPDX-License-Identifier: Apache-2.0
"""The methods by name. A new method is a file here and a row, and every law is tested on it."""

from __future__ import annotations

from oktopk.methods import dense, gaussiank, gtopk, topka, topkdsa
from oktopk.methods.base import Method
from oktopk.methods.ok_topk import exchange as ok_topk

__all__ = ["METHODS"]

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        dense.METHOD,
        topka.METHOD,
        gaussiank.METHOD,
        topkdsa.METHOD,
        gtopk.METHOD,
        ok_topk.METHOD,
    )
}
"""The methods by name: `dense`, `topka`, `gaussiank`, `topkdsa`, `gtopk`, `oktopk`."""
