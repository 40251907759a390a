# SPDX-License-Identifier: Apache-2.0
"""The process group of the job: rendezvous, registration, the interface of gloo, creation
and end.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import socket
import struct
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from fcntl import ioctl
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from oktopk.comm.communicator import Comm
from oktopk.comm.consistency import differences
from oktopk.comm.failure import (
    StoreFailureDetector,
    detection_seconds,
    is_network_error,
    job_detector,
    use_for_job,
)
from oktopk.comm.torch_transport import (
    MonitoredTransport,
    TorchTransport,
    make_group,
    new_transport,
)
from oktopk.errors import ExchangeError, LaunchError
from oktopk.launch.ranks import SINGLE_RANK, RankEnvironment, master_endpoint
from oktopk.utils.signals import GRACE, CallTimeoutError, call_with_timeout

# Rendezvous: rank 0 hosts the store of the job, unless the launcher does; the others connect.
#
# torch's client waits without end when a process accepts its connection and does not answer, and
# it prints a C++ stack for every attempt that fails. So a rank first asks the listener what it is,
# and everything that waits for the store has a time limit.


# pyright: reportPrivateImportUsage=false
# torch documents its stores, but does not list them as exported


# What a client of torch's store sends first. The store answers with the last four bytes, which are
# free to choose: they are line ends, so that servers of text protocols answer as well. The store of
# a torch version with another protocol closes the connection or stays silent; then torch's own
# client decides.
PING = b"\x00\xce\xf7\x85\x3c" + b"\x0d" + b"\n\r\n\n"
PONG = PING[-4:]
ANSWER_BYTES = 40
GREETING_SECONDS = 0.1  # for a listener that speaks first
ANSWER_SECONDS = 0.5
RETRY_SECONDS = 0.05
OTHER_PORT = "set MASTER_PORT to a free port of rank 0's host for all ranks"


def hosts_store(env: RankEnvironment) -> bool:
    """Whether the store of the job lives in this process."""
    return env.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def open_job_store(env: RankEnvironment, timeout: float) -> dist.Store:
    """Host the store of the job, or connect to it; LaunchError after `timeout` seconds says why."""
    if env.world_size == 1:
        return dist.HashStore()
    host, port = master_endpoint(env)
    hosts, deadline = hosts_store(env), time.monotonic() + timeout
    if not hosts:
        _wait_for_listener(env, host, port, timeout)
    limit = timedelta(seconds=timeout)
    try:
        return call_with_timeout(
            max(deadline - time.monotonic(), ANSWER_SECONDS),
            lambda: dist.TCPStore(host, port, None, hosts, timeout=limit, wait_for_workers=False),
        )
    except CallTimeoutError as error:
        raise LaunchError(
            f"{env}: a process at {host}:{port} accepts connections but did not answer within "
            f"{timeout:g} s: rank 0 is stopped, or another service has the port; look at rank 0, "
            f"or {OTHER_PORT}"
        ) from error
    except RuntimeError as error:
        raise LaunchError(
            f"{env}: cannot {'listen' if hosts else 'connect'} at {host}:{port}; {OTHER_PORT}: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _wait_for_listener(env: RankEnvironment, host: str, port: int, timeout: float) -> None:
    """Wait for a process that listens and keeps the connection; LaunchError if it is no store."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            answer = _answer_of(host, port, timeout)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                closes = isinstance(error, ListenerClosedError)
                found = "a process closes connections at once" if closes else "no process listens"
                raise LaunchError(
                    f"{env}: {found} at {host}:{port} after {timeout:g} s ({error}); is rank 0 "
                    "running on that host? If it runs elsewhere, set MASTER_ADDR and MASTER_PORT"
                ) from error
        time.sleep(RETRY_SECONDS)
    if answer and answer != PONG[: len(answer)]:
        raise LaunchError(
            f"{env}: another service listens at {host}:{port}, it answers {answer!r}; {OTHER_PORT}"
        )


class ListenerClosedError(ConnectionError):
    """A listener closed the connection before anything was sent: a proxy without a backend."""


def _answer_of(host: str, port: int, timeout: float) -> bytes:
    """Return the first bytes that a listener sends; none if it is silent or closes after PING."""
    with socket.create_connection((host, port), timeout=timeout) as connection:
        connection.settimeout(GREETING_SECONDS)
        try:
            greeting = connection.recv(ANSWER_BYTES)
        except TimeoutError:
            pass
        except ConnectionError as error:
            raise ListenerClosedError(*error.args) from error
        else:
            if not greeting:
                raise ListenerClosedError("it accepts connections and closes them")
            return greeting
        connection.settimeout(ANSWER_SECONDS)
        try:
            connection.sendall(PING)
            return connection.recv(ANSWER_BYTES)
        except (TimeoutError, ConnectionError):
            return b""


