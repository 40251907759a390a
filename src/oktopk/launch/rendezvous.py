# SPDX-License-Identifier: Apache-2.0
"""Rendezvous: rank 0 hosts the store of the job, unless the launcher does; the others connect.

torch's client waits without end when a process accepts its connection and does not answer, and it
prints a C++ stack for every attempt that fails. So a rank first asks the listener what it is, and
everything that waits for the store has a time limit.
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
from oktopk.launch.master_endpoint import master_endpoint
from oktopk.launch.rank_environment import RankEnvironment
from oktopk.utils.time_limit import CallTimeoutError, call_with_timeout

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
