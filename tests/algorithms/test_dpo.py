"""DPO: its losses by hand and against the oracle, over any split and mask, and what the flow calls."""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from plait.algorithms.dpo import AVERAGED, SMOOTHED, WITH_MARGIN, DPOLoss, DPOOptions, dpo, pair_losses
from plait.algorithms.reward_model import RewardModelOptions, reward_model
from plait.dataflow import trace
from plait.errors import FlowError, RunError
from tests.algorithms import oracle
from tests.algorithms.batches import Outputs, pair_ids, run_loss
from tests.algorithms.flows import graph_of, loss_of

LN2 = math.log(2)


sizes = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4)
"""Response lengths of pairs."""


def ragged(values: np.ndarray, lengths: list[int]) -> list[np.ndarray]:
    return np.split(values, np.cumsum(lengths)[:-1])


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
    st.sampled_from([0.0, 0.7]),
    st.sampled_from([0.0, 0.2]),
    st.sampled_from([0.1, 1.0]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_dpo_equals_the_oracle(lengths, how, smoothing, margin, nll_coef, beta, reference_free, masked, seed):
    rng = np.random.default_rng(seed)
    smoothing = 0.1 if how is DPOLoss.EXO_PAIR else smoothing if how in SMOOTHED else 0.0
    margin = margin if how in WITH_MARGIN else 0.0
    reference_free = reference_free or how is DPOLoss.ORPO
    flat = [length for pair in lengths for length in pair]
    logprobs, ref = (-2 + rng.uniform(-1.9, 1.9, size=sum(flat)) for _ in range(2))
    mask = rng.integers(0, 2, sum(flat)).astype(float) if masked else np.ones(sum(flat))
    mask[np.cumsum(flat) - 1] = 1.0
    log_ratios = ragged(logprobs - ref * (not reference_free), flat)
    ratios = [(x * m).sum() for x, m in zip(log_ratios, ragged(mask, flat), strict=True)]
    counts = [int(m.sum()) for m in ragged(mask, flat)]
    expected, slopes = 0.0, []
    for pair in range(len(lengths)):
        c, r = 2 * pair, 2 * pair + 1
        loss, *by = oracle.dpo(ratios[c], ratios[r], (counts[c], counts[r]), how.value, beta, smoothing, margin)
        loss -= nll_coef * float((ragged(logprobs, flat)[c] * ragged(mask, flat)[c]).sum()) / counts[c]
        by[0] -= nll_coef / counts[c]
        expected += loss / len(lengths)
        slopes += [(by[i] / len(lengths) * ragged(mask, flat)[2 * pair + i]).tolist() for i in (0, 1)]
    options = DPOOptions(
        beta=beta,
        loss_type=how,
        label_smoothing=smoothing,
        reference_free=reference_free,
        margin=margin,
        nll_coef=nll_coef,
    )
    outputs = Outputs(flat, logprobs=logprobs, mask=mask if masked else None, samples=pair_ids(len(lengths)))
    columns = {} if reference_free else {"ref_logprobs": ref}
    found = run_loss(loss_of(dpo, options), outputs, columns, cut=2 * int(rng.integers(0, len(lengths) + 1)))
    assert found.loss == pytest.approx(expected, rel=1e-10)
    assert found.gradients["logprobs"] == pytest.approx([x for part in slopes for x in part], rel=1e-9, abs=1e-12)


OF_LOSS: dict[DPOLoss, dict[str, object]] = {
    DPOLoss.EXO_PAIR: {"label_smoothing": 0.01},
    DPOLoss.ORPO: {"reference_free": True},
}
"""Options that a loss needs."""


def test_dpo_widens_the_gap_between_chosen_and_rejected():
    for how in DPOLoss:
        options = DPOOptions.model_validate({"loss_type": how, **OF_LOSS.get(how, {})})
        outputs = Outputs([1, 1], logprobs=np.array([-1.0, -1.0]), samples=pair_ids(1))
        columns = {} if options.reference_free else {"ref_logprobs": np.array([-1.0, -1.0])}
        chosen, rejected = run_loss(loss_of(dpo, options), outputs, columns).gradients["logprobs"]
        assert chosen < rejected, how
        assert chosen <= 0 < rejected, how


def test_losses_of_relatives_by_hand():
    """Two tokens of log-probs −1 and −3 against one of −2 − ln 2, all averaged: −2 and −2 − ln 2, h̄ = ln 2."""
    outputs = Outputs([2, 1], logprobs=np.array([-1.0, -3.0, -2.0 - LN2]), samples=pair_ids(1))
    simpo = DPOOptions(loss_type="sigmoid_norm", reference_free=True, beta=2.0, margin=LN2)
    found = run_loss(loss_of(dpo, simpo), outputs)  # −log σ(2 ln 2 − ln 2) = ln(1 + 1/2)
    assert found.loss == pytest.approx(math.log(1.5))
    assert found.gradients["logprobs"] == pytest.approx([-1 / 3, -1 / 3, 2 / 3])  # β (1 − σ) = 2/3, of the mean
    assert found.metrics["rewards/chosen"] == pytest.approx(-4.0)
    assert found.metrics["rewards/margins"] == pytest.approx(2 * LN2)
    assert found.metrics["rewards/accuracies"] == 1.0  # the sums, −4 and −2.7, say the opposite
    assert found.metrics["logps/chosen"] == pytest.approx(-4.0)
    orpo = DPOOptions(loss_type="orpo", reference_free=True, beta=0.5, nll_coef=1.0)
    found = run_loss(loss_of(dpo, orpo), outputs)
    p, q = math.exp(-2), math.exp(-2) / 2
    ratio = (p / (1 - p)) / (q / (1 - q))
    assert found.loss == pytest.approx(2.0 + 0.5 * math.log(1 + 1 / ratio))
    assert found.metrics["nll"] == pytest.approx(2.0)
    averaged = {how for how in DPOLoss if how in AVERAGED}
    assert averaged == {DPOLoss.SIGMOID_NORM, DPOLoss.IPO, DPOLoss.ORPO}


log_ratios = st.floats(-1e5, 1e5) | st.floats(-1.0, 1.0) | st.sampled_from([0.0, 1e-7, -1e-7, 30.0, -200.0])


@given(
    st.sampled_from(list(DPOLoss)),
    st.sampled_from([0.01, 0.1, 2.0]),
    st.sampled_from([torch.float32, torch.float64]),
    log_ratios,
    log_ratios,
)
def test_losses_are_exact_however_far_policy_and_reference_are(how, beta, dtype, chosen, rejected):
    """Loss and gradient in the run's dtype against the oracle's formulas with 60 digits: finite, and within some
    roundings of what is subtracted. `orpo` takes log-probs, down to probabilities of 1 − 1e-6."""
    options = DPOOptions(
        beta=beta,
        loss_type=how,
        label_smoothing=0.1 if how in SMOOTHED else 0.0,
        margin=0.7 if how in WITH_MARGIN else 0.0,
        reference_free=how is DPOLoss.ORPO,
    )
    given_P = [-abs(x) - 2e-6 if how is DPOLoss.ORPO else x for x in (chosen, rejected)]
    leaves = [torch.tensor([x], dtype=dtype, requires_grad=True) for x in given_P]
    loss = pair_losses(*leaves, options)
    loss.sum().backward()
    with mpmath.workdps(60), pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "math", mpmath)
        exact = [mpmath.mpf(leaf.item()) for leaf in leaves]
        numbers = (mpmath.mpf(x) for x in (beta, options.label_smoothing, options.margin))
        expected, *slopes = oracle.dpo(*exact, (1, 1), how.value, *numbers)
        slopes = [float(slope) for slope in slopes]
    rounding, size = 16 * torch.finfo(dtype).eps, abs(leaves[0].item()) + abs(leaves[1].item())
    size += 1 / (2 * beta) if how in (DPOLoss.IPO, DPOLoss.SPPO_HARD) else (20.0 if how is DPOLoss.ORPO else 1 / beta)
    squared = how in (DPOLoss.IPO, DPOLoss.SPPO_HARD)
    assert loss.item() == pytest.approx(float(expected), abs=rounding * (size**2 if squared else beta * size))
    if how is DPOLoss.HINGE and abs(1 - beta * (leaves[0] - leaves[1]).item()) < rounding * beta * size:
        return  # at its kink
    for leaf, slope in zip(leaves, slopes, strict=True):
        steepest = size if squared else abs(slope) * (1 + size) if how is DPOLoss.ORPO else beta * (1 + beta * size)
        assert leaf.grad.item() == pytest.approx(slope, abs=rounding * steepest)


