# SPDX-License-Identifier: Apache-2.0
"""Process groups that are made within a time limit, and whose errors name the rank at fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from oktopk.comm.communicator import Transport, global_ranks_of
from oktopk.comm.failure_detector import (
    FailureDetector,
    detection_seconds,
    is_network_error,
    job_detector,
)
from oktopk.comm.torch_transport import TIMEOUT, TorchTransport, nccl_timeout
from oktopk.errors import ExchangeError
from oktopk.utils.arguments import short_repr
from oktopk.utils.time_limit import GRACE, CallTimeoutError, call_with_timeout

T = TypeVar("T")


def as_process_group(argument: str, group: Any) -> dist.ProcessGroup:
    """The process group that was given, also as a mesh of one dimension; TypeError or ValueError if
    it is something else. `argument` is what the caller calls it."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"{argument} is a mesh of {group.ndim} dimensions: pass the one whose ranks "
                f"exchange, {argument}=mesh[name]"
            )
        return group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"rank {dist.get_rank()} is not in the {argument} it was given")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{argument} must be a process group or a mesh of one dimension, got "
            f"{short_repr(group)}"
        )
    return group


def timeout_of(group: dist.ProcessGroup | None) -> float:
    """The seconds that operations of a process group may take: as `init_process_group` or
    `new_group` was told, or torch's default for the backend."""
    backends = [] if group is None else map(group._get_backend, group._device_types)
    options = [backend.options for backend in backends if hasattr(backend, "options")]
    return min((each._timeout.total_seconds() for each in options), default=TIMEOUT)


class MonitoredTransport:
    """A transport whose errors name the rank at fault, by asking a failure detector.

    When an operation fails it closes the transport, and with it all subgroups: so no rank waits for
    one that has given up. A subgroup closes the transport that it was split from.
    """

    def __init__(
        self, transport: Transport, detector: FailureDetector, parent: Transport | None = None
    ) -> None:
        self.rank, self.size = transport.rank, transport.size
        self.global_ranks = global_ranks_of(transport)
        self._transport, self._detector = transport, detector
        self._root = parent or self

    def exchange(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        self._monitored(lambda: self._transport.exchange(outgoing, incoming))

    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        self._monitored(lambda: self._transport.all_to_all(x, out))

    def all_reduce_(self, x: Tensor) -> None:
        self._monitored(lambda: self._transport.all_reduce_(x))

    def split(self, groups: list[list[int]]) -> MonitoredTransport:
        transport = self._monitored(lambda: self._transport.split(groups))
        return MonitoredTransport(transport, self._detector, self._root)

    def close(self) -> None:
        self._transport.close()

    def _monitored(self, operation: Callable[[], T]) -> T:
        try:
            if self._detector.diagnosis is not None:
                raise ExchangeError("another rank failed")
            return operation()
        except ExchangeError as error:
            self._detector.abort(error, self._root)
            raise


def make_group(timeout: float, make: Callable[[timedelta], T]) -> T:
    """Call `make` with the limit that operations of a process group shall have; return its result.

    Raises ExchangeError if that takes longer than `timeout`: torch itself would wait without end
    for a store that has stopped. The limit is less than `timeout`, so that there is time left to
    find out which rank is missing.
    """
    limit = timedelta(seconds=timeout - detection_seconds(timeout))
    try:
        return call_with_timeout(timeout + GRACE, lambda: make(limit))
    except CallTimeoutError as error:
        raise ExchangeError(f"no process group was made within {timeout:g} s") from error


def new_transport(
    ranks: list[int] | None,
    timeout: float,
    *,
    on_cuda: bool,
    backend: str | None = None,
    whole_job: bool = True,
) -> TorchTransport:
    """Make a process group of these ranks of the job (None: all) and return its transport.

    Every rank of the job must call it if `whole_job` is set, else only the ranks of the group. An
    operation that takes longer than `timeout`, less the time to find out which rank is missing,
    fails.
    """

    def make(limit: timedelta) -> TorchTransport:
        group = dist.new_group(
            ranks,
            timeout=nccl_timeout(timeout) if on_cuda else limit,
            backend=backend,
            use_local_synchronization=not whole_job,
        )
        return TorchTransport(group, owned=True, timeout=limit.total_seconds())

    return make_group(timeout, make)


@contextmanager
def monitored() -> Iterator[None]:
    """Let network errors in the block name the rank at fault: those of DDP, for instance."""
    try:
        yield
    except RuntimeError as error:
        detector = job_detector()
        if detector is not None and is_network_error(error):
            detector.abort(error, _NoConnections())
        raise


class _NoConnections:
    """Nothing to close: DDP holds its connections for as long as there is a model."""

    def close(self) -> None: ...
