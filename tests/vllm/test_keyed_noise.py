"""What vLLM draws by the processor is plait's sampler's, at each sample's own place; by a stand-in for its package."""

from __future__ import annotations

import importlib
import sys
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.generation.sampler import SamplingRows, sample
from plait.generation.sampling import Sampling
from plait.kernels.noise import DrawNoise

Direction = Enum("Direction", ["UNIDIRECTIONAL", "SWAP"])
LOGITS = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    names = {"BatchUpdate": object, "LogitsProcessor": object, "MoveDirectionality": Direction}
    monkeypatch.setitem(sys.modules, "vllm.v1.sample.logits_processor", SimpleNamespace(**names))  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "plait.vllm.keyed_noise", raising=False)
    yield importlib.import_module("plait.vllm.keyed_noise").KeyedNoise(None, torch.device("cpu"), False)
    sys.modules.pop("plait.vllm.keyed_noise", None)


def changed(added: Any = (), removed: Any = (), moved: Any = ()) -> SimpleNamespace:
    return SimpleNamespace(added=added, removed=removed, moved=moved)


def row(index: int, said: list[int], **keys: Any) -> tuple[int, Any, None, list[int]]:
    extra = {
        "noise_key": 9,
        "temperature": 1.0,
        "greedy_logprobs_at": 0.7,
        "top_k": 0,
        "top_p": 1.0,
        "num_begun": 0,
    } | keys
    return index, SimpleNamespace(extra_args=extra), None, said


def drawn(processor: Any, *rows: tuple[int, int, float]) -> None:
    """It lets through what the sampler draws for rows of (noise key, place, temperature), with its log-prob."""
    samplings: Any = [Sampling(temperature=temperature, greedy_logprobs_at=0.7) for *_, temperature in rows]
    logits = LOGITS[: len(rows)]
    numbers = DrawNoise(torch.tensor([key for key, *_ in rows]), torch.tensor([place for _, place, _ in rows]))
    token_ids, logprobs = sample(logits, numbers, SamplingRows.of(samplings, 50, torch.device("cpu")))
    left = processor.apply(logits.clone())
    assert (left > -torch.inf).sum(1).tolist() == [1] * len(rows)
    assert left.argmax(1).tolist() == token_ids.tolist()
    assert left.amax(1).tolist() == logprobs.float().tolist()


def test_noise_is_by_the_place_in_the_response_wherever_the_row_stands(processor: Any) -> None:
    said: list[int] = []
    rows = [row(0, []), row(1, said, num_begun=5), row(2, [7, 7], noise_key=4, temperature=0.5)]
    processor.update_state(changed(added=rows))
    drawn(processor, (9, 0, 1.0), (9, 5, 1.0), (4, 2, 0.5))
    said.append(3)
    processor.update_state(None)
    drawn(processor, (9, 0, 1.0), (9, 6, 1.0), (4, 2, 0.5))
    processor.update_state(changed(removed=[0], moved=[(2, 0, Direction.UNIDIRECTIONAL), (0, 1, Direction.SWAP)]))
    drawn(processor, (9, 6, 1.0), (4, 2, 0.5))


def test_greedy_rows_have_log_probs_at_the_temperature_that_is_asked_for(processor: Any) -> None:
    processor.update_state(changed(added=[row(0, [], temperature=0.0), row(1, [])]))
    drawn(processor, (9, 0, 0.0), (9, 0, 1.0))
    left = processor.apply(LOGITS[:2].clone())
    assert int(left[0].argmax()) == int(LOGITS[0].argmax())
    assert left[0].max().item() == pytest.approx((LOGITS[0] / 0.7).log_softmax(-1).max().item(), abs=1e-6)
