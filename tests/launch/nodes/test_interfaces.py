"""Which interface of this machine has an address."""

from __future__ import annotations

import pytest

from plait.errors import ConfigError
from plait.launch.nodes.interfaces import interface_of


def test_an_address_has_an_interface() -> None:
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(ConfigError, match=r"does not have the address 192\.0\.2\.77, but 127\.0\.0\.1 \(lo\)"):
        interface_of("192.0.2.77")
    with pytest.raises(ConfigError, match=r"; give one of these with --leader$"):
        interface_of("192.0.2.77", "--leader")
