"""KTO: its losses by hand and against the oracle, over any split and mask, its reference point, and what it calls."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.algorithms.kto import KTOLoss, KTOOptions, kto, reference_point, unbalanced
from plait.dataflow import trace
from plait.errors import FlowError
from tests.algorithms import oracle
from tests.algorithms.batches import Outputs, run_loss
from tests.algorithms.flows import graph_of, loss_of

LN2 = math.log(2)


def spread(values: list[float], lengths: list[int]) -> np.ndarray:
    """A number for each sample, at its tokens."""
    return np.repeat(np.array(values), lengths)


def test_kto_by_hand():
    # β = 1, z₀ = ln 2. Log-ratios: the desirable one ln 4, the undesirable one 0: both are ln 2 away from z₀ on their
    # own side, σ = 2/3. Weights 1 and 2: (1/3 + 2/3) / 2.
    outputs = Outputs([2, 1], logprobs=np.array([-1.0, -1.0, -3.0]))
    columns = {
        "label": spread([1, 0], [2, 1]),
        "desirable": np.array(0.5),
        "ref_logprobs": np.array([-1.0 - 2 * LN2, -1.0, -3.0]),
        "kl": np.array(LN2),
    }
    found = run_loss(loss_of(kto, KTOOptions(beta=1.0, undesirable_weight=2.0)), outputs, columns)
    assert found.loss == pytest.approx(1 / 2)
    assert found.gradients["logprobs"] == pytest.approx([-1 / 9, -1 / 9, 2 / 9])
    assert found.metrics == pytest.approx(
        {
            "rewards/chosen": 2 * LN2,
            "rewards/rejected": 0.0,
            "rewards/margins": 2 * LN2,
            "logps/chosen": -2.0,
            "logps/rejected": -3.0,
        }
    )
    del columns["kl"]
    found = run_loss(loss_of(kto, KTOOptions(beta=1.0, loss_type="apo_zero_unpaired")), outputs, columns)
    assert found.loss == pytest.approx((1 / 5 + 1 / 2) / 2), "without a reference point"
    assert found.gradients["logprobs"] == pytest.approx([-2 / 25, -2 / 25, 1 / 8])


@given(
    st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=8),
    st.sampled_from([0.1, 1.0]),
    st.sampled_from([0.0, 0.7]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_kto_equals_the_oracle(responses, beta, z0, masked, seed):
    """However it is cut; and metrics are means over those that there are."""
    rng = np.random.default_rng(seed)
    lengths, labels = [length for length, _ in responses], [label for _, label in responses]
    count, share = len(labels), sum(labels) / len(labels)
    logprobs, ref = (-2 + rng.normal(size=sum(lengths)) for _ in range(2))
    mask = rng.integers(0, 2, sum(lengths)).astype(float) if masked else np.ones(sum(lengths))
    mask[np.cumsum(lengths) - 1] = 1.0
    masks = np.split(mask, np.cumsum(lengths)[:-1])
    ratios = [(x * m).sum() for x, m in zip(np.split(logprobs - ref, np.cumsum(lengths)[:-1]), masks, strict=True)]
    weights = (1.5, 0.5)
    of_each = [oracle.kto(r, label, z0, beta, weights) for r, label in zip(ratios, labels, strict=True)]
    options = KTOOptions(beta=beta, desirable_weight=weights[0], undesirable_weight=weights[1])
    columns = {"label": spread(labels, lengths), "desirable": np.array(share), "ref_logprobs": ref, "kl": np.array(z0)}
    outputs = Outputs(lengths, logprobs=logprobs, mask=mask if masked else None)
    found = run_loss(loss_of(kto, options), outputs, columns, cut=int(rng.integers(0, count + 1)))
    assert found.loss == pytest.approx(sum(loss for loss, _ in of_each) / count, rel=1e-10)
    slopes = np.concatenate([slope / count * m for (_, slope), m in zip(of_each, masks, strict=True)])
    assert found.gradients["logprobs"] == pytest.approx(slopes, rel=1e-9, abs=1e-12)
    of_label = {name: [r for r, label in zip(ratios, labels, strict=True) if label is which] for name, which in SIDES}
    means = {name: beta * np.mean(of) for name, of in of_label.items() if of}
    rewards = {name: value for name, value in found.metrics.items() if name.startswith("rewards/")}
    if len(means) == 2:
        means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
    assert rewards == pytest.approx(means, rel=1e-9, abs=1e-12)


SIDES = (("rewards/chosen", True), ("rewards/rejected", False))


def test_the_reference_point_by_hand():
    """The mean over responses of summed log-ratios, of trained tokens alone; at least 0."""
    logprobs, ref = [np.array([-1.0, -2.0]), np.array([-1.0])], [np.array([-3.0, -9.0]), np.array([-2.0])]
    trained = [np.array([1.0, 0.0]), np.array([1.0])]
    assert reference_point(logprobs, ref, trained) == (2 + 1) / 2
    assert reference_point(ref, logprobs, trained) == 0


def test_calls_of_kto():
    graph = graph_of(kto, KTOOptions())
    calls = ["labelled", "ref.logprobs", "mismatched", "actor.logprobs", "ref.logprobs#2", "objective/kl", "desirable"]
    assert [node.call for node in graph.nodes] == [*calls, "actor.train"]
    assert set(graph.nodes[-1].inputs) == {"mask", "label", "desirable", "ref_logprobs", "kl"}
    assert graph.main_rows.call == "labelled"
    graph = graph_of(kto, KTOOptions(loss_type=KTOLoss.APO_ZERO_UNPAIRED))
    assert [node.call for node in graph.nodes] == ["labelled", "ref.logprobs", "desirable", "actor.train"]
    with pytest.raises(FlowError, match="uses the role `ref`, which nothing fills"):
        trace(kto, roles=["actor"], options=KTOOptions())


@pytest.mark.parametrize(
    ("labels", "options", "said"),
    [
        ((10, 10), KTOOptions(desirable_weight=3.0), None),
        ((10, 9), KTOOptions(), None),
        ((30, 10), KTOOptions(undesirable_weight=2.5), None),
        ((30, 10), KTOOptions(), "from 0.33 to 0.44, or `options.undesirable_weight` from 2.2 to 3"),
        ((10, 30), KTOOptions(), "which weigh 0.33 : 1 in all"),
        ((5, 0), KTOOptions(), "all labels are true"),
        ((0, 5), KTOOptions(), "all labels are false"),
    ],
)
def test_labels_that_the_weights_do_not_balance_are_said(labels, options, said):
    """Where TRL says it, and with its ranges (1.33 for 4/3)."""
    found = unbalanced(*labels, options)
    assert (found is None) == (said is None)
    assert said is None or said in str(found)
