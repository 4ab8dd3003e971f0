"""Greedy generations equal Transformers' own `generate`, family by family, with a cache of their making."""

from __future__ import annotations

import pytest
import torch

from plait.data.records import Prompt
from plait.generation.engine import Engine, drain
from plait.generation.noise import NoiseKey
from plait.generation.request import Request
from plait.generation.settings import Sampling, SamplingSettings
from tests.models.tiny import FAMILIES, tiny, tiny_model
from tests.training.exact import ExactFloat64

NUM_TOKENS = 24


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(family: str) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 300, (length,), generator=generator).tolist() for length in (1, 4, 17)]
    engine = Engine(tiny_model(family), SamplingSettings(max_running=2))
    for uid, token_ids in enumerate(prompts):
        asked = Sampling(temperature=0.0, max_tokens=NUM_TOKENS)
        engine.add(Request(Prompt(uid, "", tuple(token_ids)), 1, asked, NoiseKey(0)))
    module = tiny(family)
    with ExactFloat64():
        samples = {sample.prompt.uid: sample for sample in drain(engine)}
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
        logprobs = torch.stack(out.logits)[:, 0].double().log_softmax(-1).gather(1, expected[:, None])[:, 0]
        assert samples[uid].logprobs == pytest.approx(logprobs.tolist(), abs=1e-9)
