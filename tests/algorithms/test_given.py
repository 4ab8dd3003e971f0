"""SFT, reward model and DPO: losses by hand and against the oracle, over any split and mask; what their flows call."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from plait.algorithms.dpo import DPOLoss, DPOOptions, dpo
from plait.algorithms.reward_model import RewardModelOptions, reward_model
from plait.algorithms.safe_rlhf import SafeRLHFOptions, safe_rlhf
from plait.algorithms.sft import SFTOptions, cross_entropy, sft
from plait.dataflow import CallKind, trace
from plait.errors import FlowError, RunError
from tests.algorithms import oracle
from tests.algorithms.batches import Outputs, run_loss
from tests.algorithms.flows import graph_of, loss_of

LN2 = math.log(2)
sizes = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4)
"""Response lengths of pairs."""


def pair_ids(count: int) -> list[tuple[int, int]]:
    return [(uid, index) for uid in range(count) for index in (0, 1)]


def ragged(values: np.ndarray, lengths: list[int]) -> list[np.ndarray]:
    return np.split(values, np.cumsum(lengths)[:-1])


# SFT


def test_cross_entropy_by_hand():
    # Probabilities 1/2, 1/4 | 1/8: 1 + 2 + 3 times ln 2 over three tokens; the second token is somebody else's.
    likeliest, mask = np.array([1.0, 1, 0]), np.array([1.0, 0, 1])
    outputs = Outputs([2, 1], logprobs=-LN2 * np.array([1.0, 2, 3]), likeliest=likeliest, mask=mask)
    found = run_loss(loss_of(sft, SFTOptions()), outputs)
    assert found.loss == pytest.approx(2 * LN2)
    assert found.gradients["logprobs"] == [-0.5, 0, -0.5]
    assert found.metrics == pytest.approx({"actor/nll": 2 * LN2, "actor/mean_token_accuracy": 1 / 2})


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any), st.integers(0, 2**31))
def test_cross_entropy_is_over_trained_tokens_of_the_whole_mini_batch(lengths, seed):
    rng = np.random.default_rng(seed)
    logprobs, mask = -rng.exponential(size=sum(lengths)), rng.integers(0, 2, sum(lengths)).astype(float)
    mask[0] = 1
    found = run_loss(
        loss_of(sft, SFTOptions()),
        Outputs(lengths, logprobs=logprobs, mask=mask),
        cut=int(rng.integers(0, len(lengths) + 1)),
    )
    assert found.loss == pytest.approx(-(logprobs * mask).sum() / mask.sum())
    assert found.gradients["logprobs"] == pytest.approx((-mask / mask.sum()).tolist())


def test_nothing_to_learn_is_zero_not_nan():
    outputs = Outputs([2], logprobs=np.array([-1.0, -2.0]), mask=np.zeros(2))
    found = run_loss(loss_of(sft, SFTOptions()), outputs)
    assert (found.loss, found.gradients["logprobs"]) == (0.0, [0.0, 0.0])


def test_sft_by_sequences():
    outputs = Outputs([1, 3], logprobs=-np.array([4.0, 1, 2, 6]))
    found = run_loss(loss_of(sft, SFTOptions(aggregation="seq-mean-token-mean")), outputs)
    assert found.loss == pytest.approx((4 + 3) / 2)


def test_calls_of_sft():
    graph = graph_of(sft, SFTOptions(mini_batches=2, epochs=3))
    assert [node.call for node in graph.nodes] == ["examples", "actor.train"]
    train = graph.nodes[-1]
    assert train.mask.name == "trained"
    assert (train.training.mini_batches, train.training.epochs) == (2, 3)
    assert graph.roles == ("actor",)


def test_the_pretraining_loss_of_safe_rlhf_is_the_same_with_a_weight():
    outputs = Outputs([2, 1], logprobs=np.array([-1.0, -2, -3]), mask=np.array([1.0, 0, 1]))
    graph = graph_of(safe_rlhf, SafeRLHFOptions(ptx_coef=4.0))
    trained = [node for node in graph.calls("actor") if node.kind is CallKind.TRAIN]
    assert len(trained) == 2
    assert trained[1].rows == graph.of_kind(CallKind.READ)[0].id
    found = run_loss(trained[1].fn, outputs)
    plain = run_loss(cross_entropy, outputs)
    assert found.loss == pytest.approx(4 * plain.loss)
    assert found.metrics == {"actor/ptx_loss": plain.loss}, "logged without its weight"


# Reward model


def test_bradley_terry_by_hand():
    # Scores ln 2 and 0: σ(ln 2) = 2/3.  A tie: 1/2, and no accuracy.
    outputs = Outputs([1, 1, 1, 1], values=np.zeros(4), scores=np.array([LN2, 0, 5, 5]), samples=pair_ids(2))
    found = run_loss(loss_of(reward_model, RewardModelOptions(), "reward"), outputs)
    assert found.loss == pytest.approx((math.log(1.5) + LN2) / 2)
    assert found.gradients["scores"] == pytest.approx([-1 / 6, 1 / 6, -1 / 4, 1 / 4])
    assert found.metrics == pytest.approx(
        {"reward/accuracy": 0.5, "reward/margin": LN2 / 2, "reward/mean_reward": (LN2 / 2 + 5) / 2}
    )


@given(
    st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30)), min_size=1, max_size=5),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([0.0, 0.01]),
    st.integers(0, 5),
    st.booleans(),
)
def test_bradley_terry_equals_the_oracle(pairs, margin, centre, cut, swapped):
    """Over any split between pairs, whichever of the two comes first."""
    expected = [oracle.bradley_terry(c, r, margin, centre) for c, r in pairs]
    order = (1, 0) if swapped else (0, 1)
    outputs = Outputs(
        [1, 2] * len(pairs),
        values=np.zeros(3 * len(pairs)),
        scores=np.array([pair[i] for pair in pairs for i in order]),
        samples=[(uid, i) for uid in range(len(pairs)) for i in order],
    )
    options = RewardModelOptions(margin=margin, center_rewards_coefficient=centre)
    found = run_loss(loss_of(reward_model, options, "reward"), outputs, cut=2 * min(cut, len(pairs)))
    assert found.loss == pytest.approx(sum(loss for loss, _, _ in expected) / len(pairs), rel=1e-9, abs=1e-12)
    slopes = [(chosen, rejected)[i] / len(pairs) for _, chosen, rejected in expected for i in order]
    assert found.gradients["scores"] == pytest.approx(slopes, rel=1e-9, abs=1e-12)
    assert found.metrics["reward/accuracy"] == pytest.approx(
        np.mean([c - r > 1e-6 * (abs(c) + abs(r)) for c, r in pairs])
    )


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9), st.floats(0, 3)), min_size=1, max_size=5))
def test_a_pairs_own_margin_adds_to_that_of_the_options(pairs):
    expected = [oracle.bradley_terry(chosen, rejected, 0.5 + margin, 0.0) for chosen, rejected, margin in pairs]
    outputs = Outputs(
        [1, 2] * len(pairs),
        values=np.zeros(3 * len(pairs)),
        scores=np.array([score for chosen, rejected, _ in pairs for score in (chosen, rejected)]),
        samples=pair_ids(len(pairs)),
    )
    margins = {"margin": np.repeat([margin for *_, margin in pairs], 3)}
    found = run_loss(loss_of(reward_model, RewardModelOptions(margin=0.5), "reward"), outputs, margins)
    assert found.loss == pytest.approx(sum(loss for loss, _, _ in expected) / len(pairs))
    assert found.gradients["scores"] == pytest.approx([s / len(pairs) for _, c, r in expected for s in (c, r)])


def test_a_far_margin_does_not_overflow():
    outputs = Outputs([1, 1], values=np.zeros(2), scores=np.array([-400.0, 400.0]), samples=pair_ids(1))
    found = run_loss(loss_of(reward_model, RewardModelOptions(), "reward"), outputs)
    assert (found.loss, found.gradients["scores"]) == (800.0, [-1.0, 1.0])


def test_calls_of_the_reward_model():
    graph = graph_of(reward_model, RewardModelOptions())
    assert [node.call for node in graph.nodes] == ["pairs", "reward.train"]
    assert graph.nodes[-1].training.whole_groups, "a pair is never split"
    assert graph.call_kinds("reward") == {"train"}


# DPO


def test_dpo_by_hand():
    # β = 1. Log-ratios: chosen ln 2 − 0 over two tokens, rejected −ln 2: h = ln 4, σ = 4/5.
    outputs = Outputs([2, 1], logprobs=np.array([-1.0, -1.0, -3.0]), samples=pair_ids(1))
    columns = {"ref_logprobs": np.array([-1.0 - LN2, -1.0, -3.0 + LN2])}
    found = run_loss(loss_of(dpo, DPOOptions(beta=1.0)), outputs, columns)
    assert found.loss == pytest.approx(math.log(5 / 4))
    assert found.gradients["logprobs"] == pytest.approx([-0.2, -0.2, 0.2])
    assert found.metrics == pytest.approx(
        {
            "rewards/chosen": LN2,
            "rewards/rejected": -LN2,
            "rewards/margins": 2 * LN2,
            "rewards/accuracies": 1.0,
            "logps/chosen": -2.0,
            "logps/rejected": -3.0,
        }
    )


def test_a_margin_of_rounding_alone_is_a_tie():
    """Policy and reference are equal but for the order of a sum in float64: no pair is preferred. Then one, by 1e-3."""
    logprobs = np.array([-30.0, -40.0, -30.0, -40.0])
    for move, accuracy in ((1e-14, 0.0), (1e-3, 0.5)):
        outputs = Outputs([1, 1, 1, 1], logprobs=logprobs + np.array([move, 0, 0, 0]), samples=pair_ids(2))
        found = run_loss(loss_of(dpo, DPOOptions(beta=0.1)), outputs, {"ref_logprobs": logprobs})
        assert found.metrics["rewards/margins"] > 0
        assert found.metrics["rewards/accuracies"] == accuracy
    scores = np.array([1.0 + 1e-14, 1.0, 1.0 + 1e-3, 1.0])
    outputs = Outputs([1, 1, 1, 1], values=np.zeros(4), scores=scores, samples=pair_ids(2))
    assert run_loss(loss_of(reward_model, RewardModelOptions(), "reward"), outputs).metrics["reward/accuracy"] == 0.5


@given(
    sizes,
    st.sampled_from(list(DPOLoss)),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.1, 1.0]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_dpo_equals_the_oracle(lengths, how, smoothing, beta, reference_free, masked, seed):
    rng = np.random.default_rng(seed)
    smoothing = smoothing if how in (DPOLoss.SIGMOID, DPOLoss.ROBUST) else 0.0
    flat = [length for pair in lengths for length in pair]
    logprobs, ref = (-2 + rng.normal(size=sum(flat)) for _ in range(2))
    mask = rng.integers(0, 2, sum(flat)).astype(float) if masked else np.ones(sum(flat))
    mask[np.cumsum(flat) - 1] = 1.0
    log_ratios = ragged(logprobs - ref * (not reference_free), flat)
    ratios = [(x * m).sum() for x, m in zip(log_ratios, ragged(mask, flat), strict=True)]
    counts = [int(m.sum()) for m in ragged(mask, flat)]
    expected, slopes = 0.0, []
    for pair in range(len(lengths)):
        c, r = 2 * pair, 2 * pair + 1
        loss, *by = oracle.dpo(ratios[c], ratios[r], (counts[c], counts[r]), how.value, beta, smoothing)
        expected += loss / len(lengths)
        slopes += [(by[i] / len(lengths) * ragged(mask, flat)[2 * pair + i]).tolist() for i in (0, 1)]
    options = DPOOptions(beta=beta, loss_type=how, label_smoothing=smoothing, reference_free=reference_free)
    outputs = Outputs(flat, logprobs=logprobs, mask=mask if masked else None, samples=pair_ids(len(lengths)))
    columns = {} if reference_free else {"ref_logprobs": ref}
    found = run_loss(loss_of(dpo, options), outputs, columns, cut=2 * int(rng.integers(0, len(lengths) + 1)))
    assert found.loss == pytest.approx(expected, rel=1e-10)
    assert found.gradients["logprobs"] == pytest.approx([x for part in slopes for x in part], rel=1e-9, abs=1e-12)


def test_dpo_lifts_the_chosen_and_lowers_the_rejected():
    for how in DPOLoss:
        outputs = Outputs([1, 1], logprobs=np.array([-1.0, -1.0]), samples=pair_ids(1))
        found = run_loss(loss_of(dpo, DPOOptions(loss_type=how)), outputs, {"ref_logprobs": np.array([-1.0, -1.0])})
        chosen, rejected = found.gradients["logprobs"]
        assert chosen < 0 < rejected, how


def test_calls_of_dpo():
    graph = graph_of(dpo, DPOOptions())
    assert [node.call for node in graph.nodes] == ["pairs", "ref.logprobs", "actor.train"]
    assert graph.nodes[-1].training.whole_groups
    assert set(graph.nodes[-1].inputs) == {"mask", "ref_logprobs"}
    graph = graph_of(dpo, DPOOptions(reference_free=True))
    assert [node.call for node in graph.nodes] == ["pairs", "actor.train"]
    with pytest.raises(FlowError, match=r"needs the role `ref`.*reference_free"):
        trace(dpo, roles=["actor"], options=DPOOptions())


def test_options_without_effect_are_refused():
    with pytest.raises(ValidationError, match=r"loss_type: ipo; set `options\.label_smoothing` to 0"):
        DPOOptions(loss_type="ipo", label_smoothing=0.1)
    with pytest.raises(ValidationError, match=r"less than 0\.5"):
        DPOOptions(label_smoothing=0.5)


def test_half_a_pair_is_an_error():
    outputs = Outputs([1, 1], logprobs=np.zeros(2), samples=[(0, 0), (1, 0)])
    with pytest.raises(RunError, match=r"expected samples 0 \(chosen\) and 1 \(rejected\) of every prompt"):
        run_loss(loss_of(dpo, DPOOptions(reference_free=True)), outputs)


@pytest.mark.process
def test_flows_import_without_torch():
    modules = ("sft", "reward_model", "dpo", "ppo", "safe_rlhf")
    code = f"import sys, {', '.join(f'plait.algorithms.{name}' for name in modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