# What every rank knows of all ranks before the process group is made: hosts, cores and GPUs.
#
# From it each rank chooses its device and its number of threads; all ranks choose in the same way.


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The host of a rank, and what the rank may use of it."""

    host: str
    cores: list[int]
    gpus: list[str] = field(default_factory=list)
    """The UUIDs of the GPUs that the rank sees."""

    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    """A random string by which a process recognizes its own entry."""


def local_rank_info() -> RankInfo:
    """Return the information about this process."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return RankInfo(
        host=socket.gethostname(),
        cores=sorted(os.sched_getaffinity(0)),
        gpus=[str(torch.cuda.get_device_properties(index).uuid) for index in range(num_gpus)],
    )


def choose_device(rank: int, ranks: list[RankInfo]) -> torch.device:
    """Return this rank's GPU if every rank has one of its own, else the CPU on all ranks."""
    own = [_own_gpu(each, ranks) for each in range(len(ranks))]
    places = {(info.host, gpu) for info, gpu in zip(ranks, own, strict=True)}
    mine = own[rank]
    if mine is not None and None not in own and len(places) == len(ranks):
        return torch.device("cuda", ranks[rank].gpus.index(mine))
    num_seeing = sum(bool(info.gpus) for info in ranks)
    if num_seeing and rank == 0:
        warnings.warn(
            f"{num_seeing} of {len(ranks)} ranks see a GPU, but not one each: all run on CPUs",
            stacklevel=2,
        )
    return torch.device("cpu")


def _own_gpu(rank: int, ranks: list[RankInfo]) -> str | None:
    """Return the only GPU that the launcher left visible, or the one of the rank's local number."""
    gpus = ranks[rank].gpus
    local_rank = sum(info.host == ranks[rank].host for info in ranks[:rank])
    return gpus[0] if len(gpus) == 1 else gpus[local_rank] if local_rank < len(gpus) else None


def choose_num_threads(rank: int, ranks: list[RankInfo]) -> int:
    """Return the number of cores for a rank; ranks that may use the same core share it equally."""
    mine = ranks[rank]
    on_host = [info for info in ranks if info.host == mine.host]
    num_users = Counter(core for info in on_host for core in info.cores)
    share = sum(1 / num_users[core] for core in mine.cores)
    return max(1, int(min(share, cpu_quota() / len(on_host)) + 1e-6))


def cpu_quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """Return how many cores this container may use, which can be fewer than it sees."""
    if not path.exists():
        return float("inf")
    limit, period = path.read_text().split()
    return float("inf") if limit == "max" else int(limit) / int(period)


# Registration: every rank writes its information to the store, and all read that of all ranks.
#
# It also makes a second start with the same store safe. torchrun keeps its store when it restarts
# the workers, and the keys of the earlier workers are still in it. So rank 0 opens a new round
# every time, whose keys have a prefix of their own, and a rank trusts a round only if it finds its
# own nonce there.


# pyright: reportPrivateImportUsage=false
# torch documents its stores, but does not list them as exported


ROUND_KEY = "oktopk/round"
"""The key that holds the prefix of the current round."""
READ_SECONDS = 1.0
"""Time that the others get to read what is wrong, before rank 0 exits and its store with it."""
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Round:
    """What rank 0 collected: the same on every rank."""

    prefix: str
    ranks: list[RankInfo | None]
    """None for a rank that did not register in time."""

    problem: str
    """How the settings of the ranks differ; empty if they do not."""


def register(
    store: dist.Store, env: RankEnvironment, timeout: float, settings: Mapping[str, object]
) -> tuple[dist.Store, list[RankInfo]]:
    """Return a part of the store that only these ranks write to, and the information of each.

    Raises the same LaunchError on all ranks if `settings` differ, or if a rank does not register
    within `timeout` seconds.
    """
    mine = local_rank_info()
    try:
        take_part = _collect if env.rank == 0 else _announce
        found = take_part(store, env, mine, timeout, settings)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise LaunchError(f"{env}: the store of the job is gone, see rank 0: {reason}") from error
    if missing := [rank for rank, info in enumerate(found.ranks) if info is None]:
        raise LaunchError(f"{env}: ranks {missing} did not register within {timeout:g} s")
    if found.problem:
        raise LaunchError(found.problem)
    return dist.PrefixStore(found.prefix, store), [info for info in found.ranks if info is not None]


