"""A leader that refuses its run tells the other commands why."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from plait.errors import ConfigError
from plait.launch.nodes import refusing
from plait.launch.nodes.joining import join
from plait.launch.nodes.place import Attached
from plait.launch.nodes.refusing import refusals_told


def attached(task: int, port: int) -> Attached:
    return Attached(task, 2, task, ("127.0.0.1", port), None, "--node")


def free_port() -> int:
    with socket.socket() as link:
        link.bind(("127.0.0.1", 0))
        return int(link.getsockname()[1])


def test_a_node_that_waits_hears_why_there_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there before node 0 listens; the folder, which was not there, is not left."""
    monkeypatch.delenv("PLAIT_RUN_KEY", raising=False)
    folder, port, said, codes = tmp_path / "run", free_port(), list[str](), list[int]()

    def node() -> None:
        codes.append(join(attached(1, port), folder, said.append, deadline_s=60.0))

    waiting = threading.Thread(target=node)
    waiting.start()
    told: list[str] = []
    with pytest.raises(ConfigError, match="no such data"), refusals_told(attached(0, port), folder, told.append):
        raise ConfigError("no such data")
    waiting.join(60)
    assert codes == [2]
    assert said[-1] == "node 0: no such data"
    assert told == ["the run is refused; its other commands are told why, for 15 s at most"]
    assert not folder.exists()


def test_nobody_is_waited_for_longer_than_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusing, "TELLS_S", 0.2)
    told: list[str] = []
    with (
        pytest.raises(ConfigError, match="no such data"),
        refusals_told(attached(0, free_port()), tmp_path, told.append),
    ):
        raise ConfigError("no such data")
    assert told == ["the run is refused; its other commands are told why, for 0.2 s at most"]


def test_a_run_without_others_tells_nobody(tmp_path: Path) -> None:
    told: list[str] = []
    for alone in (None, attached(1, 9)):
        with pytest.raises(ConfigError, match="no such data"), refusals_told(alone, tmp_path, told.append):
            raise ConfigError("no such data")
    assert told == []
