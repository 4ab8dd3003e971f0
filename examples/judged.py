"""GRPO whose reward is a model's verdict, in place of a function: a judge reads each response and says a number.

    plait train examples/my_recipe.yaml --algorithm examples/judged.py:judged --reward.functions '[]'
    plait train examples/my_recipe.yaml --algorithm examples/judged.py:judged --reward.functions '[]' \
        --options.own true --options.verdicts 4 --options.kl_coef 0.05

The judge is the role `judge`: `judge.model`, or the model that the run began with; with `options.own` the policy itself
(Self-Rewarding Language Models: Yuan et al. 2024, arXiv 2401.10020). The mean of its verdicts of a response counts.

It shows how a judge is asked, and how its words become a reward. A model of 135M parameters is no good judge: it says
no number, or 10 of almost everything, so there is little to learn. Take a larger one with the same tokens.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import Field

from plait.algorithms.advantages import standardised
from plait.algorithms.kl import KLPlace
from plait.algorithms.options import PolicyOptions
from plait.algorithms.policy import policy_logprobs, train_policy
from plait.dataflow import Prompts, Role, build_prompts, parse_grades, per_group, per_sample

QUESTION = """A user asked:

{asked}

An assistant answered:

{said}

How good is the answer, from 0 (useless) to 10 (perfect)? Say one number and nothing else."""


class Options(PolicyOptions):
    verdicts: int = Field(2, ge=1)
    """Of each response; a single one is drawn greedily."""
    verdict_tokens: int = Field(8, ge=1)
    """Of a verdict, at most."""
    own: bool = False
    """The policy judges, as it is in the step."""


def judged(prompts: Prompts, actor: Role, judge: Role, ref: Role, options: Options) -> None:
    """The flow."""
    samples = actor.generate(prompts)
    verdicts = (actor if options.own else judge).generate(
        build_prompts(samples, asks_for_a_number),
        samples_per_prompt=options.verdicts,
        greedy=options.verdicts == 1,
        max_tokens=options.verdict_tokens,
    )
    grades = parse_grades(samples, mean_number, name="grade", verdicts=verdicts)
    logprobs = policy_logprobs(actor, ref, samples, options, KLPlace.LOSS)
    train_policy(
        actor,
        samples,
        per_group(advantages_of_read, grades, name="advantages", least_samples=2),
        logprobs,
        keep=per_sample(is_read, grades, name="read"),
    )


def asks_for_a_number(prompts: Sequence[Any], completions: Sequence[Any]) -> list[str]:
    """Called for the samples of one prompt at a time, as a reward function is; what it returns is what the judge is
    asked: a text is the user's message."""
    return [
        QUESTION.format(asked=text_of(asked), said=text_of(said))
        for asked, said in zip(prompts, completions, strict=True)
    ]


def text_of(messages: Any) -> str:
    """The last of some messages; of a text the text."""
    return messages if isinstance(messages, str) else str(messages[-1]["content"])


def mean_number(verdicts: Sequence[Sequence[str]]) -> list[float | None]:
    """For each sample the mean of the numbers in its verdicts; None where none has a number from 0 to 10."""
    read = [[number for text in of_one if (number := number_in(text)) is not None] for of_one in verdicts]
    return [float(np.mean(numbers)) if numbers else None for numbers in read]


def number_in(text: str) -> float | None:
    """The first number of a verdict."""
    found = re.search(r"\d+(\.\d+)?", text)
    return float(found[0]) if found is not None and float(found[0]) <= 10 else None


def is_read(grade: float) -> float:
    """1 where a verdict has a number; samples without one are not trained on."""
    return float(math.isfinite(grade))


def advantages_of_read(grades: np.ndarray) -> np.ndarray:
    """GRPO's advantages among the samples whose verdicts have a number; 0 of the others."""
    read, advantages = np.isfinite(grades), np.zeros(len(grades))
    if read.any():
        advantages[read] = standardised(grades[read], 1e-4)
    return advantages
