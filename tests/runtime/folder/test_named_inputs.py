"""Which local data and models a recipe names, and that a change of them shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.recipes.recipe_file import recipe_of
from plait.runtime.folder import named_inputs as module
from plait.runtime.folder.named_inputs import digest_of, named_inputs, said_of_reading


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
                "more": [{"source": "reasoning_gym:chain_sum"}, {"source": f"{tmp_path}/b.jsonl"}],
            },
            "evaluation": {"items": 2, "sets": ["reasoning_gym:chain_sum", {"source": f"{tmp_path}/held.jsonl"}]},
            "pretraining": {"source": f"{tmp_path}/pre.jsonl"},
        }
    )
    assert named_inputs(recipe) == {
        "model": tmp_path / "model",
        "data.source": tmp_path / "a.jsonl",
        "data.more[1].source": tmp_path / "b.jsonl",
        "evaluation.sets.1.source": tmp_path / "held.jsonl",
        "pretraining.source": tmp_path / "pre.jsonl",
    }


def test_what_an_adapter_was_trained_on_is_found_too(tmp_path: Path) -> None:
    for name in ("base", "adapter"):
        (tmp_path / name).mkdir()
    for base, found in ((str(tmp_path / "base"), ["adapter", "base"]), ("org/elsewhere", ["adapter"])):
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        recipe = recipe_of({"model": f"{tmp_path}/adapter", "data": {"source": "reasoning_gym:chain_sum"}})
        inputs = named_inputs(recipe)
        assert inputs == dict(
            zip(("model", "model (what its adapter was trained on)"), map(tmp_path.joinpath, found), strict=False)
        )


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


def saved(folder: Path, rows: bytes = b"rows") -> Path:
    """A data set as `datasets` saves it."""
    folder.mkdir(parents=True)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    (folder / "data-00000-of-00001.arrow").write_bytes(rows)
    return folder


def test_a_saved_data_set_is_known_by_the_split_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    one = saved(tmp_path / "one")
    train, test = saved(tmp_path / "many" / "train"), saved(tmp_path / "many" / "test", b"others")
    (tmp_path / "many" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for source, folder in {
        "~/one": one,
        "hf:~/one": one,
        f"hf:{one}": one,
        "~/many": train,
        "hf:~/many": train,
        f"hf:{tmp_path}/many:test": test,
    }.items():
        recipe = recipe_of({"model": "org/m", "data": {"source": source}})
        assert named_inputs(recipe) == {"data.source": folder}, source
    first = digest_of(one)
    assert first == digest_of(train) != digest_of(test)
    (one / "cache-1f.arrow").write_bytes(b"computed from it")
    assert digest_of(one) == first
    large = bytes(3 << 20)
    digests = {first}
    for rows in (large, large[:-1] + b"\1", b"\1" + large[1:]):
        (one / "data-00000-of-00001.arrow").write_bytes(rows)
        digests.add(digest_of(one))
    (one / "state.json").write_text("{}")
    digests.add(digest_of(one))
    assert len(digests) == 5


def test_what_takes_long_to_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAID_BYTES", 3 << 20)
    model, small, large = tmp_path / "model", tmp_path / "small.jsonl", tmp_path / "large.jsonl"
    model.mkdir()
    for file, size in ((model / "model.safetensors", 1 << 34), (small, 1 << 10), (large, 5 << 29)):
        with open(file, "wb") as opened:
            opened.truncate(size)
    inputs = {"model": model, "data.source": small, "pretraining.source": tmp_path / "gone"}
    assert said_of_reading(inputs) is None
    line = "reading all of `data.more[0].source` (2.5 GiB): a resumed run says whether it has changed"
    assert said_of_reading({**inputs, "data.more[0].source": large}) == line
    assert said_of_reading({"data.source": saved(tmp_path / "saved", bytes(4 << 20))}) is not None
