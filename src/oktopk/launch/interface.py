# SPDX-License-Identifier: Apache-2.0
"""The network interface that gloo uses, where the name of this host leads nowhere.

gloo listens at the address of the host's name. On Debian that is 127.0.1.1 by default, which no
other host can reach.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from contextlib import suppress
from fcntl import ioctl

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
