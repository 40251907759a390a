# SPDX-License-Identifier: Apache-2.0
"""The process group of the job: rendezvous, registration, creation, and destruction.

A failure detector watches from registration to the end. Whichever collective fails, one of oktopk
or one of DDP, the error names the rank at fault.
"""

# pyright: reportPrivateImportUsage=false
# torch documents its stores, but does not list them as exported

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from oktopk.comm.communicator import Comm
from oktopk.comm.failure_detector import (
    StoreFailureDetector,
    detection_seconds,
    is_network_error,
    job_detector,
    use_for_job,
)
from oktopk.comm.process_groups import MonitoredTransport, make_group, new_transport
from oktopk.comm.torch_transport import TorchTransport
from oktopk.errors import ExchangeError, LaunchError
from oktopk.launch.interface import ADVICE, use_loopback, use_route_to
from oktopk.launch.master_endpoint import master_endpoint
from oktopk.launch.rank_environment import SINGLE_RANK, RankEnvironment
from oktopk.launch.rank_info import RankInfo, choose_device, choose_num_threads
from oktopk.launch.registration import READ_SECONDS, register
from oktopk.launch.rendezvous import hosts_store, open_job_store
from oktopk.utils.time_limit import GRACE, CallTimeoutError, call_with_timeout

DESTROY_SECONDS = 5.0


@contextmanager
def job_process_group(
    env: RankEnvironment | None, timeout: float, settings: Mapping[str, object] | None = None
) -> Iterator[torch.device]:
    """Make torch's default process group, and destroy it after the block; give this rank's device.

    The group is NCCL when every rank has a GPU of its own, else gloo on CPUs, on all ranks alike.
    Without an `env` it is a group of one. `timeout` seconds are the limit for the rendezvous, and
    for each operation of the group. If `settings` are not the same on all ranks, all raise
    LaunchError.
    """
    env = env or SINGLE_RANK
    job_store = open_job_store(env, timeout)
    store, ranks, detector = _register(job_store, env, timeout, settings or {})
    with use_for_job(detector):
        try:
            device = _prepare(env, ranks)
            _make_default_group(store, env, device, timeout)
            yield device
        except BaseException as error:
            try:
                detector.abort(error, _DefaultGroup())
            finally:
                if env.world_size > 1:
                    # then the detector's thread has ended: Python would abort if it found it inside
                    # the store at exit
                    detector.wait_diagnosis()
                if env.world_size > 1 and hosts_store(env):  # the store ends with this process
                    time.sleep(READ_SECONDS)
            raise
    detector.close()
    _destroy()


def job_comm(timeout: float) -> Comm:
    """Return a `Comm` over all ranks of the job. Every rank must call it.

    Inside `job_process_group` it has a process group of its own, and its errors name the rank at
    fault. When an operation fails the group is closed, so no rank waits for one that has given up.
    Elsewhere it is over the default group.
    """
    detector = job_detector()
    if detector is None:
        return Comm(TorchTransport())
    transport = new_transport(None, timeout, on_cuda=dist.get_backend() == "nccl")
    return Comm(MonitoredTransport(transport, detector))


def _register(
    job_store: dist.Store, env: RankEnvironment, timeout: float, settings: Mapping[str, object]
) -> tuple[dist.Store, list[RankInfo], StoreFailureDetector]:
    """Register within a time limit; return the ranks' part of the store, and start a detector."""

    def register_and_watch() -> tuple[dist.Store, list[RankInfo], StoreFailureDetector]:
        store, ranks = register(job_store, env, timeout, settings)
        # a connection of its own where there can be one: the group may block the first
        own: Any = store
        if env.world_size > 1 and hasattr(own, "clone"):
            own = own.clone()
        seconds = detection_seconds(timeout)
        return store, ranks, StoreFailureDetector(own, env.rank, range(env.world_size), seconds)

    try:
        return call_with_timeout(timeout + READ_SECONDS + GRACE, register_and_watch)
    except CallTimeoutError as error:
        raise LaunchError(
            f"{env}: the store of the job stopped answering while the ranks registered: the "
            "process that hosts it (rank 0, or the launcher) is stopped, or its host is down"
        ) from error


def _prepare(env: RankEnvironment, ranks: list[RankInfo]) -> torch.device:
    """Set what torch and gloo need before the group is made; return this rank's device."""
    device = choose_device(env.rank, ranks)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(choose_num_threads(env.rank, ranks))
    if env.on_one_host:
        use_loopback()
    else:
        use_route_to(master_endpoint(env)[0])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _make_default_group(
    store: dist.Store, env: RankEnvironment, device: torch.device, timeout: float
) -> None:
    try:
        make_group(
            timeout,
            lambda limit: dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=env.rank,
                world_size=env.world_size,
                timeout=limit,
                device_id=device if device.type == "cuda" else None,
            ),
        )
    except RuntimeError as error:
        if env.on_one_host or device.type == "cuda" or not is_network_error(error):
            raise
        reason = str(error).strip().split("\n")[0]
        raise ExchangeError(f"{reason}; {ADVICE}") from error


class _DefaultGroup:
    """The default process group, to be closed after an error."""

    def close(self) -> None:
        """Destroy it, but wait only a few seconds: NCCL may wait for dead ranks."""
        closing = Thread(target=_destroy, daemon=True)
        closing.start()
        closing.join(DESTROY_SECONDS)


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
