# SPDX-License-Identifier: Apache-2.0
"""The network in the box: what is accepted, what is refused, and that workers really run in it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from launchers import environment
from oktopk.launch import network
from speech import SMALL

permitted = pytest.mark.skipif(network._unshare() is None, reason=network.why_not())


@pytest.mark.parametrize(
    "text", ["100mbit", "1gbit", "1.5gbit", "none", "50mbit:20ms", "1gbit:5us"]
)
def test_rates_and_delays(text):
    network.check_network(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast", "'fast' is not a rate: write 1gbit, 200mbit or 1.5gbit, or none for no limit"),
        ("0mbit", "got '0mbit'"),
        ("0.0001bit", "a rate is from 1kbit to 1tbit, got '0.0001bit'"),
        ("99999999tbit", "a rate is from 1kbit to 1tbit, got '99999999tbit'"),
        ("100mbit:", "a delay is as in 20ms or 500us, at most 10s, got ''"),
        ("100mbit:20", "a delay is as in 20ms or 500us, at most 10s, got '20' in '100mbit:20'"),
        ("100mbit:999999s", "at most 10s, got '999999s'"),
        ("100", "'100' is not a rate"),
    ],
)
def test_what_is_no_network_is_refused(text, message):
    with pytest.raises(ValueError, match="network: ") as caught:
        network.check_network(text)
    assert message in str(caught.value)


def test_links_are_shaped_in_both_directions_and_delayed_once(monkeypatch):
    """Delays need netem, which not every kernel has: only the commands are looked at."""
    ran = []
    monkeypatch.setattr(network, "_run", lambda command, must=True: ran.append(command))
    network.shape(2, "50mbit:20ms")
    limited = [command for command in ran if "tbf rate 50mbit" in command]
    delayed = [command for command in ran if command.endswith("netem delay 20ms")]
    assert len(limited) == 4 and len(delayed) == 2
    assert all("parent 1:1" in command and "worker" in command for command in delayed)


@pytest.mark.parametrize(
    ("rate", "size"), [("1kbit", 16384), ("50mbit", 16384), ("200mbit", 25000), ("1.6gbit", 200000)]
)
def test_a_link_sends_little_at_once_after_a_pause(rate, size):
    """What it may send at once is not slowed: a sparse exchange must not fit into that."""
    assert network.burst(rate) == size


def test_a_kernel_without_delays_is_a_clear_refusal(monkeypatch):
    monkeypatch.setattr(network, "_unshare", lambda: ["unshare"])
    monkeypatch.setattr(network, "_trial", lambda unshare, further: "netem" not in further)
    with pytest.raises(network.NetworkError, match=r"no netem.*give the rate alone, as in 50mbit"):
        network.refuse_delay("50mbit:20ms")
    network.refuse_delay("50mbit")


def test_variables_alone_do_not_make_a_process_inside(monkeypatch):
    """As root it would build the network in the namespace of the machine."""
    monkeypatch.setenv(network.INSIDE, "50mbit")
    assert network.inside() == ""
    monkeypatch.setenv(network.OUTSIDE, network._namespaces())
    assert network.inside() == ""
    net, mounts = network._namespaces().split()
    monkeypatch.setenv(network.OUTSIDE, f"net:[1] {mounts}")  # only the network is another
    assert network.inside() == ""
    monkeypatch.setenv(network.OUTSIDE, "net:[1] mnt:[1]")
    assert network.inside() == "50mbit" and net.startswith("net:[")


def train(tmp_path, corpus, *more: str, **variables: str) -> subprocess.CompletedProcess:
    flags = [*SMALL, "--data", corpus, "--runs", str(tmp_path), "--name", "a", "--epochs", "1"]
    command = [sys.executable, "-m", "oktopk", "train", *flags, "--workers", "2", *more]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        env=environment(**variables),
        check=False,
    )


@permitted
def test_workers_train_in_the_network_and_nothing_is_left(tmp_path, corpus):
    before = subprocess.run(["ip", "link"], capture_output=True, check=True).stdout
    done = train(tmp_path, corpus, "--network", "50mbit")
    assert done.returncode == 0, done.stderr
    first = json.loads((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["network"] == "50mbit"
    assert subprocess.run(["ip", "link"], capture_output=True, check=True).stdout == before


@pytest.mark.slow
def test_without_namespaces_the_workers_run_as_they_can_and_it_is_said(tmp_path, corpus):
    (tmp_path / "bin").mkdir()
    done = train(tmp_path, corpus, "--network", "50mbit", PATH=str(tmp_path / "bin"))
    assert done.returncode == 0, done.stderr
    assert "no network of 50mbit here: unshare, ip, tc not found" in done.stderr
    first = json.loads((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["network"] is None


def test_a_launcher_has_a_network_of_its_own(tmp_path, corpus):
    job = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    flags = [*SMALL, "--data", corpus, "--runs", str(tmp_path), "--network", "50mbit"]
    done = subprocess.run(
        [sys.executable, "-m", "oktopk", "train", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(**job, MASTER_ADDR="127.0.0.1", MASTER_PORT="29999"),
        check=False,
    )
    assert done.returncode == 2
    assert "--network 50mbit is for workers on one machine that this command starts" in done.stderr
