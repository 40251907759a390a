"""A cluster in a box: a network namespace per worker, connected by a bridge, each link shaped.

Everything is made inside namespaces that belong to the bench (`unshare`). So nothing of the machine
changes, and the kernel removes it all when the last process has ended, in whatever way.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

INSIDE = "OKTOPK_BENCH_INSIDE"
SWITCH, DEVICE = "switch", "eth0"
BURST = 131_072  # bytes; with less than a timer tick of a fast link, tbf would not reach its rate
LATENCY = "200ms"  # of a full queue: long enough that TCP loses no packets
UNSHAPED = "none"


class NetworkError(RuntimeError):
    """The namespaces could not be made."""


def enter(argv: list[str]) -> None:
    """Replace this process by the same command inside namespaces; return if that is impossible."""
    if os.environ.get(INSIDE):
        return
    unshare = _unshare()
    if unshare is None:
        return
    sys.stdout.flush()
    os.environ[INSIDE] = "1"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it would warn that names are unknown
    os.execvp(unshare[0], [*unshare, sys.executable, "-m", "oktopk", *argv])


def inside() -> bool:
    return bool(os.environ.get(INSIDE))


def why_not() -> str:
    """Return why there are no namespaces here, as a sentence."""
    missing = [tool for tool in ("unshare", "ip", "tc") if not shutil.which(tool)]
    if missing:
        return f"{', '.join(missing)} not found (Debian: util-linux, iproute2)"
    return "the system does not permit network namespaces"


def _unshare() -> list[str] | None:
    """Return the command that makes namespaces, as root or as any user; None if neither works."""
    if any(not shutil.which(tool) for tool in ("unshare", "ip", "tc")):
        return None
    for rights in ([], ["--user", "--map-root-user"]):
        command = ["unshare", *rights, "--net", "--mount"]
        trial = [*command, "sh", "-c", "mount -t tmpfs none /run && ip link add trial type bridge"]
        if subprocess.run(trial, capture_output=True, check=False).returncode == 0:
            return command
    return None


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


def shape(workers: int, rate: str) -> None:
    """Limit every link to this rate in both directions; `none` removes the limit."""
    for rank in range(workers):
        for space, device in ((namespace(rank), DEVICE), (SWITCH, f"port{rank}")):
            if rate == UNSHAPED:
                # this fails if the link was never shaped
                _run(f"tc -n {space} qdisc del dev {device} root", must=False)
            else:
                limit = f"rate {rate} burst {BURST} latency {LATENCY}"
                _run(f"tc -n {space} qdisc replace dev {device} root tbf {limit}")


def check_rate(rate: str) -> None:
    """Raise ValueError unless `tc` accepts the rate."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)[kmgt]?bit", rate, re.ASCII)
    if rate != UNSHAPED and (found is None or float(found[1]) == 0):
        raise ValueError(f"a rate is none, or as in 1gbit, 200mbit or 1.5gbit, got {rate!r}")


def bytes_sent(device: str) -> int:
    """Return the bytes that an interface has sent, by the kernel's counter."""
    with open(f"/sys/class/net/{device}/statistics/tx_bytes") as counter:
        return int(counter.read())


def _run(command: str, *, must: bool = True) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if must and done.returncode:
        raise NetworkError(f"{command}: {done.stderr.strip()}")
