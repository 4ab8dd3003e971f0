"""What is simulated is what is run: given the recorded lengths the simulated engine takes the engine's decisions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.data.records import Prompt
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
    engine, simulated = Engine(model, settings), SimulatedEngine(settings.limits(model.max_positions))
    asked = requests()
    again = replace(asked[3], prompt=replace(asked[3].prompt, uid=100), num_samples=4)  # a prompt that was there
    ran, predicted, said, num_preempted = [], [], {}, 0
    for turn in range(2):
        if turn == 0:
            asked.append(again)
        else:  # a conversation that goes on
            token_ids = (*again.prompt.token_ids, *said[100, 2])[:60]
            prompt = Prompt(101, "", (*token_ids, 7))
            asked = [replace(again, prompt=prompt, num_samples=2, sampling=replace(again.sampling, max_tokens=8))]
        for request in asked:
            engine.add(request)
        while engine.has_work:
            finished = engine.step()
            said |= {(sample.prompt.uid, sample.index): sample.token_ids for sample in finished}
            step = engine.last_step
            num_preempted += step.num_preempted
            ran.append((step.kind, step.num_sequences, step.num_tokens, step.num_context_tokens, len(finished)))
        for request in asked:
            simulated.add(recorded(request, said, caches=prefix_cache_tokens > 0))
        while simulated.has_work:
            one = simulated.step()
            predicted.append((one.kind, one.num_sequences, one.num_tokens, one.num_context_tokens, len(one.finished)))
    assert predicted == ran
    assert len(ran) > 8
    assert (num_preempted > 0) == (kv_tokens is not None)


def recorded(asked, said, caches):
    """A request with the lengths that its samples had, and with the keys of their blocks."""
    uid, token_ids = asked.prompt.uid, asked.prompt.token_ids
    responses = [said[uid, index] for index in range(asked.num_samples)]
    lengths = tuple(map(len, responses))
    if not caches:
        return Request(uid, len(token_ids), lengths)
    contexts = tuple(prefix_keys((*token_ids, *response[:-1])) for response in responses)
    return Request(uid, len(token_ids), lengths, prefix_keys(token_ids), contexts)
