"""A calculator for the model: what follows its turns (`turns.reply`), and a reward for the answer that it gives then.

    plait train examples/calculator.yaml

The model calls it by writing <calc>17 + 25</calc>, which ends its turn; the result is a message of the role `tool`. A
turn without a call is the answer.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping, Sequence

CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def reply(messages: Sequence[Mapping[str, str]], **columns: object) -> dict[str, str] | None:
    """The result of the last call in the model's last turn; None, which ends the conversation, if it calls nothing."""
    calls = CALL.findall(messages[-1]["content"])
    return {"role": "tool", "content": calculated(calls[-1])} if calls else None


def calculated(text: str) -> str:
    """The value of an expression of whole numbers, or what is wrong with it: the model reads either."""
    try:
        return str(value_of(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, KeyError):
        return f"cannot calculate {text.strip()!r}"


def value_of(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATORS[type(op)](value_of(left), value_of(right))
    raise ValueError(f"no expression of whole numbers: {ast.unparse(node)}")


def right(turns: Sequence[Sequence[Mapping[str, str]]], answer: Sequence[str], **columns: object) -> list[float]:
    """1 if the last number of the model's last turn is the answer; 0.2 for a call, so that it learns to make one."""
    scores = []
    for said, known in zip(turns, answer, strict=True):
        numbers = re.findall(r"-?\d+", said[-1]["content"])
        called = any(message["role"] == "tool" for message in said)
        scores.append(float(numbers[-1:] == [known]) + 0.2 * called)
    return scores
