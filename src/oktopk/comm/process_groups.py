"""Process groups with a limit for making them, and whose errors name the rank that is to blame."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from oktopk.comm.communicator import Transport
from oktopk.comm.failure_detector import (
    RollCall,
    of_network,
    patience_of,
    present,
)
from oktopk.comm.torch_transport import TorchTransport
from oktopk.errors import ExchangeError
from oktopk.utils.time_limit import GRACE, Overdue, within

T = TypeVar("T")


class WatchedTransport:
    """A transport of all ranks of the job whose errors say which rank is to blame."""

    def __init__(self, transport: Transport, roll_call: RollCall) -> None:
        self.rank, self.size = transport.rank, transport.size
        self._transport, self._roll_call = transport, roll_call

    def exchange(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        self._watched(lambda: self._transport.exchange(outgoing, incoming))

    def swap(self, x: Tensor, out: Tensor) -> None:
        self._watched(lambda: self._transport.swap(x, out))

    def all_reduce_(self, x: Tensor) -> None:
        self._watched(lambda: self._transport.all_reduce_(x))

    def close(self) -> None:
        self._transport.close()

    def _watched(self, act: Callable[[], None]) -> None:
        try:
            if self._roll_call.verdict is not None:
                raise ExchangeError("another rank gave up")
            act()
        except ExchangeError as error:
            self._roll_call.give_up(error, self)
            raise


def bounded_group(timeout: float, make: Callable[[timedelta], T]) -> T:
    """Make a process group with a limit for its operations; ExchangeError if it takes too long.

    What is left of `timeout` after that limit is for finding out who is missing. A store that
    stopped would block torch for ever.
    """
    limit = timedelta(seconds=timeout - patience_of(timeout))
    try:
        return within(timeout + GRACE, lambda: make(limit))
    except Overdue as error:
        raise ExchangeError(f"no process group was made within {timeout:g} s") from error


def own_transport(
    ranks: list[int] | None, timeout: float, *, on_cuda: bool, **more: Any
) -> TorchTransport:
    """The transport of a new group. Every rank of it must call it; `more` is for torch's new_group.

    An operation that takes longer than `timeout`, less the time to find out who is missing, fails.
    NCCL ends the process at its own limit, so that one is later than ours.
    """

    def make(limit: timedelta) -> TorchTransport:
        of_torch = timedelta(seconds=2 * timeout) if on_cuda else limit
        group = dist.new_group(ranks, timeout=of_torch, **more)
        return TorchTransport(group, owned=True, timeout=limit.total_seconds())

    return bounded_group(timeout, make)


@contextmanager
def watched() -> Iterator[None]:
    """Let errors of torch's own collectives in the block name the rank too, as those of DDP."""
    try:
        yield
    except RuntimeError as error:
        roll_call = present()
        if roll_call is not None and of_network(error):
            roll_call.give_up(error, _Nothing())
        raise


class _Nothing:
    """DDP holds the connections, for as long as there is a model."""

    def close(self) -> None: ...
