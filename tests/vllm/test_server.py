"""What vLLM is asked to be, by a stand-in for its package."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.vllm.messages import Ended, Loading, Wanted
from plait.vllm.server import VllmServer
from tests.models.tiny import tiny_tokenizer


class Drawing:
    """Draws these tokens, one a step, whatever is asked of it."""

    def __init__(self, *token_ids: int) -> None:
        self.token_ids, self.count = token_ids, 0
        self.asked: list[tuple[str, Any, Any]] = []
        self.aborted: list[str] = []

    def add_request(self, *request: Any) -> None:
        self.asked.append(request)

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names

    def step(self) -> list[Any]:
        self.count += 1
        token_ids, is_last = self.token_ids[: self.count], self.count == len(self.token_ids)
        logprobs = SimpleNamespace(logprobs=[-1.0] * self.count)
        said = SimpleNamespace(token_ids=token_ids, finish_reason="length" if is_last else None, logprobs=logprobs)
        return [SimpleNamespace(request_id=self.asked[0][0], outputs=[said], finished=is_last)]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of the engine that is made last."""
    args: dict[str, Any] = {}
    vllm = SimpleNamespace(
        EngineArgs=args.update,
        LLMEngine=SimpleNamespace(from_engine_args=lambda _: args.get("made")),
        SamplingParams=SimpleNamespace,
    )
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    platform = SimpleNamespace(is_sleep_mode_available=lambda: False)
    kinds = SimpleNamespace(CUMULATIVE="cumulative", FINAL_ONLY="final only")
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", SimpleNamespace(RequestOutputKind=kinds))
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


A, N = tiny_tokenizer().encode("a") + tiny_tokenizer().encode("n")


@pytest.mark.parametrize(
    ("begun_ids", "turn_start", "stopped"),
    [
        ((), 0, False),
        ((20, A), 0, True),
        ((20, A), 1, True),
        ((20, A), 2, False),
    ],
    ids=["new", "in the first turn", "in this turn", "behind a reply"],
)
def test_a_sample_goes_on_behind_what_it_has(
    asked: dict[str, Any], tmp_path: Path, begun_ids: tuple[int, ...], turn_start: int, stopped: bool
) -> None:
    """Its limit, its noise and its stop strings, of which the first token that is drawn completes one, or none."""
    (tmp_path / "config.json").write_text("{}")
    tiny_tokenizer().save_pretrained(tmp_path)
    engine = asked["made"] = Drawing(N, 20)
    server = VllmServer(None, Loading(str(tmp_path), "float32", 64, 8, 64, 1 << 20, "cpu"))  # pyright: ignore[reportArgumentType]
    wanted = Wanted((3, 1), (5, 6), begun_ids, turn_start, 9, (2,), ("an",), 77, 0.5, 1.0, 4, 0.9)
    [ended] = server.step([wanted])
    [(name, prompt, params)] = engine.asked
    assert prompt == {"prompt_token_ids": [5, 6, *begun_ids]}
    assert params.max_tokens == 9 - len(begun_ids)
    told = {"noise_key": 77, "temperature": 0.5, "greedy_logprobs_at": 1.0, "top_k": 4, "top_p": 0.9}
    assert params.extra_args == told | {"num_begun": len(begun_ids)}
    assert ended == Ended((3, 1), (N,) if stopped else (N, 20), (-1.0,) * (1 if stopped else 2), stopped)
    assert engine.aborted == ([name] if stopped else [])
