"""The same batch through TRL's GRPOTrainer: loss and gradients equal. All that imports TRL stands here; it is slow."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.algorithms.grpo import GRPOOptions, grpo
from plait.data.rows import Rows
from plait.dataflow import Score
from tests.algorithms.flows import loss_of
from tests.cases import slow_but
from tests.models.tiny import tiny, tiny_model, tiny_tokenizer
from tests.training.batches import (
    ADVANTAGES,
    MAX_RESPONSE_TOKENS,
    OLD,
    REF,
    make_trainer,
    random_rows,
    run_all,
    train,
    with_policy_columns,
)
from tests.training.exact import ExactFloat64

pytest.importorskip("trl")

TEMPERATURE = 0.7
FAMILY = "qwen2"  # untied head, biases
LOSS_TYPES = {"grpo": "seq-mean-token-mean", "dapo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm"}


@pytest.fixture(scope="module")
def make_trl(tmp_path_factory):
    """A function that makes TRL's own trainer around a fresh tiny model, never run beyond its loss."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    folder = str(tmp_path_factory.mktemp("model"))
    tiny(FAMILY).save_pretrained(folder)  # with beta > 0 TRL loads a reference by the model's name

    def make(dtype: torch.dtype, *, weigh_kl: bool = False, **config):
        model = tiny(FAMILY, dtype=dtype)
        model.config._name_or_path = folder
        args = GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")),
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=MAX_RESPONSE_TOKENS,
            temperature=TEMPERATURE,
            use_cpu=True,
            bf16=False,
            report_to="none",
            use_bias_correction_kl=weigh_kl,  # True by default there
            **config,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["a"] * 4}),
            processing_class=tiny_tokenizer(),
        )
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        return trainer

    return make


def padded(parts: list[np.ndarray], dtype: torch.dtype, *, left: bool = False) -> torch.Tensor:
    width = max(map(len, parts))
    out = torch.zeros(len(parts), width, dtype=dtype)
    for row, part in zip(out, parts, strict=True):
        row[slice(width - len(part), None) if left else slice(len(part))] = torch.as_tensor(part, dtype=dtype)
    return out


def trl_inputs(rows: Rows, dtype: torch.dtype, *, old: bool, ref: bool) -> dict[str, torch.Tensor]:
    prompts = [np.array(sample.prompt.token_ids) for sample in rows.samples]
    responses = [np.array(sample.token_ids) for sample in rows.samples]
    ones = [np.ones(len(part)) for part in prompts], [np.ones(len(part)) for part in responses]
    inputs = {
        "prompt_ids": padded(prompts, torch.int64, left=True),
        "prompt_mask": padded(ones[0], torch.int64, left=True),
        "completion_ids": padded(responses, torch.int64),
        "completion_mask": padded(ones[1], torch.int64),
        "advantages": torch.tensor(rows.columns[ADVANTAGES], dtype=dtype),
        "num_items_in_batch": torch.tensor(rows.num_tokens),
    }
    for name, column, wanted in (("old_per_token_logps", OLD, old), ("ref_per_token_logps", REF, ref)):
        if wanted:
            inputs[name] = padded(np.split(rows.columns[column], rows.offsets[1:-1]), dtype)
    return inputs


def batch() -> Rows:
    """Old and reference log-probs near the model's own, so that some tokens of either sign are clipped."""
    rows = random_rows(seed=3)
    _, logprobs = run_all(make_trainer(tiny_model(FAMILY)).score(rows, Score.LOGPROBS))
    return with_policy_columns(rows, logprobs)


LOSSES = [
    ("grpo", 0.0, 0.2, True, False, 0.0, None),
    ("grpo", 0.04, 0.28, True, False, 0.0, None),
    ("grpo", 0.04, 0.2, False, False, 0.0, None),
    ("grpo", 0.5, 0.28, True, True, 0.0, None),
    ("grpo", 0.5, 0.28, False, True, 0.0, None),
    ("dapo", 0.0, 0.28, True, False, 0.0, None),
    ("dapo", 0.04, 0.28, False, False, 0.0, None),
    ("dapo", 0.5, 0.28, True, True, 0.05, None),  # its bonus is a mean over tokens, whatever the loss
    ("dr_grpo", 0.0, 0.2, False, False, 0.0, None),
    ("dr_grpo", 0.04, 0.28, True, False, 0.0, None),
    ("dapo", 0.04, 0.28, True, False, 0.0, 0.7),
    ("grpo", 0.04, 0.2, False, False, 0.0, 0.7),
]


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    ("loss_type", "beta", "epsilon_high", "old", "weigh_kl", "entropy_coef", "masked_above"),
    slow_but(LOSSES[1::2], LOSSES),
)
def test_loss_and_gradients_equal_trl(
    make_trl, dtype, loss_type, beta, epsilon_high, old, weigh_kl, entropy_coef, masked_above
):
    rows = batch()
    trl = make_trl(
        dtype,
        weigh_kl=weigh_kl,
        loss_type=loss_type,
        beta=beta,
        epsilon=0.2,
        epsilon_high=epsilon_high,
        entropy_coef=entropy_coef,
        off_policy_mask_threshold=masked_above,
    )
    trainer = make_trainer(tiny_model(FAMILY, dtype=dtype), temperature=TEMPERATURE, micro_batch_tokens=50)
    options = GRPOOptions(
        kl_coef=beta,
        clip_low=0.2,
        clip_high=epsilon_high,
        aggregation=LOSS_TYPES[loss_type],
        kl_estimator="k3",
        weigh_kl_by_ratio=weigh_kl,
        entropy_coef=entropy_coef,
        off_policy_mask_threshold=masked_above,
    )
    columns = {"advantages": ADVANTAGES}
    columns |= {"old_logprobs": OLD} if old else {}
    columns |= {"ref_logprobs": REF} if beta else {}
    loss = loss_of(grpo, options)
    with ExactFloat64():
        inputs = trl_inputs(rows, dtype, old=old, ref=beta > 0)
        if masked_above is not None:
            inputs["sampling_per_token_logps"] = padded(np.split(rows.sampling_logprobs, rows.offsets[1:-1]), dtype)
        expected = trl._compute_loss(trl.model, inputs)
        expected.backward()
        _, metrics = run_all(train(trainer, rows, columns, loss))

    # TRL's head works in float32 even for a float64 model, so float64 agrees to float32 rounding of the head alone.
    assert metrics["actor/loss"] == pytest.approx(expected.item(), rel=0, abs=1e-6)
    if old:
        assert 0.05 < metrics["actor/pg_clipfrac"] < 0.95, "the clip is part of the comparison"
    if masked_above is not None:
        assert 0.05 < metrics["actor/off_policy_masked"] < 0.95, "the mask is part of the comparison"
    theirs = {name: param.grad for name, param in trl.model.named_parameters()}
    largest = max(grad.abs().max().item() for grad in theirs.values())
    assert 0.1 < largest < 1
    tolerance = 1e-6 * largest if dtype is torch.float64 else 1e-6
    for block, start, stop in trainer.model.layout.entries:
        difference = trainer.optimizer.gradients[start:stop].view(block.shape) - theirs[block.param.name]
        assert difference.abs().max() <= tolerance, block.param.name
    logged = trl._metrics["train"]
    assert metrics["actor/entropy"] == pytest.approx(logged["entropy"][0], rel=1e-5)
    if beta and not weigh_kl:  # ours is the KL itself
        assert metrics["kl"] == pytest.approx(logged["kl"][0], rel=1e-5)
