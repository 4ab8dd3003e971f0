"""Which forward computes, and when its copy of the weights is made."""

from __future__ import annotations

import pytest
import torch

from plait.data.records import Prompt
from plait.generation.engine import Engine, drain
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels import paged_attention
from plait.kernels.noise import NoiseKey
from plait.models.lora import add_lora
from plait.models.lora_settings import LoraSettings
from tests.generation.requests import is_packed
from tests.models.tiny import tiny_model

needs_vectors = pytest.mark.skipif(not paged_attention.fast(torch.float32), reason="no numba, or a CPU without AVX2")


def request(uid: int, length: int) -> Request:
    sampling = Sampling(max_tokens=length, stop_token_ids=())
    return Request(Prompt(uid, "", (5, 6, 7 + uid)), 1, sampling, NoiseKey(1))


@needs_vectors
def test_an_engine_says_why_its_model_is_not_compiled() -> None:
    narrow = tiny_model("llama", dtype=torch.float32)
    assert Engine(narrow, SamplingSettings()).state.forward.refusals.compiled is None
    exact = Engine(narrow, SamplingSettings(exact=True)).state.forward.refusals.compiled
    assert exact == "exact mode has a forward of its own"
    wide = Engine(tiny_model("llama"), SamplingSettings()).state.forward.refusals.compiled
    assert wide is not None
    assert "torch.float64" in wide
    capped = Engine(tiny_model("gemma2", dtype=torch.float32), SamplingSettings()).state.forward.refusals.compiled
    assert capped == "its layers have further weights"
    adapted = add_lora(tiny_model("llama", dtype=torch.float32), LoraSettings(rank=2), name="actor", seed=0)
    assert Engine(adapted, SamplingSettings()).state.forward.refusals.compiled is None


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_weights_are_packed_once_more_work_makes_it_worthwhile(family: str) -> None:
    """A short request first; a long one comes while it is in flight."""
    engine = Engine(tiny_model(family, dtype=torch.float32), SamplingSettings())
    engine.add(request(0, 8))
    engine.step()
    assert not is_packed(engine)
    engine.add(request(1, 8))
    engine.step()
    assert not is_packed(engine)
    engine.add(request(2, 40))
    engine.step()
    assert is_packed(engine)
    found = {sample.prompt.uid: sample.token_ids for sample in drain(engine)}
    assert not is_packed(engine)
    for uid, length in enumerate((8, 8, 40)):
        alone = Engine(tiny_model(family, dtype=torch.float32), SamplingSettings())
        alone.add(request(uid, length))
        assert [sample.token_ids for sample in drain(alone)] == [found[uid]]
