"""Rounds of turns: who is replied to, when who goes on, and how a sample ends."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from plait.data.records import FinishReason, Prompt, Reply, Sample
from plait.data.replies import ReplyEncoder
from plait.generation.request import GoingOn, Request
from plait.generation.sampling import Sampling
from plait.kernels.noise import NoiseKey
from plait.rewards.scores import Failure, FailureKind, GroupScores
from plait.runtime.steps.conversing import Conversing, Replies
from plait.runtime.steps.function_reports import FunctionReports
from plait.schedule.work import MOVED_ON
from plait.workers.recorder import Recorder
from tests.models.tiny import VOCAB_SIZE, tiny_tokenizer
from tests.runtime.scripted_engine import ScriptedEngine

STOP, LENGTH, OPEN = FinishReason.STOP, FinishReason.LENGTH, FinishReason.OPEN
GO_ON = [{"role": "user", "content": "go on"}]
ENCODER = ReplyEncoder(tiny_tokenizer(), VOCAB_SIZE)
IDS = tuple(tiny_tokenizer().encode("go on"))
PROMPTS = [Prompt(uid, "", (7, 8), {"prompt": "?"}) for uid in (3, 5)]


class Engine(ScriptedEngine):
    """It halts as engines do: what was not begun is forgotten, what was is delivered as the script says."""

    traits = model = None

    def halt(self, *, parks: bool) -> None:
        super().halt(parks=parks)
        self.halted_with = parks


@dataclass
class Told:
    """Replies that come when they are told to."""

    asked: list[Sample] = field(default_factory=list)
    answers: dict[int, list[dict[str, Any]] | Failure | None] = field(default_factory=dict)

    def ask(self, sample: Sample, rollout: str) -> int:
        self.asked.append(sample)
        return len(self.asked) - 1

    def hear(self) -> bool:
        return False

    def take(self, tickets: Collection[int]) -> dict[int, list[dict[str, Any]] | Failure | None]:
        return {ticket: self.answers.pop(ticket) for ticket in list(tickets) if ticket in self.answers}


def sample(uid: int, index: int, *token_ids: int, reason: FinishReason = STOP, **more: Any) -> Sample:
    prompt = next(prompt for prompt in PROMPTS if prompt.uid == uid)
    text = tiny_tokenizer().decode(list(token_ids), skip_special_tokens=True)
    return Sample(prompt, index, token_ids, (-1.0,) * len(token_ids), text, reason, **more)


def engine_of(
    script: list[Any],
    *,
    most: int = 3,
    max_tokens: int = 20,
    by_prompt: bool = False,
    going_on: Mapping[int, GoingOn] = MappingProxyType({}),
) -> tuple[Engine, Told, Conversing]:
    """An engine that was asked for two samples of each prompt, which go on as `going_on` says by their uid."""
    engine, told = Engine(script), Told()
    conversing: Any = Conversing(engine, told, ENCODER, most, 256, by_prompt=by_prompt)  # type: ignore[arg-type]
    for prompt in PROMPTS:
        going = going_on.get(prompt.uid, GoingOn())
        conversing.add(Request(prompt, 2, Sampling(max_tokens=max_tokens), NoiseKey(1), going_on=going))
    return engine, told, conversing


def replied(one: Sample, *before: Mapping[str, Any]) -> Sample:
    """A sample behind a reply to its last turn; what was said before that turn."""
    turns = (*before, {"role": "assistant", "content": one.text}, *GO_ON)
    return replace(one, finish_reason=OPEN, replies=(*one.replies, Reply(len(one.token_ids), IDS)), turns=turns)


def test_a_round_begins_when_all_turns_and_all_replies_are_there() -> None:
    first, cut, second, other = sample(3, 1, 80), sample(3, 0, 81, reason=LENGTH), sample(5, 0, 82), sample(5, 1, 83)
    engine, told, conversing = engine_of([[first, cut], [second, other]])
    assert conversing.advance("generate")[1] == [cut], "one that is cut is not asked for"
    told.answers[0] = GO_ON
    assert conversing.advance("generate")[1] == []
    told.answers[2] = None
    assert conversing.advance("generate")[1] == [other]
    assert conversing.advance("generate") == (None, []), "it waits for the reply that is missing"
    assert conversing.ready
    assert conversing.has_work
    assert len(engine.asked) == 2
    assert all(request.in_turns for request in engine.asked)
    told.answers[1] = GO_ON
    assert conversing.advance("generate")[1] == []
    begun = [replied(s) for s in (first, second)]
    again = [(request.prompt.uid, request.going_on) for request in engine.asked[2:]]
    assert again == [(3, GoingOn((begun[0],), frozenset({0}))), (5, GoingOn((begun[1],), frozenset({1})))]
    assert [asked.turns[-1]["content"] for asked in told.asked] == [s.text for s in (first, second, other)]
    engine.script.append([replace(s, token_ids=(*s.token_ids, 84), finish_reason=LENGTH, turns=()) for s in begun])
    _, ended = conversing.advance("generate")
    own = [{"role": "assistant", "content": s.text} for s in (first, sample(3, 0, 84))]
    assert list(ended[0].turns) == [own[0], *GO_ON, own[1]]
    assert not conversing.has_work
    assert engine.ended_turns == 1


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


def test_a_sample_ends_where_nobody_could_reply_and_the_others_go_on() -> None:
    one, other = sample(3, 0, 80), sample(3, 1, 81)
    engine, told, conversing = engine_of(
        [[one, other], [sample(5, 0, 82, reason=LENGTH), sample(5, 1, 83, reason=LENGTH)]]
    )
    failure = Failure("3.0", "faulty", FailureKind.RAISED, "raised KeyError: 7", "  in faulty\n")
    told.answers |= {0: failure, 1: GO_ON}
    [ended] = conversing.advance("generate")[1]
    error = "raised KeyError: 7\n  in faulty"
    assert ended == replace(one, finish_reason=FinishReason.ABORTED, reply_error=error)
    conversing.advance("generate")
    assert [request.going_on.begun for request in engine.asked[2:]] == [(replied(other),)]


def test_a_prompt_goes_on_without_the_others_where_samples_outlive_their_step() -> None:
    samples = [sample(3, 0, 80), sample(3, 1, 81), sample(5, 0, 82)]
    engine, told, conversing = engine_of([samples, [sample(5, 1, 83, 84)]], by_prompt=True)
    told.answers |= {0: GO_ON, 2: GO_ON}
    assert conversing.advance("generate")[1] == []
    assert len(engine.asked) == 2, "the other sample of prompt 3 waits for its reply"
    told.answers[1] = None
    assert conversing.advance("generate")[1] == [samples[1]]
    assert [request.going_on.begun for request in engine.asked[2:]] == [(replied(samples[0]),)]
    assert conversing.has_work, "prompt 5 has samples that wait, and prompt 3 one that goes on"


def waiting(one: Sample, *before: Mapping[str, Any]) -> Sample:
    """A sample whose last turn is over, and was not replied to."""
    return replace(one, finish_reason=OPEN, turns=(*before, {"role": "assistant", "content": one.text}))


def test_what_halts_stands_within_a_turn_behind_a_reply_or_where_it_waits_for_one() -> None:
    """The next turn of one had been asked for, and had not begun; the reply to another comes in the next step, and is
    not asked for again."""
    first, second, third = sample(3, 0, 80), sample(3, 1, 81, reason=LENGTH), sample(5, 0, 82)
    within = sample(5, 1, 83, 84, reason=OPEN)
    engine, told, conversing = engine_of([[first, second], [third], [within]], by_prompt=True)
    told.answers[0] = GO_ON
    assert conversing.advance("generate")[1] == [second]
    assert engine.asked[-1].going_on.begun == (replied(first),)
    assert conversing.advance("generate")[1] == []
    conversing.halt(parks=True)
    assert engine.halted_with
    assert conversing.advance("generate")[1] == [within, replied(first), waiting(third)]
    assert not conversing.has_work
    assert len(engine.asked) == 3, "no round begins behind a halt"

    conversing.add(Request(PROMPTS[1], 2, Sampling(), NoiseKey(1), going_on=GoingOn((waiting(third), within))))
    assert engine.asked[-1].going_on == GoingOn((within,), frozenset({0}))
    told.answers[1] = None
    engine.script.append([replace(within, finish_reason=LENGTH)])
    ended = conversing.advance("generate")[1]
    assert ended == [replace(within, finish_reason=LENGTH), third], "one turn is told as it always was"
    assert len(told.asked) == 2


def test_who_waits_alone_asks_the_engine_for_nothing_and_a_resumed_run_asks_again() -> None:
    third = sample(5, 0, 82)
    going_on = {3: GoingOn(left_out=frozenset({0, 1})), 5: GoingOn((waiting(third),), frozenset({1}))}
    engine, told, conversing = engine_of([], by_prompt=True, going_on=going_on)
    assert engine.asked == []
    assert told.asked == [waiting(third)]
    assert conversing.advance("generate") == (None, [])
    told.answers[0] = GO_ON
    assert conversing.advance("generate")[1] == []
    assert engine.asked[-1].going_on.begun == (replied(third),)


def test_a_sample_that_was_halted_goes_on_with_its_turns_and_has_them_at_its_end() -> None:
    stood = replied(sample(3, 0, 80))
    own = [{"role": "assistant", "content": text} for text in (stood.text, sample(3, 0, 85, 86).text)]
    going_on = {3: GoingOn((stood,), frozenset({1}), keeps=frozenset({0}), parks=True)}
    bare = replace(stood, turns=())
    halted = replace(bare, token_ids=(80, 85), logprobs=(-1.0,) * 2)
    engine, told, conversing = engine_of([[halted]], by_prompt=True, going_on=going_on)
    conversing.halt(parks=True)
    [again] = conversing.advance("generate")[1]
    assert again == replace(halted, turns=(own[0], *GO_ON)), "the turn that it is in is not told before it ends"
    ended = replace(bare, token_ids=(80, 85, 86), logprobs=(-1.0,) * 3, finish_reason=STOP)
    engine.script.append([ended])
    left = GoingOn((again,), frozenset({1}))
    conversing.add(Request(PROMPTS[0], 2, Sampling(max_tokens=40), NoiseKey(1), going_on=left))
    assert conversing.advance("generate")[1] == []
    assert list(told.asked[0].turns) == [own[0], *GO_ON, own[1]]
    told.answers[0] = GO_ON
    conversing.advance("generate")
    behind = engine.asked[-1].going_on
    assert [list(s.turns) for s in behind.begun] == [[own[0], *GO_ON, own[1], *GO_ON]]


class Pool:
    """Answers with `answers`, which it is told, whatever is asked."""

    def __init__(self) -> None:
        self.answers: list[GroupScores] = []
        self.count = 0

    def submit(self, samples: list[Sample], rollout: str) -> int:
        self.count += 1
        return self.count - 1

    def poll(self) -> list[GroupScores]:
        answers, self.answers = self.answers, []
        return answers


def test_a_reply_that_another_engine_waits_for_is_news() -> None:
    """Nobody waits before that one has looked: the pool has given it out, and will not wake anybody for it."""
    pool, one = Pool(), sample(3, 0, 80)
    replies = Replies(pool, FunctionReports(Recorder(), print))  # type: ignore[arg-type]
    actor, rival = (
        Conversing(Engine([[one]]), replies, ENCODER, 3, 256, by_prompt=False)  # type: ignore[arg-type]
        for _ in range(2)
    )
    for conversing in (actor, rival):
        conversing.add(Request(PROMPTS[0], 1, Sampling(max_tokens=20), NoiseKey(1)))
        assert conversing.advance("generate")[1] == []
    assert actor.advance("generate") == (None, [])
    pool.answers.append(GroupScores(0, (one,), {}, (0.0,), extras={"reply": (None,)}))
    assert rival.advance("generate") == (MOVED_ON, [])
    assert actor.advance("generate") == (MOVED_ON, [one])


def test_a_recorded_stop_may_be_between_two_turns_and_holds_for_later_ones() -> None:
    """Sample 3.0 stops behind its first reply; 3.1 two tokens into its next turn, which the engine is told; 5.0 where
    it waits for its reply, so that nobody is asked; 5.1 behind its reply, which was shorter the first time."""
    turns, at = [sample(3, 0, 80), sample(3, 1, 81), sample(5, 0, 82), sample(5, 1, 83)], 1 + len(IDS)
    going_on = {3: GoingOn(stops={0: at, 1: at + 2}, parks=True), 5: GoingOn(stops={0: 1, 1: at - 1})}
    engine, told, conversing = engine_of([turns], by_prompt=True, going_on=going_on)
    told.answers |= {0: GO_ON, 1: GO_ON, 2: GO_ON}
    assert conversing.advance("generate")[1] == [waiting(turns[2]), replied(turns[0]), replied(turns[3])]
    assert len(told.asked) == 3
    request = engine.asked[-1]
    assert (request.indices, request.going_on.begun) == ((1,), (replied(turns[1]),))
    assert (request.going_on.stops[1], request.going_on.parks) == (at + 2, True)


def test_nobody_of_a_prompt_goes_on_beside_one_that_has_stopped_within_its_turn() -> None:
    """As it was when the record was made: what is replied now may be shorter, and leave room for a further turn. Then
    samples of the prompt would lie parked in two instances."""
    within, other = sample(3, 0, 80, 81, reason=OPEN), sample(3, 1, 82)
    going_on = {3: GoingOn(stops={0: 2, 1: 15}, parks=True), 5: GoingOn(left_out=frozenset({0, 1}))}
    engine, told, conversing = engine_of([[other], [within]], by_prompt=True, going_on=going_on)
    told.answers[0] = GO_ON
    assert conversing.advance("generate")[1] == []
    assert conversing.advance("generate")[1] == [within, replied(other)]
    assert len(engine.asked) == 1
    assert not conversing.has_work
