# SPDX-License-Identifier: Apache-2.0
"""Imported once by the server that the ranks are forked from: each alone would need seconds."""

import torch._dynamo  # noqa: F401 - DDP imports it when the first model is wrapped

import idioms  # noqa: F401
from worlds import warm_kernels

warm_kernels()
