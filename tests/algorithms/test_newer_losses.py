"""The losses of examples/newer_losses.py, by a second implementation in float64 scalars, response by response; that of
examples/distill.py, by all draws of a token; and that of examples/online_dpo.py, against DPO's."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.algorithms.dpo import DPOOptions, dpo
from plait.recipes.algorithm import load_flow
from tests.algorithms.batches import Outputs, pair_ids, run_loss
from tests.algorithms.flows import loss_of

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = load_flow(f"{EXAMPLES}/newer_losses.py:newer").__globals__
LENGTHS = (3, 1, 4)
ADVANTAGES = (1.5, -0.5, -2.0)


def topr(ratios: list[list[float]], logprobs: list[list[float]]) -> float:
    total = 0.0
    for a, of, lps in zip(ADVANTAGES, ratios, logprobs, strict=True):
        total -= a * (1.0 if a >= 0 else min(math.prod(of), 1.0)) * sum(lps)
    return total / len(ADVANTAGES)


def gpg(_: Any, logprobs: list[list[float]]) -> float:
    parts = zip(ADVANTAGES, logprobs, strict=True)
    return sum(-a * lp for a, lps in parts for lp in lps) / sum(LENGTHS)


def by_response(values: Any) -> list[list[float]]:
    return [list(map(float, part)) for part in np.split(values, np.cumsum(LENGTHS)[:-1])]


@pytest.mark.parametrize("expected", [topr, gpg])
@pytest.mark.parametrize("cut", [0, 1])
def test_losses_equal_those_of_scalars(expected: Any, cut: int) -> None:
    rng = np.random.default_rng(3)
    old, new = -rng.uniform(0.5, 3, 8), -rng.uniform(0.5, 3, 8)
    new[3] = old[3] + 2  # a bad response that has become likelier
    columns = {"advantages": np.repeat(ADVANTAGES, LENGTHS)} | ({"old_logprobs": old} if expected is topr else {})
    result = run_loss(EXAMPLE[expected.__name__], Outputs(LENGTHS, logprobs=new), columns, cut)

    def loss_at(logprobs: Any) -> float:
        return float(expected(by_response(np.exp(new - old)), by_response(logprobs)))  # ratios are constants

    assert result.loss == pytest.approx(loss_at(new), rel=1e-12)
    step = 1e-6 * np.eye(8)
    slopes = [(loss_at(new + h) - loss_at(new - h)) / 2e-6 for h in step]
    assert result.gradients["logprobs"] == pytest.approx(slopes, abs=1e-8)


def test_the_tokens_of_the_highest_entropy() -> None:
    entropies = [np.array([0.1, 3.0]), np.array([2.0]), np.array([0.5, 0.2])]
    chosen = EXAMPLE["highest"](entropies, share=0.4)
    assert [list(of) for of in chosen] == [[0, 1], [1], [0, 0]]


@pytest.mark.parametrize("cut", [0, 2])
def test_the_loss_of_online_dpo_is_that_of_dpo_with_the_better_response_first(cut: int) -> None:
    loss = load_flow(f"{EXAMPLES}/online_dpo.py:online_dpo").__globals__["pair_loss"]
    rng = np.random.default_rng(5)
    policy, ref = -rng.uniform(0.5, 3, (2, 6))
    lengths, sides = (2, 1, 1, 2), np.repeat([1.0, -1.0, -1.0, 1.0], (2, 1, 1, 2))
    found = run_loss(
        partial(loss, beta=0.3),
        Outputs(lengths, logprobs=policy, samples=pair_ids(2)),
        {"sides": sides, "ref_logprobs": ref},
        cut,
    )
    order = np.array([0, 1, 2, 4, 5, 3])
    given = Outputs((2, 1, 2, 1), logprobs=policy[order], samples=pair_ids(2))
    dpo_result = run_loss(loss_of(dpo, DPOOptions(beta=0.3)), given, {"ref_logprobs": ref[order]}, cut)
    assert found.loss == pytest.approx(dpo_result.loss, rel=1e-12)
    assert np.array(found.gradients["logprobs"])[order] == pytest.approx(dpo_result.gradients["logprobs"], rel=1e-12)
    assert found.metrics["rewards/margins"] == pytest.approx(dpo_result.metrics["rewards/margins"], rel=1e-12)


def test_the_pair_of_a_group_is_its_best_and_its_worst() -> None:
    of_group = load_flow(f"{EXAMPLES}/online_dpo.py:online_dpo").__globals__["best_and_worst"]
    assert list(of_group(np.array([0.5, 2.0, 1.0, 0.1]))) == [0, 1, 0, -1]
    assert list(of_group(np.array([0.3, 0.3]))) == [0, 0]


def test_the_expected_gradient_of_distillation_is_that_of_the_divergence() -> None:
    """Of one token, over all of its draws: E[gap · (e_t − π)] by the logits, against π · (gap − KL(π ‖ π_teacher))."""
    loss = load_flow(f"{EXAMPLES}/distill.py:distill").__globals__["reverse_kl_loss"]
    logits = np.random.default_rng(4).normal(size=(2, 5))
    policy, teacher = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    probs, gaps = np.exp(policy), policy - teacher
    expected = np.zeros(5)
    for token in range(5):
        drawn = Outputs((1,), logprobs=policy[token : token + 1])
        result = run_loss(loss, drawn, {"teacher_logprobs": teacher[token : token + 1]})
        assert result.metrics["actor/reverse_kl"] == pytest.approx(gaps[token], rel=1e-12)
        expected += probs[token] * result.gradients["logprobs"][0] * (np.eye(5)[token] - probs)
    assert expected == pytest.approx(probs * (gaps - probs @ gaps), rel=1e-12)
