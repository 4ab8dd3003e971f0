"""A command joins the run of another one: what is refused before the leader is met."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.errors import ConfigError, RunError
from plait.launch.nodes import joining
from plait.launch.nodes.joining import join
from plait.launch.nodes.place import Attached
from plait.launch.nodes.run_key import FILE, VARIABLE


def test_an_address_that_is_none_of_this_machines_is_refused_at_once(tmp_path: Path) -> None:
    """Else it is found when ranks are to be started, by an agent that then answers nothing."""
    attached = Attached(1, 2, 1, ("127.0.0.1", 9), "203.0.113.7", "--node")
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"this machine does not have the address 203\.0\.113\.7"):
        join(attached, tmp_path, said.append, deadline_s=0.0)
    assert said == []


def test_why_it_has_not_joined_is_said_before_it_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: a leader that is late replaces the key of an earlier run."""
    monkeypatch.setattr(joining, "SILENT_S", 0.0)
    monkeypatch.delenv(VARIABLE, raising=False)
    said: list[str] = []
    why = f"there is no key of the run: neither {tmp_path / FILE} nor the variable {VARIABLE}"
    with pytest.raises(RunError, match=f"^this node could not join: {why}$"):
        join(Attached(1, 2, 1, ("127.0.0.1", 9), None, "--node"), tmp_path, said.append, deadline_s=0.9)
    assert said == [
        "node 1 waits for the leader at 127.0.0.1:9",
        f"this node has not joined yet, and tries for 1 s more: {why}",
    ]


def test_that_nobody_answers_is_said_before_it_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader has not begun to listen, or has all its nodes and listens no more."""
    monkeypatch.setattr(joining, "SILENT_S", 0.3)
    monkeypatch.setenv(VARIABLE, "correct horse battery")
    said: list[str] = []
    why = r"no leader answers at 127\.0\.0\.1:9 \(.*refused\); is the command of node 0 running"
    with pytest.raises(RunError, match=f"^this node could not join: {why}"):
        join(Attached(1, 2, 1, ("127.0.0.1", 9), None, "--node"), tmp_path, said.append, deadline_s=1.5)
    assert len(said) == 2
    assert said[1].startswith("this node has not joined yet, and tries for 1 s more: no leader answers at 127.0.0.1:9")
