"""A reward of your own: any function in TRL's signature.

    plait train RECIPE --reward.functions '["task", "examples/length_reward.py:brief"]' --reward.weights '[1.0, 0.1]'

It gets lists, one entry per sample, and gives one number per sample: `completions` are the responses (texts for text
prompts, messages otherwise), `completion_ids` their token ids, and every column of the data comes under its own name.
None says that the function does not apply to a sample. It runs in a worker process of its own, with a time limit.
"""

from __future__ import annotations

LONGEST = 64
"""Tokens from which on a response earns nothing."""


def brief(completion_ids: list[list[int]], **columns: object) -> list[float]:
    """1 for an empty response, falling evenly to 0 at LONGEST tokens."""
    return [max(0.0, 1 - len(ids) / LONGEST) for ids in completion_ids]


def close_to_the_answer(completions: list[str], answer: list[str], **columns: object) -> list[float | None]:
    """1/(1 + distance) to a whole-number answer; None, so left out, where the answer is no whole number."""
    rewards: list[float | None] = []
    for completion, right in zip(completions, answer, strict=True):
        if not right.removeprefix("-").isdecimal():
            rewards.append(None)
            continue
        last = completion.split()[-1].rstrip(".") if completion.split() else ""
        given = int(last) if last.removeprefix("-").isdecimal() else None
        rewards.append(0.0 if given is None else 1 / (1 + abs(given - int(right))))
    return rewards
