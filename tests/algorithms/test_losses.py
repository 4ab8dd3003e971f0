"""Estimators, clipping and aggregation: hand-computed numbers, then the float64 oracle on random batches."""

from __future__ import annotations

import inspect
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from plait.algorithms.grpo import GRPOOptions, grpo
from plait.algorithms.kl import KLPlace
from plait.algorithms.losses import Aggregation, KLEstimator, kl_estimate, policy_loss
from plait.algorithms.options import PolicyOptions
from plait.algorithms.ppo import PPOOptions, ppo
from plait.algorithms.reinforce_pp import ReinforcePPOptions, reinforce_pp
from plait.algorithms.remax import ReMaxOptions, remax
from plait.algorithms.rloo import RLOOOptions, rloo
from plait.algorithms.safe_rlhf import SafeRLHFOptions, safe_rlhf
from plait.algorithms.surrogates import Ratio, Surrogate, clipped_surrogate, log_ratio, ratio_of
from plait.errors import RunError
from plait.models.outputs import Outputs as ModelOutputs
from plait.training.loss_batch import MicroBatchLoss, Responses
from plait.training.mini_batch import loss_share
from plait.training.token_means import MiniBatchTotals, TokenMeans
from tests.algorithms import oracle
from tests.algorithms.batches import Outputs, leaf, run_loss
from tests.algorithms.flows import loss_of

LN2 = math.log(2)


def test_kl_estimators_by_hand():
    # π/π_ref = 2, 1/2, 1 at three tokens: d = ln 2, −ln 2, 0.
    d = leaf([LN2, -LN2, 0.0])
    zero = torch.zeros(3, dtype=torch.float64)
    assert kl_estimate(d, zero, "k1").tolist() == pytest.approx([LN2, -LN2, 0])
    assert kl_estimate(d, zero, "k2").tolist() == pytest.approx([LN2**2 / 2, LN2**2 / 2, 0])
    assert kl_estimate(d, zero, "k3").tolist() == pytest.approx([0.5 - 1 + LN2, 2 - 1 - LN2, 0])


@pytest.mark.parametrize(("how", "slopes"), [("k1", [1, 1, 1]), ("k2", [LN2, -LN2, 0]), ("k3", [0.5, -1, 0])])
def test_kl_gradients_by_hand(how, slopes):
    d = leaf([LN2, -LN2, 0.0])
    kl_estimate(d, torch.zeros(3, dtype=torch.float64), how).sum().backward()
    assert d.grad.tolist() == pytest.approx(slopes)


