"""Addresses and network interfaces of this machine. Linux and macOS, by the C library's `getifaddrs`."""

from __future__ import annotations

import ctypes
import ctypes.util
import socket
import struct
import sys
from collections.abc import Iterator, Mapping

from plait.errors import ConfigError

LOOPBACK_INTERFACE = "lo" if sys.platform == "linux" else "lo0"


class _Entry(ctypes.Structure):
    """`struct ifaddrs`, as far as it is read."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def addresses() -> Iterator[tuple[str, str]]:
    """(interface, IPv4 address) of each that this machine has."""
    library = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Entry)()
    if library.getifaddrs(ctypes.byref(first)) != 0:
        return
    try:
        entry = first
        while entry:
            interface = entry.contents
            if interface.address:
                head = ctypes.string_at(interface.address, 8)
                family = struct.unpack("=H", head[:2])[0] if sys.platform == "linux" else head[1]
                if family == socket.AF_INET:
                    yield interface.name.decode(), socket.inet_ntoa(head[4:8])
            entry = interface.next
    finally:
        library.freeifaddrs(first)


def interface_of(address: str, option: str = "--address") -> str:
    """The name of the interface that has an IPv4 address.

    Args:
        option: that the address was given by, for messages.

    Raises:
        ConfigError: none has it; names those that there are.
    """
    if address.startswith("127."):
        return LOOPBACK_INTERFACE
    interfaces = list(addresses())
    for name, own_address in interfaces:
        if own_address == address:
            return name
    choices = ", ".join(f"{own_address} ({name})" for name, own_address in interfaces)
    raise ConfigError(
        f"the address {address} is none of this machine's, which are {choices}; give one of these with {option}"
    )


def interface_variables(address: str, environ: Mapping[str, str], option: str = "--address") -> dict[str, str]:
    """Variables by which process groups talk on the interface that has `address`; one that a user has set stays.

    Args:
        option: as of `interface_of`.

    Raises:
        ConfigError: no interface has it.
    """
    name = interface_of(address, option)
    return {variable: environ.get(variable, name) for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}


def resolved(host: str) -> str:
    """The IPv4 address of a host.

    Raises:
        ConfigError: it has none.
    """
    try:
        return socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]  # type: ignore[return-value]
    except OSError as error:
        raise ConfigError(f"the host `{host}` has no IPv4 address that this machine can find: {error}") from error
