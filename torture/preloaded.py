# SPDX-License-Identifier: Apache-2.0
"""Imported once by the server that all processes are forked from: each alone would need seconds."""

import torch

import oktopk.cli
import torture.inputs  # noqa: F401
from oktopk.kernels.ready import make_ready

oktopk.cli.parser([])
make_ready([torch.float32, torch.float64])