def _collect(
    store: dist.Store,
    env: RankEnvironment,
    mine: RankInfo,
    timeout: float,
    settings: Mapping[str, object],
) -> Round:
    """On rank 0: open a round, read what the other ranks announce, and publish the result."""
    prefix = f"oktopk/{mine.nonce}"
    store.set(ROUND_KEY, prefix)
    missing = {rank: f"{prefix}/{rank}" for rank in range(1, env.world_size)}
    ranks: list[RankInfo | None] = [mine, *(None for _ in missing)]
    given = {0: json.loads(json.dumps(dict(settings)))}  # as JSON returns it, like the others'
    deadline = time.monotonic() + timeout
    while missing and time.monotonic() < deadline:
        for rank in [rank for rank, key in missing.items() if store.check([key])]:
            info, given[rank] = json.loads(store.get(missing.pop(rank)))
            ranks[rank] = RankInfo(**info)
        time.sleep(POLL_SECONDS)
    # settings are compared here and not published: P ranks would read the settings of P ranks
    problem = _settings_problem([given[rank] for rank in sorted(given)])
    infos = [None if info is None else asdict(info) for info in ranks]
    store.set(f"{prefix}/ranks", json.dumps([infos, problem]))
    if missing or problem:
        time.sleep(READ_SECONDS)
    return Round(prefix, ranks, problem)


def _announce(
    store: dist.Store,
    env: RankEnvironment,
    mine: RankInfo,
    timeout: float,
    settings: Mapping[str, object],
) -> Round:
    """On other ranks: announce this rank in the current round until rank 0 has published it."""
    deadline, announced = time.monotonic() + timeout + READ_SECONDS, ""
    text = json.dumps([asdict(mine), dict(settings)])
    while time.monotonic() < deadline:
        prefix = store.get(ROUND_KEY).decode() if store.check([ROUND_KEY]) else ""
        if prefix != announced:
            store.set(f"{prefix}/{env.rank}", text)
            announced = prefix
        if prefix and store.check([f"{prefix}/ranks"]):
            infos, problem = json.loads(store.get(f"{prefix}/ranks"))
            ranks = [None if info is None else RankInfo(**info) for info in infos]
            own = ranks[env.rank] if env.rank < len(ranks) else None
            if own is not None and own.nonce == mine.nonce:  # else it is of an earlier start
                return Round(prefix, ranks, problem)
        time.sleep(POLL_SECONDS)
    raise LaunchError(f"{env}: rank 0 did not open the registration within {timeout:g} s")


def _settings_problem(settings: list[Mapping[str, object]]) -> str:
    """Describe how the settings of the ranks differ; empty if they do not."""
    found = differences(settings, range(len(settings)))
    if not found:
        return ""
    return f"the ranks were started with different settings: {found}. Give all ranks the same flags"


# The network interface that gloo uses, where the name of this host leads nowhere.
#
# gloo listens at the address of the host's name. On Debian that is 127.0.1.1 by default, which no
# other host can reach.


VARIABLE = "GLOO_SOCKET_IFNAME"
ADVICE = (
    f"if gloo could not connect: it listens at the address of this host's name, or of the "
    f"interface in {VARIABLE}; set {VARIABLE} on every host to the interface that reaches the "
    "others, as `ip -brief address` lists them"
)
OUTSIDE = "192.0.2.1"
"""An address that no host has: it is reached by the default route, if there is one."""
GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
ANY_PORT = 9


def use_loopback() -> None:
    """Keep gloo from looking up the host's name, which machines without DNS do not have."""
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if names:
        os.environ.setdefault(VARIABLE, names.pop())


def use_route_to(host: str) -> None:
    """Let gloo use the interface by which this host reaches another one, rank 0's, unless the user
    has named one or the name of this host has an address that others can reach.

    On rank 0's own host its name may lead to loopback, too; then it is that of the default route.
    """
    if VARIABLE in os.environ or not _is_loopback(_address_of(socket.gethostname())):
        return
    for target in (host, OUTSIDE):
        address = local_address(target)
        name = None if _is_loopback(address) else interface_with(address)
        if name is not None:
            os.environ[VARIABLE] = name
            return


def local_address(target: str) -> str | None:
    """The IPv4 address that this host has on its route to another; None without a route. Nothing is
    sent: connecting a UDP socket only chooses the route."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target, ANY_PORT))
        return probe.getsockname()[0]
    return None


def interface_with(address: str | None) -> str | None:
    """The name of the interface that has an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an address
                answer = ioctl(probe, GET_ADDRESS, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def _address_of(name: str) -> str | None:
    with suppress(OSError):
        return str(socket.getaddrinfo(name, None)[0][4][0])
    return None


def _is_loopback(address: str | None) -> bool:
    """Whether gloo would listen where only this host reaches it; so it does without an address."""
    return address is None or ipaddress.ip_address(address.partition("%")[0]).is_loopback


# The process group of the job: rendezvous, registration, creation, and destruction.
#
# A failure detector watches from registration to the end. Whichever collective fails, one of
# oktopk or one of DDP, the error names the rank at fault.


# pyright: reportPrivateImportUsage=false
# torch documents its stores, but does not list them as exported


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
