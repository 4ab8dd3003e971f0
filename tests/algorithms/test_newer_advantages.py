"""The advantages of examples/newer_advantages.py, by all groups of k, and by hand; its loss by scalars."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from plait.errors import FlowError
from plait.recipes.algorithm import load_flow, trace_algorithm
from tests.algorithms.batches import Outputs, run_loss

FLOW = load_flow(f"{Path(__file__).parents[2]}/examples/newer_advantages.py:newer")
EXAMPLE = FLOW.__globals__
LENGTHS = (2, 1)


def test_relative_to_the_mean() -> None:
    assert EXAMPLE["maxrl"](np.array([1.0, 0.0, 0.0, 0.0])).tolist() == [3.0, -1.0, -1.0, -1.0]
    assert EXAMPLE["maxrl"](np.zeros(3)).tolist() == [0.0] * 3


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("right", [0, 1, 2, 3, 4, 5])
def test_pass_at_k_is_the_mean_over_all_groups(right: int, k: int) -> None:
    scores = np.array([1.0] * right + [0.0] * (5 - right))
    groups = list(combinations(range(5), k))
    rewards = np.array([scores[list(group)].max() for group in groups])
    spread = rewards.std() or np.inf
    expected = [
        np.mean([(r - rewards.mean()) / spread for r, group in zip(rewards, groups, strict=True) if i in group])
        for i in range(5)
    ]
    assert EXAMPLE["pass_at_k"](scores, k) == pytest.approx(expected, abs=1e-12)


def test_groups_that_lost_samples_and_the_best_of_a_group() -> None:
    assert EXAMPLE["pass_at_k"](np.array([1.0]), 2).tolist() == [0.0]
    assert EXAMPLE["best"](np.array([0.2, 0.9, 0.9])).tolist() == [0.0, 1.0, 0.0]
    assert EXAMPLE["best"](np.array([0.5, 0.5])).tolist() == [0.0, 0.0]


def test_a_baseline_that_each_prompt_keeps() -> None:
    """Prompt 1 had 0.5 with the weight 8: a score of 1 moves it to 0.5 + 0.5 / 8.2."""
    table = np.array([0.25, 4.0, 0.5, 8.0])
    after = EXAMPLE["tracked"](table, np.array([1.0]), np.array([1.0]))
    assert after == pytest.approx([0.25, 4.0, 0.5 + 0.5 / 8.2, 8.2], rel=1e-12)
    assert table.tolist() == [0.25, 4.0, 0.5, 8.0], "what the step reads is not changed"
    gains = np.array([1.0 - 0.5, 1.0 - 0.25, 0.0 - 0.25])
    expected = (gains - gains.mean()) / (gains.std() + 1e-8)
    found = EXAMPLE["above"](table, np.array([1.0, 1.0, 0.0]), np.array([1.0, 0.0, 0.0]))
    assert found == pytest.approx(expected, rel=1e-12)
    for wrong in (-1.0, 0.5, 2.0):
        with pytest.raises(ValueError, match=f"`index`: expected whole numbers from 0 to 1, found {wrong}"):
            EXAMPLE["tracked"](table, np.array([1.0]), np.array([wrong]))


def test_tokens_that_are_held_are_the_most_covariant() -> None:
    """Log-probs −1, −3 of the sample with the advantage 1, −2 of that with −1. Their mean is −2, that of the advantages
    1/3: products 2/3, −2/3 and 0."""
    logprobs, advantages = [np.array([-1.0, -3.0]), np.array([-2.0])], np.array([1.0, -1.0])
    held = EXAMPLE["most_covariant"](logprobs, advantages, share=0.3)
    assert [part.tolist() for part in held] == [[1.0, 0.0], [0.0]]
    held = EXAMPLE["most_covariant"](logprobs, advantages, share=0.5)
    assert [part.tolist() for part in held] == [[1.0, 0.0], [1.0]]
    held = EXAMPLE["most_covariant"](logprobs, np.zeros(2), share=0.3)
    assert [part.tolist() for part in held] == [[1.0, 0.0], [0.0]], "never more than the share, where all are alike"


@pytest.mark.parametrize("cut", [0, 1])
def test_the_loss(cut: int) -> None:
    """Ratios 2 (clipped at 1.2), 0.5 and 2, which a negative advantage does not clip; the middle one is held."""
    log = np.log([2.0, 0.5, 2.0])
    columns = {
        "advantages": np.array([1.0, 1.0, -1.0]),
        "old_logprobs": np.full(3, -3.0),
        "held": np.array([0.0, 1, 0]),
    }
    result = run_loss(EXAMPLE["clipped"], Outputs(LENGTHS, logprobs=-3 + log), columns, cut)
    assert result.loss == pytest.approx((-1.2 + (-0.5 + np.log(2)) + 2.0) / 3, rel=1e-12)
    assert result.gradients["logprobs"] == pytest.approx(np.array([0.0, -0.5 - 1.0, 2.0]) / 3, rel=1e-12)


@pytest.mark.parametrize("advantage", ["maxrl", "pass_at_k", "best", "tracked"])
def test_the_flow_is_traced(advantage: str) -> None:
    flow = trace_algorithm(FLOW, {"advantage": advantage, "covariant": 0.1}, ("actor", "reward"))
    outputs = {column.name for node in flow.nodes for column in node.outputs}
    assert {"advantages", "held"} <= outputs
    assert ("data/index" in outputs) == (advantage == "tracked")
    with pytest.raises(FlowError, match="reward"):
        trace_algorithm(FLOW, {}, ("actor",))
