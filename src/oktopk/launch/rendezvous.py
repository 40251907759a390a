"""The store of the job: rank 0 hosts it, unless the launcher does, and the others connect to it.

torch's client waits for ever when somebody accepts its connection and does not answer, and prints a
C++ stack for every attempt that fails. So the listener is asked first who it is, and everything
that waits for the store has a limit.
"""

# pyright: reportPrivateImportUsage=false
# torch documents its stores, but does not list them as exported

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from oktopk.errors import LaunchError
from oktopk.launch.master_endpoint import meeting_point
from oktopk.launch.rank_environment import Place
from oktopk.utils.time_limit import Overdue, within

# What a client of torch's store says first, and what it gets back: the last four bytes, which are
# free to choose. Line ends, so that servers of text answer as well. A store of a torch that speaks
# otherwise closes the connection or stays silent, and then torch's own client has the last word.
PING = b"\x00\xce\xf7\x85\x3c" + b"\x0d" + b"\n\r\n\n"
PONG = PING[-4:]
ANSWER_BYTES = 40
UNASKED_SECONDS, ANSWER_SECONDS, PAUSE = 0.1, 0.5, 0.05
OTHER_PORT = "set MASTER_PORT to a free port of rank 0's host for all ranks"


def hosts_store(place: Place) -> bool:
    """Whether the store lives in this process."""
    return place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def store_of_job(place: Place, timeout: float) -> dist.Store:
    """Host the store or connect to it, within `timeout` seconds; LaunchError says why not."""
    if place.size == 1:
        return dist.HashStore()
    host, port = meeting_point(place)
    hosts, deadline = hosts_store(place), time.monotonic() + timeout
    if not hosts:
        _await_listener(place, host, port, timeout)
    limit = timedelta(seconds=timeout)
    try:
        return within(
            max(deadline - time.monotonic(), ANSWER_SECONDS),
            lambda: dist.TCPStore(host, port, None, hosts, timeout=limit, wait_for_workers=False),
        )
    except Overdue as error:
        raise LaunchError(
            f"{place}: somebody at {host}:{port} accepts connections and did not answer within "
            f"{timeout:g} s: rank 0 is stopped, or another service has the port; look at rank 0, "
            f"or {OTHER_PORT}"
        ) from error
    except RuntimeError as error:
        raise LaunchError(
            f"{place}: cannot {'listen' if hosts else 'meet'} at {host}:{port}; {OTHER_PORT}: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _await_listener(place: Place, host: str, port: int, timeout: float) -> None:
    """Wait for somebody who listens and keeps the connection; refuse one who is not a store."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            answer = _answer_of(host, port, timeout)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                hangs_up = isinstance(error, HungUpError)
                found = "somebody hangs up at once" if hangs_up else "nobody listens"
                raise LaunchError(
                    f"{place}: {found} at {host}:{port} after {timeout:g} s ({error}); is rank 0 "
                    "running, on that host? Else set MASTER_ADDR and MASTER_PORT"
                ) from error
        time.sleep(PAUSE)
    if answer and answer != PONG[: len(answer)]:
        raise LaunchError(
            f"{place}: another service listens at {host}:{port}, it answers {answer!r}; "
            f"{OTHER_PORT}"
        )


class HungUpError(ConnectionError):
    """A listener closed the connection before it was told anything: a proxy without a backend."""


def _answer_of(host: str, port: int, timeout: float) -> bytes:
    """The first bytes a listener says or answers; none if it is silent or does not understand."""
    with socket.create_connection((host, port), timeout=timeout) as connection:
        connection.settimeout(UNASKED_SECONDS)
        try:
            said = connection.recv(ANSWER_BYTES)
        except TimeoutError:
            pass
        except ConnectionError as error:
            raise HungUpError(*error.args) from error
        else:
            if not said:
                raise HungUpError("it accepts connections and closes them")
            return said
        connection.settimeout(ANSWER_SECONDS)
        try:
            connection.sendall(PING)
            return connection.recv(ANSWER_BYTES)
        except (TimeoutError, ConnectionError):
            return b""
