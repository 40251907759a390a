"""Join the other ranks: meet at a store, sign in, make the group, and leave it."""

# pyright: reportPrivateImportUsage=false
# torch documents its stores, but does not list them as exported

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist

from oktopk.meeting import meeting_point
from oktopk.place import LaunchError, Place
from oktopk.signin import device_of, sign_in, threads

ALONE = Place("nobody", 0, 1, 0, 1)
LEAVE_SECONDS = 5.0


@contextmanager
def joined(place: Place | None, timeout: float) -> Iterator[torch.device]:
    """The default process group, for as long as the block lasts; gives this rank's device.

    NCCL when every rank has a GPU of its own, else gloo on CPUs: all ranks alike. None is a group
    of one. `timeout` seconds are the limit for meeting, and for each operation of the group.
    """
    place = place or ALONE
    store, signed = sign_in(_meet(place, timeout), place, timeout)
    device = device_of(place, signed)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads(place.rank, signed))
    if place.local_size == place.size:
        _stay_on_loopback()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=timeout),
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield device
    except BaseException:
        # NCCL may wait for the dead here, and the error must come out
        leaving = Thread(target=_leave, daemon=True)
        leaving.start()
        leaving.join(LEAVE_SECONDS)
        raise
    _leave()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _meet(place: Place, timeout: float) -> dist.Store:
    """The store of the job. Rank 0 hosts it, unless the launcher does."""
    if place.size == 1:
        return dist.HashStore()
    host, port = meeting_point(place)
    hosts = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not hosts:
        _await_listener(place, host, port, timeout)
    limit = timedelta(seconds=timeout)
    try:
        return dist.TCPStore(host, port, None, hosts, timeout=limit, wait_for_workers=False)
    except RuntimeError as error:
        raise LaunchError(
            f"{place}: cannot {'listen' if hosts else 'meet'} at {host}:{port}; set MASTER_PORT to "
            f"a free port of rank 0's host for all ranks: {str(error).splitlines()[0]}"
        ) from error


def _await_listener(place: Place, host: str, port: int, timeout: float) -> None:
    """Wait until somebody listens: torch's own store would print a stack for every attempt."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), timeout=timeout).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{place}: nobody listens at {host}:{port} after {timeout:g} s ({error}); is "
                    "rank 0 running, on that host? Else set MASTER_ADDR and MASTER_PORT"
                ) from error
        time.sleep(0.05)


def _stay_on_loopback() -> None:
    """One host: gloo would look up its name, which machines without DNS do not have."""
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names.pop())
