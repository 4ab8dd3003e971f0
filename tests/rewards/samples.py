"""Samples to score, and reward functions that fail in every way."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time
from typing import Any

from plait.data.records import FinishReason, Prompt, Sample


def group(uid: int, *texts: str, prompt: Any = "q", **columns: Any) -> list[Sample]:
    asked = Prompt(uid, "q", (1, 2), {"prompt": prompt, **columns})
    return [
        Sample(asked, index, tuple(range(len(text))), (0.0,) * len(text), text, FinishReason.STOP)
        for index, text in enumerate(texts)
    ]


def length(completions, **columns):
    return [float(len(text)) for text in completions]


def chars(completions):
    return [float(len(text)) for text in completions]


def slow_length(completions, **columns):
    """The longer, the sooner: later groups overtake."""
    time.sleep(0.02 * max(0, 6 - len(completions[0])))
    return length(completions)


def only_even(completions, **columns):
    return [float(len(text)) if len(text) % 2 == 0 else None for text in completions]


def faulty(completions, **columns):
    """Does what its completions say."""
    scores: list[Any] = []
    for text in completions:
        match text:
            case "raise":
                raise ValueError("cannot read this")
            case "exit":
                sys.exit(3)
            case "hang":
                while True:
                    time.sleep(0.01)
            case "hang in C":
                re.match(r"(a+)+$", "a" * 60 + "b")
            case "die":
                os._exit(7)
            case "segfault":
                ctypes.string_at(0)
            case "orphan":
                subprocess.Popen(["sleep", "1000"])
                os._exit(9)
            case "nan":
                scores.append(float("nan"))
            case "inf":
                scores.append(float("-inf"))
            case "text":
                scores.append("1.0")
            case "list":
                scores.append([1.0])
            case "skip":
                continue
            case "bare":
                return 1.0
            case _:
                scores.append(float(len(text)))
    return scores


def one_for_all(completions, **columns):
    """A miscount that no sample shows alone."""
    return [1.0]


def crowd_shy(completions, **columns):
    """A failure that no sample shows alone."""
    if len(completions) > 1:
        raise ConnectionError("too many at once")
    return [2.0]


def noisy(completions, **columns):
    import random

    return [random.random() for _ in completions]


def logging(completions, log_extra, log_metric, **columns):
    log_extra("shout", [text.upper() for text in completions])
    log_metric("longest", max(map(len, completions)))
    return length(completions)


async def later(completions, **columns):
    return length(completions)


def see(prompts, completions, completion_ids, answer, log_extra, **columns):
    log_extra("seen", [list(row) for row in zip(prompts, completions, completion_ids, answer, strict=True)])
    return [0.0] * len(prompts)


def modules(completions, log_extra, **columns):
    heavy = [name for name in ("torch", "numpy", "transformers", "pydantic") if name in sys.modules]
    log_extra("heavy", [heavy] * len(completions))
    return [0.0] * len(completions)


def pids(completions, log_extra, **columns):
    log_extra("pid", [os.getpid()] * len(completions))
    return [0.0] * len(completions)


class Weighted:
    """A picklable callable."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, completions, **columns):
        return [self.factor * len(text) for text in completions]
