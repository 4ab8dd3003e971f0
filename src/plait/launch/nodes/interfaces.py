"""Addresses and network interfaces of this machine."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Mapping

import psutil

from plait.errors import ConfigError

LOOPBACK_INTERFACE = "lo" if sys.platform == "linux" else "lo0"


def addresses() -> Iterator[tuple[str, str]]:
    """(interface, IPv4 address) of each that this machine has."""
    for interface, of_interface in psutil.net_if_addrs().items():
        for found in of_interface:
            if found.family == socket.AF_INET:
                yield interface, found.address


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
        f"this machine does not have the address {address}, but {choices}; give one of these with {option}"
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
