"""What travels between ranks arrives as it was sent: a value of each kind of field, and the records that have most."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from plait.data.records import FinishReason, Prompt, Sample
from plait.generation.request import GoingOn, Request
from plait.generation.sampling import Sampling
from plait.kernels.noise import NoiseKey
from plait.settings import Settings
from plait.workers.call_messages import Delivered, Generate, answer_of
from plait.workers.messages import NUM_SAMPLE_ARRAYS, Message
from plait.workers.wire_forms import Record, form_of
from tests.workers.test_messages import REPLIES, samples_of


class Side(StrEnum):
    LEFT = "left"


class Pair(NamedTuple):
    name: str
    sizes: tuple[int, ...]


class Keys(Settings):
    side: Side = Side.LEFT
    temperature: float = 1.0


@dataclass(frozen=True)
class Part(Record):
    """It has a message of its own."""

    numbers: NDArray[np.float64]

    kind: ClassVar[str] = "part"


def there(value: Any, kind: Any) -> Any:
    """The value behind a message of its own."""
    form, arrays = form_of(kind), []
    body = Message({"value": form.pack(value, arrays)}, tuple(arrays)).to_bytes()
    message = Message.from_bytes(np.frombuffer(body, dtype=np.uint8))
    left = iter(message.arrays)
    found = form.unpack(message.header["value"], left)
    assert not list(left), "it has taken all of its arrays"
    return found


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (-0.0, float),
        (None, float | None),
        ((1, "a", None), tuple[int, str, float | None]),
        ([(1, 2)], Sequence[tuple[int, int]]),
        (frozenset({(1, 2), (0, 3)}), frozenset[tuple[int, int]]),
        ({(1, 2): [3]}, Mapping[tuple[int, int], Sequence[int]]),
        ({"a": {"b": (1, 2)}}, Mapping[str, Mapping[str, tuple[int, int]]]),
        (Side.LEFT, Side | None),
        ([Pair("a", (1, 2))], Sequence[Pair]),
        (Keys(temperature=0.5), Keys),
        (Prompt(7, "", (1, 2)), Prompt),
        (Message({"a": [1]}, kind=""), Message),
        ((), tuple[Sample, ...]),
    ],
    ids=lambda value: None,
)
def test_a_value_of_each_kind_is_there_as_it_was(value: Any, kind: Any) -> None:
    found = there(value, kind)
    assert found == value
    assert type(found) is type(value)


def test_arrays_of_records_within_records_do_not_mix() -> None:
    parts = {(0, i): Part(np.arange(i, dtype=np.float64)) for i in range(3)}
    found, last = there((parts, np.array([7])), tuple[Mapping[tuple[int, int], Part], NDArray[np.int64]])
    assert [part.numbers.tolist() for part in found.values()] == [[], [0.0], [0.0, 1.0]]
    assert last.tolist() == [7]


def test_samples_come_back_with_the_prompts_that_were_asked() -> None:
    samples = samples_of()
    asked = {sample.prompt.uid: sample.prompt for sample in samples}
    said = {(7, 1): 3, (8, 0): 0}
    for delivered in (Delivered(samples, said), Delivered((), {})):
        message = Message.from_bytes(np.frombuffer(delivered.to_message().to_bytes(), dtype=np.uint8))
        found = answer_of(message)
        assert isinstance(found, Delivered)
        assert found.as_asked(asked) == list(samples[: len(delivered.samples)])
        assert (found.said, found.speculation) == (delivered.said, None)


def test_requests_travel_whole() -> None:
    sampling = Sampling(temperature=0.7, top_k=5, top_p=0.9, max_tokens=8, stop_token_ids=(2, 3), stop=("end",))
    request = Request(Prompt(7, "", (1, 2)), 2, sampling, NoiseKey(1, 2, 3), lengths=(3, 5), in_turns=True)
    begun = Sample(request.prompt, 1, (5, 6), (-0.5, -1.5), "", FinishReason.OPEN, 4, (3, 4), REPLIES)
    kept = replace(begun, index=0, supports=(b"\0\x01\x7f", b""))
    going_on = GoingOn((begun, kept), frozenset({2}), {0: 3}, frozenset({1}), parks=True)
    word = Generate("actor", "rollout", [request, replace(request, going_on=going_on)], 3)
    message = word.to_message()
    assert len(message.arrays) == NUM_SAMPLE_ARRAYS, "a request of which nothing has begun has none"
    assert Generate.of(replace(message, header=json.loads(json.dumps(message.header)))) == word
