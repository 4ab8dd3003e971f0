"""What an engine can do beside drafts, and whoever drafts: in exact mode every sample is that of plain decoding, to
the bit, of every temperature, top-k, top-p, and however it stops."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from plait.data.records import Sample
from plait.generation.engine import Engine
from plait.generation.request import Request
from plait.generation.settings import SamplingSettings
from plait.generation.speculates import NoSpeculation, Speculates
from plait.generation.speculator import Speculator
from plait.speculation.drafter import PoolDrafter
from tests.cases import slow_but
from tests.generation.requests import with_head
from tests.generation.scripted_drafter import ScriptedDrafter, at_random, stop_tokens
from tests.generation.test_engine import by_uid, requests
from tests.generation.test_model_drafter import drafter_of, perturbed, speculates
from tests.models.tiny import tiny_model

BESIDE = {
    "chunked prefill": {"max_prefill_tokens": 9, "max_running": 3},
    "preemption": {"kv_tokens": 80},
    "prefix sharing": {"prefix_cache_tokens": 256},
    "all of it": {"max_prefill_tokens": 9, "kv_tokens": 80, "prefix_cache_tokens": 64},
}


DRAFTERS: dict[str, Callable[[], Speculates]] = {
    "what was said": lambda: Speculator(6, PoolDrafter(1 << 22)),
    "at random": lambda: Speculator(6, ScriptedDrafter(at_random)),
    "stop tokens": lambda: Speculator(6, ScriptedDrafter(stop_tokens)),
    "a draft model": lambda: speculates(drafter_of(perturbed_of(torch.float32)), 4),
}


def perturbed_of(dtype: torch.dtype):
    model = tiny_model("llama", dtype=dtype)
    model.weights.copy_(perturbed(0.02).weights)
    return model


def asked() -> list[Request]:
    """Filters, stops and greedy samples, of prompts of their own; and prompts that begin alike."""
    return [*requests(), *(with_head(10 + uid, 40, [9, 5]) for uid in range(3))]


class Told:
    """Two rollouts of the same prompts: what they said, and what an engine did for it."""

    def __init__(self, settings: dict, speculates: Speculates) -> None:
        model = tiny_model("llama", dtype=torch.float32)
        engine = Engine(model, SamplingSettings(exact=True, **settings), speculates=speculates)
        self.said: list[dict[str, Sample]] = []
        self.steps = 0
        self.prompt_tokens: list[int] = []
        """That were computed, by rollout."""
        self.preempted, self.most_chunk = 0, 0
        for _ in range(2):
            samples: list[Sample] = []
            self.prompt_tokens.append(0)
            for one in asked():
                engine.add(one)
            while engine.has_work:
                samples += engine.step()
                assert engine.last_step is not None
                self.steps += 1
                self.preempted += engine.last_step.num_preempted
                self.prompt_tokens[-1] += engine.last_step.num_prefill_tokens
                self.most_chunk = max(self.most_chunk, engine.last_step.num_prefill_tokens)
            assert engine.state.scheduler.blocks.num_held == 0
            self.said.append(by_uid(samples))


@pytest.fixture(scope="module")
def plain() -> dict[str, Told]:
    return {}


QUICK = [*((beside, "what was said") for beside in BESIDE), ("all of it", "at random"), ("all of it", "a draft model")]


@pytest.mark.parametrize(("beside", "drafter"), slow_but(QUICK, itertools.product(BESIDE, DRAFTERS)))
def test_with_drafts_as_without_to_the_bit(beside: str, drafter: str, plain: dict[str, Told]) -> None:
    if beside not in plain:
        plain[beside] = Told(BESIDE[beside], NoSpeculation())
    without = plain[beside]
    drafting = DRAFTERS[drafter]()
    found = Told(BESIDE[beside], drafting)
    assert found.said == without.said
    assert drafting.counts is not None
    assert drafting.counts.drafted > 50
    if drafter in ("what was said", "a draft model"):
        assert drafting.counts.accepted > 20
        assert found.steps < without.steps
    for told in (found, without):
        assert (told.most_chunk <= 9) == ("max_prefill_tokens" in BESIDE[beside])
        assert (told.preempted > 0) == ("kv_tokens" in BESIDE[beside])
        if beside == "prefix sharing":
            assert told.prompt_tokens[0] > 1.5 * told.prompt_tokens[1] > 0, "of what was computed before, less is"
