"""By what nodes see that they have the same files."""

from __future__ import annotations

from pathlib import Path

from plait.recipes.recipe import Recipe
from plait.recipes.recipe_file import recipe_of
from plait.runtime.folder.named_inputs import digest_of
from plait.runtime.folder.node_files import ALONE, given


def files_of(recipe: Recipe) -> dict[str, str]:
    return dict(given({ALONE: recipe}).files)


def test_the_flow_and_local_models_are_compared_by_their_contents(tmp_path: Path) -> None:
    """Nobody but the leader reads data; models of the hub are known by their names. A link is called as it is named."""
    flow, model, link = tmp_path / "flow.py", tmp_path / "model", tmp_path / "latest"
    flow.write_text("def own(): ...")
    model.mkdir()
    link.symlink_to(model)
    (model / "config.json").write_text("{}")
    (tmp_path / "a.jsonl").touch()
    tree = {"model": str(link), "algorithm": f"{flow}:own", "data": {"source": f"{tmp_path}/a.jsonl"}}
    recipe = recipe_of(tree | {"reward": {"model": "org/elsewhere"}})
    before = files_of(recipe)
    assert before == {f"`model` {link}": digest_of(model), f"`algorithm` {flow}:own": digest_of(flow)}
    for stray in ("trainer_state.json", "results.txt"):
        (model / stray).write_text("{}")
    assert files_of(recipe) == before, "what lies beside a model is not part of it"
    for part in ("tokenizer_config.json", "merges.txt", "tekken.json", "model.safetensors.index.json"):
        (model / part).write_text("{}")
        assert before[f"`model` {link}"] != (before := files_of(recipe))[f"`model` {link}"]
    (model / "config.json").write_text("[]")
    assert [name for name, digest in files_of(recipe).items() if before[name] != digest] == [f"`model` {link}"]
    flow.unlink()
    assert [name for name, _ in files_of(recipe).items()] == [f"`model` {link}"]


def test_stages_are_compared_by_their_names_and_by_the_keys_of_each(tmp_path: Path) -> None:
    """What a stage begins with that another ends with is there on no node yet."""
    (tmp_path / "config.json").write_text("{}")
    data = {"data": {"source": "prompts.jsonl"}}
    sft, policy = {"model": str(tmp_path), "steps": 3}, {"model": "@sft"}
    recipes = {"sft": recipe_of(data | sft), "policy": recipe_of(data | policy)}
    of_stages = given(recipes)
    keys = dict(of_stages.keys)
    assert (keys["stages"], keys["sft.steps"], keys["policy.model"]) == ('["sft", "policy"]', "3", '"@sft"')
    assert "sft.run_dir" not in keys
    assert dict(of_stages.files) == {f"`model` {tmp_path}": digest_of(tmp_path)}
    assert dict(given({ALONE: recipes["sft"]}).keys)["stages"] == "[]"
