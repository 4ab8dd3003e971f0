"""Rows, samples and requests arrive as they were sent, to the bit."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from plait.data.experts import Experts
from plait.data.records import FinishReason, Prompt, Reply, Sample
from plait.data.rows import Rows
from plait.dataflow import Column, Level
from plait.generation.request import GoingOn, Request
from plait.generation.sampling import Sampling
from plait.kernels.noise import NoiseKey
from plait.workers.call_messages import Delivered
from plait.workers.messages import (
    Message,
    pack_requests,
    pack_rows,
    unpack_requests,
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


def test_samples_come_back_with_the_prompts_that_were_asked() -> None:
    samples = samples_of()
    asked = {sample.prompt.uid: sample.prompt for sample in samples}
    said = {(7, 1): 3, (8, 0): 0}
    for delivered in (Delivered(samples, said), Delivered((), {})):
        message = Message.from_bytes(np.frombuffer(delivered.to_message().to_bytes(), dtype=np.uint8))
        assert Delivered.of(message, asked) == delivered


def test_requests_travel_whole() -> None:
    sampling = Sampling(temperature=0.7, top_k=5, top_p=0.9, max_tokens=8, stop_token_ids=(2, 3), stop=("end",))
    request = Request(Prompt(7, "", (1, 2)), 2, sampling, NoiseKey(1, 2, 3), lengths=(3, 5))
    begun = Sample(request.prompt, 1, (5, 6), (-0.5, -1.5), "", FinishReason.OPEN, 4, (3, 4), REPLIES)
    kept = replace(begun, index=0, supports=(b"\0\x01\x7f", b""))
    goes_on = replace(request, going_on=GoingOn((begun, kept), frozenset()))
    assert unpack_requests(json.loads(json.dumps(pack_requests([request, goes_on])))) == [request, goes_on]
