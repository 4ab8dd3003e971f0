"""Greedy generations equal Transformers' own `generate`, family by family, with a cache of their making."""

from __future__ import annotations

import contextlib

import pytest
import torch

from plait.data.records import Prompt
from plait.generation.compiled_forward import CompiledForward
from plait.generation.engine import Engine, drain
from plait.generation.refused import Refused
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels import paged_attention
from plait.kernels.noise import NoiseKey
from tests.cases import slow_but
from tests.generation.test_compiled_forward import FAMILIES as LOWERED
from tests.models.tiny import FAMILIES, RECURRENT, tiny, tiny_model
from tests.training.exact import ExactFloat64

NUM_TOKENS = 16
"""Long enough for weights to be packed, and longer than the sliding windows."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("family", slow_but(["llama", "deepseek_v3", "qwen3_5_text"], {**FAMILIES, **RECURRENT}))
def test_greedy_equals_transformers(family: str, dtype: torch.dtype) -> None:
    """In float64 through the plain twins, in float32 through what users run: the compiled forward where the family has
    one, else the module with packed products, the compiled attention and draw."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 300, (length,), generator=generator).tolist() for length in (1, 4, 17)]
    engine = Engine(tiny_model(family, dtype=dtype), SamplingSettings(max_running=2))
    for uid, token_ids in enumerate(prompts):
        asked = Sampling(temperature=0.0, max_tokens=NUM_TOKENS)
        engine.add(Request(Prompt(uid, "", tuple(token_ids)), 1, asked, NoiseKey(0)))
    module = tiny(family, dtype=dtype)
    wide = dtype == torch.float64
    with ExactFloat64() if wide else contextlib.nullcontext():
        samples = {sample.prompt.uid: sample for sample in engine.step()}
        is_compiled = family in LOWERED and paged_attention.fast(dtype)
        best = engine.state.forward.backends[0]
        assert isinstance(best, CompiledForward) == is_compiled
        assert best.is_prepared
        samples |= {sample.prompt.uid: sample for sample in drain(engine)}
        outs = [
            module.generate(
                torch.tensor([token_ids]),
                attention_mask=torch.ones(1, len(token_ids), dtype=torch.int64),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
            for token_ids in prompts
        ]
    for uid, (token_ids, out) in enumerate(zip(prompts, outs, strict=True)):
        expected = out.sequences[0, len(token_ids) :]
        assert samples[uid].token_ids == tuple(expected.tolist())
        logprobs = torch.stack(out.logits)[:, 0].to(dtype).log_softmax(-1).gather(1, expected[:, None])[:, 0]
        assert samples[uid].logprobs == pytest.approx(logprobs.tolist(), abs=1e-9 if wide else 1e-5)


@pytest.mark.skipif(not paged_attention.fast(torch.bfloat16), reason="no numba, or a CPU without AVX2")
@pytest.mark.parametrize("family", slow_but(list(FAMILIES)[::3], FAMILIES))
def test_every_family_is_compiled_or_refused_with_a_reason(family: str) -> None:
    """Another error would stop a model that its module can compute."""
    model = tiny_model(family, dtype=torch.bfloat16)
    if family in LOWERED:
        CompiledForward.of(model)
        return
    with pytest.raises(Refused, match=r".{11}"):
        CompiledForward.of(model)
