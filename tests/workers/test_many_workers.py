"""What 64 ranks have the leader send: it grows with the rows, and hardly with the ranks that they are divided among."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from plait.data.records import FinishReason, Prompt, Sample
from plait.data.rows import Rows
from plait.dataflow import CallKind, Column, Grain, Level, Node, Score, TrainOptions
from plait.engines import LossOver
from plait.layout.mesh import Layout
from plait.schedule.placements import RolePlacement
from plait.workers.announcer import Announcer
from plait.workers.messages import Message, pack_rows
from plait.workers.score_call import ScoreCall
from plait.workers.train_calls import TrainCall

ADVANTAGES, LOGPROBS, MASK = (Column(name, Level.TOKEN, 0, place) for place, name in enumerate(("adv", "ref", "mask")))
STUB_BYTES = 6
"""Bytes at most for a row and a rank that it is not sent to, in large batches of uneven responses."""


class Counted:
    """A transport to ranks that are not there."""

    def __init__(self) -> None:
        self.sent_bytes = 0

    def send(self, rank: int, message: Message, what: str) -> None:
        self.sent_bytes += len(message.to_bytes())


def batch(prompts: int, seed: int = 5) -> Rows:
    """8 samples of each prompt of 100 to 200 tokens; 1 to 512 tokens each, 7 of 8 trained."""
    drawn, samples = random.Random(seed), []
    for uid in range(prompts):
        prompt = Prompt(1000 + uid, "", tuple(drawn.randrange(32000) for _ in range(drawn.randrange(100, 200))))
        for index in range(8):
            tokens = tuple(drawn.randrange(32000) for _ in range(drawn.randrange(1, 512)))
            reason = drawn.choice([FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH])
            samples.append(Sample(prompt, index, tokens, (-0.5,) * len(tokens), "", reason))
    rows = Rows(tuple(samples), {})
    mask = np.ones(rows.num_tokens)
    mask[: rows.num_tokens // 8] = 0
    columns = {ADVANTAGES: np.zeros(rows.num_tokens), LOGPROBS: np.zeros(rows.num_tokens), MASK: mask}
    return Rows(rows.samples, columns)


def sent(rows: Rows, ranks: int, *, trains: bool, tp: int = 1) -> int:
    """Bytes that the leader sends for one call over so many ranks."""
    layout = Layout.on(tuple(range(ranks)), dp=ranks // tp, tp=tp)
    place = RolePlacement("actor", train=layout, score=layout)
    state: Any = SimpleNamespace(
        places={"actor": place},
        recipe=SimpleNamespace(seed=0),
        copies={},
        held_copies={},
        pair_tokens={"actor": 0.0},
    )
    inputs = {"advantages": ADVANTAGES, "ref_logprobs": LOGPROBS, "mask": MASK}
    node = Node(3, "actor.train", CallKind.TRAIN, Grain.BATCH, "actor", 0, inputs, options=TrainOptions())
    call = (
        TrainCall((LossOver(node, rows),), 1) if trains else ScoreCall("actor", Score.LOGPROBS, "actor.logprobs", rows)
    )
    transport = Counted()
    anything: Any = SimpleNamespace(step=1)
    announcer = Announcer(state, transport, anything, anything)  # pyright: ignore[reportArgumentType]
    announcer.send(range(ranks), call.messages(state))
    return transport.sent_bytes


def once(rows: Rows, *, trains: bool) -> int:
    """Bytes of all rows, each sent once, as a call needs them."""
    columns = (ADVANTAGES, LOGPROBS, MASK) if trains else ()
    bare = rows if trains else Rows(tuple(replace(sample, logprobs=()) for sample in rows.samples), {})
    return Message({}, pack_rows(bare, columns)).num_array_bytes


@pytest.mark.parametrize("trains", [False, True], ids=["score", "train"])
def test_64_ranks_get_each_row_once(trains: bool) -> None:
    rows = batch(64)
    least = once(rows, trains=trains) * 63 / 64
    found = sent(rows, 64, trains=trains)
    stubs = 63 * len(rows) * STUB_BYTES
    heads = 63 * 1500
    assert 0.9 * least < found < 1.02 * least + stubs + heads
    assert found < 1.3 * least


def test_twice_the_ranks_are_not_twice_the_bytes_and_twice_the_rows_are() -> None:
    rows = batch(64)
    at_8, at_32, at_64 = (sent(rows, ranks, trains=True) for ranks in (8, 32, 64))
    assert at_64 < 1.06 * at_32 < 1.2 * at_8
    assert 1.8 < sent(batch(128), 64, trains=True) / at_64 < 2.2


def test_ranks_of_one_share_get_it_each_from_the_leader() -> None:
    """What only rows that go from worker to worker would save: docs/cluster.md has the number."""
    rows = batch(32)
    assert 7 < sent(rows, 64, trains=True, tp=8) / sent(rows, 8, trains=True) < 10
