"""Paths of users: a `~` at the beginning is the home, in recipes, options and calls of the library alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from plait import train
from plait.cli import main
from plait.cost.cluster_file import read_cluster
from plait.data.files import saved_folder
from plait.data.package_file import cache_folder
from plait.errors import ConfigError
from plait.models.files.adapter_folder import adapter_of
from plait.models.files.hub import read_config
from plait.paths import at_home
from plait.recipes.plan_files import plan_file
from plait.recipes.recipe_file import load_recipe
from plait.runtime.prediction.lengths import lengths_of
from plait.runtime.prediction.refinement import recorded_drafts
from plait.runtime.prepare import outline
from plait.schedule.plan import Plan
from plait.schedule.schedule import Schedule, parse
from plait.schedule.timeline import Timeline, load_any, write_chrome_trace
from plait.vllm.environment import vllm_python

RECIPE = Path(__file__).parents[1] / "recipes/demo.yaml"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_tilde_is_the_home_and_nothing_else_is_replaced(home: Path) -> None:
    assert at_home("~/a/~b", None) == f"{home}/a/~b"
    assert at_home(Path("~/a"), None) == home / "a"
    for name in ("a/~", "hf:org/name", "~nobody-of-that-name/a", "a$b", "cost_in_$", "5$/x", "{x}"):
        assert at_home(name, None) == name


@pytest.mark.parametrize("name", ["runs/${NAME}", "$HOME/a", "runs/$user", "runs/job-$SLURM_JOB_ID"])
def test_what_a_shell_would_replace_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        at_home(name, None)
    assert str(error.value).startswith("expected a path as it is, in which nothing but a `~`")
    assert str(error.value).endswith(f"found `{name}`; write out what it stands for")


def lengths_in(folder: str) -> object:
    """Lengths of a run's folder, as of `--lengths`."""
    run = outline(load_recipe(RECIPE))
    return lengths_of(folder, run, lambda: run.lengths)


@pytest.mark.parametrize(
    ("called", "use"),
    [
        ("recipe", train),
        ("cluster", read_cluster),
        ("`plan`", plan_file),
        ("--lengths", lengths_in),
        ("--lengths", recorded_drafts),
        ("model", adapter_of),
        ("model", read_config),
        ("`data.source`", lambda path: saved_folder(f"hf:{path}", "data.source")),
        ("plan", Plan.load),
        ("plan", Plan("p", 1, ()).save),
        ("schedule", Schedule.load),
        ("schedule", parse("rank 0: 0F0 0B0").save),
        ("timeline", Timeline.load),
        ("timeline", Timeline(()).save),
        ("timeline", load_any),
        ("trace", lambda path: write_chrome_trace(path, Timeline(()))),
    ],
)
def test_what_is_refused_is_named(called: str, use: Callable[[str], object]) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{called}: expected a path as it is.*, found `\$\{{X\}}/a`; write out what it stands for$"
    ):
        use("${X}/a")


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_recipe_is_named_as_in_the_usage(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "${X}/r.yaml"]) == 2
    assert capsys.readouterr().err.startswith("error: `RECIPE`: expected a path as it is")


@pytest.mark.parametrize(
    ("variable", "use"),
    [
        ("PLAIT_CACHE", cache_folder),
        ("XDG_CACHE_HOME", cache_folder),
        ("XDG_CACHE_HOME", lambda: vllm_python("cpu")),
        ("PLAIT_VLLM_PYTHON", lambda: vllm_python("cpu")),
    ],
)
def test_variables(home: Path, monkeypatch: pytest.MonkeyPatch, variable: str, use: Callable[[], Path]) -> None:
    for other in ("PLAIT_CACHE", "XDG_CACHE_HOME", "PLAIT_VLLM_PYTHON"):
        monkeypatch.delenv(other, raising=False)
    assert use().is_relative_to(home / ".cache/plait")
    monkeypatch.setenv(variable, "~/mine")
    assert use().is_relative_to(home / "mine")
    monkeypatch.setenv(variable, "${X}/a")
    with pytest.raises(ConfigError, match=rf"^{variable}: expected a path as it is"):
        use()


def test_the_base_of_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "${X}/base"}')
    said = rf"^model: `base_model_name_or_path` in {tmp_path}/adapter_config.json: expected a path as it is"
    with pytest.raises(ConfigError, match=said):
        adapter_of(str(tmp_path))


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
