# SPDX-License-Identifier: Apache-2.0
"""The names of the baselines, for those who need not import them: configs and tables."""

LOCAL = ("post_local_sgd", "diloco", "sparseloco")
"""Those that do not exchange at every step: the weights of the ranks differ in between."""
SPARSE = ("sparseloco",)
"""Those that send a part of the entries: `density` has an effect."""
HOOK_NAMES = ("ddp_dense", "ddp_fp16", "ddp_powersgd_r1", "ddp_powersgd_r2", "ddp_powersgd_r4")
"""Plain DDP, and the communication hooks that come with PyTorch."""
BASELINE_NAMES = (*HOOK_NAMES, *LOCAL)
