# SPDX-License-Identifier: Apache-2.0
"""The stream of the exchange on CUDA, one per device, and what it shares with other streams."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from oktopk.utils.device import wait_until

log = logging.getLogger("oktopk")

DRAIN_SECONDS = 5.0

_streams: dict[torch.device, torch.cuda.Stream] = {}


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of the exchange on a device; there is one."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


@contextmanager
def reading(x: Tensor | None) -> Iterator[None]:
    """Read x on the current stream; the stream of the exchange does not change it meanwhile."""
    if x is None or not x.is_cuda:
        yield
        return
    here, side = torch.cuda.current_stream(x.device), side_stream(x.device)
    here.wait_stream(side)
    x.record_stream(here)
    yield
    side.wait_stream(here)


def share(x: Tensor) -> None:
    """Tell the allocator that the stream of the exchange uses x, which another stream has made."""
    if x.is_cuda:
        x.record_stream(side_stream(x.device))


def drain(device: torch.device) -> None:
    """Wait for the stream of the exchange: unlike a result, an error has no event to wait for.

    Else backward would raise, and the user change gradients and residuals that are still written.
    """
    done = torch.cuda.Event()
    done.record(side_stream(device))
    try:
        wait_until(done.query, DRAIN_SECONDS)
    except TimeoutError as late:
        log.warning("an exchange failed and its stream is still busy (%s)", late)
