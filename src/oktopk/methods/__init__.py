"""The methods: one row each. Adding a method adds a row, and every law is tested on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oktopk.methods import exchanges, selection
from oktopk.methods.exchanges import Exchanged
from oktopk.methods.selection import Candidates
from oktopk.methods.state import State
from oktopk.sparse import Sparse

__all__ = ["METHODS", "Candidates", "Exchanged", "Method", "State"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One way to average a gradient: how to choose, how to exchange, and what that costs."""

    select: Callable[..., Sparse]
    """(acc, k, state, candidates) -> what this rank offers."""

    exchange: Callable[..., Exchanged]
    """(local, rider, k, state, comm) -> the global sums, the same bits on every rank."""

    keeps_k: bool
    """Whether the result has about k entries too, not only what each rank offers."""

    words: str
    """Words sent per rank and step with fp32 values, headers apart; see docs/algorithms.md."""

    summary: str

    scout: Callable[..., Candidates | None] | None = None
    """(acc, k, state) -> candidates to be found in the pass that adds the gradient."""


METHODS: dict[str, Method] = {
    "dense": Method(
        select=selection.everything,
        exchange=exchanges.dense,
        keeps_k=False,
        words="2n(P-1)/P",
        summary="everything, by allreduce",
    ),
    "topka": Method(
        select=selection.exact,
        exchange=exchanges.allgather,
        keeps_k=False,
        words="2k(P-1)",
        summary="exact top k, by allgather",
    ),
    "gaussiank": Method(
        select=selection.gaussian,
        exchange=exchanges.allgather,
        keeps_k=False,
        words="2k'(P-1), k' within 10 % of k",
        summary="about top k by a normal quantile, by allgather",
    ),
    "topkdsa": Method(
        select=selection.exact,
        exchange=exchanges.region_gather,
        keeps_k=False,
        words="4k(P-1)/P .. (2k+n)(P-1)/P",
        summary="exact top k, by sparse reduce-scatter and allgather, dense on fill-in",
    ),
    "gtopk": Method(
        select=selection.exact,
        exchange=exchanges.tree_merge,
        keeps_k=True,
        words="2k up, 2k to each of at most log P children down",
        summary="exact top k, merged pairwise in a tree, k kept at every node",
    ),
    "oktopk": Method(
        select=selection.near_exact,
        scout=selection.scout,
        exchange=exchanges.oktopk,
        keeps_k=True,
        words="2k(P-1)/P .. 6k(P-1)/P",
        summary="top k by region: split and reduce, global threshold, balanced gather",
    ),
}
"""The methods by name: `dense`, `topka`, `gaussiank`, `topkdsa`, `gtopk`, `oktopk`."""
