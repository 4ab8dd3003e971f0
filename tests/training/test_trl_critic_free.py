"""TRL's RLOO (advantages, loss, gradients), GSPO ratio and truncation mask, on the same batches. Slow to import."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from plait.algorithms.advantages import standardised
from plait.algorithms.grpo import GRPOOptions, grpo
from plait.algorithms.kl import subtract_kl
from plait.algorithms.losses import KLEstimator
from plait.algorithms.rloo import RLOOOptions, leave_one_out_advantages, rloo
from plait.data.rows import Rows
from plait.dataflow import Score
from tests.algorithms.flows import loss_of
from tests.models.tiny import tiny, tiny_model, tiny_tokenizer
from tests.training.batches import ADVANTAGES, MAX_RESPONSE_TOKENS, OLD, REF, make_trainer, random_rows, run_all, train
from tests.training.exact import ExactFloat64
from tests.training.gradients import assert_equal_gradients
from tests.training.test_trl import FAMILY, TEMPERATURE, batch, make_trl, trl_inputs  # noqa: F401

pytest.importorskip("trl")

GROUP = 3
BETA = 0.1
REF_SEED = 7


@pytest.fixture(scope="module")
def make_rloo(tmp_path_factory):
    """A function that makes TRL's RLOO trainer; its reference is another model than its policy."""
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    folder = str(tmp_path_factory.mktemp("reference"))
    tiny(FAMILY, seed=REF_SEED).save_pretrained(folder)

    def make(dtype: torch.dtype, rewards: list[float] | None = None, **config):
        model = tiny(FAMILY, dtype=dtype)
        model.config._name_or_path = folder
        args = RLOOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")),
            per_device_train_batch_size=4 * GROUP,
            num_generations=GROUP,
            max_completion_length=MAX_RESPONSE_TOKENS,
            temperature=TEMPERATURE,
            use_cpu=True,
            bf16=False,
            report_to="none",
            **config,
        )
        trainer = RLOOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: rewards,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["a"] * 4 * GROUP}),
            processing_class=tiny_tokenizer(),
        )
        trainer.model.train()
        return trainer

    return make


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("beta", [0.0, BETA])
def test_rloo_advantages_equal_trl(make_rloo, beta, normalize):
    """TRL scores given completions itself: its log-probs, its KL in the reward, its baseline."""
    rows = random_rows(4, GROUP, seed=3)
    rewards = np.random.default_rng(5).normal(size=len(rows)).tolist()
    trl = make_rloo(torch.float64, rewards, beta=beta, normalize_advantages=normalize)
    completions = [list(sample.token_ids) for sample in rows.samples]
    trl._generate = lambda prompts: ([list(s.prompt.token_ids) for s in rows.samples], completions, [""] * len(rows))
    with ExactFloat64():
        expected = trl._generate_and_score_completions([{"prompt": "a"}] * len(rows))["advantages"]
        policy, ref = (
            run_all(make_trainer(tiny_model(FAMILY, seed=seed), temperature=TEMPERATURE).score(rows, Score.LOGPROBS))[1]
            for seed in (0, REF_SEED)
        )
    shaped = [
        subtract_kl(reward, policy[start:stop], ref[start:stop], beta, KLEstimator.K1)
        for reward, (start, stop) in zip(rewards, pairwise(rows.offsets), strict=True)
    ]
    if beta:
        assert np.abs(np.array(shaped) - rewards).max() > 0.5, "the KL is part of the comparison"
    found = np.concatenate([leave_one_out_advantages(group) for group in np.array(shaped).reshape(-1, GROUP)])
    if normalize:
        found = standardised(found, 1e-4)
    assert found == pytest.approx(expected.numpy(), abs=1e-4 if beta else 1e-6)  # its head and its rewards are float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("epsilon_high", [0.2, 0.6])
def test_rloo_loss_and_gradients_equal_trl(make_rloo, dtype, epsilon_high):
    rows = batch()
    trl = make_rloo(dtype, epsilon=0.2, epsilon_high=epsilon_high)
    inputs = trl_inputs(rows, dtype, old=True, ref=False)
    inputs["old_logps"] = inputs.pop("old_per_token_logps").sum(1)
    trainer = make_trainer(tiny_model(FAMILY, dtype=dtype), temperature=TEMPERATURE, micro_batch_tokens=50)
    loss = loss_of(rloo, RLOOOptions(clip_high=epsilon_high))
    with ExactFloat64():
        expected = trl._compute_loss(trl.model, inputs)
        expected.backward()
        columns = {"advantages": ADVANTAGES, "old_logprobs": OLD}
        _, metrics = run_all(train(trainer, rows, columns, loss))
    assert metrics["actor/loss"] == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    assert 0.05 < trl._metrics["train"]["clip_ratio/region_mean"][0] < 0.95, "the clip is part of the comparison"
    assert_equal_gradients(trainer, trl.model, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("beta", "weigh_kl"), [(0.0, False), (0.04, False), (0.5, True)])
