# SPDX-License-Identifier: Apache-2.0
"""A cluster in a box: a network namespace per worker, connected by a bridge, each link shaped.

Everything is made inside namespaces that belong to the command (`unshare`). So nothing of the
machine changes, and the kernel removes it all when the last process has ended, in whatever way.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

from oktopk.errors import LaunchError
from oktopk.launch.workers import run_local_workers

INSIDE = "OKTOPK_NETWORK"
"""The variable that processes inside the namespaces have: the network."""
OUTSIDE = "OKTOPK_NETWORK_OUTSIDE"
"""The variable with the namespaces of the process that made them."""
SWITCH, DEVICE = "switch", "eth0"
BURST_SECONDS, LEAST_BURST = 1e-3, 16_384
"""What a link may send at once after a pause: what it carries in this time, and at least so many
bytes. With less, tbf would not reach its rate; with more, a small exchange would not be slowed."""
LATENCY = "200ms"  # of a full queue: long enough that TCP loses no packets
UNSHAPED = "none"
TOOLS = ("unshare", "ip", "tc")
RATE = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)bit", re.ASCII)
DELAY = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)", re.ASCII)
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "us": 1e-6, "ms": 1e-3, "s": 1.0}
SLOWEST, FASTEST, LONGEST = 1e3, 1e12, 10.0
"""Bits per second and seconds that links can have."""


class NetworkError(LaunchError):
    """The network could not be made."""


def check_rate(rate: str) -> None:
    """Raise ValueError unless `tc` accepts the rate."""
    if rate == UNSHAPED:
        return
    found = RATE.fullmatch(rate)
    if found is None:
        raise ValueError(
            f"{rate!r} is not a rate: write 1gbit, 200mbit or 1.5gbit, or none for no limit"
        )
    if not SLOWEST <= float(found[1]) * UNITS[found[2]] <= FASTEST:
        raise ValueError(f"a rate is from 1kbit to 1tbit, got {rate!r}")


def check_network(text: str) -> None:
    """Raise ValueError unless the text is a rate, or a rate and a delay as in `50mbit:20ms`."""
    rate, colon, delay = text.partition(":")
    try:
        check_rate(rate)
    except ValueError as error:
        raise ValueError(f"network: {error}") from None
    if colon and rate == UNSHAPED:
        raise ValueError(f"network: a delay needs a rate, as in 1gbit:20ms, got {text!r}")
    found = DELAY.fullmatch(delay)
    if colon and (found is None or float(found[1]) * UNITS[found[2]] > LONGEST):
        raise ValueError(
            f"network: a delay is as in 20ms or 500us, at most 10s, got {delay!r} in {text!r}"
        )


def run_workers_in_network(workers: int, argv: list[str], network: str) -> int:
    """Run `oktopk ARGV...` as local workers in a network; return the exit code of the job.

    This process is replaced by the same command inside namespaces, which then starts the workers.
    Where namespaces are not permitted, the workers run on this machine's own network, and a line on
    stderr says so.
    """
    enter(argv, network)
    if not inside():
        sys.stderr.write(f"{fallback(network)}\n")
        return run_local_workers(workers, argv)
    address = build(workers)
    shape(workers, network)
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE  # of the workers
    return run_local_workers(workers, argv, address=address, prefix=prefix)


def fallback(network: str) -> str:
    """A sentence for where the network cannot be made."""
    return (
        f"no network of {network} here: {why_not()}; the workers run on this machine's own "
        "network, unshaped"
    )


def is_permitted() -> bool:
    """Whether a network can be made here."""
    return _unshare() is not None


def refuse_delay(network: str) -> None:
    """Raise NetworkError if the network has a delay, and this kernel cannot make one."""
    unshare = _unshare() if ":" in network else None
    if unshare and not _trial(unshare, "tc qdisc add dev trial root netem delay 1ms"):
        raise NetworkError(
            f"network {network}: this kernel cannot delay packets (it has no netem): give the rate "
            f"alone, as in {network.partition(':')[0]}"
        )


def enter(argv: list[str], network: str) -> None:
    """Replace this process by the same command inside namespaces; return if that is impossible."""
    if inside():
        return
    unshare = _unshare()
    if unshare is None:
        return
    sys.stdout.flush()
    mark_inside(network)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it would warn that names are unknown
    os.execvp(unshare[0], [*unshare, sys.executable, "-m", "oktopk", *argv])


def mark_inside(network: str) -> None:
    """Set the variables of a process that `unshare` starts."""
    os.environ |= {INSIDE: network, OUTSIDE: _namespaces()}


def inside() -> str:
    """The network that this process runs in; empty outside of namespaces.

    The variables alone are no proof: what is made here must be made in other namespaces.
    """
    before = os.environ.get(OUTSIDE, "").split()
    is_outside = not before or any(space in before for space in _namespaces().split())
    return "" if is_outside else os.environ.get(INSIDE, "")


def _namespaces() -> str:
    """The ids of the network and of the mounts that this process sees."""
    return " ".join(os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "mnt"))


def why_not() -> str:
    """Return why there are no namespaces here, as a sentence."""
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        return f"{', '.join(missing)} not found (Debian: util-linux, iproute2)"
    return "the system does not permit network namespaces"


def _unshare() -> list[str] | None:
    """Return the command that makes namespaces, as root or as any user; None if neither works."""
    if any(not shutil.which(tool) for tool in TOOLS):
        return None
    for rights in ([], ["--user", "--map-root-user"]):
        command = ["unshare", *rights, "--net", "--mount"]
        if _trial(command, "true"):
            return command
    return None


def _trial(unshare: list[str], further: str) -> bool:
    """Whether a bridge can be made in new namespaces, and a further command succeeds there."""
    commands = f"mount -t tmpfs none /run && ip link add trial type bridge && {further}"
    trial = [*unshare, "sh", "-c", commands]
    return subprocess.run(trial, capture_output=True, check=False).returncode == 0


def build(workers: int) -> str:
    """Make the bridge and a namespace per worker; return the address of this process."""
    _run("mount -t tmpfs none /run")
    _run(f"ip netns attach {SWITCH} {os.getpid()}")
    _run("ip link set lo up")
    _run("ip link add bridge type bridge")
    _run("ip address add 10.77.255.254/16 dev bridge")
    _run("ip link set bridge up")
    for rank in range(workers):
        space = namespace(rank)
        _run(f"ip netns add {space}")
        _run(f"ip link add port{rank} type veth peer name {DEVICE} netns {space}")
        _run(f"ip link set port{rank} master bridge up")
        _run(f"ip -n {space} link set lo up")
        _run(f"ip -n {space} address add 10.77.{rank // 250}.{rank % 250 + 1}/16 dev {DEVICE}")
        _run(f"ip -n {space} link set {DEVICE} up")
    return "10.77.255.254"


def namespace(rank: int) -> str:
    return f"worker{rank}"


def prefix(rank: int) -> list[str]:
    """Return what goes before a command to run it in a worker's namespace."""
    return ["ip", "netns", "exec", namespace(rank)]


