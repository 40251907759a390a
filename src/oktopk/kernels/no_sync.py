# SPDX-License-Identifier: Apache-2.0
"""Operations of torch whose result size the caller knows, so the host need not wait for a device.

They run on every device, in plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def histogram(x: Tensor, num_bins: int) -> Tensor:
    """How often each integer from 0 to `num_bins - 1` occurs in x, int32. O(n).

    x may have no other integers. `torch.bincount` would wait for the device to learn their range.
    """
    one = torch.ones((), dtype=torch.int32, device=x.device)
    return x.new_zeros(num_bins, dtype=torch.int32).index_add_(0, x, one.expand(x.numel()))


def nonzero_counted(mask: Tensor, count: int) -> Tensor:
    """The positions where a flat mask is true, ascending, int64, when there are `count`. O(n).

    `torch.nonzero` would wait for the device to learn how many there are.
    """
    # every true position goes to its slot, all false ones to an extra slot behind the last
    slots = torch.where(mask, mask.cumsum(0) - 1, count).clamp_(max=count)
    positions = torch.arange(mask.numel(), device=mask.device)
    return positions.new_empty(count + 1).scatter_(0, slots, positions)[:count]
