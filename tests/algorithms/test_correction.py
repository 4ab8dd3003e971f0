"""What samples of older weights count: by hand, against a NumPy oracle, and on by default where there are any."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from plait.algorithms.correction import BOUNDS, Corrected, Correction
from plait.algorithms.grpo import GRPOOptions, grpo
from plait.algorithms.losses import Aggregation, KLEstimator, policy_loss
from plait.algorithms.ppo import PPOOptions, ppo
from plait.algorithms.remax import ReMaxOptions, remax
from plait.algorithms.sft import sft
from plait.dataflow import CallKind
from plait.recipes.algorithm import trace_algorithm
from tests.algorithms.batches import Outputs, run_loss

ON = [how for how in Correction if how is not Correction.OFF]
PLAIN: dict[str, Any] = {"aggregation": Aggregation.TOKEN_MEAN}


def oracle(log_w: np.ndarray, lengths: list[int], mask: np.ndarray, how: str, low: float | None, high: float):
    """(weight of each token, whether it is cut), response by response, token by token."""
    weights, cuts = [], []
    start = 0
    for length in lengths:
        part, kept = log_w[start : start + length], mask[start : start + length]
        start += length
        total = float(np.sum(part * kept))
        for t in range(length):
            if how in ("tis", "seq_tis"):
                w = math.exp(part[t] if how == "tis" else total)
                weights.append(min(w, high))
                cuts.append(w > high)
                continue
            if how == "icepop":
                w = math.exp(part[t])
            elif how in ("seq_mask", "seq_icepop"):
                w = math.exp(total)
            else:
                w = math.exp(total / max(1.0, float(np.sum(kept))))
            inside = (low or 0.0) <= w <= high
            weights.append((w if how in ("icepop", "seq_icepop") else 1.0) if inside else 0.0)
            cuts.append(not inside)
    return np.array(weights), np.array(cuts, dtype=float)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any),
    st.sampled_from(ON),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_the_corrected_loss_equals_the_oracle(
    lengths: list[int], how: Correction, used_once: bool, weigh_kl: bool, masked: bool, seed: int
) -> None:
    """Loss, gradient and what is logged, over any split of the samples into micro-batches: the plain loss of each token
    times its weight, and so its gradient; denominators are those of all trained tokens."""
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    logprobs = -3 + rng.normal(size=total)
    old = logprobs if used_once else logprobs + 0.3 * rng.normal(size=total)
    sampling = old + (0.05 if how is Correction.GEO_MASK else 0.8) * rng.normal(size=total)
    ref, advantages = logprobs + 0.4 * rng.normal(size=total), rng.normal(size=total)
    mask = (rng.uniform(size=total) < 0.8).astype(float) if masked else np.ones(total)
    low, high = BOUNDS[how]
    weights, cuts = oracle(old - sampling, lengths, mask, how.value, low, high)
    ratio = np.exp(logprobs - old)
    plain, clipped = ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages
    surrogate = -np.minimum(plain, clipped) * weights
    slope = np.where(clipped < plain, 0.0, -ratio * advantages) * weights
    d = logprobs - ref
    rho = ratio * weights if weigh_kl else np.ones(total)
    kl = 0.1 * d**2 / 2 * rho
    kl_slope = 0.1 * d * rho + (kl if weigh_kl else 0.0)
    count = max(1.0, mask.sum())
    loss = partial(
        policy_loss,
        **PLAIN,
        kl_coef=0.1,
        kl_estimator=KLEstimator.K2,
        weigh_kl=weigh_kl,
        correction=Corrected(how, low, high),
    )
    columns = {"advantages": advantages, "ref_logprobs": ref} | ({} if used_once else {"old_logprobs": old})
    outputs = Outputs(lengths, logprobs, mask=mask if masked else None, sampling_logprobs=sampling)
    for cut in range(len(lengths) + 1):
        found = run_loss(loss, outputs, columns, cut)
        assert found.loss == pytest.approx(float((mask * (surrogate + kl)).sum() / count), rel=1e-9, abs=1e-12)
        np.testing.assert_allclose(
            found.gradients["logprobs"], mask * (slope + kl_slope) / count, rtol=1e-9, atol=1e-12
        )
        if mask.sum():
            assert found.metrics["actor/correction_weight"] == pytest.approx((mask * weights).sum() / count)
            assert found.metrics["actor/correction_cut"] == pytest.approx((mask * cuts).sum() / count)


@pytest.mark.parametrize("how", ON)
def test_tokens_of_several_versions_are_weighed_each_by_its_own(how: Correction) -> None:
    """A response whose tokens three policies drew: each is weighed by the probability that its own version gave it."""
    rng = np.random.default_rng(7)
    lengths, versions = [6, 3], np.array([0, 0, 1, 1, 2, 2, 2, 2, 2])
    drift = 0.01 if how is Correction.GEO_MASK else 0.5
    logprobs_of = [-3 + rng.normal(size=9)]
    for _ in range(2):
        logprobs_of.append(logprobs_of[-1] + drift * rng.normal(size=9))
    sampling = np.stack(logprobs_of)[versions, np.arange(9)]
    old = logprobs_of[2]
    weights, _ = oracle(old - sampling, lengths, np.ones(9), how.value, *BOUNDS[how])
    outputs = Outputs(lengths, old, sampling_logprobs=sampling)
    loss = partial(policy_loss, **PLAIN, correction=Corrected(how, *BOUNDS[how]))
    for cut in range(3):
        found = run_loss(loss, outputs, {"advantages": np.ones(9)}, cut)
        np.testing.assert_allclose(found.gradients["logprobs"], -weights / 9, rtol=1e-9)
    if how in (Correction.TIS, Correction.ICEPOP):
        assert weights[versions == 2] == pytest.approx(1), "tokens of the newest version count once"


def test_weights_by_hand() -> None:
    """Two responses: w = 4 and 1/4, whose product and geometric mean are 1; and w = 3."""
    outputs = Outputs([2, 1], np.zeros(3), sampling_logprobs=-np.log([4.0, 0.25, 3.0]))
    expected = {
        Correction.TIS: [2, 0.25, 2],
        Correction.ICEPOP: [4, 0, 3],
        Correction.SEQ_MASK: [1, 1, 0],
        Correction.GEO_MASK: [1, 1, 0],
    }
    for how, weights in expected.items():
        loss = partial(policy_loss, **PLAIN, correction=Corrected(how, *BOUNDS[how]))
        found = run_loss(loss, outputs, {"advantages": np.ones(3)})
        assert found.gradients["logprobs"] == pytest.approx([-w / 3 for w in weights])


def test_given_completions_count_once() -> None:
    outputs = Outputs([2], np.array([-1.0, -2.0]), sampling_logprobs=np.array([np.nan, np.nan]))
    for how in ON:
        loss = partial(policy_loss, **PLAIN, correction=Corrected(how, *BOUNDS[how]))
        found = run_loss(loss, outputs, {"advantages": np.ones(2)})
        assert found.gradients["logprobs"] == pytest.approx([-0.5, -0.5])


ROLES = ("actor", "ref", "critic", "reward", "cost", "cost_critic")


def test_what_is_left_out_by_hand() -> None:
    """Three responses of two tokens: the first two have become less likely by 0.3 and by 0.1 nats per token, the third
    by more, but it was good. With 0.2 the first is left out; denominators count all six tokens."""
    behind = np.array([0.6, 0.0, 0.0, 0.2, 5.0, 5.0])
    outputs = Outputs([2, 2, 2], np.full(6, -3.0), sampling_logprobs=-3.0 + behind)
    advantages = np.array([-1.0, -1.0, -2.0, -2.0, 1.0, 1.0])
    for threshold, kept in ((0.2, [0, 0, 1, 1, 1, 1]), (0.05, [0, 0, 0, 0, 1, 1]), (0.4, [1] * 6)):
        loss = partial(policy_loss, **PLAIN, off_policy_mask_threshold=threshold)
        found = run_loss(loss, outputs, {"advantages": advantages})
        np.testing.assert_allclose(found.gradients["logprobs"], -advantages * kept / 6, rtol=1e-12)
        assert found.metrics["actor/off_policy_masked"] == pytest.approx(1 - sum(kept) / 6)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_what_is_left_out_equals_the_oracle(lengths: list[int], of_tokens: bool, masked: bool, seed: int) -> None:
    """Of advantages of responses and of tokens, over any split into micro-batches: the surrogate is 0 there, and the KL
    stays."""
    rng = np.random.default_rng(seed)
    total, owners = sum(lengths), np.repeat(np.arange(len(lengths)), lengths)
    logprobs = -3 + rng.normal(size=total)
    old, sampling = logprobs + 0.3 * rng.normal(size=total), logprobs + 0.5 * rng.normal(size=total)
    advantages = rng.normal(size=total) if of_tokens else rng.normal(size=len(lengths))[owners]
    mask = (rng.uniform(size=total) < 0.8).astype(float) if masked else np.ones(total)
    ref = logprobs + 0.4 * rng.normal(size=total)
    kept = np.ones(total)
    for owner in range(len(lengths)):
        its = owners == owner
        behind = float(((sampling - logprobs) * mask)[its].sum() / max(1.0, mask[its].sum()))
        kept[its & (advantages < 0)] = float(behind <= 0.1)
    ratio = np.exp(logprobs - old)
    plain, clipped = ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages
    values = -np.minimum(plain, clipped) * kept + 0.1 * (logprobs - ref) ** 2 / 2
    slopes = np.where(clipped < plain, 0.0, -plain) * kept + 0.1 * (logprobs - ref)
    count = max(1.0, mask.sum())
    loss = partial(policy_loss, **PLAIN, kl_coef=0.1, kl_estimator=KLEstimator.K2, off_policy_mask_threshold=0.1)
    columns = {"advantages": advantages, "old_logprobs": old, "ref_logprobs": ref}
    outputs = Outputs(lengths, logprobs, mask=mask if masked else None, sampling_logprobs=sampling)
    for cut in range(len(lengths) + 1):
        found = run_loss(loss, outputs, columns, cut)
        assert found.loss == pytest.approx(float((mask * values).sum() / count), rel=1e-9, abs=1e-12)
        np.testing.assert_allclose(found.gradients["logprobs"], mask * slopes / count, rtol=1e-9, atol=1e-12)


def test_completions_that_were_given_stay() -> None:
    outputs = Outputs([2], np.full(2, -30.0), sampling_logprobs=np.full(2, np.nan))
    loss = partial(policy_loss, **PLAIN, off_policy_mask_threshold=0.1)
    assert run_loss(loss, outputs, {"advantages": -np.ones(2)}).gradients["logprobs"] == pytest.approx([0.5, 0.5])


def keywords_of(flow: Any, options: dict[str, Any], most: int) -> dict[str, Any]:
    traced = trace_algorithm(flow, options, ROLES, max_staleness=most)
    losses = [node.fn for node in traced.of_kind(CallKind.TRAIN) if node.role == "actor"]
    return losses[0].keywords  # type: ignore[union-attr]


def correction_of(flow: Any, options: dict[str, Any], most: int) -> Corrected | None:
    return keywords_of(flow, options, most).get("correction")


@pytest.mark.parametrize("flow", [grpo, ppo, remax])
def test_every_policy_may_leave_responses_out(flow: Any) -> None:
    assert keywords_of(flow, {}, 1)["off_policy_mask_threshold"] is None
    assert keywords_of(flow, {"off_policy_mask_threshold": 0.02}, 0)["off_policy_mask_threshold"] == 0.02


@pytest.mark.parametrize("flow", [grpo, ppo, remax])
def test_it_is_on_where_samples_are_older(flow: Any) -> None:
    assert correction_of(flow, {}, 0) is None
    assert correction_of(flow, {}, 1) == Corrected(Correction.TIS, None, 2.0)
    assert correction_of(flow, {"correction": "off"}, 1) is None
    bounds = {"correction": "icepop", "correction_low": 0.2, "correction_high": 3.0}
    assert correction_of(flow, bounds, 0) == Corrected(Correction.ICEPOP, 0.2, 3.0)
    assert correction_of(flow, {"old_logprobs": "engine"}, 1) is None, "the ratio is to the engine's"


def test_a_flow_without_a_policy_loss_has_none() -> None:
    assert correction_of(sft, {}, 1) is None


@pytest.mark.parametrize("options", [GRPOOptions, PPOOptions, ReMaxOptions])
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"correction": "tis", "correction_low": 0.5}, "only bounds weights from above"),
        ({"correction": "seq_tis", "correction_low": 0.5}, "correction: seq_tis only bounds weights from above"),
        ({"correction": "icepop", "correction_low": 6.0}, "which are none"),
        ({"correction": "tis", "old_logprobs": "engine"}, "takes the engine's for both"),
        ({"correction": "clip"}, "correction"),
        ({"off_policy_mask_threshold": 0}, "greater than 0"),
    ],
)
def test_what_would_correct_nothing_is_refused(options: Any, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        options(**keys)
