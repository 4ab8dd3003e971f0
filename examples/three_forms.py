"""One reward in each of the three forms that plait takes; plait knows a form by the names of the parameters.

python examples/three_forms.py        scores two sums without a model
plait train RECIPE --data.source examples/sums.jsonl --reward.functions '["examples/three_forms.py:brief", ...]'
"""

from __future__ import annotations

from typing import Any


def brief(completions: list[str], **columns: Any) -> list[float | None]:
    """TRL's: lists with one entry per sample, every column of the data by its name; None where it does not apply."""
    return [1 / (1 + len(text)) if text else None for text in completions]


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """verl's: one sample at a time; what the dict holds besides `score` is logged."""
    words = solution_str.split()
    return {"score": float(ground_truth in words), "words": len(words), "source": data_source}


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    """OpenRLHF's: a query is the prompt with its response; `rewards` train, the rest is logged."""
    responses = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    ends = [float(text.rstrip(".").endswith(label)) for text, label in zip(responses, labels, strict=True)]
    return {"rewards": ends, "scores": ends, "extra_logs": {"characters": [len(text) for text in responses]}}


if __name__ == "__main__":
    from plait.data.records import FinishReason, Prompt, Sample
    from plait.rewards.functions import reward_functions
    from plait.rewards.pool import RewardPool

    row = {"prompt": "2 + 3 = ", "data_source": "sums", "ground_truth": "5", "label": "5"}
    prompt = Prompt(uid=0, text=row["prompt"], token_ids=(1,), columns=row)
    texts = ["5", "5 or 6", ""]
    group = [Sample(prompt, index, (), (), text, FinishReason.STOP) for index, text in enumerate(texts)]
    with RewardPool(reward_functions([brief, compute_score, reward_func], [0.5, 1.0, 1.0])) as pool:
        pool.start(list(row))
        (scores,) = pool.score(group)
    for name, values in scores.scores.items():
        print(f"{name:14}", *(f"{value:6.3f}" for value in values))
    print(f"{'reward':14}", *(f"{value:6.3f}" for value in scores.rewards))
    print("logged:", dict(scores.extras))
