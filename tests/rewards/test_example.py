"""The reward functions of `examples/length_reward.py`, by hand."""

from __future__ import annotations

from pathlib import Path

from plait.rewards.functions import reward_functions
from plait.rewards.pool import RewardPool
from tests.rewards.samples import group

EXAMPLE = Path(__file__).parents[2] / "examples" / "length_reward.py"


def test_the_example_runs_as_it_stands():
    with RewardPool(reward_functions([f"{EXAMPLE}:brief", f"{EXAMPLE}:close_to_the_answer"], [1.0, 10.0])) as pool:
        pool.start(["prompt", "answer"])
        one, two = pool.score(group(0, "it is 12.", "9", "no", answer="12") + group(1, "x" * 80, answer="blue"))
    assert one.scores["brief"] == (1 - 9 / 64, 1 - 1 / 64, 1 - 2 / 64)
    assert one.scores["close_to_the_answer"] == (1.0, 0.25, 0.0)
    assert two.rewards == (0.0,), "past the longest, and the other does not apply"
