"""Reward files that users may write: each as text, and what is said of it.

`answer` does with a file what a worker process does with it, in this process: it loads the function and answers a call
over three samples.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from plait.rewards.calls import call_arguments
from plait.rewards.loading import load_function
from plait.rewards.signature import RewardCall
from plait.rewards.worker import reply_to
from tests.fuzz.user_code import ERRORS, NO_NUMBERS
from tests.rewards.samples import group

HEAD = "import math, os, sys\nimport numpy as np, torch\n"
COUNTED = "returned {} scores for 3 samples"


def trl(body: str, parameters: str = "completions, log_extra, log_metric, **columns") -> str:
    return f"{HEAD}def f({parameters}):\n    {body}\n"


def verl(body: str, parameters: str = "solution_str, log_metric=None") -> str:
    return trl(body, parameters)


def openrlhf(body: str, parameters: str = "queries, prompts, labels") -> str:
    return trl(body, parameters)


LOADED: dict[str, tuple[str, str]] = {
    f"at import: {code}": (f"{HEAD}{code}\ndef f(completions): ...\n", said) for code, said in ERRORS.items()
} | {
    "no function": (HEAD, "has no `f`"),
    "a number": ("f = 3", "is not callable, but int"),
    "by position only": (trl("pass", "completions, /"), "takes `completions` by position only"),
    "no response": (trl("pass", "prompts"), "gets no response"),
    "two forms": (trl("pass", "completions, solution_str"), "fits more than one form"),
    "a class that needs more": (
        "class f:\n    def __init__(self, x): ...",
        "f` is a class; give a function",
    ),
}

FAILS: dict[str, tuple[str, str]] = (
    {f"in the function: {code}": (trl(code), said) for code, said in ERRORS.items()}
    | {f"verl: {code}": (verl(code), said) for code, said in ERRORS.items()}
    | {f"awaited: {code}": (trl(code).replace("def f", "async def f"), said) for code, said in ERRORS.items()}
    | {
        f"returns {value}": (trl(f"return {value}"), said)
        for value, said in {
            "None": "returned None, expected a list with a number for each of 3 samples",
            "1.0": "returned float 1.0, expected a list with a number for each of 3 samples",
            "'abc'": "returned str 'abc', expected a list with a number for each of 3 samples",
            "b'abc'": "expected a list with a number for each of 3 samples",
            "{0: 1.0, 1: 1.0, 2: 1.0}": "returned dict",
            "{1.0, 2.0, 3.0}": "returned set",
            "(x for x in range(3))": "returned generator",
            "[]": COUNTED.format(0),
            "[1.0]": COUNTED.format(1),
            "[1.0] * 10**5": COUNTED.format(10**5),
            "np.ones(2)": COUNTED.format(2),
            "np.ones((3, 2))": "returned list [1.0, 1.0] where a number or None is expected",
            "torch.ones(3, dtype=torch.complex64)": "returned complex (1+0j) where a number or None is expected",
            "[1.0, float('nan'), 1.0]": "returned nan, which is no score",
            "[[float('nan')]] * 3": "returned nan for turn 1, which is no score",
            "[[None]] * 3": "returned None for turn 1 where a number is expected",
            "[[]] * 3": "a number for each turn of the sample: 1, not 0",
            "[10**400, 1, 1]": "where a number or None is expected",
            **{f"[{value}] * 3": "None" if value == "None" else "where a number or None" for value in NO_NUMBERS},
        }.items()
        if said != "None"
    }
    | {
        "verl: a dict without score": (verl("return {'reward': 1.0}"), "a dict with `score`, found keys ['reward']"),
        "verl: None in a dict of text": (verl("return {'score': 'abc'}"), "returned str 'abc' where a number"),
        "OpenRLHF: a dict without rewards": (openrlhf("return {'scores': 1}"), "a dict with `rewards`"),
        "OpenRLHF: miscounted logs": (
            openrlhf("return {'rewards': [1.0] * 3, 'extra_logs': {'a': [1.0]}}"),
            "`a` has 1 values for 3 samples",
        ),
        "OpenRLHF: extra_logs of a text": (openrlhf("return {'rewards': [1.0] * 3, 'extra_logs': 'abc'}"), "raised"),
        "a column too short": (trl("log_extra('a', [1.0]); return [1.0] * 3"), "log_extra('a') gave 1 values"),
        "a column of a number": (
            trl("log_extra('a', 3); return [1.0] * 3"),
            "expected a list with one value per sample, found int",
        ),
        "a column of a text": (
            trl("log_extra('a', 'abc'); return [1.0] * 3"),
            "expected a list with one value per sample",
        ),
        "a column that holds itself": (
            trl("x = []; x.append(x); log_extra('a', [x] * 3); return [1.0] * 3"),
            "raised ValueError: Circular reference",
        ),
        "a column of keys that are none": (
            trl("log_extra('a', [{(1, 2): 3}] * 3); return [1.0] * 3"),
            "raised TypeError",
        ),
        "a curve of a text": (trl("log_metric('m', 'abc'); return [1.0] * 3"), "expected a finite number, found str"),
        "the curve step": (trl("log_metric('step', 1); return [1.0] * 3"), "`step` is a column of every log"),
        "an argument too many": (trl("return log_metric('m')"), "raised TypeError"),
    }
)

FINE: dict[str, str] = {
    "a list": trl("return [1.0, None, 3]"),
    "a tuple of booleans": trl("return (True, False, True)"),
    "an array": trl("return np.arange(3)"),
    "an array of columns": trl("return np.ones((3, 1))"),
    "a number for each turn": trl("return [[1.0], (True,), np.ones(1)]"),
    "a tensor": trl("return torch.ones(3, requires_grad=True).detach()"),
    "bfloat16": trl("return torch.ones(3, dtype=torch.bfloat16)"),
    "prints": trl("print('x'); print('y', file=sys.stderr); return [1.0] * 3"),
    "logs": trl("log_extra('a', np.ones(3)); log_metric('m', torch.tensor(1.0)); return [1.0] * 3"),
    "odd values in a column": trl("log_extra('a', [object(), float('nan'), {1: print}]); return [1.0] * 3"),
    "a thread": trl("__import__('threading').Thread(target=int, daemon=True).start(); return [1.0] * 3"),
    "verl": verl("return {'score': len(solution_str), 'note': 'x'}"),
    "OpenRLHF": openrlhf("return {'rewards': torch.ones(3), 'extra_logs': {'n': 3}}"),
    "async": trl("return [1.0] * 3").replace("def f", "async def f"),
}


def answer(folder: Path, source: str) -> dict[str, Any]:
    """The worker's reply to a call of the file's function `f`. Raises ConfigError: it cannot be loaded."""
    file = folder / "mine.py"
    file.write_text(source)
    function = RewardCall("f", load_function(f"{file}:f"))
    samples = group(0, "a", "bb", "ccc", labels="x")
    texts = [("q", sample.text) for sample in samples]
    request = {"arguments": call_arguments(samples), "texts": texts, "turns": [1, 1, 1]}
    return reply_to(pickle.dumps(request), lambda request: function)[0]
