"""Dashboard servers of this host: their published addresses, and the user of a connection."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def published_server(port: int, url: str) -> Iterator[None]:
    """Keep a file with the address and the pid of this process during the block. Raises OSError."""
    folder = servers_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    path = folder / f"{port}.json"
    withdraw_server(port)  # one that was killed
    # Exclusively: a planted link never receives the token.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"url": url, "pid": os.getpid()}, file)
    try:
        yield
    finally:
        withdraw_server(port)


def withdraw_server(port: int) -> None:
    """Delete the file of a server that ends or has ended. Raises OSError."""
    (servers_folder() / f"{port}.json").unlink(missing_ok=True)


def servers_folder() -> Path:
    """Return the folder of this host's servers, as several hosts may share the home folder."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "stepscope" / "servers" / socket.gethostname()


Address = tuple[str, int]

UNKNOWN_USER = 65534
"""User id of nobody, and of every user whom this user namespace does not map."""
# ESTABLISHED, FIN_WAIT1, FIN_WAIT2 and CLOSE_WAIT of <linux/tcp_states.h>.
_CONNECTED_STATES = frozenset({1, 4, 5, 8})
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
_HEADER = struct.Struct("=IHHII")  # nlmsghdr
_REQUEST = struct.Struct("=4BI")  # inet_diag_req_v2 up to its inet_diag_sockid
_PORTS = struct.Struct(">HH")
_ANY_INTERFACE_AND_COOKIE = struct.pack("=3I", 0, 0xFFFFFFFF, 0xFFFFFFFF)
_MESSAGE = struct.Struct("=4B48s5I")  # inet_diag_msg with its inet_diag_sockid


def loopback_owner(local: Address, remote: Address) -> int | None:
    """Return the user id of the process whose socket `local` is connected to `remote`.

    Returns None for an address that is not loopback, for a socket that its process has closed, and
    for UNKNOWN_USER. Takes 20 us. Raises OSError if a sandbox refuses netlink.
    """
    local_ip, remote_ip = _loopback_ip(local[0]), _loopback_ip(remote[0])
    if local_ip is None or remote_ip is None:
        return None
    addresses = local_ip.packed.ljust(16, b"\0") + remote_ip.packed.ljust(16, b"\0")
    family = socket.AF_INET if local_ip.version == 4 else socket.AF_INET6
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
    request += _PORTS.pack(local[1], remote[1]) + addresses + _ANY_INTERFACE_AND_COOKIE
    length = _HEADER.size + len(request)
    header = _HEADER.pack(length, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
        netlink.sendto(header + request, (0, 0))
        answer = netlink.recv(8192, socket.MSG_DONTWAIT)  # the kernel answers within sendto
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None  # the kernel has no such socket, or no module for the request
    _, state, *_, user, inode = _MESSAGE.unpack_from(answer, _HEADER.size)
    # Without a connected socket the kernel returns one that listens on `local`. A closed socket has
    # no inode, and may be listed with the user id 0.
    is_connected = state in _CONNECTED_STATES and inode != 0
    return user if is_connected and user != UNKNOWN_USER else None


def _loopback_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a loopback address, as IPv4 if it is mapped to IPv6, or None."""
    ip = ipaddress.ip_address(host)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return ip if ip.is_loopback else None
