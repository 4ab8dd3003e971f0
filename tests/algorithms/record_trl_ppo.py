"""Record what the PPO trainer of TRL 1.10 computes on a fixed small batch: `python record_trl_ppo.py > trl_ppo.json`.

Runs in an environment with trl 1.10 (`benchmarks/ppo/setup_peer.sh` makes one), which has no plait. The trainer's own
`train` method runs: truncation, masks, rewards, whitening, GAE, both losses and their backward pass are its code.
Only models are replaced, by tables of logits and values, and generation by a fixed batch.

Two cases. In `full` all responses are as long as the limit; the definitions then coincide. In `ragged` some end before:
TRL gives their score one token after the last, in a state of its own, and learns a value of that state.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import numpy as np
import torch
from torch import Tensor
from trl.experimental.ppo import ppo_trainer

RESPONSES, TOKENS, VOCAB = 6, 5, 7
EOS, PAD = 5, 6
WHITEN, MEAN = ppo_trainer.masked_whiten, ppo_trainer.masked_mean
LENGTHS = {"full": [5] * RESPONSES, "ragged": [5, 3, 5, 1, 4, 2]}


class Tables(torch.nn.Module):
    """Stands for policy and critic: logits [responses, tokens, vocab], values [responses, tokens]."""

    def __init__(self, logits: Tensor, values: Tensor) -> None:
        super().__init__()
        self.logits, self.values = torch.nn.Parameter(logits), torch.nn.Parameter(values)
        self.policy, self.value_model = None, None


class Recorder:
    """Stands for the optimizer: keeps the gradients of each step, and moves nothing."""

    def __init__(self, tables: Tables) -> None:
        self.tables, self.steps = tables, []

    def step(self) -> None:
        self.steps.append({"logits": self.tables.logits.grad.tolist(), "values": self.tables.values.grad.tolist()})

    def zero_grad(self) -> None:
        self.tables.zero_grad(set_to_none=True)


def record(lengths: list[int], **settings: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def numbers(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.tensor(rng.normal(scale=scale, size=shape).round(3))

    tokens = torch.tensor(rng.integers(0, EOS, (RESPONSES, TOKENS)))
    for row, length in enumerate(lengths):
        if length < TOKENS or row % 2 == 0:
            tokens[row, length - 1] = EOS
            tokens[row, length:] = PAD
    sampled, reference = numbers(RESPONSES, TOKENS, VOCAB), numbers(RESPONSES, TOKENS, VOCAB)
    old_values, scores = numbers(RESPONSES, TOKENS), numbers(RESPONSES)
    tables = Tables(sampled + numbers(*sampled.shape, scale=0.4), old_values + numbers(*old_values.shape, scale=0.4))
    given = {
        "tokens": tokens,
        "lengths": torch.tensor(lengths),
        "sampled_logits": sampled,
        "ref_logits": reference,
        "old_values": old_values,
        "scores": scores,
        "new_logits": tables.logits.detach().clone(),
        "new_values": tables.values.detach().clone(),
    }
    optimizer, logged, seen = Recorder(tables), [], {"whitened": [], "members": [], "means": []}
    reward_model, ref_policy = object(), object()
    queries = torch.arange(RESPONSES)[:, None]

    def forward(model: Any, query_responses: Tensor, pad: int) -> Any:
        rows = query_responses[:, 0]
        if model is ref_policy:
            return SimpleNamespace(logits=with_ends(reference[rows]))
        seen["members"].append(rows.tolist())
        return SimpleNamespace(logits=with_ends(tables.logits[rows])), with_ends(tables.values[rows])[..., None]

    def with_ends(values: Tensor) -> Tensor:
        """One position more: what follows the last token, which the trainer cuts off."""
        return torch.cat([values, torch.zeros_like(values[:, :1])], 1)

    def get_reward(model: Any, query_responses: Tensor, pad: int, context: int) -> tuple[Any, Any, Any]:
        rows = query_responses[:, 0]
        return with_ends(old_values[rows])[..., None], scores[rows].clone(), None

    def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
        result = WHITEN(values, mask, shift_mean)
        seen["whitened"].append({"before": (values * mask).tolist(), "after": (result * mask).tolist()})
        return result

    def masked_mean(values: Tensor, mask: Tensor, axis: Any = None) -> Tensor:
        result = MEAN(values, mask, axis)
        seen["means"].append(result.item())
        return result

    ppo_trainer.batch_generation = lambda *_: (torch.cat([queries, tokens], 1), sampled.clone())
    ppo_trainer.unwrap_model_for_generation = lambda model, *_, **__: nullcontext(model)
    ppo_trainer.forward, ppo_trainer.get_reward = forward, get_reward
    ppo_trainer.masked_whiten, ppo_trainer.masked_mean = masked_whiten, masked_mean
    args = {
        "response_length": TOKENS,
        "temperature": 1 - 1e-7,  # TRL adds 1e-7
        "num_ppo_epochs": 2,
        "num_mini_batches": 2,
        "gradient_accumulation_steps": 1,
        "num_total_batches": 1,
        "total_episodes": RESPONSES,
        "batch_size": RESPONSES,
        "local_batch_size": RESPONSES,
        "local_mini_batch_size": RESPONSES // 2,
        "per_device_train_batch_size": RESPONSES // 2,
        "local_rollout_forward_batch_size": RESPONSES,
        "num_sample_generations": 0,
        "logging_steps": None,
        "eval_steps": None,
        "save_steps": None,
        "ds3_gather_for_generation": False,
        "vf_coef": 1.0,
        **settings,
    }
    trainer = object.__new__(ppo_trainer.PPOTrainer)
    hook = SimpleNamespace(on_train_begin=keep, on_step_end=keep, on_train_end=keep)
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        print=lambda *_: None,
        unwrap_model=lambda model: model,
        accumulate=lambda model: nullcontext(),
        backward=lambda loss: loss.backward(),
        gather_for_metrics=lambda value: value,
    )
    attributes = {
        "args": SimpleNamespace(**args),
        "accelerator": accelerator,
        "optimizer": optimizer,
        "model": tables,
        "ref_model": ref_policy,
        "reward_model": reward_model,
        "processing_class": SimpleNamespace(pad_token_id=PAD, eos_token_id=EOS),
        "dataloader": [{"input_ids": queries}],
        "state": SimpleNamespace(),
        "train_dataset_len": RESPONSES,
        "callback_handler": hook,
        "control": SimpleNamespace(should_save=False),
        "stop_token_id": EOS,
        "lr_scheduler": SimpleNamespace(get_last_lr=lambda: [0.0], step=lambda: None),
        "is_deepspeed_enabled": False,
        "log": logged.append,
    }
    for name, value in attributes.items():
        setattr(trainer, name, value)
    np.random.seed(0)  # noqa: NPY002 (the trainer draws its mini-batches so)
    torch.set_default_dtype(torch.float64)
    trainer.train()
    means = seen["means"][-4 * 4 :]  # per optimizer step: twice the value loss, its clip share, policy loss, clip share
    return {
        "settings": settings,
        "given": {name: value.tolist() for name, value in given.items()},
        "whitened": seen["whitened"],
        "steps": [
            {"members": members, "gradients": gradients}
            | dict(zip(("vf", "vf_clipfrac", "pg_loss", "pg_clipfrac"), means[4 * i : 4 * i + 4], strict=True))
            for i, (members, gradients) in enumerate(zip(seen["members"], optimizer.steps, strict=True))
        ],
        "logged": {name: value for name, value in logged[0].items() if name.split("/")[0] in ("objective", "loss")},
    }


def keep(args: Any, state: Any, control: Any) -> Any:
    return control


if __name__ == "__main__":
    common = {"cliprange": 0.2, "cliprange_value": 0.2, "kl_coef": 0.05, "gamma": 0.98, "lam": 0.9}
    cases = {
        "full": record(LENGTHS["full"], **common, whiten_rewards=True, missing_eos_penalty=1.0, kl_estimator="k1"),
        "ragged": record(
            LENGTHS["ragged"], **common, whiten_rewards=False, missing_eos_penalty=None, kl_estimator="k3"
        ),
    }
    import trl

    json.dump({"trl": trl.__version__, "cases": cases}, sys.stdout, separators=(",", ":"))
    print()
