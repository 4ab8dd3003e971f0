"""The command by which a run follows a plan that was found: that `plait train` takes it as it is printed."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from plait.cli import plan_following
from plait.cli.plan_following import following
from plait.cli.train import FLAGS, attached_by, node_options, read_recipe
from plait.runtime.prediction.planning import Planning
from plait.schedule.plan import Plan
from tests.cli.printed import run
from tests.cli.recipes import write_with_reward
from tests.cli.test_dry_run import recipe as dry_recipe
from tests.cli.test_plan import RECIPE


@dataclass
class Known:
    """What is asked of a planning."""

    devices: int = 0
    launcher: str = "auto"
    names: tuple[str, ...] = ("smollm2-135m-instruct",)
    device: str = "cpu"
    recipe: Any = field(init=False)
    models: Any = field(init=False)

    def __post_init__(self) -> None:
        sampling = SimpleNamespace(draft_model=None)
        self.recipe = SimpleNamespace(
            devices=self.devices, launcher=self.launcher, sampling=sampling, device=self.device
        )
        self.models = [SimpleNamespace(name=name) for name in self.names]


def told(known: Known, plan: Plan, out: str | None = "p.json", stage: str | None = None, keys: tuple[str, ...] = ()):
    """What is to be done beside, and the words behind `plait train r.yaml`."""
    found = following(cast(Planning, known), plan, Path("r.yaml"), keys, None if out is None else Path(out), stage)
    words = shlex.split(found.command)
    assert words[:3] == ["plait", "train", "r.yaml"]
    return found.beside, words[3:]


def on(ranks: int, nodes: int = 1) -> Plan:
    return Plan("found", ranks, (), nodes=nodes)


def test_of_one_node_it_is_the_recipe_with_its_keys_and_the_plan() -> None:
    keys = ("--prompts_per_step", "32")
    assert told(Known(), on(4), keys=keys) == ("", [*keys, "--plan", "p.json"])
    assert told(Known(4), on(4), stage="first") == ("", ["--first.plan", "p.json"])
    assert told(Known(), on(4), None) == ("keep the plan with `--out FILE`", ["--plan", "FILE"])


@pytest.mark.parametrize(("stage", "option"), [(None, "--devices"), ("second", "--second.devices")])
def test_devices_are_the_plans(stage: str | None, option: str) -> None:
    assert told(Known(2), on(4), stage=stage)[1][2:] == [option, "4"]


@pytest.mark.parametrize("launcher", ["auto", "attach", "local", "ray"])
def test_on_several_nodes_train_takes_the_options(launcher: str, tmp_path: Path) -> None:
    beside, words = told(Known(launcher=launcher), on(8, 2))
    rest, place = node_options(["0" if word == "I" else word.replace("PORT", "4000") for word in words])
    overrides = dict(read_recipe("train", rest, FLAGS)[1])
    assert place.nodes == 2
    recipe = cast(Any, SimpleNamespace(launcher=overrides.get("launcher", launcher)))
    attached = attached_by(recipe, place)
    if launcher == "ray":
        assert (beside, place.given, attached) == ("", ["--nodes"], None)
    else:
        assert beside == "on each node, I from 0 on"
        assert attached is not None
        assert (attached.num_nodes, attached.leads) == (2, True)
    of_stage = told(Known(launcher=launcher), on(8, 2), stage="first")
    assert of_stage == (beside, [word.replace("--plan", "--first.plan") for word in words]), "all stages run there"


def test_shapes_are_named_that_weights_have_to_stand_for() -> None:
    known = Known(names=("llama-2-7b", "smollm2-135m-instruct", "llama-2-7b", "llama-2-13b"))
    assert told(known, on(4)) == ("with weights in place of the shapes llama-2-7b, llama-2-13b", ["--plan", "p.json"])


@pytest.mark.parametrize(
    ("ranks", "nodes", "here", "said"),
    [
        (1, 1, 0, "where there is a GPU: this machine has none"),
        (4, 1, 2, "where there are 4 GPUs: this machine has 2"),
        (4, 1, 4, ""),
        (8, 2, 0, "on each node, I from 0 on; where there are 4 GPUs on each node: this machine has none"),
        (8, 2, 4, "on each node, I from 0 on"),
    ],
)
def test_gpus_that_are_not_here_are_said(
    ranks: int, nodes: int, here: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_following, "visible_devices", lambda: here)
    assert told(Known(device="cuda"), on(ranks, nodes))[0] == said
    assert "GPU" not in told(Known(), on(ranks, nodes))[0], "a CPU has as many devices as a run asks for"


@pytest.mark.parametrize(
    "name", ["split", "colocated", "standalone", "auto", "real", "one-mesh", "hybridflow", "--p", "~p"]
)
def test_a_file_that_is_called_as_something_else_is(name: str) -> None:
    assert told(Known(), on(4), name) == ("", ["--plan", f"./{name}"])


@pytest.mark.parametrize("columns", [60, 120])
def test_the_command_is_printed_as_a_shell_takes_it(
    columns: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path longer than a line, two spaces and a new line in a value."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(plan_following, "visible_devices", lambda: 4)
    folder = tmp_path / ("a long-path " * 12).strip()
    folder.mkdir()
    monkeypatch.chdir(folder)
    recipe, out = str(folder / "ppo.yaml"), str(folder / "kept plan.json")
    write_with_reward(RECIPE, folder / "ppo.yaml")
    keys = ["--data.system_prompt", "two  spaces,\nand a\tline - `as` it's"]
    place = ("--cluster", "4xH200", "--evaluations", 5, "--lengths", "64:128", "--out", out)
    code, printed, err = run(capsys, "plan", recipe, *keys, *place)
    assert code == 0, err
    _, _, below = printed.partition("to follow it")
    beside, _, command = below.partition("\n")
    assert beside.strip() == "with weights in place of the shape llama-2-7b"
    assert shlex.split(command) == ["plait", "train", recipe, *keys, "--plan", out]


@pytest.mark.parametrize(("cluster", "devices"), [("2xH100", 4), ("16xH100", 0), ("16xH100", 4)])
def test_a_dry_run_takes_the_command(
    cluster: str, devices: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one node and on two, of a recipe that says nothing of devices, or another number."""
    monkeypatch.chdir(tmp_path)
    path = Path(dry_recipe(tmp_path, "smollm2-135m"))
    path.write_text(f"{path.read_text()}devices: {devices}\ndevice: cuda\n")
    place = ("--cluster", cluster, "--evaluations", 5, "--lengths", "64:128", "--out", "split")
    code, out, err = run(capsys, "plan", path, *place)
    assert code == 0, err
    words = ["train", *shlex.split(out.rpartition("\nplait train ")[2])]
    names = {"I": "0", "HOST:PORT": "localhost:4000"}
    code, out, err = run(capsys, *[names.get(word, word) for word in words], "--device", "cpu", "--dry-run")
    assert code == 0, err
    assert "device" in out


def test_of_a_stage_the_command_is_that_of_all_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_with_reward(RECIPE, tmp_path / "ppo.yaml")
    stages = {"first": {"algorithm": "grpo", "steps": 1, "samples_per_prompt": 2}}
    common = yaml.safe_load(RECIPE) | {"stages": stages}
    del common["algorithm"]
    (tmp_path / "stages.yaml").write_text(yaml.safe_dump(common))
    place = ("--lengths", "64:128", "--stage", "first", "--evaluations", 5)
    for cluster, options in (("8xH100", ""), ("16xH100", " --nodes 2 --node I --leader HOST:PORT")):
        code, out, err = run(capsys, "plan", "stages.yaml", "--cluster", cluster, *place)
        assert code == 0, err
        assert "to follow it" in out
        assert f"plait train stages.yaml --first.plan FILE{options}\n" in out
