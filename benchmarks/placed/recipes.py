"""The work: GRPO with a reference, every response of the same length, so that half a batch is half the work."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo.workload import full, tiny

REWARD = '''
def distinct(completions, **columns):
    """Next to no work: the share of distinct characters."""
    return [len(set(text)) / max(1, len(text)) for text in completions]
'''


def grpo(folder: Path, *, is_tiny: bool, prompts: int, samples: int, steps: int) -> dict[str, Any]:
    """A recipe as a mapping; its files are written to `folder`. One thread for each process."""
    sizes: dict[str, Any] = {"num_prompts": prompts, "samples_per_prompt": samples, "threads": 1, "num_steps": steps}
    work = tiny(folder / "model", **sizes) if is_tiny else full(**sizes)
    keys = grpo_of(folder, work.model, work.prompts, samples=samples, steps=steps, tokens=work.max_response_tokens)
    return keys | {"dtype": work.dtype}


def grpo_of(
    folder: Path, model: str, prompts: Sequence[str], *, samples: int, steps: int, tokens: int
) -> dict[str, Any]:
    """As `grpo`, of a model's checkpoint and prompts that are given.

    Args:
        tokens: of each response.
    """
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    (folder / "reward.py").write_text(REWARD)
    return {
        "model": model,
        "algorithm": "grpo",
        "options": {"kl_coef": 0.04},
        "steps": steps,
        "prompts_per_step": len(prompts),
        "samples_per_prompt": samples,
        "data": {"source": str(folder / "prompts.jsonl"), "chat_template": False},
        "reward": {"functions": [f"{folder}/reward.py:distinct"], "workers": 1},
        # No token ends a response: every one reaches the limit. What is timed here are not drafts.
        "sampling": {"max_response_tokens": tokens, "stop_token_ids": [], "speculation": "off"},
        "optimizer": {"learning_rate": 1e-6},
        "checkpoint": {"every": 0},
        "doctor": {"enabled": False},
        "threads": 1,
        "micro_batch_tokens": 4096,
    }


def write_reward_model(model: str, folder: Path) -> str:
    """A scorer that begins as a language model's backbone, with a random head; returns its folder, made once."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    if not folder.is_dir():
        torch.manual_seed(0)
        scorer = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
        scorer.save_pretrained(folder)
        AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return str(folder)
