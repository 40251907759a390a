# SPDX-License-Identifier: Apache-2.0
"""How the ranks share what an exchange delivers: the default method of `local_steps`.

The largest weight changes of different ranks are at different places: 4 ranks found 3.5 to 3.9
times as many places as one rank selects (docs/experiments.md). `oktopk` keeps the k largest sums of
k entries from each rank, so most of what the ranks have sent to the owners of the regions goes back
to their residuals. Here every rank selects k/P entries and all of them are
delivered: the bytes still hardly grow with the number of ranks, and none of them are wasted.
"""

from __future__ import annotations

from dataclasses import replace

from oktopk.adapters.budget import AUTO
from oktopk.settings import Settings

METHOD = "topkdsa"
"""Delivers all that any rank has selected, by the owners of regions."""


def method_of(method: str) -> str:
    """The method that exchanges, where `auto` stands for shared density."""
    return METHOD if method == AUTO else method


def shared(settings: Settings, size: int) -> Settings:
    """The settings of a rank that shares `settings.density` with all others.

    At density 1 nothing is selected: the exchange is dense.
    """
    if settings.density == 1:
        return settings
    return replace(settings, density=settings.density / size)