def test_kl_estimates_average_to_the_kl():
    """k1 and k3 are unbiased: weighted by π, they sum to KL(π ‖ π_ref) exactly."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    exact = float((p * np.log(p / q)).sum())
    for how in ("k1", "k3"):
        values = kl_estimate(torch.tensor(np.log(p)), torch.tensor(np.log(q)), how).numpy()
        assert float((p * values).sum()) == pytest.approx(exact)


def test_a_weighed_kl_by_hand():
    """On-policy ρ is 1, but differentiated: the slope of ρ k is k + k'. Of k3 that is d, the gradient of the KL; of k1
    it is d + 1, and the 1 averages to 0."""
    log_ratio = leaf([LN2, -LN2, 0.0])
    ref = torch.zeros(3, dtype=torch.float64)
    for how, slopes in (("k3", [LN2, -LN2, 0.0]), ("k1", [LN2 + 1, -LN2 + 1, 1.0])):
        log_ratio.grad = None
        batch = MicroBatchLoss(
            ModelOutputs(log_ratio, ref), Responses([3], ref), MiniBatchTotals(3, 1, 3), TokenMeans(3)
        )
        bounds = {"aggregation": Aggregation.TOKEN_MEAN}
        policy_loss(batch, ref, None, ref, 3.0, **bounds, kl_estimator=KLEstimator(how), weigh_kl=True).backward()
        assert log_ratio.grad.tolist() == pytest.approx(slopes)


@pytest.mark.parametrize(
    ("how", "weigh_kl", "exact"), [("k1", True, True), ("k3", True, True), ("k2", False, False), ("k3", False, False)]
)
def test_a_weighed_kl_has_the_gradient_of_the_kl_after_an_update(how, weigh_kl, exact):
    """Every outcome as often as the old policy draws it, and advantages of 0, which leave the KL alone: the mean
    gradient by the logits is p (log p/q − KL), that of KL(π ‖ π_ref), wherever the policy has gone since."""
    logits = torch.tensor([0.2, -0.5, 0.9], dtype=torch.float64, requires_grad=True)
    policy, ref = logits.log_softmax(0), torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    drawn = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
    old = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()[drawn]
    responses = Responses([1] * 10, old)
    batch = MicroBatchLoss(ModelOutputs(policy[drawn], old), responses, MiniBatchTotals(10, 10, 1), TokenMeans(10))
    bounds = {"aggregation": Aggregation.TOKEN_MEAN}
    kl = {"kl_estimator": KLEstimator(how), "weigh_kl": weigh_kl}
    policy_loss(batch, torch.zeros_like(old), old, ref[drawn], 1.0, **bounds, **kl).backward()
    p = policy.detach().exp()
    log_ratio = (policy - ref).detach()
    expected = p * (log_ratio - (p * log_ratio).sum())
    difference = (logits.grad - expected).abs().max().item()
    assert difference < 1e-15 if exact else difference > 0.02


def test_a_huge_log_ratio_stays_finite():
    far = torch.tensor([1000.0, -1000.0], requires_grad=True)
    for how in KLEstimator:
        assert torch.isfinite(kl_estimate(far, torch.zeros(2), how)).all()
    ratio = ratio_of(far)
    loss, _ = clipped_surrogate(ratio, torch.ones(2), 0.2, 0.2)
    loss.sum().backward()
    assert torch.isfinite(ratio).all()
    assert torch.isfinite(far.grad).all()


def test_clipping_by_hand():
    # ρ = 2, 2, 1/2, 1/2, 1.25 with A = 1, −1, 1, −1, 1; clip to [0.8, 1.3].
    logprobs = leaf([LN2, LN2, -LN2, -LN2, math.log(1.25)])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    ratio = ratio_of(logprobs)
    loss, clipped = clipped_surrogate(ratio, advantages, 0.2, 0.3)
    assert loss.tolist() == pytest.approx([-1.3, 2.0, -0.5, 0.8, -1.25])
    assert ratio.tolist() == pytest.approx([2, 2, 0.5, 0.5, 1.25])
    assert clipped.tolist() == [1, 0, 0, 1, 0]
    loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([0, 2, -0.5, 0, -1.25])


def loss_batch(
    lengths: list[int],
    totals: MiniBatchTotals,
    logprobs: list[float],
    means: TokenMeans | None = None,
    entropies: list[float] | None = None,
) -> MicroBatchLoss:
    values = leaf(logprobs)
    spread = values.detach() if entropies is None else leaf(entropies)
    responses = Responses(lengths, values.detach())
    return MicroBatchLoss(ModelOutputs(values, spread), responses, totals, means or TokenMeans(totals.tokens))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        # Samples of 1, 3 and 0 tokens with values 4 | 1 2 6; limit 10. The empty sample is in no denominator.
        ("token-mean", 13 / 4),
        ("seq-mean-token-mean", (4 / 1 + 9 / 3) / 2),
        ("seq-mean-token-sum-norm", (4 + 9) / (2 * 10)),
    ],
)
def test_aggregation_by_hand(how, expected):
    values = [4.0, 1.0, 2.0, 6.0]
    totals = MiniBatchTotals(tokens=4, sequences=2, max_response_tokens=10)
    whole = loss_batch([1, 3, 0], totals, values)
    assert whole.aggregate(whole.logprobs, how).item() == pytest.approx(expected)
    parts = [loss_batch([1], totals, values[:1]), loss_batch([3, 0], totals, values[1:])]
    assert sum(part.aggregate(part.logprobs, how).item() for part in parts) == pytest.approx(expected)


@pytest.mark.parametrize("how", list(Aggregation))
def test_a_batch_without_tokens_is_zero(how):
    batch = loss_batch([0, 0], MiniBatchTotals(0, 0, 10), [])
    assert batch.aggregate(batch.logprobs, how).item() == 0


def test_logged_means_are_over_the_mini_batch():
    totals = MiniBatchTotals(4, 2, 10)
    means = TokenMeans(4)
    for lengths, values in (([1], [4.0]), ([3], [1.0, 2.0, 6.0])):
        batch = loss_batch(lengths, totals, values, means)
        batch.log("x", batch.logprobs)
    assert means.result() == {"x": 3.25}


def ragged(flat: np.ndarray, lengths: list[int]) -> oracle.Ragged:
    return [part.tolist() for part in np.split(flat, np.cumsum(lengths)[:-1])]


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any),
    st.sampled_from(list(Aggregation)),
    st.sampled_from(list(KLEstimator)),
    st.sampled_from(list(Ratio)),
    st.sampled_from([0.0, 0.04]),
    st.sampled_from([None, 1.3]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 0.01]),
    st.integers(0, 2**31),
)
def test_the_policy_loss_equals_the_oracle(
    lengths, aggregation, estimator, ratio, kl_coef, dual, on_policy, weigh_kl, entropy_coef, seed
):
    """Loss and its gradient, with an advantage per token, over any split of the samples into micro-batches."""
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    logprobs = -3 + rng.normal(size=total)
    old = logprobs if on_policy else logprobs + 0.4 * rng.normal(size=total)
    ref = logprobs + 0.4 * rng.normal(size=total) if kl_coef else None
    advantages = rng.normal(size=total)
    entropies = rng.uniform(0, 5, size=total)
    expected, slopes = oracle.policy_loss(
        ragged(logprobs, lengths),
        ragged(old, lengths),
        None if ref is None else ragged(ref, lengths),
        ragged(advantages, lengths),
        low=0.2,
        high=0.28,
        kl_coef=kl_coef,
        estimator=estimator.value,
        aggregation=aggregation.value,
        limit=7,
        ratio=ratio.value,
        dual=dual,
        weigh_kl=weigh_kl,
    )
    bonus, bonus_slopes = oracle.entropy_bonus(ragged(entropies, lengths), entropy_coef, aggregation.value, limit=7)
    totals = MiniBatchTotals(total, sum(length > 0 for length in lengths), 7)
    cut = int(rng.integers(0, len(lengths) + 1))
    loss, gradient, by_entropy = 0.0, [], []
    for part in (slice(0, cut), slice(cut, None)):
        tokens = slice(sum(lengths[: part.start]), sum(lengths[: part.stop]))
        batch = loss_batch(lengths[part], totals, logprobs[tokens].tolist(), entropies=entropies[tokens].tolist())
        share = policy_loss(
            batch,
            torch.tensor(advantages[tokens]),
            None if on_policy else torch.tensor(old[tokens]),
            None if ref is None else torch.tensor(ref[tokens]),
            surrogate=Surrogate(ratio=ratio, clip_high=0.28, dual_clip=dual),
            aggregation=aggregation,
            kl_coef=kl_coef,
            kl_estimator=estimator,
            weigh_kl=weigh_kl,
            entropy_coef=entropy_coef,
        )
        share.backward()
        loss += float(share.detach())
        gradient += batch.logprobs.grad.tolist()
        by_entropy += [0.0] * len(advantages[tokens]) if entropy_coef == 0 else batch.entropies.grad.tolist()
        assert (batch.entropies.grad is None) == (entropy_coef == 0), "a weight of 0 asks for no gradient"
    assert loss == pytest.approx(expected + bonus, rel=1e-12, abs=1e-12)
    assert gradient == pytest.approx([slope for sample in slopes for slope in sample], rel=1e-11, abs=1e-13)
    assert by_entropy == pytest.approx([slope for sample in bonus_slopes for slope in sample], rel=1e-12)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.sampled_from(list(Aggregation)),
    st.sampled_from(list(Ratio)),
    st.integers(0, 2**31),
)
def test_masked_tokens_are_as_if_they_were_not_there(lengths, aggregation, ratio, seed):
    """The loss under a mask is that of the kept tokens alone: in values, ratios, means of sequences and metrics."""
    rng = np.random.default_rng(seed)
    kept = rng.integers(0, 2, sum(lengths)).astype(bool)
    logprobs, advantages, old, ref = (rng.normal(size=sum(lengths)) for _ in range(4))
    options = GRPOOptions(kl_coef=0.1, ratio=ratio, aggregation=aggregation, epochs=2)
    columns = {"advantages": advantages, "old_logprobs": old, "ref_logprobs": ref}
    loss = loss_of(grpo, options)
    poisoned = np.where(kept, logprobs, np.inf)  # whatever stands there, NaN included, must not reach the loss
    found = run_loss(loss, Outputs(lengths, logprobs=poisoned, mask=kept.astype(float)), columns)
    shorter = [int(part.sum()) for part in np.split(kept, np.cumsum(lengths)[:-1])]
    expected = run_loss(
        loss, Outputs(shorter, logprobs=logprobs[kept]), {name: values[kept] for name, values in columns.items()}
    )
    assert found.loss == pytest.approx(expected.loss, rel=1e-12, abs=1e-12)
    assert np.array(found.gradients["logprobs"])[kept] == pytest.approx(expected.gradients["logprobs"], abs=1e-12)
    assert found.metrics == pytest.approx(expected.metrics)


IN_LOSS = {"kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k3", "clip_high": 0.28}


@pytest.mark.parametrize("more", [{}, {"entropy_coef": 0.3}, {"weigh_kl_by_ratio": True}], ids=str)
@pytest.mark.parametrize(
    ("flow", "make", "keys", "ratio", "aggregation"),
    [
        (grpo, GRPOOptions, IN_LOSS, "token", "seq-mean-token-mean"),
        (
            grpo,
            GRPOOptions,
            IN_LOSS | {"ratio": "sequence-mean", "aggregation": "token-mean"},
            "sequence-mean",
            "token-mean",
        ),
        (rloo, RLOOOptions, IN_LOSS, "sequence-product", "seq-mean-token-mean"),
        (reinforce_pp, ReinforcePPOptions, IN_LOSS, "token", "token-mean"),
        (ppo, PPOOptions, IN_LOSS, "token", "token-mean"),
        (safe_rlhf, SafeRLHFOptions, IN_LOSS, "token", "token-mean"),
        (remax, ReMaxOptions, {"clip_high": 0.28}, "token", "seq-mean-token-sum-norm"),
    ],
)
def test_each_algorithm_hands_its_options_to_the_loss(flow, make, keys, more, ratio, aggregation):
    if flow is remax and "weigh_kl_by_ratio" in more:
        with pytest.raises(ValidationError, match="weigh_kl_by_ratio"):  # its KL is in the reward
            make(**keys, **more)
        return
    rng = np.random.default_rng(0)
    lengths, flat = [3, 2], -3 + rng.normal(size=5)
    old, ref, advantages = flat + 0.4 * rng.normal(size=5), flat + 0.4 * rng.normal(size=5), rng.normal(size=5)
    entropies = rng.uniform(0, 5, size=5)
    expected, _ = oracle.policy_loss(
        ragged(flat, lengths),
        ragged(old, lengths),
        ragged(ref, lengths),
        ragged(advantages, lengths),
        low=0.2,
        high=0.28,
        kl_coef=keys.get("kl_coef", 0.0),
        estimator="k3",
        aggregation=aggregation,
        limit=7,
        ratio=ratio,
        weigh_kl="weigh_kl_by_ratio" in more,
    )
    expected += oracle.entropy_bonus(ragged(entropies, lengths), more.get("entropy_coef", 0.0), aggregation, 7)[0]
    means = TokenMeans(5)
    batch = loss_batch(lengths, MiniBatchTotals(5, 2, 7), flat.tolist(), means, entropies.tolist())
    found = loss_of(flow, make(**keys, **more))(
        batch, torch.tensor(advantages), old_logprobs=torch.tensor(old), ref_logprobs=torch.tensor(ref)
    )
    assert found.item() == pytest.approx(expected, rel=1e-12)
    logged = means.result()
    assert logged.keys() == {"actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "kl"}
    assert logged["kl"] == pytest.approx(np.mean([oracle.kl(d, "k3")[0] for d in flat - ref]))
    assert logged["actor/ppo_kl"] == pytest.approx(np.mean([oracle.kl(d, "k3")[0] for d in old - flat]))


def test_sequence_sums_by_hand():
    batch = loss_batch([1, 0, 3], MiniBatchTotals(4, 2, 10), [4.0, 1.0, 2.0, 6.0])
    sums = batch.sequence_sum(batch.logprobs)
    assert sums.tolist() == [4, 9, 9, 9]
    (sums * torch.tensor([1.0, 1.0, 0.0, 10.0], dtype=torch.float64)).sum().backward()
    assert batch.logprobs.grad.tolist() == [1, 11, 11, 11]


def test_a_sequence_sum_does_not_depend_on_its_neighbours():
    """Bit for bit in float32, forward and backward, wherever the response stands in a micro-batch."""
    rng = np.random.default_rng(0)
    values, weights = (rng.normal(size=500).astype(np.float32) for _ in range(2))

    def sums_of(before: int) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = [before, 500, 3]
        around = [rng.normal(size=n).astype(np.float32) for n in (before, 3)]
        logprobs = torch.tensor(np.concatenate([around[0], values, around[1]]), requires_grad=True)
        outputs, responses = ModelOutputs(logprobs, logprobs), Responses(lengths, logprobs)
        batch = MicroBatchLoss(outputs, responses, MiniBatchTotals(9, 3, 9), TokenMeans(9))
        sums = batch.sequence_sum(logprobs)
        scale = torch.zeros(len(logprobs))
        scale[before : before + 500] = torch.tensor(weights)
        (sums * scale).sum().backward()
        place = slice(before, before + 500)
        return sums[place].detach(), logprobs.grad[place]

    for before in (1, 37, 4096):
        for left, right in zip(sums_of(0), sums_of(before), strict=True):
            assert torch.equal(left, right)


def test_ratios_by_hand():
    # Two tokens at π/π_old = 8 and 2, one at 4: means of the logs are ln 4 and ln 4, their sums ln 16 and ln 4.
    batch = loss_batch([2, 1], MiniBatchTotals(3, 2, 10), [math.log(8), math.log(2), math.log(4)])
    zero = torch.zeros(3, dtype=torch.float64)
    ratios = {how.value: log_ratio(batch, zero, how).exp().tolist() for how in Ratio}
    assert ratios["token"] == pytest.approx([8, 2, 4])
    assert ratios["sequence-mean"] == pytest.approx([4, 4, 4])
    assert ratios["sequence-product"] == pytest.approx([16, 16, 4])


def test_a_gspo_response_is_clipped_as_a_whole():
    """Token ratios e^0.6 and e^-0.6: their product is 1, so nothing is clipped, though each token alone would be."""
    totals = MiniBatchTotals(2, 1, 10)
    old = torch.zeros(2, dtype=torch.float64)
    advantages = torch.ones(2, dtype=torch.float64)
    for ratio, slopes, clipped in (("sequence-mean", [-0.5, -0.5], 0.0), ("token", [0.0, -math.exp(-0.6) / 2], 0.5)):
        means = TokenMeans(2)
        batch = loss_batch([2], totals, [0.6, -0.6], means)
        loss_of(grpo, GRPOOptions(ratio=ratio))(batch, advantages, old_logprobs=old).backward()
        assert batch.logprobs.grad.tolist() == pytest.approx(slopes)
        assert means.result()["actor/pg_clipfrac"] == clipped


def test_kl_in_the_reward_is_no_part_of_the_loss():
    totals = MiniBatchTotals(2, 1, 10)
    losses = []
    for ref in (None, torch.tensor([-9.0, -9.0], dtype=torch.float64)):
        batch = loss_batch([2], totals, [-1.0, -2.0])
        loss = loss_of(grpo, GRPOOptions(kl_coef=0.5, kl_in=KLPlace.REWARD))
        losses.append(loss(batch, torch.ones(2, dtype=torch.float64), ref_logprobs=ref).item())
    assert losses == [-1.0, -1.0]


def test_wrong_shapes_and_names_are_refused():
    batch = loss_batch([2], MiniBatchTotals(2, 1, 10), [-1.0, -2.0])
    with pytest.raises(RunError, match=r"batch.aggregate: expected one value per response token, \(2,\), found \(\)"):
        batch.aggregate(batch.logprobs.sum(), "token-mean")
    with pytest.raises(RunError, match="found `mean`"):
        batch.aggregate(batch.logprobs, "mean")
    with pytest.raises(RunError, match=r"batch.log\('x'\): expected one value per response token, \(2,\), found 1.0"):
        batch.log("x", 1.0)
    with pytest.raises(RunError, match=r"batch.sequence_sum: .* per response token, \(2,\), found \(1,\)"):
        batch.sequence_sum(batch.logprobs[:1])


def test_a_loss_must_return_a_scalar_with_a_gradient():
    batch = loss_batch([2], MiniBatchTotals(2, 1, 10), [-1.0, -2.0])

    def vector(batch):
        return batch.logprobs

    def constant(batch, value):
        return batch.logprobs.detach().sum() * value

    with pytest.raises(
        RunError, match=r"loss `vector` must return a scalar tensor .* found one of shape \(2,\)"
    ) as told:
        loss_share(vector, batch, {})
    assert told.value.frames.endswith(f'test_losses.py", line {vector.__code__.co_firstlineno}, in vector')
    with pytest.raises(RunError, match="loss `constant` has no gradient") as told:
        loss_share(partial(constant, value=2.0), batch, {})
    assert told.value.frames.endswith(", in constant"), "as of what it raises, any rank tells it as one process does"


def test_the_policy_loss_alone_has_the_settings_that_options_begin_with() -> None:
    """So that a flow may name it as it is: `loss=policy_loss`."""
    settings = {name: parameter.default for name, parameter in inspect.signature(policy_loss).parameters.items()}
    assert settings["surrogate"] == PolicyOptions().surrogate(Ratio.TOKEN)
    for name in ("aggregation", "kl_coef", "entropy_coef"):
        assert settings[name] == PolicyOptions.model_fields[name].default, name
