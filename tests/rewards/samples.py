"""Samples to score, and reward functions that fail in every way."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

from plait.data.records import FinishReason, Prompt, Reply, Sample


def group(uid: int, *texts: str, prompt: Any = "q", **columns: Any) -> list[Sample]:
    asked = Prompt(uid, "q", (1, 2), {"prompt": prompt, **columns})
    return [
        Sample(asked, index, tuple(range(len(text))), (0.0,) * len(text), text, FinishReason.STOP)
        for index, text in enumerate(texts)
    ]


def in_two_turns(sample: Sample) -> Sample:
    """The same tokens, with a reply behind the first one."""
    said = (("assistant", sample.text[0]), ("tool", "7"), ("assistant", sample.text[1:]))
    turns = tuple({"role": role, "content": content} for role, content in said)
    return replace(sample, replies=(Reply(1, (7,)),), turns=turns)


def length(completions, **columns):
    return [float(len(text)) for text in completions]


def chars(completions):
    return [float(len(text)) for text in completions]


def slow_length(completions, **columns):
    """The longer, the sooner: later groups overtake."""
    time.sleep(0.02 * max(0, 6 - len(completions[0])))
    return length(completions)


def naps(completions, **columns):
    time.sleep(0.2)
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
                scores.append([1.0, 2.0])
            case "skip":
                continue
            case "bare":
                return 1.0
            case _:
                scores.append(float(len(text)))
    return scores


def forks(completions, **columns):
    """On "fork" the child comes back too, and would answer; it takes its time."""
    if "fork" in completions and os.fork() == 0:
        return [-1.0] * len(completions)
    time.sleep(0.05)
    return length(completions)


def forks_unseen(completions, **columns):
    """The same past Python's hooks: the child has all that the worker has."""
    if "fork" in completions and ctypes.CDLL(None).fork() == 0:
        return [-1.0] * len(completions)
    time.sleep(0.05)
    return length(completions)


def forks_and_ends(completions, **columns):
    """A child that ends as it should, by either way, and one of multiprocessing."""
    import multiprocessing

    for end in (os._exit, sys.exit):
        if os.fork() == 0:
            end(0)
        os.wait()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.map(float, map(len, completions))


def babbles(completions, **columns):
    """Writes to every descriptor that it finds."""
    for fd in range(3, 64):
        try:
            os.write(fd, b"\x00\x00\x00\x02{}")
        except OSError:
            continue
    time.sleep(0.2)
    return length(completions)


def hoards(completions, **columns):
    """Asks for the gigabytes that its completions say."""
    return [float(len(bytearray(int(text) * 10**9))) for text in completions]


def hoards_in_c(completions, **columns):
    """The same past Python: pages that are written, and no MemoryError but a null pointer."""
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    for text in completions:
        size = int(text) * 10**9
        ctypes.memset(library.malloc(ctypes.c_size_t(size)), 1, size)
    return length(completions)


def oom_scores(completions, log_extra, **columns):
    child = subprocess.run(["cat", "/proc/self/oom_score_adj"], capture_output=True, text=True, check=True)
    with open("/proc/self/oom_score_adj") as own:
        log_extra("adj", [[int(own.read()), int(child.stdout)]] * len(completions))
    return length(completions)


def one_for_all(completions, **columns):
    """A miscount that no sample shows alone."""
    return [1.0]


def crowd_shy(completions, **columns):
    """A failure that no sample shows alone."""
    if len(completions) > 1:
        raise ConnectionError("too many at once")
    return [2.0]


def ranks(completions, log_extra=None, log_metric=None, **columns):
    """Compares the samples that it gets; fails on its first call, and on samples that say so."""
    global _was_away
    log_extra("beside", [len(completions) - 1] * len(completions))
    log_metric("asked_about", len(completions))
    if not _was_away or "raise" in completions:
        _was_away = True
        raise ConnectionError("away")
    return [float(sum(len(other) < len(text) for other in completions)) for text in completions]


_was_away = False


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
