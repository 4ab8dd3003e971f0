"""What the golden runs read: tiny random models by Transformers alone, data, rewards and a flow. Imports no plait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging

from tests.data.json_rows import written
from tests.models.tiny import tiny, tiny_config, tiny_tokenizer

FLOW = """
import numpy as np

from plait.dataflow import Level, per_group, per_sample


def baseline_flow(prompts, actor, ref, reward, critic):
    samples = actor.generate(prompts)
    greedy = actor.generate(prompts, samples_per_prompt=1, greedy=True)
    scores, baseline = reward.score(samples), reward.score(greedy)
    values = critic.values(samples)
    logprobs = ref.logprobs(samples)
    advantages = per_group(above, scores, baseline, name="advantages")
    returns = per_sample(spread, scores, values, name="returns", level=Level.TOKEN)
    critic.train(samples, loss=squared, returns=returns)
    actor.train(samples, loss=pushed, advantages=advantages, ref_logprobs=logprobs)
    after = actor.logprobs(samples)
    actor.train(samples, loss=pushed, mini_batches=2, advantages=advantages, ref_logprobs=after)


def above(scores, baseline):
    return scores - baseline.mean()


def spread(score, values):
    return np.full_like(values, score)


def squared(batch, returns):
    return batch.aggregate((batch.values - returns) ** 2, "token-mean")


def pushed(batch, advantages, ref_logprobs):
    return batch.aggregate(-advantages * batch.logprobs + 0.1 * (batch.logprobs - ref_logprobs) ** 2, "token-mean")
"""
REWARDS = """
def sevens(completions, **columns):
    return [text.count("7") + 0.01 * len(text) for text in completions]


def cost(completions, **columns):
    return [0.1 * len(text) - 1.0 for text in completions]
"""
SMALL: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "head_dim": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
"""The models whose checkpoints lie in the repository."""


def write_inputs(folder: Path) -> None:
    """Fill an empty folder."""
    for family in ("llama", "gemma2", "qwen2", "qwen3_moe"):
        _save(tiny(family, dtype=torch.float32), folder / family)
    _save(tiny("llama", dtype=torch.float32, **SMALL), folder / "small")
    for seed, name in enumerate(("scorer", "other_scorer")):
        _save(_scorer(seed), folder / name)
    (folder / "flow.py").write_text(FLOW)
    (folder / "rewards.py").write_text(REWARDS)
    questions = [(f"what is {i} plus 4?", str(i + 4), str(i)) for i in range(12)]
    written(folder / "prompts.jsonl", [{"prompt": question} for question, _, _ in questions])
    written(folder / "examples.jsonl", [{"prompt": q, "completion": right} for q, right, _ in questions])
    written(folder / "pairs.jsonl", [{"prompt": q, "chosen": good, "rejected": bad} for q, good, bad in questions])


def _scorer(seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = tiny_config("llama", num_labels=1)
        module = AutoModelForSequenceClassification.from_config(config)
        with torch.no_grad():
            for param in module.parameters():
                if param.ndim > 1:
                    param.normal_(std=0.2)
    return module


def _save(module: Any, folder: Path) -> None:
    logging.disable_progress_bar()
    module.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
