"""Rounds of turns: who is replied to, when who goes on, and how a sample ends."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from plait.data.records import FinishReason, Prompt, Reply, Sample
from plait.data.replies import ReplyEncoder
from plait.generation.request import GoingOn, Request
from plait.generation.settings import Sampling
from plait.kernels.noise import NoiseKey
from plait.runtime.steps.conversing import Conversing
from tests.models.tiny import VOCAB_SIZE, tiny_tokenizer
from tests.runtime.scripted_engine import ScriptedEngine

STOP, LENGTH, OPEN = FinishReason.STOP, FinishReason.LENGTH, FinishReason.OPEN
GO_ON = [{"role": "user", "content": "go on"}]
IDS = tuple(tiny_tokenizer().encode("go on"))
PROMPTS = [Prompt(uid, "", (7, 8), {"prompt": "?"}) for uid in (3, 5)]


class Engine(ScriptedEngine):
    traits = model = None


@dataclass
class Told:
    """Replies that come when they are told to."""

    asked: list[Sample] = field(default_factory=list)
    answers: dict[int, list[dict[str, Any]] | None] = field(default_factory=dict)

    def ask(self, sample: Sample) -> int:
        self.asked.append(sample)
        return len(self.asked) - 1

    def take(self, tickets: Collection[int]) -> dict[int, list[dict[str, Any]] | None]:
        return {ticket: self.answers.pop(ticket) for ticket in list(tickets) if ticket in self.answers}


def sample(uid: int, index: int, *token_ids: int, reason: FinishReason = STOP, **more: Any) -> Sample:
    prompt = next(prompt for prompt in PROMPTS if prompt.uid == uid)
    text = tiny_tokenizer().decode(list(token_ids), skip_special_tokens=True)
    return Sample(prompt, index, token_ids, (-1.0,) * len(token_ids), text, reason, **more)


def engine_of(script: list[Any], *, most: int = 3, max_tokens: int = 20) -> tuple[Engine, Told, Conversing]:
    engine, told = Engine(script), Told()
    conversing: Any = Conversing(engine, told, ReplyEncoder(tiny_tokenizer(), VOCAB_SIZE), most, 256)  # type: ignore[arg-type]
    for prompt in PROMPTS:
        conversing.add(Request(prompt, 2, Sampling(max_tokens=max_tokens), NoiseKey(1)))
    return engine, told, conversing


def test_a_round_begins_when_all_turns_and_all_replies_are_there() -> None:
    first, cut, second, other = sample(3, 1, 80), sample(3, 0, 81, reason=LENGTH), sample(5, 0, 82), sample(5, 1, 83)
    engine, told, conversing = engine_of([[first, cut], [second, other]])
    assert conversing.advance("generate")[1] == [cut], "one that is cut is not asked for"
    told.answers[0] = GO_ON
    assert conversing.advance("generate")[1] == []
    told.answers[2] = None
    done, ended = conversing.advance("generate")
    assert (done, ended) == (None, [other]), "it waits for the reply that is missing"
    assert conversing.ready
    assert conversing.has_work
    assert len(engine.asked) == 2
    told.answers[1] = GO_ON
    assert conversing.advance("generate")[1] == []
    reply = (Reply(1, IDS),)
    begun = [replace(s, finish_reason=OPEN, replies=reply) for s in (first, second)]
    again = [(request.prompt.uid, request.going_on) for request in engine.asked[2:]]
    assert again == [(3, GoingOn((begun[0],), frozenset({0}))), (5, GoingOn((begun[1],), frozenset({1})))]
    assert [asked.turns[-1]["content"] for asked in told.asked] == [s.text for s in (first, second, other)]
    engine.script.append([replace(s, token_ids=(*s.token_ids, 84), finish_reason=LENGTH) for s in begun])
    _, ended = conversing.advance("generate")
    own = [{"role": "assistant", "content": s.text} for s in (first, sample(3, 0, 84))]
    assert list(ended[0].turns) == [own[0], *GO_ON, own[1]]
    assert not conversing.has_work


def test_the_last_turn_is_not_replied_to() -> None:
    _, told, conversing = engine_of([[sample(3, 1, 80, 81, replies=(Reply(1, IDS),))]], most=2)
    assert len(conversing.advance("generate")[1]) == 1
    assert not told.asked


def test_a_reply_that_leaves_no_room_is_left_out_and_the_sample_is_cut() -> None:
    for max_tokens, reason in ((1 + len(IDS), LENGTH), (2 + len(IDS), None)):
        _, told, conversing = engine_of([[sample(3, 0, 80)]], max_tokens=max_tokens)
        told.answers[0] = GO_ON
        ended = conversing.advance("generate")[1]
        assert [(s.finish_reason, s.replies, s.turns) for s in ended] == ([(reason, (), ())] if reason else [])
