# SPDX-License-Identifier: Apache-2.0
"""Rendezvous, registration and the process group end in time, whatever goes wrong."""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from launchers import environment, rank_main, srun, start, wait_for
from oktopk.comm.failure import STORE_UNREACHABLE
from oktopk.errors import ExchangeError
from oktopk.launch import rendezvous
from oktopk.launch.ranks import RankEnvironment

SECONDS = 2.0


@contextmanager
def listener(answers):
    """A port where every connection is passed to `answers`, which may keep it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    answers(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def http(connection: socket.socket) -> None:
    connection.recv(99)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    connection.close()


kept: list[socket.socket] = []
FOUND = {
    "silent": (kept.append, "accepts connections but did not answer within 2 s: rank 0 is stopped"),
    "another": (http, "another service listens at {}, it answers b'HTTP/1.1 400 Bad Request"),
    "proxy": (
        socket.socket.close,
        "a process closes connections at once at {} after 2 s (it accepts",
    ),
}


@pytest.mark.parametrize("who", FOUND)
def test_whoever_listens_start_up_ends_and_says_what_it_found(tmp_path, who):
    answers, message = FOUND[who]
    with listener(answers) as port:
        process = start(rank_main, srun(1, 2, MASTER_PORT=port), SECONDS, tmp_path)
        process.join(30)
        process.kill()
    endpoint = f"127.0.0.1:{port}"
    said = (tmp_path / "1").read_text()
    assert said.startswith("rank 1 of 2, started by srun: ")
    assert endpoint in said and message.format(endpoint) in said, said


def host_main(port: int, ready: Path) -> None:
    store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    ready.touch()
    store.wait(["never"])


def test_a_store_that_stops_while_ranks_register(tmp_path, free_port):
    """Rank 0 hosts the store and stops before it has opened the registration."""
    folder = tmp_path / "said"
    folder.mkdir()
    host = start(host_main, free_port, tmp_path / "ready")
    try:
        wait_for((tmp_path / "ready").exists)
        process = start(stopping_main, host.pid, srun(1, 2, MASTER_PORT=free_port), folder)
        process.join(30)
        process.kill()
    finally:
        host.kill()
        host.join(10)
    assert "the store of the job stopped answering while the ranks registered" in (
        (folder / "1").read_text()
    )


def stopping_main(pid: int, variables: dict[str, str], folder: Path) -> None:
    """A rank that connects to the store, and then finds its host stopped."""
    register = rendezvous.register

    def after_a_stop(*args):
        os.kill(pid, signal.SIGSTOP)
        return register(*args)

    rendezvous.register = after_a_stop
    rank_main(variables, SECONDS, folder)


def lost_main(variables: dict[str, str], blow: int, lost: int, folder: Path) -> None:
    """A rank that, if it is the one to be lost, is so after registration, before the group."""
    os.environ.clear()
    os.environ.update(environment(**variables))
    rank = int(variables["SLURM_PROCID"])
    env = RankEnvironment("srun", rank, 3, rank, 3)
    make_group = rendezvous._make_default_group

    def lost_or_made(*args) -> None:
        (folder / f"{env.rank}.registered").touch()
        if env.rank == lost:
            wait_for(lambda: len(list(folder.glob("*.registered"))) == 3)
            os.kill(os.getpid(), blow)
        make_group(*args)

    rendezvous._make_default_group = lost_or_made
    try:
        with rendezvous.job_process_group(env, 3.0):
            said = "joined"
    except ExchangeError as error:
        said = str(error)
    (folder / str(env.rank)).write_text(said)


@pytest.mark.parametrize(
    ("blow", "lost", "message"),
    [
        (signal.SIGKILL, 2, "step 0: rank 2 does not answer: it died, stopped, or ended before"),
        (signal.SIGSTOP, 0, STORE_UNREACHABLE),  # and the store with it
    ],
)
def test_a_rank_lost_between_rendezvous_and_group(tmp_path, blow, lost, message):
    ranks = [srun(rank, 3, SLURM_JOB_ID=tmp_path.name) for rank in range(3)]
    processes = [start(lost_main, variables, blow, lost, tmp_path) for variables in ranks]
    others = [rank for rank in range(3) if rank != lost]
    for rank in others:
        processes[rank].join(30)
    for process in processes:
        process.kill()
    for rank in others:
        said = (tmp_path / str(rank)).read_text()
        assert said.startswith(f"rank {rank}, step 0: ") and message in said, said