def shape(workers: int, network: str) -> None:
    """Limit every link to a rate in both directions, and delay what workers send.

    `none` removes the limit.
    """
    rate, _, delay = network.partition(":")
    for rank in range(workers):
        for space, device in ((namespace(rank), DEVICE), (SWITCH, f"port{rank}")):
            if rate == UNSHAPED:
                # this fails if the link was never shaped
                _run(f"tc -n {space} qdisc del dev {device} root", must=False)
            else:
                limit = f"rate {rate} burst {burst(rate)} latency {LATENCY}"
                _run(f"tc -n {space} qdisc replace dev {device} root handle 1: tbf {limit}")
        if delay:
            worker = namespace(rank)
            _run(f"tc -n {worker} qdisc add dev {DEVICE} parent 1:1 handle 10: netem delay {delay}")


def burst(rate: str) -> int:
    """The bytes that a link of this rate may send at once."""
    found = RATE.fullmatch(rate)
    assert found is not None, rate  # it was checked
    return max(LEAST_BURST, round(float(found[1]) * UNITS[found[2]] * BURST_SECONDS / 8))


def bytes_sent(device: str) -> int:
    """Return the bytes that an interface has sent, by the kernel's counter."""
    with open(f"/sys/class/net/{device}/statistics/tx_bytes") as counter:
        return int(counter.read())


def _run(command: str, *, must: bool = True) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if must and done.returncode:
        raise NetworkError(f"{command}: {done.stderr.strip()}")