def test_odds_of_a_certain_response_are_finite():
    """Probabilities of 1, also above it by rounding, and of next to nothing, in float32."""
    options = DPOOptions(loss_type="orpo", reference_free=True)
    for both in itertools.product([1e-7, 0.0, -1e-8, -1e-6, -1.0, -1e4], repeat=2):
        leaf = torch.tensor(both, requires_grad=True)
        loss = pair_losses(leaf[:1], leaf[1:], options)
        loss.sum().backward()
        assert loss.isfinite().all()
        assert leaf.grad.isfinite().all()
        chosen, rejected = leaf.grad.tolist()
        assert chosen <= 0 <= rejected


def test_a_tie_of_averages_is_judged_by_averages():
    """Without a reference 10,000 tokens of −2 are higher than as many of −2.001, which is little of their sum."""
    logprobs = np.repeat([-2.0, -2.001], 10_000)
    outputs = Outputs([10_000, 10_000], logprobs=logprobs, samples=pair_ids(1))
    for options in ({"loss_type": "sigmoid_norm", "reference_free": True}, {"reference_free": True}):
        found = run_loss(loss_of(dpo, DPOOptions.model_validate(options)), outputs)
        assert found.metrics["rewards/accuracies"] == 1.0


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
    with pytest.raises(ValidationError, match=r"margin has no effect .* hinge; .* to sigmoid or sigmoid_norm"):
        DPOOptions(loss_type="hinge", margin=0.1)
    with pytest.raises(ValidationError, match=r"exo_pair .* label_smoothing is 0; set `options\.label_smoothing`"):
        DPOOptions(loss_type="exo_pair")
    with pytest.raises(ValidationError, match=r"orpo .*set `options\.reference_free` to true"):
        DPOOptions(loss_type="orpo")
    with pytest.raises(ValidationError, match=r"less than 0\.5"):
        DPOOptions(label_smoothing=0.5)


def test_half_a_pair_is_an_error():
    outputs = Outputs([1, 1], logprobs=np.zeros(2), samples=[(0, 0), (1, 0)])
    with pytest.raises(RunError, match=r"expected two samples of every prompt, found \[0\] of prompt 0"):
        run_loss(loss_of(dpo, DPOOptions(reference_free=True)), outputs)
