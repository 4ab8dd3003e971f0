"""`plait.train` from Python: what it takes as a recipe, a flow and rewards."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import plait
from plait.errors import ConfigError
from plait.models.lora_settings import LoraSettings
from plait.observe.loading import loading
from plait.recipes.recipe import Recipe
from plait.recipes.recipe_file import load_recipe
from plait.runtime import api
from plait.runtime.controller import Outcome
from plait.runtime.evaluating.evaluation import Evaluation
from plait.runtime.evaluating.evaluations import Evaluations
from plait.runtime.inputs.keys_from_python import overrides_of, path_of


def halved(function: Callable[..., list[float]]) -> Callable[..., list[float]]:
    @functools.wraps(function)
    def half(*arguments: Any, **columns: Any) -> list[float]:
        return [score / 2 for score in function(*arguments, **columns)]

    return half


def sevens(completions: list[str], **_: Any) -> list[float]:
    return [float(text.count("7")) for text in completions]


@pytest.mark.process
def test_train_is_found_by_who_looks_for_it_before_its_first_use() -> None:
    """By `help(plait)` and by the completion of names, which ask `dir`."""
    code = (
        "import plait, pydoc, sys; print('train' in dir(plait), 'sys' in dir(plait), 'torch' in sys.modules); "
        "print(pydoc.render_doc(plait))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    assert said.startswith("True False False\n")
    assert "Train as `plait train RECIPE --key value` does." in said


def test_what_a_notebook_shows_of_an_outcome() -> None:
    """A line for each that there is, and none of the sixty metrics of a step but the few that tell how it went."""
    metrics = {"reward": -0.505, "actor/loss": 0.25, "timing_s/step": 3.0, "kl": 0.0125}
    assert repr(Outcome(False, 2, metrics, steps=3)).splitlines() == [
        "Outcome",
        "  stopped after step 2 of 3",
        "  last step: reward -0.505, actor/loss 0.25, kl 0.0125",
        "  (4 metrics of the last step are in `metrics`)",
    ]
    before, after = (
        Evaluations({"": Evaluation((), (), None, logged={"actor/loss": loss}, num_given=2)}) for loss in (0.5, 0.25)
    )
    shown = repr(Outcome(True, 3, metrics, before, after, steps=3)).splitlines()
    assert shown[1:3] == ["  finished after step 3 of 3", "  before: eval/actor/loss 0.5"]
    assert shown[4] == "  after: eval/actor/loss 0.25"


def test_functions_go_by_their_files() -> None:
    assert path_of(sevens) == f"{__file__}:sevens"


def test_a_decorated_function_goes_by_the_file_that_defines_it(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "decorated.py").write_text(
        "from tests.runtime.test_api import halved\n@halved\ndef ones(completions, **_): return [1.0]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from decorated import ones  # pyright: ignore[reportMissingImports]

    assert path_of(ones) == f"{tmp_path}/decorated.py:ones"


@pytest.mark.parametrize(
    "function",
    [
        lambda completions, **_: [1.0],
        halved(lambda completions, **_: [1.0]),
        halved(sevens),
        functools.partial(sevens, weight=2),
        5,
    ],
    ids=("a lambda", "a wrapped lambda", "a wrapper", "a partial", "a number"),
)
def test_what_no_path_can_name_is_refused(function: Any) -> None:
    """A wrapper that has another name than what it wraps would be computed without."""
    with pytest.raises(ConfigError, match=r"cannot be named in a recipe: give a function that is defined at the top"):
        plait.train(model="m", data={"source": "d.jsonl"}, reward=function)


def test_rewards_may_be_several(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Recipe] = []
    monkeypatch.setattr(api, "run", lambda recipe, **_: asked.append(recipe))
    plait.train(model="m", data={"source": "d.jsonl"}, reward=[sevens, "mine.rewards:brief"])
    assert list(asked[0].reward.functions) == [f"{__file__}:sevens", "mine.rewards:brief"]


def test_what_is_loaded_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A notebook would be silent for minutes while a model is fetched."""
    monkeypatch.setattr(api, "run", lambda recipe, **_: loading(f"model {recipe.model}"))
    plait.train(model="m", data={"source": "d.jsonl"}, reward=sevens)
    loading("nobody listens any more")
    assert capsys.readouterr().err == "loading model m\n"


