"""Rows arrive as they were sent, to the bit."""

from __future__ import annotations

import numpy as np

from plait.data.experts import Experts
from plait.data.records import FinishReason, Prompt, Reply, Sample
from plait.data.rows import Rows
from plait.dataflow import Column, Level
from plait.workers.messages import (
    Message,
    pack_rows,
    unpack_rows,
)

REPLIES = (Reply(1, (20, 21)), Reply(2, ()))


def samples_of() -> tuple[Sample, ...]:
    prompts = [Prompt(7, "seven", (1, 2, 3), {"answer": 4}), Prompt(9, "nine", (5,))]
    return (
        Sample(prompts[0], 0, (4, 5), (-0.5, -1e-300), "four five", FinishReason.STOP, 3, (2, 3)),
        Sample(prompts[0], 2, (6,), (-0.1,), "six", FinishReason.LENGTH, 3, experts=Experts(b"\0\1\2", b"")),
        Sample(prompts[1], 1, (), (), "", FinishReason.ABORTED),
        Sample(prompts[1], 0, (8, 9), (-0.2, -0.3), "", FinishReason.STOP, replies=REPLIES, supports=(b"\0\x05", b"")),
        Sample(prompts[0], 1, (4, 5), (-0.2, -0.3), "", FinishReason.STOP, experts=Experts(b"\0\1\2", b"\7")),
        Sample(prompts[0], 3, (), (), "", FinishReason.STOP, experts=Experts(b"\0\1\3", b"")),
    )


def test_rows_travel_bit_by_bit() -> None:
    token, sample = Column("logprobs", Level.TOKEN, 0, 0), Column("score", Level.SAMPLE, 1, 0)
    rows = Rows(
        samples_of(),
        {
            token: np.array([np.nan, -0.0, np.inf, 0, 1, 2, 3]),
            sample: np.array([1 / 3, 2.0, -1e-320, 0, 1, 2]),
        },
    )
    body = Message({"a": [1, None, float("nan")]}, pack_rows(rows, [token, sample])).to_bytes()
    message = Message.from_bytes(np.frombuffer(body, dtype=np.uint8))
    found = unpack_rows(message.arrays, [token, sample])
    assert [(s.uid, s.prompt.token_ids, s.token_ids, s.logprobs) for s in found.samples] == [
        (s.uid, s.prompt.token_ids, s.token_ids, s.logprobs) for s in rows.samples
    ]
    further = lambda s: (s.finish_reason, s.policy_version, s.token_versions, s.replies, s.supports, s.experts)
    assert list(map(further, found.samples)) == list(map(further, rows.samples))
    assert all(s.text == s.prompt.text == "" for s in found.samples), "texts stay behind"
    for column in (token, sample):
        assert found.columns[column].tobytes() == rows.columns[column].tobytes()
