"""How many micro-batches an order is searched for that roles train together by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from plait.algorithms.losses import cross_entropy
from plait.dataflow import build_prompts, trace
from plait.recipes.algorithm import load_flow, trace_algorithm
from plait.runtime.prediction.fusing import num_micro_batches


def loss(batch):
    return batch.logprobs


def asks(prompts):
    return list(prompts)


def judged(prompts, actor, judge):
    """Trains on 4 samples of each prompt; the 8 verdicts of each of them are read, and not trained on."""
    samples = actor.generate(prompts)
    judge.generate(build_prompts(samples, asks), samples_per_prompt=8)
    actor.train(samples, loss=loss)


def attempted(prompts, actor):
    """Trains on 2 second attempts at each of the 4 samples of each prompt."""
    samples = actor.generate(prompts)
    attempts = actor.generate(build_prompts(samples, asks), samples_per_prompt=2)
    actor.train(attempts, loss=loss, mini_batches=2)


def beside(prompts, examples, actor):
    """Samples and examples in one optimizer step, then examples alone."""
    actor.train(actor.generate(prompts), loss=loss, with_next=True)
    actor.train(examples, loss=cross_entropy)
    actor.train(examples, loss=cross_entropy)


def facts_of(flow: Any, prompts_per_step: int) -> Any:
    return SimpleNamespace(flow=flow, recipe=SimpleNamespace(prompts_per_step=prompts_per_step, samples_per_prompt=4))


@pytest.mark.parametrize(
    ("flow", "prompts_per_step", "dp", "pp", "count"),
    [
        (judged, 1, 1, 2, 4),
        (judged, 1, 2, 2, 2),
        (judged, 3, 1, 2, 8),  # as many as keep two stages busy, of 12 samples
        (attempted, 1, 1, 2, 4),  # of 8 attempts, in two mini-batches
        (attempted, 1, 3, 2, 2),
        (beside, 1, 1, 2, 5),  # 4 samples and an example
        (beside, 1, 4, 2, 2),
    ],
)
def test_micro_batches_are_of_the_samples_that_are_trained_on(flow, prompts_per_step, dp, pp, count) -> None:
    facts = facts_of(trace(flow, roles=("actor", "judge")), prompts_per_step)
    place: Any = SimpleNamespace(dp=dp, pp=pp)
    assert num_micro_batches(facts, "actor", place) == count


def test_pairs_stay_whole() -> None:
    facts = facts_of(trace_algorithm(load_flow("dpo"), {}, ("actor", "ref")), 3)
    place: Any = SimpleNamespace(dp=1, pp=2)
    assert num_micro_batches(facts, "actor", place) == 3
