# SPDX-License-Identifier: Apache-2.0
"""The names of the baselines, for those who need not import them: configs and tables."""

LOCAL = ("post_local_sgd", "diloco")
"""Those that do not exchange at every step: the weights of the ranks differ in between."""
BASELINE_NAMES = ("ddp_dense", "ddp_fp16", "ddp_powersgd_r1", "ddp_powersgd_r4", *LOCAL)
