import importlib.util
import json
import sys
from pathlib import Path

import pytest

from plait.errors import ConfigError
from plait.observe.trackers import Trackers, check_trackers

CONFIG = {"model": "m", "steps": 3, "data": {"source": "s"}, "trackers": ["wandb"], "none": None}

# Stands for the real package, which needs an account or a service: what it is told goes to a file.
FAKE_WANDB = """
import json, os

class Error(Exception):
    pass

class config:
    @staticmethod
    def update(values, **_):
        write({"config": values})

def write(row):
    with open(os.environ["FAKE_WANDB_LOG"], "a") as file:
        file.write(json.dumps(row) + "\\n")

class Run:
    def log(self, values, step=None, **_):
        write({"step": step, **values})
    def finish(self):
        write({"finish": True})

def init(**settings):
    if os.environ.get("FAKE_WANDB_FAILS"):
        raise Error("no API key configured")
    write({"init": settings})
    return Run()
"""


def test_no_trackers_cost_nothing(tmp_path: Path):
    with Trackers((), tmp_path, CONFIG) as trackers:
        trackers.log(1, {"reward": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_unknown_and_missing_trackers_name_the_key_and_the_remedy(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="key `trackers`: expected some of tensorboard, wandb, found `mlflow`"):
        check_trackers(["mlflow"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("tensorboard", "wandb"):
        with pytest.raises(ConfigError, match=f"key `trackers`.*pip install {name}"):
            check_trackers([name])


@pytest.fixture
def wandb_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "packages" / "wandb"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.setenv("FAKE_WANDB_LOG", str(tmp_path / "wandb.jsonl"))
    yield tmp_path / "wandb.jsonl"
    sys.modules.pop("wandb", None)


def test_wandb_goes_on_with_the_same_run(tmp_path: Path, wandb_log: Path):
    run = tmp_path / "my-run"
    run.mkdir()
    with Trackers(["wandb", "wandb"], run, CONFIG) as trackers:
        trackers.log(1, {"reward": 0.5, "note": "text is left out"})
        trackers.log(2, {"reward": 0.75})
    with Trackers(["wandb"], run, CONFIG, last_step=1) as trackers:
        trackers.log(2, {"reward": 0.75})
    rows = [json.loads(line) for line in wandb_log.read_text().splitlines()]
    first, config, one, two, end, second, again, end_again = rows
    assert first["init"]["project"] == "plait"
    assert first["init"]["name"] == "my-run"
    assert first["init"]["resume"] == "allow"
    assert second["init"]["id"] == first["init"]["id"] != ""
    assert config["config"] == {"model": "m", "steps": 3, "data.source": "s", "trackers": "['wandb']", "none": "None"}
    assert (one, two) == ({"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.75})
    assert again == two, "the resumed run's steps go on behind its checkpoint"
    assert end == end_again == {"finish": True}


def test_wandb_that_does_not_start_is_a_config_error(tmp_path: Path, wandb_log: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAKE_WANDB_FAILS", "1")
    with pytest.raises(ConfigError, match="no API key configured; log in with `wandb login`"):
        Trackers(["wandb"], tmp_path, CONFIG)


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with Trackers(["tensorboard"], tmp_path, CONFIG) as trackers:
        for step in (0, 1, 2, 3):
            trackers.log(step, {"reward": 10.0 * step})
    with Trackers(["tensorboard"], tmp_path, CONFIG, last_step=2) as trackers:
        for step in (3, 4):
            trackers.log(step, {"reward": 10.0 * step + 1})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [
        (0, 0),
        (1, 10),
        (2, 20),
        (3, 31),
        (4, 41),
    ]


def test_a_step_logged_twice_is_our_own_fault(tmp_path: Path):
    trackers = Trackers((), tmp_path, CONFIG, last_step=4)
    with pytest.raises(AssertionError, match="step 4 logged after step 4"):
        trackers.log(4, {})
