"""What is simulated is what is run: given the recorded lengths the simulated engine takes the engine's decisions."""

from __future__ import annotations

import pytest

from plait.policy.batching import Limits
from plait.simulator.rollout import Request, SimulatedEngine
from tests.generation.test_engine import engine_of, requests
from tests.models.tiny import tiny_model


@pytest.mark.parametrize(("max_running", "max_prefill_tokens"), [(1, 1), (3, 20), (8, 64), (64, 1000)])
def test_the_simulated_engine_repeats_the_engines_steps(max_running, max_prefill_tokens):
    engine = engine_of(tiny_model("llama"), max_running, max_prefill_tokens)
    asked = requests()
    for request in asked:
        engine.add(request)
    ran, lengths = [], {}
    while engine.has_work:
        finished = engine.step()
        for sample in finished:
            lengths[sample.prompt.uid, sample.index] = len(sample.token_ids)
        step = engine.last_step
        ran.append((step.kind, step.num_sequences, step.num_tokens, step.num_context_tokens, len(finished)))

    simulated = SimulatedEngine(Limits(max_running, max_prefill_tokens))
    for request in asked:
        uid = request.prompt.uid
        recorded = tuple(lengths[uid, index] for index in range(request.num_samples))
        simulated.add(Request(uid, len(request.prompt.token_ids), recorded))
    predicted = []
    while simulated.has_work:
        step = simulated.step()
        predicted.append((step.kind, step.num_sequences, step.num_tokens, step.num_context_tokens, len(step.finished)))
    assert predicted == ran
    assert len(ran) > 10
