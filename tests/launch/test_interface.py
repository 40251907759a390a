# SPDX-License-Identifier: Apache-2.0
"""gloo's interface on hosts whose name leads to loopback, as Debian makes them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launchers import environment
from oktopk.launch import network, rendezvous

permitted = pytest.mark.skipif(network._unshare() is None, reason=network.why_not())
HOSTS = Path(__file__).parents[1] / "helpers" / "hosts.py"


def check_on_two_hosts(folder: Path, name: str = "") -> tuple[int, list[str]]:
    unshare = network._unshare()
    assert unshare is not None
    done = subprocess.run(
        [*unshare, sys.executable, HOSTS, folder, name], env=environment(), timeout=200, check=False
    )
    return done.returncode, [(folder / f"said-{rank}").read_text() for rank in range(2)]


@permitted
def test_hosts_whose_names_lead_to_loopback_find_each_other(tmp_path):
    code, said = check_on_two_hosts(tmp_path)
    assert code == 0, said


@permitted
def test_what_to_set_is_said_where_gloo_cannot_connect(tmp_path):
    code, said = check_on_two_hosts(tmp_path, name="lo")
    assert code == 1 and "set GLOO_SOCKET_IFNAME on every host" in "".join(said), said


@pytest.fixture
def names(monkeypatch):
    """What names and targets lead to; the interfaces are this machine's."""
    found = {socket.gethostname(): "127.0.1.1"}
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(rendezvous, "_address_of", found.get)
    monkeypatch.setattr(rendezvous, "local_address", found.get)
    monkeypatch.setattr(rendezvous, "interface_with", lambda address: f"with {address}")
    yield found
    os.environ.pop("GLOO_SOCKET_IFNAME", None)


def test_a_name_that_others_can_reach_is_left_to_gloo(names):
    names[socket.gethostname()] = "10.0.0.1"
    rendezvous.use_route_to("master")
    assert "GLOO_SOCKET_IFNAME" not in os.environ


@pytest.mark.parametrize("own", ["127.0.1.1", "::1", None])
@pytest.mark.parametrize(
    ("routes", "chosen"),
    [
        ({"master": "10.0.0.2"}, "with 10.0.0.2"),
        ({"master": "127.0.1.1", rendezvous.OUTSIDE: "10.0.0.3"}, "with 10.0.0.3"),
        ({"master": "127.0.1.1"}, None),
        ({}, None),
    ],
)
def test_the_interface_is_that_of_the_route_to_rank_0(names, own, routes, chosen):
    names |= routes | {socket.gethostname(): own}
    rendezvous.use_route_to("master")
    assert os.environ.get("GLOO_SOCKET_IFNAME") == chosen


def test_what_the_user_has_set_stays(names, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    names["master"] = "10.0.0.2"
    rendezvous.use_route_to("master")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"


def test_addresses_and_interfaces_of_this_machine():
    assert rendezvous.local_address("127.0.0.1") == "127.0.0.1"
    assert rendezvous.interface_with("127.0.0.1") in ("lo", "lo0")
    assert rendezvous.interface_with("203.0.113.9") is None
