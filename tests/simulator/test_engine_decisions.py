"""What is simulated is what is run: given the recorded lengths the simulated engine takes the engine's decisions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.generation.engine import Engine
from plait.generation.settings import SamplingSettings
from plait.policy.blocks import prefix_keys
from plait.simulator.engine import Request, SimulatedEngine
from tests.generation.test_engine import requests
from tests.models.tiny import tiny_model


@pytest.mark.parametrize(
    ("max_running", "max_prefill_tokens", "kv_tokens", "prefix_cache_tokens"),
    [(1, 1, None, 0), (3, 20, None, 0), (8, 64, None, 0), (64, 1000, None, 0), (8, 64, 96, 0), (64, 7, 96, 64)],
)
def test_the_simulated_engine_repeats_the_engines_steps(
    max_running, max_prefill_tokens, kv_tokens, prefix_cache_tokens
):
    """Also where the pool is too small and samples are preempted, and where prompts share blocks."""
    model = tiny_model("llama")
    settings = SamplingSettings(
        max_running=max_running,
        max_prefill_tokens=max_prefill_tokens,
        kv_tokens=kv_tokens,
        prefix_cache_tokens=prefix_cache_tokens,
    )
    engine = Engine(model, settings)
    asked = requests()
    again = replace(asked[3], prompt=replace(asked[3].prompt, uid=100), num_samples=4)  # a prompt that was there
    asked.append(again)
    for request in asked:
        engine.add(request)
    ran, lengths, num_preempted = [], {}, 0
    while engine.has_work:
        finished = engine.step()
        for sample in finished:
            lengths[sample.prompt.uid, sample.index] = len(sample.token_ids)
        step = engine.last_step
        num_preempted += step.num_preempted
        ran.append((step.kind, step.num_sequences, step.num_tokens, step.num_context_tokens, len(finished)))

    simulated = SimulatedEngine(settings.limits(model.max_positions))
    for request in asked:
        uid, token_ids = request.prompt.uid, request.prompt.token_ids
        recorded = tuple(lengths[uid, index] for index in range(request.num_samples))
        prefix = prefix_keys(token_ids) if prefix_cache_tokens else None
        simulated.add(Request(uid, len(token_ids), recorded, prefix))
    predicted = []
    while simulated.has_work:
        step = simulated.step()
        predicted.append((step.kind, step.num_sequences, step.num_tokens, step.num_context_tokens, len(step.finished)))
    assert predicted == ran
    assert len(ran) > 8
    assert (num_preempted > 0) == (kv_tokens is not None)
