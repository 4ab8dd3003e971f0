"""What is refused before there are weights, as it would be with them; what is not."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils.logging import warning_once

from plait.cost.estimate import model_shape
from plait.errors import ModelError
from plait.models.foreseen import check_layers
from plait.models.language_loading import from_module
from tests.cases import slow_but
from tests.models.test_admission import IN_PLACE, REFUSED
from tests.models.tiny import FAMILIES, RECURRENT, tiny, tiny_config

BY_CONFIGURATION = ("inkling_text", "falcon_mamba", "mamba2", "llama4_text")
"""Refused by `admission.check_config`."""
FORESEEN = [family for family in REFUSED if family not in BY_CONFIGURATION]


@pytest.mark.parametrize("family", slow_but(["jamba", "zamba2", "diffllama"], FORESEEN))
def test_a_family_is_refused_in_the_words_of_the_self_check(family: str) -> None:
    _, overrides = REFUSED[family]
    with pytest.raises(ModelError) as with_weights:
        from_module(tiny(family, dtype=torch.float32, **overrides), None, "float32", name="it")
    with pytest.raises(ModelError) as without:
        check_layers(tiny_config(family, **overrides).to_dict(), "it")
    assert str(without.value) == str(with_weights.value)


def test_transformers_tells_of_missing_kernels_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and not of what is asked before there are weights."""
    said: list[str] = []
    listening = logging.Handler()
    monkeypatch.setattr(listening, "emit", lambda record: said.append(record.getMessage()))
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [listening])
    warning_once.cache_clear()
    # A number of its own: what was asked of other tests is known.
    check_layers(tiny_config("falcon_h1", vocab_size=133).to_dict(), "it")
    assert said == []
    from_module(tiny("falcon_h1", dtype=torch.float32), None, "float32", name="it")
    assert any("is falling back" in text for text in said)
    assert len(set(said)) == len(said)


ADMITTED: list[tuple[str, dict[str, Any]]] = [*((family, {}) for family in (*FAMILIES, *RECURRENT)), *IN_PLACE.items()]


@pytest.mark.parametrize(("family", "overrides"), slow_but([*ADMITTED[::8], *ADMITTED[-6::4]], ADMITTED))
def test_nothing_is_said_against_families_that_are_admitted(family: str, overrides: dict[str, Any]) -> None:
    check_layers(tiny_config(family, **overrides).to_dict(), "it")


def test_a_shape_is_not_told_of_a_model_that_would_be_refused(tmp_path: Path) -> None:
    """A dry run, a plan and a run ask for shapes first."""
    config = tiny_config("jamba", **REFUSED["jamba"][1]).to_dict() | {"architectures": ["JambaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"^model: .*family jamba.* is refused by the check of its self-check: what "):
        model_shape(str(tmp_path))
