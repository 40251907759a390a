# SPDX-License-Identifier: Apache-2.0
"""`BASELINES`: every baseline by name, and how it is attached."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn
from torch.optim import Optimizer

from oktopk.baselines.base import Baseline, BaselineOptions
from oktopk.baselines.diloco import DiLoCo
from oktopk.baselines.hooks import HOOKS, HookBaseline
from oktopk.baselines.local_sgd import PostLocalSgd
from oktopk.baselines.names import BASELINE_NAMES
from oktopk.baselines.sparseloco import SparseLoCo

Build = Callable[[nn.Module, Optimizer, BaselineOptions], Baseline]

BASELINES: dict[str, Build] = {
    **{name: partial(HookBaseline, hook=hook) for name, hook in HOOKS.items()},
    "post_local_sgd": PostLocalSgd,
    "diloco": DiLoCo,
    "sparseloco": SparseLoCo,
}
assert tuple(BASELINES) == BASELINE_NAMES
