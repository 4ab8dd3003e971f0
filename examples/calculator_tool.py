"""A calculator as a tool that the model is told of and calls in its own format (`turns.tools`), and a reward.

    plait train examples/calculator_tool.yaml

The chat template tells the model of the tool by the types and the docstring of the function.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from calculator import calculated


def calculate(expression: str) -> str:
    """Calculates with whole numbers.

    Args:
        expression: What to calculate, with +, - and *, such as 17 + 25 * 3.

    Returns:
        The value.
    """
    return calculated(expression)


def right(turns: Sequence[Sequence[Mapping[str, str]]], answer: Sequence[str], **columns: object) -> list[float]:
    """1 if the last number of the model's last turn is the answer; 0.2 for a call that gave a result."""
    scores = []
    for said, known in zip(turns, answer, strict=True):
        numbers = re.findall(r"-?\d+", said[-1]["content"])
        called = any(message["role"] == "tool" and "is_error" not in message for message in said)
        scores.append(float(numbers[-1:] == [known]) + 0.2 * called)
    return scores
