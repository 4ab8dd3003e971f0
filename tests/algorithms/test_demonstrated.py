"""examples/demonstrated.py: weights, advantages and losses by hand, and that both losses make each optimizer step."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from plait.recipes.algorithm import load_flow
from tests.algorithms.batches import Outputs, run_loss
from tests.algorithms.flows import graph_of

FLOW = load_flow(f"{Path(__file__).parents[2]}/examples/demonstrated.py:demonstrated")
EXAMPLE = FLOW.__globals__


@pytest.mark.parametrize("mix", ["chord", "luffy"])
def test_both_losses_make_each_step(mix: str) -> None:
    graph = graph_of(FLOW, EXAMPLE["Options"](mix=mix, mini_batches=2, epochs=2))
    ((own, given),) = graph.updates("actor")
    assert [graph.nodes[node.rows].call for node in (own, given)] == ["actor.generate", "examples"]
    assert graph.optimizer_steps("actor") == 4
    assert ("advantages" in given.loss_columns) == (mix == "luffy")


def test_a_demonstration_is_one_more_sample_of_its_group() -> None:
    scores, shown, index, shown_index = np.array([1.0, 0, 0]), np.array([1.0]), np.full(3, 7.0), np.array([7.0])
    assert list(EXAMPLE["of_samples"](scores, shown, index, shown_index)) == [0.5, -0.5, -0.5]
    assert list(EXAMPLE["of_demonstrations"](shown, scores, shown_index, index)) == [0.5]
    assert list(EXAMPLE["of_demonstrations"](shown, scores[:0], shown_index, index[:0])) == [0.0]
    with pytest.raises(ValueError, match="have to be the same rows"):
        EXAMPLE["of_samples"](scores, shown, index, shown_index + 1)
    with pytest.raises(ValueError, match="have to be the same rows"):
        EXAMPLE["of_samples"](scores, shown[:0], index, shown_index[:0])


def test_the_weight_of_demonstrations() -> None:
    mu_at = partial(EXAMPLE["mu_at"], first=0.9, last=0.1, steps=10)
    assert [mu_at(steps) for steps in (0, 5, 10, 20)] == pytest.approx([0.9, 0.5, 0.1, 0.1])
    assert EXAMPLE["share_of_second"](np.zeros(12), np.zeros(4)) == 0.25


@pytest.mark.parametrize("cut", [0, 1])
def test_losses_of_demonstrations_by_hand(cut: int) -> None:
    p = np.array([0.5, 0.25, 0.1])
    outputs = Outputs([2, 1], logprobs=np.log(p), max_response_tokens=4)
    found = run_loss(partial(EXAMPLE["imitated"], weight=0.5, weights="phi"), outputs, cut=cut)
    assert found.gradients["logprobs"] == pytest.approx(-0.5 * p * (1 - p) / 3)
    assert found.loss == pytest.approx(-0.5 * (p * (1 - p) * np.log(p)).sum() / 3)
    assert found.metrics["actor/nll"] == pytest.approx(-np.log(p).mean())
    plain = run_loss(partial(EXAMPLE["imitated"], weight=0.5, weights="one"), outputs, cut=cut)
    assert plain.gradients["logprobs"] == pytest.approx([-0.5 / 3] * 3)

    # d/dlog p of A p / (p + gamma) is A gamma p / (p + gamma)^2; the mean over two samples and four tokens.
    advantages = np.array([2.0, 2.0, -1.0])
    found = run_loss(partial(EXAMPLE["shaped"], weight=0.25, gamma=0.1), outputs, {"advantages": advantages}, cut)
    assert found.loss == pytest.approx(-0.25 * (advantages * p / (p + 0.1)).sum() / 8)
    assert found.gradients["logprobs"] == pytest.approx(-0.25 * advantages * 0.1 * p / (p + 0.1) ** 2 / 8)


def test_the_loss_of_own_samples_by_hand() -> None:
    old, new = np.log([0.5, 0.5, 0.5]), np.log([0.5, 0.75, 0.3])
    columns = {"advantages": np.array([1.0, 1.0, 1.0]), "old_logprobs": old}
    loss = partial(EXAMPLE["clipped"], weight=0.5, aggregation="token-mean")
    found = run_loss(loss, Outputs([2, 1], logprobs=new), columns)
    assert found.loss == pytest.approx(-0.5 * (1 + 1.2 + 0.6) / 3)
    assert found.gradients["logprobs"] == pytest.approx([-0.5 / 3, 0, -0.5 * 0.6 / 3])
