"""Trainer against sampling engine: numbers by hand, and each cause of a difference told from the others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from plait.data.records import FinishReason, Prompt, Sample
from plait.data.rows import Rows
from plait.dataflow import Column, Level
from plait.generation.engine import Engine, drain
from plait.generation.request import Request
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.policy.packing import draw_mini_batches
from plait.training.rollout_check import coverage, rollout_comparison, shift_match
from tests.models.tiny import tiny_llama
from tests.training.batches import MAX_RESPONSE_TOKENS, make_trainer, random_rows, run_all, token_mean, train

EOS = 2
MASK = Column("trained", Level.TOKEN, 6, 0)
NONFINITE = ("nonfinite_losses", "nonfinite_gradients", "nonfinite_outputs")


def rows_of(*responses: tuple[int, ...], reason: FinishReason = FinishReason.STOP) -> Rows:
    """One prompt each; log-probs of −1."""
    samples = [
        Sample(Prompt(uid, "", (5, 6)), 0, ids, (-1.0,) * len(ids), "", reason) for uid, ids in enumerate(responses)
    ]
    return Rows(tuple(samples))


def test_the_comparison_by_hand():
    # Two tokens: p_train 0.5 and 0.2, p_sampling 0.25 and 0.2. w = 2 and 1.
    rows = rows_of((7, 8))
    found = rollout_comparison(np.log([0.5, 0.2]), np.log([0.25, 0.2]), np.ones(2), rows)
    expected = {
        "training/rollout_probs_diff_mean": 0.125,
        "training/rollout_probs_diff_max": 0.25,
        "training/rollout_logprobs_diff_mean": np.log(2) / 2,
        "training/rollout_logprobs_diff_max": np.log(2),
        "training/rollout_kl": (2 - 1 - np.log(2)) / 2,
        "training/rollout_ess": 9 / 5 / 2,
        "training/rollout_shift_match": min(np.log(0.25 / 0.2), np.log(0.5 / 0.2)),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found.keys() - expected.keys() == {"training/rollout_temperature_ratio", "training/rollout_temperature_fit"}


def test_given_tokens_are_no_part_of_the_comparison():
    rows = rows_of((7, 8), (9,))
    sampling = np.array([np.nan, np.nan, np.log(0.5)])
    found = rollout_comparison(np.log([0.1, 0.1, 0.25]), sampling, np.ones(3), rows)
    assert found["training/rollout_probs_diff_mean"] == pytest.approx(0.25)
    assert "training/rollout_shift_match" not in found, "one sampled token has no neighbour"
    assert rollout_comparison(np.log([0.1, 0.1, 0.25]), np.full(3, np.nan), np.ones(3), rows) == {}
    assert rollout_comparison(np.zeros(0), np.zeros(0), np.zeros(0), Rows(())) == {}
    assert rollout_comparison(np.array([0.0, np.nan, 0.0]), np.zeros(3), np.ones(3), rows) == {}


def test_a_shift_is_found_in_either_direction_and_only_within_a_response():
    # Responses of 4 and 1 tokens: the second has no neighbour of its own, and the first's last token is not its.
    rows = rows_of((7, 8, 9, 10), (11,))
    true = np.array([-1.0, -2.0, -4.0, -8.0, -99.0])
    for shifted in ([-2, -4, -8, -50, 0], [-50, -1, -2, -4, 0]):
        found = shift_match(np.array(shifted, dtype=float), true, rows)
        assert found == {"training/rollout_shift_match": 0.0}
    assert shift_match(true, true, rows)["training/rollout_shift_match"] == pytest.approx((1 + 2 + 4) / 3)
    assert shift_match(np.zeros(1), np.zeros(1), rows_of((7,))) == {}


def test_coverage_by_hand():
    stops = {EOS, 3}
    rows = rows_of((7, EOS), (8, 3), (9, 10, 11), ())
    assert coverage(rows, None, stops) == {"mask_coverage": 1.0, "eos_coverage": 2 / 3}
    # The first loses its stop token, the second is not trained at all, the third ends on no stop token.
    mask = np.array([1, 0, 0, 0, 1, 1, 1], dtype=np.float64)
    assert coverage(rows, mask, stops) == {"mask_coverage": 4 / 7, "eos_coverage": 0.0}
    # The stop token may be followed by tokens that are not trained (a template's line break).
    assert coverage(rows_of((7, EOS, 12)), np.array([1.0, 1.0, 0.0]), stops)["eos_coverage"] == 1.0
    truncated = rows_of((7, 8), reason=FinishReason.LENGTH)
    assert coverage(truncated, None, stops) == {"mask_coverage": 1.0}
    assert coverage(Rows(()), None, stops) == {}


@pytest.fixture(scope="module")
def rollout() -> Rows:
    """Responses that the real engine drew at temperature 1, with the log-probs that it recorded."""
    engine = Engine(tiny_llama(torch.float32), SamplingSettings(max_response_tokens=MAX_RESPONSE_TOKENS))
    sampling = SamplingSettings(temperature=1.0, max_response_tokens=MAX_RESPONSE_TOKENS).sampling()
    for prompt in {sample.prompt.uid: sample.prompt for sample in random_rows(6).samples}.values():
        engine.add(Request(prompt, 6, sampling, NoiseKey(0, 0)))
    return Rows(tuple(drain(engine))).ordered()


def moved(rows: Rows, by: int) -> Rows:
    """The same rows, each log-prob recorded one place off."""
    samples = (replace(s, logprobs=tuple(np.roll(s.logprobs, by))) for s in rows.samples)
    return Rows(tuple(samples))


def check(rows: Rows, temperature: float = 1.0, stale: float = 0.0) -> dict[str, float]:
    """What a training step says of the rollout; `stale` moves the trainer's weights by that share of themselves."""
    model = tiny_llama(torch.float32)
    noise = torch.randn(model.weights.shape, generator=torch.Generator().manual_seed(1))
    model.weights.mul_(1 + stale * noise)

    trainer = make_trainer(model, temperature=temperature)
    _, metrics = run_all(train(trainer, rows, {}, token_mean))
    prefix = "training/rollout_"
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


