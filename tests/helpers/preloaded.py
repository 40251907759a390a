# SPDX-License-Identifier: Apache-2.0
"""Imported once by the server that the ranks are forked from: each alone would need seconds."""

import torch
import torch._dynamo  # DDP imports it when the first model is wrapped

import idioms  # noqa: F401
from oktopk.kernels.ready import make_ready

make_ready([torch.float32, torch.float64])
