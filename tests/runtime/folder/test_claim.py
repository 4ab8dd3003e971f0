"""What is checked of a run before any work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from plait.errors import ModelError
from plait.recipes.recipe import Recipe
from plait.runtime.folder.claim import claim


def test_adapters_without_their_package_are_refused_before_the_folder_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = {"model": "m", "data": {"source": "d.jsonl"}, "run_dir": str(tmp_path / "run"), "lora": {"rank": 8}}
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r"adapters need the package peft; install plait\[lora\]"):
        claim(Recipe.model_validate(stated), resume=False)
    assert not (tmp_path / "run").exists()
    claim(Recipe.model_validate(stated | {"lora": {"rank": 0}}), resume=False).close()
