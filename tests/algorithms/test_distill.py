"""Distillation: its divergences by hand and against the oracle, over any split and mask, and what it calls."""

from __future__ import annotations

from math import log as ln

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.algorithms.distill import DistillOptions, distill
from plait.dataflow import Top, trace
from plait.errors import FlowError
from tests.algorithms import oracle
from tests.algorithms.batches import Outputs, run_loss
from tests.algorithms.flows import graph_of, loss_of


@pytest.mark.parametrize(
    ("beta", "loss"),
    [
        (0.0, 1 / 2 * ln(4) + 1 / 4 * ln(2) + 1 / 4 * ln(1 / 3)),
        (1.0, 1 / 8 * ln(1 / 4) + 1 / 8 * ln(1 / 2) + 3 / 4 * ln(3)),
        (
            0.5,
            (1 / 2 * ln(8 / 5) + 1 / 4 * ln(4 / 3) + 1 / 4 * ln(1 / 2)) / 2
            + (1 / 8 * ln(2 / 5) + 1 / 8 * ln(2 / 3) + 3 / 4 * ln(3 / 2)) / 2,
        ),
    ],
)
def test_by_hand(beta, loss):
    """One token. The teacher gives two tokens 1/2 and 1/4, and all others 1/4; the policy 1/8, 1/8 and 3/4. The mixture
    of both is 5/16, 3/16 and 1/2."""
    teacher, policy = np.log([[1 / 2, 1 / 4, 1 / 4]]), np.log([[1 / 8, 1 / 8, 3 / 4]])
    columns = {"teacher_ids": np.array([[7.0, 9]]), "teacher_logprobs": teacher}
    outputs = Outputs([1], logprobs=np.array([-1.0]), at=policy)
    found = run_loss(loss_of(distill, DistillOptions(beta=beta, top_k=2)), outputs, columns)
    assert found.loss == pytest.approx(loss)
    assert found.metrics == pytest.approx(
        {"actor/divergence": loss, "actor/top_mass": 1 / 4, "ref/top_mass": 3 / 4, "actor/agreement": 1.0}
    )
    columns = {"teacher_ids": np.array([[7.0, 9]]), "teacher_logprobs": policy}
    likelier = Outputs([1], logprobs=np.array([-1.0]), at=np.log([[0.2, 0.3, 0.5]]))
    found = run_loss(loss_of(distill, DistillOptions(beta=beta, top_k=2)), likelier, columns)
    assert found.metrics["actor/agreement"] == 0, "the second is likelier for the policy"


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
    st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_the_loss_equals_the_oracle(lengths, beta, masked, seed):
    """However it is cut; the gradient too, by the log-probs as they come."""
    rng = np.random.default_rng(seed)
    tokens, outcomes = sum(lengths), int(rng.integers(2, 6))
    teacher, policy = (np.log(rng.dirichlet(np.ones(outcomes), tokens) + 1e-12) for _ in range(2))
    mask = rng.integers(0, 2, tokens).astype(float) if masked else np.ones(tokens)
    mask[0] = 1.0
    of_each = [oracle.divergence(p, q, beta) for p, q in zip(policy, teacher, strict=True)]
    columns = {"teacher_ids": np.zeros((tokens, outcomes - 1)), "teacher_logprobs": teacher}
    outputs = Outputs(lengths, logprobs=-np.ones(tokens), at=policy, mask=mask if masked else None)
    cut = int(rng.integers(0, len(lengths) + 1))
    found = run_loss(loss_of(distill, DistillOptions(beta=beta, top_k=outcomes - 1)), outputs, columns, cut)
    assert found.loss == pytest.approx(sum(d * m for (d, _), m in zip(of_each, mask, strict=True)) / mask.sum())
    slopes = np.array([np.array(slope) * m for (_, slope), m in zip(of_each, mask, strict=True)]) / mask.sum()
    assert np.array(found.gradients["at"]) == pytest.approx(slopes, rel=1e-8, abs=1e-12)
    assert found.loss >= -1e-9


def test_calls_of_distill():
    graph = graph_of(distill, DistillOptions(top_k=3))
    assert [node.call for node in graph.nodes] == ["actor.generate", "ref.top_logprobs", "actor.train"]
    assert graph.nodes[1].scoring == Top(3)
    assert set(graph.nodes[-1].inputs) == {"teacher_ids", "teacher_logprobs"}
    graph = graph_of(distill, DistillOptions(on_policy=False))
    assert [node.call for node in graph.nodes] == ["examples", "ref.top_logprobs", "actor.train"]
    assert set(graph.nodes[-1].inputs) == {"mask", "teacher_ids", "teacher_logprobs"}
    with pytest.raises(FlowError, match="uses the role `ref`, which nothing fills"):
        trace(distill, roles=["actor"], options=DistillOptions())
