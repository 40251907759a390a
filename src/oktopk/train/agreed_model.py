# SPDX-License-Identifier: Apache-2.0
"""The model that all ranks agree on, also while each of them trains alone."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from oktopk.train.setup import Run
from oktopk.train.validate import average_statistics


def agreed_model(run: Run) -> nn.Module:
    """The model; where the ranks have different weights, a copy with their mean and that of the
    batch-norm statistics. Collective."""
    if run.exchange.weights_agree:
        return run.model
    mean = deepcopy(run.model)
    with torch.no_grad():
        flat = parameters_to_vector(mean.parameters())
        total = run.comm.all_reduce_(flat, stage="validation")
        vector_to_parameters(total / run.comm.size, mean.parameters())
        average_statistics(mean, run.comm)
    return mean