def test_gspo_loss_and_gradients_equal_trl(make_trl, dtype, beta, weigh_kl):  # noqa: F811
    rows = batch()
    epsilon = 0.05  # the mean of a response's log-ratios is small: this clips some of them
    trl = make_trl(
        dtype,
        weigh_kl=weigh_kl,
        loss_type="grpo",
        importance_sampling_level="sequence",
        beta=beta,
        epsilon=epsilon,
        epsilon_high=epsilon,
    )
    trainer = make_trainer(tiny_model(FAMILY, dtype=dtype), temperature=TEMPERATURE, micro_batch_tokens=50)
    options = GRPOOptions(
        ratio="sequence-mean", kl_coef=beta, clip_low=epsilon, clip_high=epsilon, weigh_kl_by_ratio=weigh_kl
    )
    columns = {"advantages": ADVANTAGES, "old_logprobs": OLD} | ({"ref_logprobs": REF} if beta else {})
    loss = loss_of(grpo, options)
    with ExactFloat64():
        expected = trl._compute_loss(trl.model, trl_inputs(rows, dtype, old=True, ref=beta > 0))
        expected.backward()
        _, metrics = run_all(train(trainer, rows, columns, loss))
    assert metrics["actor/loss"] == pytest.approx(expected.item(), rel=0, abs=1e-6)
    assert 0.05 < metrics["actor/pg_clipfrac"] < 0.95, "the clip is part of the comparison"
    assert_equal_gradients(trainer, trl.model, 1e-5)


OTHER_LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cispo": ({"epsilon_high": 1.2}, {"loss_type": "cispo", "clip_high": 0.2, "aggregation": "token-mean"}),
    "sapo": ({}, {"loss_type": "sapo"}),
    "luspo": (
        {"importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.05},
        {"ratio": "sequence-mean", "clip_low": 0.05, "clip_high": 0.05, "aggregation": "seq-mean-token-sum-norm"},
    ),
    "vespo": ({}, {"loss_type": "vespo", "aggregation": "token-mean"}),
}
"""TRL's `loss_type` → keys there, options here."""


@pytest.mark.parametrize("loss_type", OTHER_LOSSES)
def test_other_losses_and_gradients_equal_trl(make_trl, loss_type):  # noqa: F811
    """With a KL beside them. LUSPO's sum over tokens is divided by the response limit here. In VESPO's w, to the power
    of k, the rounding of TRL's head, which works in float32, counts several times for each token of a response."""
    dtype, rows = torch.float64, batch()
    rounding = 1e-4 if loss_type == "vespo" else 1e-5
    theirs, ours = OTHER_LOSSES[loss_type]
    trl = make_trl(dtype, loss_type=loss_type, beta=0.04, **theirs)
    trainer = make_trainer(tiny_model(FAMILY, dtype=dtype), temperature=TEMPERATURE, micro_batch_tokens=50)
    columns = {"advantages": ADVANTAGES, "old_logprobs": OLD, "ref_logprobs": REF}
    loss = loss_of(grpo, GRPOOptions(kl_coef=0.04, **ours))
    with ExactFloat64():
        expected = trl._compute_loss(trl.model, trl_inputs(rows, dtype, old=True, ref=True))
        expected = expected / (MAX_RESPONSE_TOKENS if loss_type == "luspo" else 1)
        expected.backward()
        _, metrics = run_all(train(trainer, rows, columns, loss))
    assert metrics["actor/loss"] == pytest.approx(expected.item(), rel=rounding, abs=1e-6)
    if loss_type in ("cispo", "luspo"):
        assert 0.05 < metrics["actor/pg_clipfrac"] < 0.95, "the clip is part of the comparison"
    if loss_type == "vespo":
        assert 0.05 < metrics["actor/vespo_phi"] < 0.95, "the weight is part of the comparison"
    assert_equal_gradients(trainer, trl.model, rounding)


def test_masking_truncated_samples_equals_trl(make_trl):  # noqa: F811
    """TRL sets their mask to 0, tokens and denominator alike; here they are no rows of the batch."""
    dtype = torch.float64
    rows = batch()
    truncated = [i for i in range(len(rows)) if i % 3 == 1]
    trl = make_trl(dtype, loss_type="dapo", beta=0.0, epsilon=0.2, epsilon_high=0.28)
    inputs = trl_inputs(rows, dtype, old=True, ref=False)
    inputs["completion_mask"][truncated] = 0
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    kept: Rows = rows.select([i for i in range(len(rows)) if i not in truncated])
    trainer = make_trainer(tiny_model(FAMILY, dtype=dtype), temperature=TEMPERATURE, micro_batch_tokens=50)
    loss = loss_of(grpo, GRPOOptions(clip_high=0.28, aggregation="token-mean"))
    columns = {"advantages": ADVANTAGES, "old_logprobs": OLD}
    with ExactFloat64():
        expected = trl._compute_loss(trl.model, inputs)
        expected.backward()
        _, metrics = run_all(train(trainer, kept, columns, loss))
    assert metrics["actor/loss"] == pytest.approx(expected.item(), rel=0, abs=1e-6)
    assert_equal_gradients(trainer, trl.model, 1e-6)