def test_an_engine_that_agrees(rollout):
    found = check(rollout)
    assert found["logprobs_diff_max"] < 1e-4
    assert found["probs_diff_max"] < 1e-4
    assert found["kl"] < 1e-8
    assert found["ess"] == pytest.approx(1)
    assert found["shift_match"] > 0.5
    assert found["temperature_ratio"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("by", [1, -1])
def test_a_shift_matches_when_moved_back(rollout, by):
    found = check(moved(rollout, by))
    assert found["logprobs_diff_mean"] > 0.5
    assert found["shift_match"] < 1e-4
    assert found["temperature_fit"] < 0.6


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_another_temperature_is_named_and_estimated(rollout, temperature):
    found = check(rollout, temperature)
    assert found["logprobs_diff_mean"] > 0.1
    assert found["temperature_fit"] > 0.85
    assert found["temperature_ratio"] == pytest.approx(1 / temperature, rel=0.1)
    assert found["shift_match"] > found["logprobs_diff_mean"]


def test_stale_weights_are_neither(rollout):
    found = check(rollout, stale=0.1)
    assert found["logprobs_diff_mean"] > 0.1
    assert found["temperature_fit"] < 0.5
    assert found["shift_match"] > found["logprobs_diff_mean"]


def test_the_check_is_of_the_first_mini_batch_that_is_trained(rollout):
    """A first mini-batch without a trained token is no step; the comparison waits for one."""
    uids = sorted(rollout.groups)
    first = draw_mini_batches([(s.prompt.uid, s.index) for s in rollout.samples], 6, seed=0, step=0, epoch=0)[0]
    mask = np.ones(rollout.num_tokens)
    mask[rollout.token_places(first)] = 0
    rows = rollout.with_column(MASK, mask)
    trainer = make_trainer(tiny_llama(torch.float32), temperature=1.0)

    _, metrics = run_all(train(trainer, rows, {}, token_mean, mini_batches=6, epochs=1, step=0, mask=MASK))
    assert len(uids) == 6
    assert metrics["training/masked_mini_batches"] == 1
    assert metrics["training/rollout_logprobs_diff_max"] < 1e-4


def test_what_is_not_finite_is_counted_by_its_cause(rollout):
    """A loss, a gradient alone, an output: each has a count of its own; and the first one leaves no comparison."""
    made = []

    def loss(batch):
        made.append(len(made))
        plain = batch.aggregate(batch.logprobs, "token-mean")
        if made[-1] == 0:
            return plain * float("nan")
        # sqrt has an infinite slope at 0.
        return plain if made[-1] == 1 else plain + (plain - plain.detach()).clamp(min=0).sqrt()

    whole = {"micro_batch_tokens": 100_000, "temperature": 1.0, "max_skipped_steps": 3}
    trainer = make_trainer(tiny_llama(torch.float32), **whole)
    _, metrics = run_all(train(trainer, rollout, {}, loss, mini_batches=3, epochs=1, step=0))
    counts = {name: metrics[f"training/{name}"] for name in ("optimizer_steps", "skipped_steps", *NONFINITE)}
    assert counts == {
        "optimizer_steps": 3,
        "skipped_steps": 2,
        "nonfinite_losses": 1,
        "nonfinite_gradients": 2,
        "nonfinite_outputs": 0,
    }
    broken = make_trainer(tiny_llama(torch.float32), **whole)
    broken.model.weights[broken.model.layout.entries[-1][1]] = float("inf")
    _, metrics = run_all(train(broken, rollout, {}, token_mean))
    assert metrics["training/nonfinite_outputs"] == rollout.num_tokens
    assert not any(name.startswith("training/rollout_") for name in metrics)
