"""Join the other ranks: meet at a store, sign in, make the group, and leave it.

From signing in to leaving, one `RollCall` watches: whatever collective fails, of ours or of DDP's,
the error that comes out names the rank that is to blame.
"""

# pyright: reportPrivateImportUsage=false
# torch documents its stores, but does not list them as exported

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from oktopk.comm import failure_detector
from oktopk.comm.communicator import Comm
from oktopk.comm.failure_detector import RollCall, patience_of
from oktopk.comm.process_groups import WatchedTransport, bounded_group, own_transport
from oktopk.comm.torch_transport import TorchTransport
from oktopk.errors import LaunchError
from oktopk.launch.rank_environment import Place
from oktopk.launch.registration import (
    HEARD_SECONDS,
    Signed,
    device_of,
    sign_in,
    threads,
)
from oktopk.launch.rendezvous import hosts_store, store_of_job
from oktopk.utils.time_limit import GRACE, Overdue, within

ALONE = Place("nobody", 0, 1, 0, 1)
LEAVE_SECONDS = 5.0


@contextmanager
def joined(
    place: Place | None, timeout: float, alike: Mapping[str, Any] | None = None
) -> Iterator[torch.device]:
    """The default process group, for as long as the block lasts; gives this rank's device.

    NCCL when every rank has a GPU of its own, else gloo on CPUs: all ranks alike. None is a group
    of one. `timeout` seconds are the limit for meeting, and for each operation of the group.
    `alike` is what every rank must have been started with: LaunchError on all ranks if it differs.
    """
    place = place or ALONE
    met = store_of_job(place, timeout)
    store, signed, roll_call = _sign_in(met, place, timeout, alike or {})
    with failure_detector.of_job(roll_call):
        try:
            device = _prepare(place, signed)
            _make_group(store, place, device, timeout)
            yield device
        except BaseException as error:
            try:
                roll_call.give_up(error, _Group())
            finally:
                if place.size > 1 and hosts_store(place):  # the others must hear before it is gone
                    roll_call.hear()
                    time.sleep(HEARD_SECONDS)
            raise
    roll_call.close()
    _leave()


def comm_of_job(timeout: float) -> Comm:
    """Collectives of all ranks, whose errors name the rank that is to blame.

    Inside `joined` they have a group of their own, which closes when one fails: so no rank waits
    for one that has given up. Every rank must call it. Elsewhere it is the default group.
    """
    roll_call = failure_detector.present()
    if roll_call is None:
        return Comm(TorchTransport())
    transport = own_transport(None, timeout, on_cuda=dist.get_backend() == "nccl")
    return Comm(WatchedTransport(transport, roll_call))


def _sign_in(
    met: dist.Store, place: Place, timeout: float, alike: Mapping[str, Any]
) -> tuple[dist.Store, Signed, RollCall]:
    """The page of these ranks in the store, what each said of itself, and who watches them."""

    def act() -> tuple[dist.Store, Signed, RollCall]:
        store, signed = sign_in(met, place, timeout, alike)
        # a connection of its own where there can be one: the group may block the first
        own: Any = store
        if place.size > 1 and hasattr(own, "clone"):
            own = own.clone()
        return store, signed, RollCall(own, place.rank, place.size, patience_of(timeout))

    try:
        return within(timeout + HEARD_SECONDS + GRACE, act)
    except Overdue as error:
        raise LaunchError(
            f"{place}: the store of the job stopped answering while the ranks signed in: the "
            "process that hosts it (rank 0, or the launcher) is stopped, or its host is down"
        ) from error


def _prepare(place: Place, signed: Signed) -> torch.device:
    device = device_of(place, signed)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads(place.rank, signed))
    if place.local_size == place.size:
        _stay_on_loopback()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _make_group(store: dist.Store, place: Place, device: torch.device, timeout: float) -> None:
    bounded_group(
        timeout,
        lambda limit: dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=limit,
            device_id=device if device.type == "cuda" else None,
        ),
    )


class _Group:
    """The default process group, to be closed after an error: NCCL may wait for the dead there."""

    def close(self) -> None:
        leaving = Thread(target=_leave, daemon=True)
        leaving.start()
        leaving.join(LEAVE_SECONDS)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _stay_on_loopback() -> None:
    """One host: gloo would look up its name, which machines without DNS do not have."""
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names.pop())
