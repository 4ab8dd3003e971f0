"""PPO against what the trainer of TRL 1.10 computed on the same batch (`record_trl_ppo.py`): rewards, whitening, GAE,
losses, gradients."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plait.algorithms.advantages import gae, scaled, whitened
from plait.algorithms.critic import at_last_token, returns_of, score_less_kl, value_loss
from plait.algorithms.kl import mean_kl
from plait.algorithms.losses import KLEstimator, kl_estimate
from plait.algorithms.ppo import PPOOptions, less_if_truncated, ppo
from tests.algorithms.batches import Outputs, run_loss
from tests.algorithms.flows import loss_of

RECORD = json.loads((Path(__file__).parent / "trl_ppo.json").read_text())
EOS = 5


class Case:
    """A recorded case; ragged lists of one array per response. What TRL pads is cut off."""

    def __init__(self, name: str) -> None:
        record: dict[str, Any] = RECORD["cases"][name]
        self.settings, self.steps, self.logged = record["settings"], record["steps"], record["logged"]
        self.whitenings = record["whitened"]
        given = {key: np.array(values) for key, values in record["given"].items()}
        self.lengths, self.tokens, self.scores = given["lengths"], given["tokens"], given["scores"]
        self.new_logits, self.new_values = given["new_logits"], given["new_values"]
        limit = self.tokens.shape[1]
        self.states = [min(n + 1, limit) for n in self.lengths]
        """TRL gives the score of a response that ends early in a state of its own, after the last token."""
        self.logprobs = self.ragged(self.gathered(given["sampled_logits"]), self.lengths)
        self.ref = self.ragged(self.gathered(given["ref_logits"]), self.lengths)
        self.values = self.ragged(given["old_values"], self.states)
        self.finished = [float(self.tokens[i, n - 1] == EOS) for i, n in enumerate(self.lengths)]
        self.estimator = KLEstimator(self.settings["kl_estimator"])

    def gathered(self, logits: np.ndarray) -> np.ndarray:
        logprobs = torch.tensor(logits).log_softmax(-1).numpy()
        return np.take_along_axis(logprobs, self.tokens[..., None], -1)[..., 0]

    def ragged(self, values: Any, lengths: Any) -> list[np.ndarray]:
        return [np.array(row)[:n] for row, n in zip(values, lengths, strict=True)]

    def rewards(self) -> list[np.ndarray]:
        penalty = self.settings["missing_eos_penalty"] or 0.0
        scores = [less_if_truncated(s, f, penalty) for s, f in zip(self.scores, self.finished, strict=True)]
        rewards = []
        for i, (p, q) in enumerate(zip(self.logprobs, self.ref, strict=True)):
            if self.states[i] == self.lengths[i]:
                rewards.append(score_less_kl(scores[i], p, q, self.settings["kl_coef"], self.estimator))
            else:
                kl = self.settings["kl_coef"] * kl_estimate(p, q, self.estimator)
                rewards.append(at_last_token(scores[i], np.append(p, 0.0)) - np.append(kl, 0.0))
        return scaled(rewards) if self.settings["whiten_rewards"] else rewards

    def advantages(self) -> list[np.ndarray]:
        settings = {key: self.settings[key] for key in ("gamma", "lam")}
        return [gae(r, v, **settings) for r, v in zip(self.rewards(), self.values, strict=True)]


CASES = {name: Case(name) for name in RECORD["cases"]}


def test_the_cases_are_what_they_should_be():
    assert RECORD["trl"].startswith("1.10.")
    assert set(CASES["full"].lengths) == {5}
    assert min(CASES["ragged"].lengths) == 1
    assert set(CASES["full"].finished) == {0.0, 1.0}
    for case in CASES.values():
        shares = [step[name] for step in case.steps for name in ("vf_clipfrac", "pg_clipfrac")]
        assert len(case.steps) == 4
        assert 0 < max(shares) < 1, "both clips are part of the comparison"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rewards_and_advantages_equal_trl(case):
    """float32 nowhere: what differs is the 1e-8 that TRL adds to the variance and we to its root."""
    if case.settings["whiten_rewards"]:
        expected = case.ragged(case.whitenings[0]["after"], case.states)
        for found, theirs in zip(case.rewards(), expected, strict=True):
            assert found == pytest.approx(theirs, rel=1e-7, abs=1e-7)
    expected = case.ragged(case.whitenings[-1]["before"], case.lengths)
    for found, theirs, length in zip(case.advantages(), expected, case.lengths, strict=True):
        assert found[:length] == pytest.approx(theirs, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_whitened_advantages_equal_trl(case):
    """Global, over the tokens that are trained."""
    found = whitened([a[:n] for a, n in zip(case.advantages(), case.lengths, strict=True)])
    for ours, theirs in zip(found, case.ragged(case.whitenings[-1]["after"], case.lengths), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_measured_kl_equals_trl(case):
    assert mean_kl(case.logprobs, case.ref, case.estimator) == pytest.approx(case.logged["objective/kl"], rel=1e-6)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_losses_and_gradients_equal_trl(case):
    """Each of the four mini-batches of two epochs: both losses, both clip shares, both gradients by the tables."""
    advantages = whitened([a[:n] for a, n in zip(case.advantages(), case.lengths, strict=True)])
    returns = [returns_of(a, v) for a, v in zip(case.advantages(), case.values, strict=True)]
    options = PPOOptions(kl_coef=0, lam=case.settings["lam"], gamma=case.settings["gamma"], epochs=2, mini_batches=2)
    policy, critic = (loss_of(ppo, options, role) for role in ("actor", "critic"))
    for step in case.steps:
        members = step["members"]

        def picked(values: list[np.ndarray], members: list[int] = members) -> np.ndarray:
            return np.concatenate([values[i] for i in members])

        logits = torch.tensor(case.new_logits, requires_grad=True)
        table = logits.log_softmax(-1)
        rows = [(i, t) for i in members for t in range(case.lengths[i])]
        new_R = torch.stack([table[i, t, case.tokens[i, t]] for i, t in rows])
        found = run_loss(
            policy,
            Outputs([case.lengths[i] for i in members], logprobs=new_R.detach().numpy()),
            {"advantages": picked(advantages), "old_logprobs": picked(case.logprobs)},
            cut=1,
        )
        assert found.loss == pytest.approx(step["pg_loss"], rel=1e-6)
        assert found.metrics["actor/pg_clipfrac"] == pytest.approx(step["pg_clipfrac"], abs=1e-6)
        (slopes,) = torch.autograd.grad(new_R, logits, torch.tensor(found.gradients["logprobs"]))
        theirs = np.array(step["gradients"]["logits"])
        assert np.abs(theirs).max() > 0.05
        assert np.abs(slopes.numpy() - theirs).max() < 1e-7

        found = run_loss(
            critic,
            Outputs([case.states[i] for i in members], values=picked(case.ragged(case.new_values, case.states))),
            {"old_values": picked(case.values), "returns": picked(returns)},
            cut=2,
        )
        assert found.loss == pytest.approx(step["vf"] / 2, rel=1e-6)
        assert found.metrics["critic/vf_clipfrac"] == pytest.approx(step["vf_clipfrac"], abs=1e-6)
        theirs = np.array(step["gradients"]["values"])
        ours = np.zeros_like(theirs)
        ours[tuple(np.array([(i, t) for i in members for t in range(case.states[i])]).T)] = found.gradients["values"]
        assert np.abs(ours - theirs).max() < 1e-7
    assert isinstance(critic, partial)
    assert critic.func is value_loss
