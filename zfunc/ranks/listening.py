"""Where a rank listens: everywhere, since ranks may be on several hosts, or on the loopback only.

Across hosts a rank that connects first sends a token, which it can only have from the store. A
world that ``launch`` has started is on one host, and listens to no other.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

__all__ = ["BACKLOG", "HERE", "listening_socket", "loopback", "loopback_only"]

HERE = "127.0.0.1"
BACKLOG = 4096  # callers that nobody has listened to yet; the system may allow fewer
ONLY = "ZFUNC_LOOPBACK_ONLY"
INTERFACES = "lo", "lo0"  # as Linux and BSD call it


def loopback() -> dict[str, str]:
    """The environment of a rank that listens on the loopback only.

    What others open there, torch's process groups and NCCL, go by the name of an interface.
    """
    asked = {ONLY: "1"}
    for _, name in socket.if_nameindex():
        if name in INTERFACES:
            asked |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return asked


def loopback_only() -> bool:
    """Whether this rank is to listen on the loopback only."""
    return os.environ.get(ONLY) == "1"


def listening_socket() -> socket.socket:
    """A socket that hears callers of either kind of address, where the system has both."""
    if loopback_only():
        return socket.create_server((HERE, 0), backlog=BACKLOG)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=BACKLOG)
