# SPDX-License-Identifier: Apache-2.0
"""What people use instead: plain DDP, PyTorch's communication hooks, post-local SGD, DiLoCo
and SparseLoCo.

The bench and the trainer compare with them. Each is attached the way its documentation says.

base        `Baseline`: what the trainer needs of one
hooks       plain DDP, and its fp16 and PowerSGD hooks
local_sgd   post-local SGD, with PyTorch's hook, averager and optimizer
diloco      DiLoCo: local steps, then an outer optimizer on the averaged weight changes
sparseloco  SparseLoCo: DiLoCo with the largest changes of every chunk, in 2 bits, all-gathered
names       their names
table       BASELINES, by name
"""

from __future__ import annotations

LOCAL = ("post_local_sgd", "diloco", "sparseloco")
"""Those that do not exchange at every step: the weights of the ranks differ in between."""
SPARSE = ("sparseloco",)
"""Those that send a part of the entries: `density` has an effect."""
HOOK_NAMES = ("ddp_dense", "ddp_fp16", "ddp_powersgd_r1", "ddp_powersgd_r2", "ddp_powersgd_r4")
"""Plain DDP, and the communication hooks that come with PyTorch."""
BASELINE_NAMES = (*HOOK_NAMES, *LOCAL)
