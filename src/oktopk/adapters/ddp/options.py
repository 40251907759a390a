# SPDX-License-Identifier: Apache-2.0
"""`AttachOptions`: the options of `attach`, for functions that pass them on."""

from __future__ import annotations

from typing import Literal, TypedDict

from torch.distributed import ProcessGroup

from oktopk.adapters.driver import OnStep
from oktopk.adapters.policy import Policy
from oktopk.comm.communicator import Comm
from oktopk.settings import GroupNumel, OnNonfinite, Scope
from oktopk.wire.codec import CodecName


class AttachOptions(TypedDict, total=False):
    """The keywords of `attach`, which documents them, apart from the optimizer and the scaler."""

    method: str
    density: float | Literal["auto"]
    exchange_share: float
    warmup_steps: int | None
    ramp_steps: int | None
    schedule: tuple[tuple[int, float], ...] | None
    overshoot: float | None
    staleness_correction: bool | None
    rescale_with_lr: bool | None
    max_beta1: float | None
    clip_before: float | None
    policy: Policy | None
    scope: Scope
    wire: CodecName | None
    group_numel: GroupNumel
    exact_every: int
    bounds_every: int
    short_bytes: int
    on_nonfinite: OnNonfinite | None
    on_step: OnStep | None
    check_every: int
    timeout: float | None
    total_steps: int | None
    verbose: bool
    comm: Comm | None
    local_group: ProcessGroup | Literal["node"] | None