def test_a_function_may_be_given_wherever_a_key_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Recipe] = []
    monkeypatch.setattr(api, "run", lambda recipe, **_: asked.append(recipe))
    plait.train(
        model="m",
        data={"source": "d.jsonl"},
        cost={"functions": sevens},
        turns={"reply": sevens},
        evaluation={"items": 2, "functions": [sevens, "mine.judges:kind"]},
    )
    named = f"{__file__}:sevens"
    assert (asked[0].turns.reply, list(asked[0].cost.functions)) == (named, [named])
    assert list(asked[0].evaluation.functions) == [named, "mine.judges:kind"]
    with pytest.raises(ConfigError, match="cannot be named in a recipe"):
        plait.train(model="m", data={"source": "d.jsonl"}, turns={"reply": lambda messages: None})


def test_a_reward_may_be_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Recipe] = []
    monkeypatch.setattr(api, "run", lambda recipe, **_: asked.append(recipe))
    section = {"functions": [sevens, "mine.rewards:brief"], "weights": [2.0, 1.0], "timeout_s": 5.0}
    for reward in (section, section | {"functions": sevens, "weights": [1.0]}, {"timeout_s": 3.0}):
        plait.train(model="m", data={"source": "reasoning_gym:leg_counting"}, reward=reward)
    several, one, none = (recipe.reward for recipe in asked)
    assert list(several.functions) == [f"{__file__}:sevens", "mine.rewards:brief"]
    assert (several.weights, several.timeout_s) == ((2.0, 1.0), 5.0)
    assert (list(one.functions), one.timeout_s) == ([f"{__file__}:sevens"], 5.0)
    assert (list(none.functions), none.timeout_s) == ([], 3.0)
    with pytest.raises(ConfigError, match="timeout_s"):
        plait.train(model="m", data={"source": "d.jsonl"}, reward={"functions": sevens, "timeout": 5})


def test_a_recipe_is_a_path_or_keys() -> None:
    with pytest.raises(ConfigError, match="expected the path of a recipe, or its keys as arguments, found a dict"):
        plait.train({"model": "m"})  # type: ignore[arg-type]


def test_keys_may_be_paths_and_data_several_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Recipe] = []
    monkeypatch.setattr(api, "run", lambda recipe, **_: asked.append(recipe))
    sources = [{"source": Path("a.jsonl"), "weight": 2}, {"source": "b.jsonl", "weight": 1}]
    plait.train(model=Path("folder/model"), data=sources, reward=sevens)
    plait.train(
        model="m",
        data={"source": Path("a.jsonl"), "size": 3},
        reward=sevens,
        evaluation={"items": 2, "sets": [Path("e.jsonl")]},
    )
    several, one = asked
    assert several.model == "folder/model"
    assert [(source.source, source.weight) for source in several.data.sources] == [("a.jsonl", 2), ("b.jsonl", 1)]
    assert (one.data.source, one.evaluation.sets[0].source) == ("a.jsonl", "e.jsonl")


def test_numbers_and_arrays_of_numpy_are_those_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `options` hold is written into the run's folder, which failed when the run before it was cleared."""
    asked: list[Recipe] = []
    monkeypatch.setattr(api, "run", lambda recipe, **_: asked.append(recipe))
    options = {"kl_coef": np.float64(0.5), "mini_batches": np.int64(2), "table": [np.float32(0.5), np.arange(2)]}
    reward = {"functions": [sevens, sevens], "weights": np.array([1.0, 2.0])}
    keys: dict[str, Any] = {"model": "m", "data": {"source": "d.jsonl"}, "reward": reward, "steps": np.int64(3)}
    keys["algorithm"] = "my_flow.py:flow"  # which options a file's flow has is seen later
    plait.train(**keys, options=options)
    assert repr(asked[0].options) == "{'kl_coef': 0.5, 'mini_batches': 2, 'table': [0.5, [0, 1]]}"
    assert (asked[0].reward.weights, repr(asked[0].steps)) == ((1.0, 2.0), "3")
    with pytest.raises(
        ConfigError, match=r"^key `options`: expected texts, numbers, lists and maps, .* type Dataset is"
    ):
        plait.train(**keys, options={"rows": Dataset()})


