"""What vLLM is asked to be, by a stand-in for its package."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.vllm.messages import Loading
from plait.vllm.server import VllmServer


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of the engine that is made last."""
    args: dict[str, Any] = {}
    vllm = SimpleNamespace(EngineArgs=args.update, LLMEngine=SimpleNamespace(from_engine_args=lambda _: None))
    platform = SimpleNamespace(is_sleep_mode_available=lambda: False)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    for variable in ("NUMBA_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.setenv(variable, "as it was")
    return args


@pytest.mark.parametrize(
    ("stated", "device", "overrides"),
    [
        ({}, "cuda", {}),
        ({"quantization_config": None}, "cpu", {"tie_word_embeddings": False}),
        ({"quantization_config": {"quant_method": "fp8"}}, "cuda", {"quantization_config": None}),
    ],
)
def test_vllm_holds_full_numbers_whatever_the_checkpoint_stores(
    asked: dict[str, Any], tmp_path: Path, stated: dict[str, Any], device: str, overrides: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | stated))
    VllmServer(None, Loading(str(tmp_path), "bfloat16", 64, 8, 64, 1 << 20, device))  # pyright: ignore[reportArgumentType]
    assert asked["hf_overrides"] == overrides
