"""Paths of users: a `~` at the beginning is the home, in recipes, options and calls of the library alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.cost.cluster_file import read_cluster
from plait.errors import ConfigError
from plait.paths import at_home
from plait.recipes.plan_files import plan_file
from plait.schedule.plan import Plan
from plait.schedule.schedule import Schedule, parse
from plait.schedule.timeline import Timeline, load_any, write_chrome_trace


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_tilde_is_the_home_and_nothing_else_is_replaced(home: Path) -> None:
    assert at_home("~/a/~b") == f"{home}/a/~b"
    assert at_home(Path("~/a")) == home / "a"
    for name in ("a/~", "hf:org/name", "~nobody-of-that-name/a", "$HOME/a", "{x}"):
        assert at_home(name) == name
    with pytest.raises(ConfigError, match=r"expected a path as it is.*, found `runs/\$\{NAME\}`"):
        at_home("runs/${NAME}")


def test_what_the_library_saves_and_loads(home: Path) -> None:
    plan, schedule = Plan("p", 1, ()), parse("rank 0: 0F0 0B0")
    plan.save("~/plan.json")
    schedule.save(Path("~/schedule.json"))
    Timeline((), source="measured").save("~/timeline.json")
    write_chrome_trace("~/trace.json", Timeline((), source="measured"))
    assert sorted(path.name for path in home.iterdir()) == ["plan.json", "schedule.json", "timeline.json", "trace.json"]
    assert Plan.load("~/plan.json") == plan_file("~/plan.json") == plan
    assert Schedule.load("~/schedule.json").to_text() == schedule.to_text()
    assert Timeline.load("~/timeline.json") == load_any("~/timeline.json")
    load_any("~/trace.json")


def test_clusters(home: Path) -> None:
    (home / "mine.yaml").write_text("nonsense: 1\n")
    with pytest.raises(ConfigError, match="nonsense"):
        read_cluster("~/mine.yaml")
