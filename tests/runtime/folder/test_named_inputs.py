"""Which local data and models a recipe names, and that a change of them shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.recipes.recipe_file import recipe_of
from plait.runtime.folder.named_inputs import digest_of, named_inputs


def test_what_is_there_is_found_under_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a.jsonl", "b.jsonl", "held.jsonl", "pre.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "model").mkdir()
    recipe = recipe_of(
        {
            "model": "~/model",
            "reward": {"model": "org/elsewhere"},
            "critic": {"model": "smollm2-135m-instruct"},
            "data": {
                "source": f"{tmp_path}/a.jsonl",
                "evaluation_source": f"{tmp_path}/held.jsonl",
                "more": [{"source": "reasoning_gym:chain_sum"}, {"source": f"{tmp_path}/b.jsonl"}],
            },
            "pretraining": {"source": f"{tmp_path}/pre.jsonl"},
        }
    )
    assert named_inputs(recipe) == {
        "model": tmp_path / "model",
        "data.source": tmp_path / "a.jsonl",
        "data.evaluation_source": tmp_path / "held.jsonl",
        "data.more[1].source": tmp_path / "b.jsonl",
        "pretraining.source": tmp_path / "pre.jsonl",
    }


def test_a_model_is_known_by_its_files_large_ones_by_a_sample(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(1 << 21))
    first = digest_of(tmp_path)
    (tmp_path / "README.md").write_text("no file of a model")
    (tmp_path / "checkpoint-5").mkdir()
    assert digest_of(tmp_path) == first
    seen = {first}
    for content in (bytes((1 << 21) + 1), b"\1" * (1 << 21), bytes((1 << 21) - 1) + b"\1"):
        weights.write_bytes(content)
        seen.add(digest_of(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    seen.add(digest_of(tmp_path))
    assert len(seen) == 5
