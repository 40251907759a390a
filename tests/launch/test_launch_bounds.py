"""Start-up ends: whoever listens at the meeting point, and whoever is lost on the way."""

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
from oktopk.comm.failure_detector import LOST, of_network
from oktopk.errors import ExchangeError
from oktopk.launch import process_group
from oktopk.launch.registration import disagreement
from oktopk.utils.time_limit import Overdue, within

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
    "silent": (kept.append, "accepts connections and did not answer within 2 s: rank 0 is stopped"),
    "another": (http, "another service listens at {}, it answers b'HTTP/1.1 400 Bad Request"),
    "proxy": (socket.socket.close, "somebody hangs up at once at {} after 2 s (it accepts"),
}


@pytest.mark.parametrize("who", FOUND)
def test_whoever_listens_start_up_ends_and_says_what_it_found(tmp_path, who):
    answers, message = FOUND[who]
    with listener(answers) as port:
        process = start(rank_main, srun(1, 2, MASTER_PORT=port), SECONDS, tmp_path)
        process.join(30)
        process.kill()
    place = f"127.0.0.1:{port}"
    said = (tmp_path / "1").read_text()
    assert said.startswith("rank 1 of 2, started by srun: ")
    assert place in said and message.format(place) in said, said


def host_main(port: int, ready: Path) -> None:
    store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    ready.touch()
    store.wait(["never"])


def test_a_store_that_stops_while_ranks_sign_in(tmp_path, free_port):
    """Rank 0 hosts the store and stops before it has opened the list."""
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
    assert "the store of the job stopped answering while the ranks signed in" in (
        (folder / "1").read_text()
    )


def stopping_main(pid: int, variables: dict[str, str], folder: Path) -> None:
    """A rank that connects to the store, and then finds its host stopped."""
    sign_in = process_group.sign_in

    def after_a_stop(*args):
        os.kill(pid, signal.SIGSTOP)
        return sign_in(*args)

    process_group.sign_in = after_a_stop
    rank_main(variables, SECONDS, folder)


def lost_main(variables: dict[str, str], blow: int, lost: int, folder: Path) -> None:
    """A rank that, if it is the one to be lost, is so after signing in, before the group."""
    os.environ.clear()
    os.environ.update(environment(**variables))
    place = process_group.Place(
        "srun", int(variables["SLURM_PROCID"]), 3, int(variables["SLURM_PROCID"]), 3
    )
    make_group = process_group._make_group

    def lost_or_made(*args) -> None:
        (folder / f"{place.rank}.signed").touch()
        if place.rank == lost:
            wait_for(lambda: len(list(folder.glob("*.signed"))) == 3)
            os.kill(os.getpid(), blow)
        make_group(*args)

    process_group._make_group = lost_or_made
    try:
        with process_group.joined(place, 3.0):
            said = "joined"
    except ExchangeError as error:
        said = str(error)
    (folder / str(place.rank)).write_text(said)


@pytest.mark.parametrize(
    ("blow", "lost", "message"),
    [
        (signal.SIGKILL, 2, "step 0: rank 2 does not answer: it died, stopped, or ended before"),
        (signal.SIGSTOP, 0, LOST),  # and the store with it
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


def test_what_is_late_is_left_behind_and_what_fails_comes_out():
    with pytest.raises(Overdue, match="no answer after"):
        within(0.05, threading.Event().wait)
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 / 0)
    assert within(5, lambda: 7) == 7


def test_ranks_that_differ_are_told_apart():
    same = {"lr": 0.1, "method": "oktopk", "resume": False}
    assert disagreement([same] * 3) == disagreement([same]) == disagreement([{}] * 2) == ""
    said = disagreement([same, same | {"lr": 0.2}, same, {"lr": 0.1}])
    assert "lr is 0.1 on ranks 0, 2, 3, 0.2 on rank 1;" in said
    assert 'method is "oktopk" on ranks 0, 1, 2, not set on rank 3' in said


@pytest.mark.parametrize(
    ("error", "network"),
    [
        (ExchangeError("x"), True),
        (dist.DistNetworkError("x"), True),
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:1] closed"), True),
        (RuntimeError("Expected to have finished reduction"), False),
        (ValueError("[/gloo/gloo/x] "), False),
    ],
)
def test_errors_of_the_network_are_told_from_a_ranks_own(error, network):
    assert of_network(error) == network
