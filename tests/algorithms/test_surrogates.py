"""The losses that take the place of the clipped surrogate: by hand, by a second implementation in float64 scalars,
response by response, and beside a KL, a correction and masks. TRL's: `tests/training/test_trl_critic_free.py`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from plait.algorithms.correction import Corrected, Correction
from plait.algorithms.grpo import GRPOOptions, grpo
from plait.algorithms.losses import KLEstimator, policy_loss
from plait.algorithms.options import PolicyOptions
from plait.algorithms.ppo import PPOOptions
from plait.algorithms.reinforce_pp import ReinforcePPOptions
from plait.algorithms.remax import ReMaxOptions
from plait.algorithms.rloo import RLOOOptions, rloo
from plait.algorithms.safe_rlhf import SafeRLHFOptions
from plait.algorithms.surrogates import OF_RESPONSES, LossType, Ratio, Surrogate
from tests.algorithms.batches import Outputs, run_loss
from tests.algorithms.flows import loss_of

LN2 = math.log(2)
LENGTHS = (3, 1, 4)
ADVANTAGES = (1.5, -0.5, -2.0)
OTHERS = [how for how in LossType if how is not LossType.CLIP]


def found_of(surrogate: Surrogate, logprobs: Any, advantages: Any, lengths: Any = (1, 1, 1, 1)) -> Any:
    """Loss, gradients and metrics of a policy whose old log-probs are 0."""
    columns = {"advantages": np.array(advantages), "old_logprobs": np.zeros(len(logprobs))}
    return run_loss(partial(policy_loss, surrogate=surrogate), Outputs(lengths, logprobs=np.array(logprobs)), columns)


def test_cispo_by_hand() -> None:
    # ρ = 2, 2, 1/2, 1/2 with A = 1, −1, 1, −1; weights 1.5, 1.5, 1/2, 1/2, which multiply A log π, log π = ± ln 2.
    found = found_of(Surrogate(LossType.CISPO, clip_high=0.5), [LN2, LN2, -LN2, -LN2], [1.0, -1, 1, -1])
    assert found.loss == pytest.approx((-1.5 + 1.5 + 0.5 - 0.5) * LN2 / 4)
    assert found.gradients["logprobs"] == pytest.approx([-1.5 / 4, 1.5 / 4, -0.5 / 4, 0.5 / 4]), "clipped ones learn"
    assert found.metrics["actor/pg_clipfrac"] == 0.5


def test_sapo_by_hand() -> None:
    # ρ = 2, 1: gates 4/τ σ(τ (ρ − 1)), of A = 1 with τ = 1, of A = −1 with τ = 2; d/dl = 4 σ (1 − σ) ρ.
    surrogate = Surrogate(LossType.SAPO, temperature_pos=1.0, temperature_neg=2.0)
    found = found_of(surrogate, [LN2, LN2, 0.0, 0.0], [1.0, -1, 1, -1])
    up, down = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2))
    assert found.loss == pytest.approx((-4 * up + 2 * down - 2 + 1) / 4)
    slopes = [-8 * up * (1 - up), 8 * down * (1 - down), -1, 1]
    assert found.gradients["logprobs"] == pytest.approx([slope / 4 for slope in slopes])
    assert "actor/pg_clipfrac" not in found.metrics, "nothing is clipped"


def test_gmpo_by_hand() -> None:
    # A = 1, two tokens with log ρ = ln 2, bounded by 0.4, and −ln 2, which is not: exp of their mean.
    surrogate = Surrogate(LossType.GMPO, clip_low=0.4, clip_high=0.4)
    found = found_of(surrogate, [LN2, -LN2, LN2, -LN2], [1.0, 1, -1, -1], (2, 2))
    up, down = math.exp((0.4 - LN2) / 2), math.exp((LN2 - 0.4) / 2)
    assert found.loss == pytest.approx((-2 * up + 2 * down) / 4)
    assert found.gradients["logprobs"] == pytest.approx([0, -up / 4, down / 4, 0])
    assert found.metrics["actor/pg_clipfrac"] == 0.5


def test_vespo_by_hand() -> None:
    # w = 2 · 2 = 4 of the response with A = 1: φ = 4² e^(3 − 12); w = 1/4 of the other: φ = 4^−3 e^(2 − 1/2).
    found = found_of(Surrogate(LossType.VESPO), [LN2, LN2, -LN2, -LN2], [1.0, 1, -1, -1], (2, 2))
    up, down = 16 * math.exp(-9), math.exp(1.5) / 64
    assert found.loss == pytest.approx((-2 * up * LN2 - 2 * down * LN2) / 4)
    assert found.gradients["logprobs"] == pytest.approx([-up / 4, -up / 4, down / 4, down / 4])
    assert found.metrics["actor/vespo_phi"] == pytest.approx((up + down) / 2)
    assert "actor/pg_clipfrac" not in found.metrics


@pytest.mark.parametrize("loss_type", OTHERS)
def test_on_the_first_use_of_a_batch_all_are_reinforce(loss_type: LossType) -> None:
    logprobs, advantages = np.array([-1.0, -2, -0.5, -3]), np.array([1.5, 1.5, -1, -1])
    outputs = Outputs((2, 2), logprobs=logprobs)
    found = run_loss(partial(policy_loss, surrogate=Surrogate(loss_type)), outputs, {"advantages": advantages})
    assert found.gradients["logprobs"] == pytest.approx(list(-advantages / 4))
    assert found.metrics.get("actor/pg_clipfrac", 0) == 0
    assert found.metrics.get("actor/vespo_phi", 1) == pytest.approx(1)


def cispo(ratios: list[list[float]], logprobs: list[list[float]]) -> list[list[float]]:
    parts = zip(ADVANTAGES, ratios, logprobs, strict=True)
    return [[-a * min(r, 1.2) * lp for r, lp in zip(of, lps, strict=True)] for a, of, lps in parts]


def sapo(ratios: list[list[float]], _: Any) -> list[list[float]]:
    taus = [1.0 if a > 0 else 1.05 for a in ADVANTAGES]
    gates = [[4 / tau / (1 + math.exp(-tau * (r - 1))) for r in of] for tau, of in zip(taus, ratios, strict=True)]
    return [[-a * gate for gate in of] for a, of in zip(ADVANTAGES, gates, strict=True)]


def gmpo(ratios: list[list[float]], _: Any) -> list[list[float]]:
    losses = []
    for a, of in zip(ADVANTAGES, ratios, strict=True):
        bounded = [min(r, math.exp(0.2)) if a > 0 else max(r, math.exp(-0.2)) for r in of]
        losses.append([-a * math.prod(bounded) ** (1 / len(of))] * len(of))
    return losses


def vespo(ratios: list[list[float]], logprobs: list[list[float]]) -> list[list[float]]:
    losses = []
    for a, of, lps in zip(ADVANTAGES, ratios, logprobs, strict=True):
        k, rate = (2, 3) if a >= 0 else (3, 2)
        w = min(max(math.prod(of), 1e-8), math.exp(20))
        losses.append([-a * math.exp(rate) * w**k * math.exp(-rate * w) * lp for lp in lps])
    return losses


def by_response(values: Any) -> list[list[float]]:
    return [list(map(float, part)) for part in np.split(values, np.cumsum(LENGTHS)[:-1])]


@pytest.mark.parametrize("expected", [cispo, sapo, gmpo, vespo])
@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_losses_equal_those_of_scalars(expected: Any, cut: int, masked: bool) -> None:
    """With a mask the loss is that of the other tokens alone, whatever stands where it is 0."""
    rng = np.random.default_rng(3)
    old, new = -rng.uniform(0.5, 3, 8), -rng.uniform(0.5, 3, 8)
    new[0] = old[0] + 2  # beyond every bound
    options = GRPOOptions(loss_type=expected.__name__, epochs=2)
    columns = {"advantages": np.repeat(ADVANTAGES, LENGTHS), "old_logprobs": old}
    outputs, real = Outputs(LENGTHS, logprobs=new), np.arange(8)
    if masked:
        lengths, real = [n + 1 for n in LENGTHS], np.array([1, 2, 3, 5, 7, 8, 9, 10])
        mask = np.zeros(11)
        mask[real] = 1
        columns = {name: np.full(11, 7.0) for name in columns}
        for name, values in (("advantages", np.repeat(ADVANTAGES, LENGTHS)), ("old_logprobs", old)):
            columns[name][real] = values
        poisoned = np.full(11, np.inf)
        poisoned[real] = new
        outputs = Outputs(lengths, logprobs=poisoned, mask=mask)
    result = run_loss(loss_of(grpo, options), outputs, columns, cut)

    def loss_at(logprobs: Any) -> float:
        held = new if expected in (cispo, vespo) else logprobs  # whose weights are constants
        losses = expected(by_response(np.exp(held - old)), by_response(logprobs))
        return float(np.mean([np.mean(of) for of in losses]))

    assert result.loss == pytest.approx(loss_at(new), rel=1e-12)
    step = 1e-6 * np.eye(8)
    slopes = [(loss_at(new + h) - loss_at(new - h)) / 2e-6 for h in step]
    assert np.array(result.gradients["logprobs"])[real] == pytest.approx(slopes, abs=1e-8)


@given(st.sampled_from(OTHERS), st.booleans(), st.integers(0, 2**31))
def test_all_stand_beside_a_correction_and_a_kl(loss_type: LossType, weigh_kl: bool, seed: int) -> None:
    """The correction multiplies the loss of each token, and a KL that is weighed; the KL adds what it adds."""
    rng = np.random.default_rng(seed)
    logprobs, old, ref, sampling = -2 + 0.5 * rng.normal(size=(4, 8))
    advantages = np.repeat(ADVANTAGES, LENGTHS)
    surrogate = Surrogate(loss_type)
    columns = {"advantages": advantages, "old_logprobs": old, "ref_logprobs": ref}
    outputs = Outputs(LENGTHS, logprobs=logprobs, sampling_logprobs=sampling)
    kl: dict[str, Any] = {"kl_coef": 0.3, "kl_estimator": KLEstimator.K3, "weigh_kl": weigh_kl}
    corrected = {"correction": Corrected(Correction.TIS, None, 2.0)}
    found = run_loss(partial(policy_loss, surrogate=surrogate, **kl, **corrected), outputs, columns)
    weights = np.minimum(np.exp(old - sampling), 2.0)
    d = logprobs - ref
    penalty = 0.3 * (np.exp(-d) - 1 + d) * (np.exp(logprobs - old) * weights if weigh_kl else 1)
    losses = _losses_of_tokens(surrogate, logprobs, old, advantages)
    assert found.loss == pytest.approx(float((losses * weights + penalty).mean()), rel=1e-9, abs=1e-12)
    assert found.metrics["actor/pg_loss"] == pytest.approx(float((losses * weights).mean()), rel=1e-9, abs=1e-12)
    assert found.metrics["actor/correction_weight"] == pytest.approx(weights.mean())


def _losses_of_tokens(surrogate: Surrogate, logprobs: Any, old: Any, advantages: Any) -> Any:
    """The loss of each token, which scalars check above."""
    taken: list[Any] = []

    def watching(batch: Any, advantages: Any, old_logprobs: Any) -> Any:
        loss_R, _ = surrogate.losses(batch, advantages, old_logprobs)
        taken.append(loss_R.detach().numpy().copy())
        return batch.aggregate(loss_R, "token-mean")

    run_loss(watching, Outputs(LENGTHS, logprobs=logprobs), {"advantages": advantages, "old_logprobs": old})
    return np.concatenate(taken)


@pytest.mark.parametrize("ratio", list(Ratio))
@pytest.mark.parametrize("loss_type", [LossType.CISPO, LossType.SAPO])
def test_ratios_of_responses_have_the_gradient_of_their_logarithm(loss_type: LossType, ratio: Ratio) -> None:
    """On the first use of a batch that of −A log ρ, as of the clipped surrogate."""
    options: dict[str, Any] = {"ratio": ratio, "epochs": 2}
    logprobs = np.array([-1.0, -2, -0.5, -3])
    columns = {"advantages": np.array([1.5, 1.5, -1, -1]), "old_logprobs": logprobs}
    outputs = Outputs((2, 2), logprobs=logprobs)
    clip, other = (
        run_loss(loss_of(rloo, RLOOOptions(loss_type=how, **options)), outputs, columns)
        for how in (LossType.CLIP, loss_type)
    )
    assert other.gradients["logprobs"] == pytest.approx(clip.gradients["logprobs"])


@pytest.mark.parametrize("loss_type", OTHERS)
def test_a_policy_that_is_far_away_stays_finite(loss_type: LossType) -> None:
    found = found_of(Surrogate(loss_type), [900.0, -900, 900, -900], [1.0, 1, -1, -1], (2, 2))
    assert math.isfinite(found.loss)
    assert np.isfinite(found.gradients["logprobs"]).all()


@pytest.mark.parametrize("make", [PPOOptions, SafeRLHFOptions, ReMaxOptions, ReinforcePPOptions])
@pytest.mark.parametrize("loss_type", OF_RESPONSES)
def test_what_weighs_responses_needs_their_advantages(make: type[PolicyOptions], loss_type: LossType) -> None:
    with pytest.raises(ValidationError, match=rf"loss_type: {loss_type} weighs whole responses, .* to grpo or rloo"):
        make(loss_type=loss_type)
    assert make(loss_type=LossType.CISPO).loss_type is LossType.CISPO


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"loss_type": "cispo", "clip_low": 0.1},
            r"clip_low is set, but .*: cispo; remove `options\.clip_low`",
        ),
        ({"loss_type": "sapo", "clip_high": 0.3}, r"or set `options\.loss_type` to clip or cispo or gmpo"),
        ({"loss_type": "gmpo", "dual_clip": 3.0}, "dual_clip is set, but has no effect with loss_type: gmpo"),
        ({"sapo_temperature_neg": 2.0}, "sapo_temperature_neg is set, but has no effect with loss_type: clip"),
        ({"vespo_k_pos": 1.0}, r"set `options\.loss_type` to vespo"),
    ],
)
def test_numbers_that_a_loss_does_not_read_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPOOptions(**options).check_read()


def test_combinations_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"found ratio: sequence-product; set `options\.ratio` to token"):
        RLOOOptions(loss_type=LossType.GMPO)
    with pytest.raises(ValidationError, match=r"correction: tis would weigh them twice; set `options\.old_logprobs`"):
        GRPOOptions(**GRPOOptions.of_older_samples({"loss_type": "vespo"}))
    engine = GRPOOptions.of_older_samples({"loss_type": "vespo", "old_logprobs": "engine"})
    assert GRPOOptions(**engine).correction is Correction.OFF
    assert GRPOOptions(**GRPOOptions.of_older_samples({"loss_type": "cispo"})).correction is Correction.TIS
