"""The user who owns a TCP socket on the loopback interface, as the kernel knows it."""

from __future__ import annotations

import ipaddress
import socket
import struct
from pathlib import Path

Address = tuple[str, int]
_PackedAddress = tuple[bytes, int]

UNKNOWN_USER = 65534
"""User id of nobody, and of every user whom this user namespace does not map."""
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_MAPPED = bytes(10) + b"\xff\xff"  # ::ffff:0:0/96
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
    for UNKNOWN_USER. Takes 20 us, and 10 ms where netlink is refused or has no such socket. Raises
    OSError if /proc cannot be read either.
    """
    local_ip, remote_ip = _loopback_ip(local[0]), _loopback_ip(remote[0])
    if local_ip is None or remote_ip is None:
        return None
    here, there = (local_ip.packed, local[1]), (remote_ip.packed, remote[1])
    try:
        state, user, inode = _ask_kernel(here, there)
    except OSError:  # refused, without the kernel's module, or no such socket
        state, user, inode = _find_in_tables(here, there)
    # A closed socket has no inode, and may be listed with the user id 0.
    has_process = state in _CONNECTED_STATES and inode != 0
    return user if has_process and user != UNKNOWN_USER else None


def _loopback_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a loopback address, as IPv4 if it is mapped to IPv6, or None."""
    ip = ipaddress.ip_address(host)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return ip if ip.is_loopback else None


def _ask_kernel(local: _PackedAddress, remote: _PackedAddress) -> tuple[int, int, int]:
    """Return state, user and inode of a socket. Raises OSError."""
    family = socket.AF_INET if len(local[0]) == 4 else socket.AF_INET6
    ports = _PORTS.pack(local[1], remote[1])
    addresses = local[0].ljust(16, b"\0") + remote[0].ljust(16, b"\0")
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
    request += ports + addresses + _ANY_INTERFACE_AND_COOKIE
    length = _HEADER.size + len(request)
    header = _HEADER.pack(length, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
        netlink.sendto(header + request, (0, 0))
        answer = netlink.recv(8192, socket.MSG_DONTWAIT)  # the kernel answers within sendto
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        raise OSError("The kernel has no such socket, or no module for the request.")
    _, state, _, _, found, _, _, _, user, inode = _MESSAGE.unpack_from(answer, _HEADER.size)
    # Without a connected socket the kernel returns one that listens on `local`.
    if not found.startswith(ports):
        raise OSError("The kernel has no such socket.")
    return state, user, inode


def _find_in_tables(local: _PackedAddress, remote: _PackedAddress) -> tuple[int, int, int]:
    """Return state, user and inode of a socket, zeros for an unknown one. Raises OSError."""
    # An IPv6 socket with an IPv4 address is in the second table, with the mapped address.
    wanted = {(_as_listed(prefix, local), _as_listed(prefix, remote)) for prefix in (b"", _MAPPED)}
    for table in filter(Path.exists, TABLES):  # a host without IPv6 has the first only
        for line in table.read_text().splitlines()[1:]:
            columns = line.split()
            if (columns[1], columns[2]) in wanted:
                return int(columns[3], 16), int(columns[7]), int(columns[9])
    return 0, 0, 0


def _as_listed(prefix: bytes, address: _PackedAddress) -> str:
    """Return an address as /proc/net/tcp lists it, in words of this machine's byte order."""
    ip = prefix + address[0]
    words = struct.unpack(f"={len(ip) // 4}I", ip)
    return "".join(f"{word:08X}" for word in words) + f":{address[1]:04X}"