def test_sources_from_python_take_the_place_of_the_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Recipe] = []
    monkeypatch.setattr(api, "run", lambda recipe, **_: asked.append(recipe))
    (tmp_path / "r.yaml").write_text("model: m\ndata: {source: a.jsonl, size: 3}\nreward: {functions: [well_formed]}\n")
    plait.train(tmp_path / "r.yaml", data=[{"source": "b.jsonl"}, {"source": "c.jsonl"}])
    assert [(source.source, source.size) for source in asked[0].data.sources] == [("b.jsonl", None), ("c.jsonl", None)]


class Dataset:
    """As of `datasets`."""


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (Dataset(), "Dataset"),
        ([{"prompt": "2 + 3?", "answer": "5"}], "list"),
        ({"prompt": ["2 + 3?"], "answer": ["5"]}, "dict of columns"),
        ({"messages": ([{"role": "user", "content": "2 + 3?"}],)}, "dict of columns"),
        ({"source": Dataset()}, "Dataset"),
        ([{"source": "d.jsonl"}, {"source": Dataset()}], "Dataset"),
    ],
)
def test_rows_are_no_source(data: Any, kind: str) -> None:
    said = (
        rf"^`data` says where rows are, and does not hold them: found a {kind}; write what .* `save_to_disk\(FOLDER\)`"
    )
    with pytest.raises(ConfigError, match=said):
        plait.train(model="m", data=data, reward=sevens)


@pytest.mark.parametrize(
    ("sets", "kind"),
    [
        (Dataset(), "Dataset"),
        ({"own": Dataset(), "other": Dataset()}, "Dataset"),
        (["a.jsonl", {"source": Dataset()}], "Dataset"),
        ([{"source": "a.jsonl"}, {"prompt": ["2 + 3?"]}], "dict of columns"),
    ],
)
def test_rows_are_no_evaluation_set(sets: Any, kind: str) -> None:
    said = rf"^`evaluation.sets` says where rows are, and does not hold them: found a {kind}; write what "
    with pytest.raises(ConfigError, match=said):
        plait.train(model="m", data={"source": "d.jsonl"}, reward=sevens, evaluation={"items": 1, "sets": sets})


def test_a_model_in_memory_is_no_name() -> None:
    module = torch.nn.Linear(2, 2)
    said = r"a model is given by its name, a local folder or a hub id, found a Linear; write it first, .* as `"
    with pytest.raises(ConfigError, match=rf"^`model`: {said}model`"):
        plait.train(model=module)
    with pytest.raises(ConfigError, match=rf"^`reference\.model`: {said}reference\.model`"):
        plait.train(model="m", reference={"model": module})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (({"source": "a.jsonl"}, {"sorce": "b.jsonl"}), "unknown key `data.more.0.sorce`; did you mean"),
        (["a.jsonl", "b.jsonl"], "`data` is a section of keys, such as `data.source`, found"),
        ([], "`data` is a section of keys"),
        ({"source": [Path("a.jsonl")]}, r"key `data.source`: .*found \['a.jsonl'\]"),
    ],
)
def test_what_is_wrong_but_holds_no_rows_is_said_as_in_a_recipe(data: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plait.train(model="m", data=data, reward=sevens)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"optimiser": {}}, r"^unknown key `optimiser`; did you mean the section `optimizer`\?$"),
        ({"critic": {"optimiser": {}}}, r"^unknown key `critic\.optimiser`; did you mean"),
        (
            {"sampling": {"temprature": {}}},
            r"^unknown key `sampling\.temprature`; did you mean `sampling\.temp",
        ),
        ({"model": {}}, r"`model` cannot be set: `model` is not a section but 'm'"),
    ],
)
def test_an_empty_section_is_known_as_any_other(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    (tmp_path / "recipe.yaml").write_text("model: m\ndata: {source: d.jsonl}\n")
    with pytest.raises(ConfigError, match=said):
        plait.train(tmp_path / "recipe.yaml", **keys)


def test_an_empty_section_leaves_what_a_recipe_says(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("model: m\ndata: {source: d.jsonl}\nsampling: {temperature: 0.5}\n")
    given = overrides_of({"sampling": {}, "lora": LoraSettings(), "optimizer": {"betas": [0.9, 0.95]}}, None, None)
    recipe = load_recipe(tmp_path / "recipe.yaml", given)
    assert (recipe.sampling.temperature, recipe.lora, recipe.optimizer.betas) == (0.5, LoraSettings(), (0.9, 0.95))
