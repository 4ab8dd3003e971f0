"""GRPO with an advantage for each turn: what follows it is compared with what followed in the group's other samples.

    plait train examples/calculator.yaml --algorithm examples/turn_credit.py:each_turn \
        --reward.functions '["examples/turn_credit.py:calls_and_answer"]'

Responses of one turn have GRPO's advantage.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from plait.dataflow import Level, Prompts, Role, per_group


def calls_and_answer(
    turns: Sequence[Sequence[Mapping[str, str]]], answer: Sequence[str], **columns: object
) -> list[list[float]]:
    """For each turn of the model: 0.2 if it calls the calculator, 1 if it is the last and has the answer."""
    scores = []
    for said, known in zip(turns, answer, strict=True):
        own = [message["content"] for message in said if message["role"] == "assistant"]
        scores.append([0.2 * ("<calc>" in text) for text in own])
        scores[-1][-1] += known in own[-1]
    return scores


def each_turn(prompts: Prompts, actor: Role, reward: Role) -> None:
    samples = actor.generate(prompts)
    given = reward.score(samples).by_turn
    advantages = per_group(of_turns, given, samples.turn, name="advantages", level=Level.TOKEN, least_samples=2)
    actor.train(samples, loss=pushed, advantages=advantages)


def of_turns(given: list[np.ndarray], turns: list[np.ndarray]) -> list[np.ndarray]:
    """Per token (G − mean G) / (std G + 1e-4), where G is what the sample got from the token's turn on; mean and
    deviation are those of the samples that have this turn. 0 where they got the same."""
    advantages = [np.zeros(len(turn)) for turn in turns]
    for k in range(int(max(turn.max() for turn in turns)) + 1):
        have = [i for i, turn in enumerate(turns) if k in turn]
        to_go = np.array([given[i][turns[i] >= k].sum() for i in have])
        if np.ptp(to_go) > 0:
            for i, value in zip(have, (to_go - to_go.mean()) / (to_go.std(ddof=1) + 1e-4), strict=True):
                advantages[i][turns[i] == k] = value
    return advantages


def pushed(batch: Any, advantages: Any) -> Any:
    return batch.aggregate(-advantages * batch.logprobs, "seq-mean-token-mean")
