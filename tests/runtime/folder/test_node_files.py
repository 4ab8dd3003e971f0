"""By what nodes see that they have the same files."""

from __future__ import annotations

from pathlib import Path

from plait.recipes.recipe_file import recipe_of
from plait.runtime.folder.named_inputs import digest_of
from plait.runtime.folder.node_files import said_files


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
    before = dict(said_files(recipe))
    assert before == {f"`model` {link}": digest_of(model), f"`algorithm` {flow}:own": digest_of(flow)}
    for stray in ("trainer_state.json", "results.txt"):
        (model / stray).write_text("{}")
    assert dict(said_files(recipe)) == before, "what lies beside a model is not part of it"
    for part in ("tokenizer_config.json", "merges.txt", "tekken.json", "model.safetensors.index.json"):
        (model / part).write_text("{}")
        assert before[f"`model` {link}"] != (before := dict(said_files(recipe)))[f"`model` {link}"]
    (model / "config.json").write_text("[]")
    assert [name for name, digest in said_files(recipe) if before[name] != digest] == [f"`model` {link}"]
    flow.unlink()
    assert [name for name, _ in said_files(recipe)] == [f"`model` {link}"]
