# SPDX-License-Identifier: Apache-2.0
"""The transport over a torch process group: the only module that calls torch's collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from oktopk.comm.communicator import Transport, global_ranks_of
from oktopk.comm.consistency import Store
from oktopk.comm.failure import FailureDetector, detection_seconds, is_network_error, job_detector
from oktopk.errors import ExchangeError
from oktopk.utils.arguments import short_repr
from oktopk.utils.device import finish
from oktopk.utils.signals import GRACE, CallTimeoutError, call_with_timeout

TIMEOUT = 300.0  # seconds; less than NCCL's own limit of 600, which ends the process
CLOSE_SECONDS = 5.0

Move = Literal["send", "recv"]
"""What is done with a tensor; the names of a process group's methods."""


def nccl_timeout(seconds: float) -> timedelta:
    """Return the limit to give to a NCCL group whose operations may take `seconds`.

    NCCL ends the process at its limit, so that one must be later than the one of `TorchTransport`.
    """
    return timedelta(seconds=2 * seconds)


class TorchTransport:
    """A torch process group as a transport; `None` is the default group.

    On a GPU, `timeout` seconds are the limit of each operation: the host would otherwise wait for
    a dead rank without end. On a CPU the process group has the limit. `close` destroys the process
    group only if it is `owned`.
    """

    def __init__(self, group: Any = None, *, owned: bool = False, timeout: float = TIMEOUT) -> None:
        self.group: Any = group
        self._owned = owned
        self._timeout = timeout
        self._on_device = self._failed = False
        self._subgroups: list[TorchTransport] = []
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} of the job is not in the group it was given")
        self.size = dist.get_world_size(group)
        self.global_ranks = dist.get_process_group_ranks(group)

    def exchange(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        moves: list[tuple[Move, Tensor, int]] = []
        for distance in range(1, self.size):  # rotated: no two ranks aim at the same peer at once
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            if source in incoming:
                moves.append(("recv", incoming[source], source))
            if target in outgoing:
                moves.append(("send", outgoing[target], target))
        if moves:
            self._wait(moves)

    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        out[self.rank].copy_(x[self.rank])
        peers = [peer for peer in range(self.size) if peer != self.rank] if x[0].numel() else []
        self.exchange({peer: x[peer] for peer in peers}, {peer: out[peer] for peer in peers})

    def all_reduce_(self, x: Tensor) -> None:
        failure = "the dense allreduce failed"
        try:
            work = dist.all_reduce(x, group=self.group, async_op=True)
        except RuntimeError as error:
            raise ExchangeError(f"{failure}: {error}") from error
        self._finish(work, x, failure)

    def split(self, groups: list[list[int]]) -> TorchTransport:
        """Return the transport of a new process group.

        torch gives a new group its name by counting. If this transport has all ranks of the job,
        each rank therefore takes part in making every group. If not, a rank makes its own group
        only, and its ranks must have made equally many groups before.
        """
        whole_job = self.size == dist.get_world_size()
        backend = dist.get_backend(self.group)
        on_cuda = backend == "nccl"
        limit = nccl_timeout(self._timeout) if on_cuda else timedelta(seconds=self._timeout)
        for ranks in groups:
            if not whole_job and self.rank not in ranks:
                continue
            group = dist.new_group(
                [self.global_ranks[rank] for rank in ranks],
                timeout=limit,
                backend=backend,
                use_local_synchronization=not whole_job,
            )
            if self.rank in ranks:
                self._subgroups.append(TorchTransport(group, owned=True, timeout=self._timeout))
        return self._subgroups[-1]

    def store(self) -> Store:
        """Return the store of the group, over a connection of its own where torch can make one."""
        store: Any = dist.distributed_c10d._get_process_group_store(self.group)
        return store.clone() if hasattr(store, "clone") else store

    def close(self) -> None:
        """Destroy the group if it is owned. Connections close with the last reference to it."""
        for subgroup in self._subgroups:
            subgroup.close()
        if not self._owned:
            return
        self._owned = False
        group, self.group = self.group, dist.GroupMember.NON_GROUP_MEMBER
        if not self._on_device:
            if group in dist.distributed_c10d._world.pg_map:  # else the script has destroyed it
                dist.destroy_process_group(group)
            return
        # NCCL finishes its pending operations before it destroys a group: it waits for dead ranks
        abort = getattr(dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group)
        end = abort if self._failed else dist.destroy_process_group
        closing = Thread(target=end, args=(group,), name="oktopk-close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    def _begin(self, moves: list[tuple[Move, Tensor, int]]) -> list[Any]:
        """Post all of them at once.

        On CPUs by the group's own methods: torch's functions look it up among all groups first, and
        a script that ends destroys them while its last exchange is in flight. The other ranks wait
        for the rest of that one.
        """
        if moves[0][1].device.type == "cpu":
            group = dist.group.WORLD if self.group is None else self.group
            if group in (None, dist.GroupMember.NON_GROUP_MEMBER):
                raise ExchangeError("the process group was closed during an exchange")
            return [getattr(group, move)([x], peer, 0) for move, x, peer in moves]
        how = {"send": dist.isend, "recv": dist.irecv}
        return dist.batch_isend_irecv(
            [
                dist.P2POp(how[move], x, self.global_ranks[peer], self.group)
                for move, x, peer in moves
            ]
        )

    def _wait(self, moves: list[tuple[Move, Tensor, int]]) -> None:
        peers = [self.global_ranks[peer] for *_, peer in moves]
        ranks = sorted(set(peers))
        try:
            works = self._begin(moves)
        except RuntimeError as error:
            raise ExchangeError(f"the connection to a rank of {ranks} is gone: {error}") from error
        # NCCL returns one work for all of them
        each = len(works) == len(moves)
        names = [f"rank {peer}" for peer in peers] if each else [f"ranks {ranks}"]
        for work, name in zip(works, names, strict=True):
            self._finish(work, moves[0][1], f"no exchange with {name}")

    def _finish(self, work: Any, x: Tensor, failure: str) -> None:
        self._on_device = x.device.type != "cpu"
        try:
            finish(work, x, self._timeout)
        except (RuntimeError, TimeoutError) as error:
            self._failed = True
            raise ExchangeError(f"{failure}: {error}") from error


# Process groups that are made within a time limit, and whose errors name the rank at fault.


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
