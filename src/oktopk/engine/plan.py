# SPDX-License-Identifier: Apache-2.0
"""`StepPlan`: what a step will do, decided once before its first bucket arrives.

A plan follows from the settings, the number of the step and the quotas, which are the same on every
rank. So every rank has the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oktopk.engine.buckets import Buckets
from oktopk.engine.shards import UNSHARDED, Shards
from oktopk.methods import METHODS
from oktopk.methods.base import Average, SparseMethod
from oktopk.settings import Settings, num_kept
from oktopk.stats import Phase
from oktopk.wire.codec import CodecName

NEVER = 2**62  # steps, or entries

QUOTA_STEPS = frozenset({0, 1, 2, 4, 8, 16})
"""Sparse steps that also set quotas: early in the sparse phase the gradient shifts between layers
quickly, and quotas of `exact_every` steps ago would not fit any more."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Buckets that are selected and exchanged together, and how many entries they keep."""

    buckets: range
    k: int
    """At density 1 the size of the group."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Valid for this step only."""

    step: int
    phase: Phase
    density: float
    k: int
    """Entries to keep; those that travel dense come on top. Of a model that is sharded over ranks
    these are the entries of this rank's shard, as far as they are known before the step."""

    model_k: int
    """Entries of the whole model to keep, all shards together."""

    divides_k: bool
    """Whether the shards of the model divide `model_k` anew in this step (`engine.shards`)."""

    codec: CodecName
    overshoot: float
    """Deliver this much more of every sum than was accumulated (`Settings.overshoot`)."""

    average: Average
    """Which ranks the sparse sums are averaged over. What travels dense is averaged over all."""

    decay: float
    """The residual is multiplied by this first (`Settings.decay`)."""

    groups: tuple[GroupPlan, ...]
    whole_model: bool
    """Whether all buckets are one group, in order to set the quotas of the next steps."""


def make_plan(
    settings: Settings,
    step: int,
    buckets: Buckets,
    quotas: list[int],
    shards: Shards = UNSHARDED,
    shares: Sequence[int] = (),
) -> StepPlan:
    """The plan of step number `step`. `shares` are the entries that each shard keeps, if known."""
    if settings.is_dense(step):
        groups = tuple(
            GroupPlan(range(i, i + 1), bucket.numel) for i, bucket in enumerate(buckets.items)
        )
        return StepPlan(
            step=step,
            phase="dense",
            density=1.0,
            k=buckets.numel,
            model_k=buckets.numel,
            divides_k=False,
            codec="plain",
            overshoot=0.0,
            average="all",
            decay=settings.decay,
            groups=groups,
            whole_model=False,
        )
    density = settings.rank_density(settings.density_at(step))
    model_k = num_kept(shards.num_sparse(buckets), density)
    divides = shards.size > 1 and density < 1 and settings.scope == "model"
    divides_k = divides and (_is_due(settings, step) or sum(shares) != model_k)
    k = num_kept(buckets.numel - buckets.num_dense, density)
    if divides and not divides_k:
        k = shares[shards.rank]
    whole_model = has_quotas(settings, buckets) and (
        divides_k or _is_due(settings, step) or sum(quotas) != k
    )
    if whole_model:
        groups = (GroupPlan(buckets.everything, _all_if_dense(buckets.numel, k, density)),)
    else:
        groups = tuple(
            GroupPlan(group, _group_k(i, group, buckets, quotas, k, density))
            for i, group in enumerate(buckets.groups)
        )
    # at density 1 every entry arrives in every step: then it arrives unrounded
    codec: CodecName = "plain" if density == 1 else settings.wire
    return StepPlan(
        step=step,
        phase="sparse",
        density=density,
        k=k,
        model_k=model_k,
        divides_k=divides_k,
        codec=codec,
        overshoot=settings.overshoot_at(step),
        average=settings.average,
        decay=settings.decay,
        groups=groups,
        whole_model=whole_model,
    )


def has_fixed_groups(settings: Settings) -> bool:
    """Whether groups do not depend on `group_numel`: each bucket is one, or the whole model is.

    A method that proposes no candidates must see the whole model to choose.
    """
    method = METHODS[settings.method]
    proposes = isinstance(method, SparseMethod) and method.propose is not None
    return settings.scope == "bucket" or not proposes


def min_group_numel(settings: Settings, group_numel: int) -> int:
    """Entries that make a group."""
    if not has_fixed_groups(settings):
        return group_numel
    return 1 if settings.scope == "bucket" else NEVER


def has_quotas(settings: Settings, buckets: Buckets) -> bool:
    """Whether groups leave before the whole gradient is known, each with a quota of k."""
    return len(buckets.groups) > 1 and settings.scope == "model"


def _is_due(settings: Settings, step: int) -> bool:
    """Whether k is divided anew in this step, among groups of buckets and among shards."""
    sparse_step = step - settings.warmup_steps
    return sparse_step in QUOTA_STEPS or sparse_step % settings.exact_every == 0


def _group_k(
    number: int, group: range, buckets: Buckets, quotas: list[int], k: int, density: float
) -> int:
    if quotas:
        group_k = quotas[number]
    elif len(buckets.groups) == 1:
        group_k = k
    else:
        group_k = num_kept(buckets.num_sparse(group), density)
    return _all_if_dense(buckets.starts[group.stop] - buckets.starts[group.start], group_k, density)


def _all_if_dense(numel: int, k: int, density: float) -> int:
    """At density 1 a method may keep everything there is, what travels dense included.

    That part is 0 in the vector it selects from. With a k below the size of that vector, a method
    would look for a threshold that about k entries reach, and leave out up to a tenth of them.
    """
    return numel if density == 1 else k
