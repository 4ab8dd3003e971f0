"""A command joins the run of another one: what is refused before the leader is met."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.errors import ConfigError
from plait.launch.nodes.joining import join
from plait.launch.nodes.place import Attached


def test_an_address_that_is_none_of_this_machines_is_refused_at_once(tmp_path: Path) -> None:
    """Else it is found when ranks are to be started, by an agent that then answers nothing."""
    attached = Attached(1, 2, 1, ("127.0.0.1", 9), "203.0.113.7", "--node")
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"the address 203\.0\.113\.7 is none of this machine's"):
        join(attached, tmp_path, said.append, deadline_s=0.0)
    assert said == []
