"""Calls of coroutine functions that a worker has under way together: each comes to what it comes to alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from plait.errors import RunError
from plait.rewards.functions import reward_functions
from plait.rewards.pool import RewardPool
from plait.rewards.replies import reply_function, reply_of
from plait.rewards.scores import FailureKind, GroupScores
from tests.cases import slow_but
from tests.rewards.pools import score
from tests.rewards.samples import group

SERVICE = """
import asyncio
import os
import random
import sys
import time

running = most = 0


async def judge(prompts, completions, log_extra, **columns):
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(WAIT_S)
    running -= 1
    log_extra("most", [most] * len(completions))
    return [float(len(text)) for text in completions]


async def draws(completions, **columns):
    async def one(text):
        await asyncio.sleep(random.random() * 0.01)
        return random.random()

    first = random.random()
    await asyncio.sleep(0.01)
    return [first + await one(text) for text in completions]


async def scores(solution_str):
    await asyncio.sleep(WAIT_S)
    return float(len(solution_str))


async def fails(completions, **columns):
    await asyncio.sleep(0.01)
    bad = [text for text in completions if not text.isdigit()]
    for text in bad:
        if text == "hangs":
            await asyncio.sleep(1000)
        if text == "blocks":
            time.sleep(1000)
        if text == "leaves":
            sys.exit(3)
        if text == "dies":
            os._exit(3)
        if text == "raises":
            raise ValueError("bad sample")
    return [float(text) for text in completions]


def brief(completions, **columns):
    return [-float(len(text)) for text in completions]


def has_a_loop_of_its_own(completions, **columns):
    return asyncio.run(answer(completions))


async def answer(completions):
    return [-float(len(text)) for text in completions]


async def reply(messages):
    await asyncio.sleep(WAIT_S)
    return f"and {len(messages)}?"
"""


@pytest.fixture
def service(tmp_path: Path) -> Path:
    path = tmp_path / "service.py"
    path.write_text(SERVICE.replace("WAIT_S", "0.2"))
    return path


def groups(count: int) -> list[list[Any]]:
    return [group(uid, "a" * (uid + 1), "b") for uid in range(count)]


@pytest.mark.parametrize("function", ["judge", "scores"])
def test_what_waits_for_a_service_waits_together(service: Path, function: str) -> None:
    with RewardPool(reward_functions([f"{service}:{function}"])) as pool:
        pool.start()
        began = time.perf_counter()
        found = pool.score([sample for one in groups(16) for sample in one])
        took_s = time.perf_counter() - began
    assert [one.rewards for one in found] == [(uid + 1.0, 1.0) for uid in range(16)]
    assert took_s < 8 * 0.2, "sixteen groups, eight at a time"
    if function == "judge":
        assert max(one.extras["most"][0] for one in found) == 8


@pytest.mark.parametrize(("workers", "max_concurrency"), [(1, 8), (2, 3)])
def test_what_is_drawn_is_what_a_call_alone_draws(service: Path, workers: int, max_concurrency: int) -> None:
    alone = score(f"{service}:draws", *groups(12), seed=3, max_concurrency=1)
    beside = score(f"{service}:draws", *groups(12), seed=3, workers=workers, max_concurrency=max_concurrency)
    assert [one.rewards for one in beside] == [one.rewards for one in alone]
    assert len({one.rewards for one in alone}) == 12


KINDS = {"raises": FailureKind.RAISED, "leaves": FailureKind.RAISED, "dies": FailureKind.DIED}
"""Of failures that do not wait for a time limit."""


def told(results: list[GroupScores]) -> list[Any]:
    return [(str(one.rewards), [(f.uid, f.kind, f.message) for f in one.failures], one.recovered) for one in results]


@pytest.mark.parametrize("bad", slow_but(["raises", "leaves", "dies", "blocks"], [*KINDS, "hangs", "blocks"]))
def test_who_fails_is_named_as_if_it_were_alone(service: Path, bad: str) -> None:
    """Others that were under way in a worker that ended are not."""
    given = [group(uid, str(uid), bad if uid == 3 else "7") for uid in range(9)]
    alone, beside = (
        score(f"{service}:fails", *given, timeout_s=1.0, on_error="drop", max_concurrency=max_concurrency)
        for max_concurrency in (1, 8)
    )
    assert told(beside) == told(alone)
    assert [failure.uid for one in beside for failure in one.failures] == ["3.1"]
    assert beside[3].failures[0].kind is KINDS.get(bad, FailureKind.TIMEOUT)
    if bad in KINDS:  # what stops a run is the failure, whatever time it took
        with pytest.raises(RunError, match=r"sample 3\.1"):
            score(f"{service}:fails", *given, timeout_s=1.0)


@pytest.mark.parametrize("plain", ["brief", "has_a_loop_of_its_own"])
def test_functions_that_are_not_awaited_have_a_worker_for_themselves(service: Path, plain: str) -> None:
    functions = [f"{service}:judge", f"{service}:{plain}"]
    for workers in (1, 2):
        found = score(functions, *groups(12), workers=workers, max_concurrency=4)
        assert [one.rewards for one in found] == [(0.0, 0.0)] * 12
        assert max(one.extras["most"][0] for one in found) > 1


def test_replies_to_several_samples_are_awaited_together(service: Path) -> None:
    with RewardPool((reply_function(f"{service}:reply"),)) as pool:
        pool.start()
        began = time.perf_counter()
        tickets = [pool.submit([one]) for uid in range(4) for one in group(uid, "a", "b")]
        answers = {answer.ticket: reply_of(answer) for answer in pool.wait()}
    assert time.perf_counter() - began < 4 * 0.2
    assert [answers[ticket] for ticket in tickets] == [[{"role": "user", "content": "and 2?"}]] * 8
