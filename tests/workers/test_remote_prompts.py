"""Prompts that the leader has computed on instances of their own: who computes them, and when they go on."""

from __future__ import annotations

from plait.data.records import Prompt
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.kernels.noise import NoiseKey
from plait.policy.prompt_pace import PromptRoom
from plait.policy.step import PROMPT
from plait.workers.dealing import Outstanding
from plait.workers.gathering import Computed, Gathering, Left, Said, Stage, Through
from plait.workers.messages import Message
from plait.workers.remote_prompts import RemotePrompts

DRAWS, OTHER = 0, 1
"""Instances that draw; 2 and 3 compute prompts."""


def request(uid: int, tokens: int, samples: int = 2) -> Request:
    return Request(Prompt(uid, "", (1,) * tokens), samples, Sampling(max_tokens=9), NoiseKey(0))


class Leader:
    def __init__(self, room: PromptRoom, *, ahead: bool = True) -> None:
        self.outstanding = Outstanding()
        self.said: dict[tuple[int, int], int] = {}
        self.told: list[Gathering] = []
        self.prompts = RemotePrompts((2, 3), self.outstanding, self.said, self.tell, room, ahead=ahead)

    def tell(self, stage: Gathering) -> int:
        self.told.append(stage)
        return 100 + len(self.told)

    def ask(self, *asked: tuple[int, Request]) -> dict[int, list[int]]:
        shares = self.prompts.deal(asked)
        for place, share in shares.items():
            for target, one in share:
                self.outstanding.dealt([one], target, number=place)
        return {place: [one.prompt.uid for _, one in share] for place, share in shares.items()}

    def computed(self, place: int, *uids: int) -> None:
        self.prompts.heard(place, place, Computed(uids))
        self.prompts.go_on()

    def answer(self, place: int, word: Said | Through | Left) -> None:
        self.prompts.heard(100 + len(self.told), place, word)
        self.prompts.go_on()

    def new(self) -> list[tuple[Stage, dict[tuple[int, int], list[int]]]]:
        """What was told since the last time."""
        stages = [
            (stage.stage, {pair: [uid for uid, _ in keys] for pair, keys in stage.pairs.items()}) for stage in self.told
        ]
        assert all(index == PROMPT for stage in self.told for keys in stage.pairs.values() for _, index in keys)
        new, self.seen = stages[getattr(self, "seen", 0) :], len(stages)
        return new


def test_prompts_are_dealt_by_their_tokens() -> None:
    """By the requests alone: who is idle is the clock's to say."""
    leader = Leader(PromptRoom(100))
    asked = [(DRAWS, request(1, 9)), (DRAWS, request(2, 4)), (OTHER, request(3, 4)), (DRAWS, request(4, 2))]
    assert leader.ask(*asked) == {2: [1], 3: [2, 3, 4]}
    assert leader.ask((DRAWS, request(5, 1))) == {2: [5]}
    leader.prompts.forget()
    assert leader.ask((DRAWS, request(6, 1))) == {2: [6]}


def test_a_prompt_goes_on_stage_by_stage_and_the_next_ones_together() -> None:
    leader = Leader(PromptRoom(100))
    leader.ask((DRAWS, request(1, 9)), (DRAWS, request(2, 4)), (OTHER, request(3, 4)), (DRAWS, request(4, 2)))
    assert leader.prompts.instances == {2, 3}
    leader.computed(3, 2)
    leader.computed(3, 3, 4)
    leader.computed(2, 1)
    assert leader.new() == [
        (Stage.HERE, {(3, DRAWS): [2]}),
        (Stage.HERE, {(3, OTHER): [3]}),
        (Stage.HERE, {(2, DRAWS): [1]}),
    ], "4 waits for 2, and no other instance does"
    assert [prompt.uid for prompt in leader.told[0].prompts] == [2]
    assert dict(leader.told[0].numbers) == {2: 3}, "its samples are delivered under the command that asked for them"
    numbers = sorted(leader.prompts.numbers)
    assert numbers == [101, 102, 103]
    here, given = Message({"here": 1}), Message({"given": 1})
    leader.prompts.heard(101, DRAWS, Said(Stage.HERE, {(3, DRAWS): here}))
    leader.prompts.heard(104, 3, Said(Stage.GIVE, {(3, DRAWS): given}))
    assert leader.told[3].said == {(3, DRAWS): here}
    assert leader.told[4].said == {(3, DRAWS): given}
    leader.prompts.heard(105, DRAWS, Through())
    leader.prompts.go_on()
    assert leader.new() == [
        (Stage.GIVE, {(3, DRAWS): [2]}),
        (Stage.TAKE, {(3, DRAWS): [2]}),
        (Stage.ENTER, {(3, DRAWS): [2]}),
        (Stage.HERE, {(3, DRAWS): [4]}),
    ]
    assert leader.prompts.numbers == {102, 103, 107}, "nobody answers that they enter"


def test_where_nothing_may_go_ahead_both_meet() -> None:
    leader = Leader(PromptRoom(100), ahead=False)
    leader.ask((DRAWS, request(1, 9)))
    leader.computed(2, 1)
    assert leader.new() == [(Stage.REST, {(2, DRAWS): [1]})]
    leader.answer(2, Left([(1, PROMPT)]))
    assert leader.new() == []
    assert not leader.prompts.numbers
    assert not leader.prompts.instances


def test_prompts_wait_for_room_where_they_are_drawn() -> None:
    """Two samples of one prompt fill the batch, two more may wait; the third prompt comes when two have ended."""
    leader = Leader(PromptRoom(slots=2), ahead=False)
    leader.ask(*((DRAWS, request(uid, 4)) for uid in (1, 2, 3)))
    leader.computed(2, 1)
    leader.computed(3, 2)
    leader.computed(2, 3)
    assert leader.new() == [(Stage.REST, {(2, DRAWS): [1]}), (Stage.REST, {(3, DRAWS): [2]})]
    leader.prompts.heard(101, 2, Left([(1, PROMPT)]))
    leader.prompts.heard(102, 3, Left([(2, PROMPT)]))
    leader.prompts.go_on()
    del leader.outstanding.where[1, 0]
    leader.prompts.look_again()
    leader.prompts.go_on()
    assert leader.new() == [], "three are left, and two of them run"
    del leader.outstanding.where[1, 1]
    leader.prompts.go_on()
    assert leader.new() == [], "nothing was heard"
    leader.prompts.look_again()
    leader.prompts.go_on()
    assert leader.new() == [(Stage.REST, {(2, DRAWS): [3]})]


def test_what_samples_have_said_takes_room() -> None:
    """4 tokens of the prompt, twice those said and the 16 that may not be known of, and a block for each of four."""
    leader = Leader(PromptRoom(100, kv_tokens=4 + 2 * (5 + 16) + 4 + 4 * 16), ahead=False)
    leader.ask((DRAWS, request(1, 4)), (OTHER, request(9, 9)), (DRAWS, request(2, 4)))
    leader.computed(2, 1)
    leader.answer(2, Left([(1, PROMPT)]))
    leader.said |= {(1, 0): 5, (1, 1): 6}
    leader.computed(2, 2)
    assert [stage for stage, _ in leader.new()] == [Stage.REST], "a token too many"
    leader.said[1, 1] = 5
    leader.prompts.look_again()
    leader.prompts.go_on()
    assert leader.new() == [(Stage.REST, {(2, DRAWS): [2]})]
