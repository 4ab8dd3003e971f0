"""Which instance gets which requests: the longest expected first, each to the instance with the least; by hand."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from plait.data.records import FinishReason, Prompt, Sample
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.layout.mesh import Layout
from plait.speculation.counts import Counts
from plait.workers.call_messages import Delivered, Forget, Generate
from plait.workers.messages import Message
from plait.workers.remote_engine import RemoteEngine
from plait.workers.upkeep import EndTurns, Recall


def request(uid: int, prompt_tokens: int, *lengths: int, rollout: int = 0) -> Request:
    """Whose responses have been recorded, with these lengths."""
    prompt = Prompt(uid, "", (1,) * prompt_tokens)
    return Request(prompt, len(lengths), Sampling(max_tokens=20), NoiseKey(0, rollout), lengths)


class Ranks:
    """What a RemoteEngine asks of a group and its transport: who was told what; samples come when the test says so."""

    def __init__(self, *instances: Layout) -> None:
        self.told: list[tuple[tuple[int, ...], list[int]]] = []
        self.also_told: list[tuple[list[int], Forget | EndTurns]] = []
        self.recalled: list[tuple[list[int], list[tuple[int, ...]]]] = []
        """Who was told texts of which prompts."""
        self.coming: list[tuple[int, Message]] = []
        place = SimpleNamespace(generate=instances, drawing=instances)
        self.rank_state = SimpleNamespace(
            places={"actor": place},
            roles={},
            copies_for=lambda role, mode: frozenset(),
            held_copies={"actor": ()},
            keeps_all=True,
            moves_samples=False,
            recipe=SimpleNamespace(sampling=SamplingSettings()),
        )
        self.transport, self.status = self, SimpleNamespace(doing=lambda what: nullcontext())
        self.fresh = self
        self.has_fresh_weights = True

    def is_fresh(self, role: str, mode: str) -> bool:
        return self.has_fresh_weights

    def weights_number(self, role: str) -> int:
        return 0

    def sync_weights(self, role: str, mode: str) -> None:
        """Weights are where they are."""

    def tell(self, ranks: Collection[int], command: Generate | Forget | EndTurns | Recall, copies: Any) -> Any:
        if isinstance(command, Recall):
            self.recalled.append((list(ranks), [prompt_ids for prompt_ids, *_ in command.texts]))
        elif isinstance(command, Generate):
            self.told.append((tuple(ranks), [request.prompt.uid for request in command.requests]))
        else:
            self.also_told.append((sorted(ranks), command))
        return SimpleNamespace(number=len(self.told))

    def do(self, told: Any) -> None:
        """The leader has no part in it."""

    def poll(self, sources: list[int], wait_s: float, what: str, *, answers: Any) -> tuple[int, Message] | None:
        return self.coming.pop(0) if self.coming else None

    def finish(self, rank: int, *asked: Request, counts: Counts | None = None) -> None:
        """All samples of these requests are on their way from this rank, which drafts where it has counts."""
        samples = [
            Sample(r.prompt, i, (3,), (0.0,), "", FinishReason.STOP) for r in asked for i in range(r.num_samples)
        ]
        self.coming.append((rank, replace(Delivered(samples, {}, counts).to_message(), number=1)))


def engine_of(ranks: Any) -> RemoteEngine:
    return RemoteEngine(ranks, "actor")


def dealt(engine: RemoteEngine, ranks: Ranks, *requests: Request) -> list[tuple[tuple[int, ...], list[int]]]:
    """Who is told what in the next step."""
    before = len(ranks.told)
    for one in requests:
        engine.add(one)
    engine.advance("actor.generate")
    return ranks.told[before:]


def test_unequal_requests() -> None:
    """Groups of 12, 3, 11 and 2 expected tokens: 12 to rank 1, 11 and 3 to rank 2, 2 to rank 1, so 14 each. In turn, by
    count, it were 23 and 5."""
    ranks = Ranks(Layout.on((1,)), Layout.on((2,)))
    asked = [request(1, 2, 5, 5), request(2, 1, 2), request(3, 4, 7), request(4, 1, 1)]
    assert dealt(engine_of(ranks), ranks, *asked) == [((1,), [1, 4]), ((2,), [2, 3])]


def test_responses_without_recorded_lengths_count_as_their_limit() -> None:
    """3 + 20 tokens against 10, 9 and 3, which together are fewer."""
    ranks = Ranks(Layout.on((1,)), Layout.on((2,)))
    endless = Request(Prompt(9, "", (1, 1, 1)), 1, Sampling(max_tokens=20), NoiseKey(0))
    asked = [request(1, 4, 6), request(2, 3, 6), endless, request(3, 1, 2)]
    assert dealt(engine_of(ranks), ranks, *asked) == [((1,), [9]), ((2,), [1, 2, 3])]


def test_what_an_instance_was_given_counts_until_another_rollout() -> None:
    """19 and 5 at first; 10 and 3 go to rank 2 (18), so does the next (22, after 2 to rank 1, 21). Who is idle changes
    nothing, since that is the clock's to say. With another rollout, rank 1 is first again."""
    ranks = Ranks(Layout.on((1,)), Layout.on((2,)))
    engine = engine_of(ranks)
    first, second = request(1, 9, 10), request(2, 2, 3)
    assert dealt(engine, ranks, first, second) == [((1,), [1]), ((2,), [2])]
    third, fourth = request(3, 5, 5), request(4, 1, 2)
    assert dealt(engine, ranks, third, fourth) == [((2,), [3, 4])]
    ranks.finish(2, second, third, fourth)
    fifth, sixth = request(5, 2, 2), request(6, 1, 1)
    assert dealt(engine, ranks, fifth, sixth) == [((1,), [6]), ((2,), [5])], "rank 2 is idle"
    ranks.finish(1, first, sixth)
    ranks.finish(2, fifth)
    engine.advance("actor.generate")
    assert not engine.has_work
    assert dealt(engine, ranks, request(7, 1, 1), request(8, 1, 1)) == [((1,), [7]), ((2,), [8])], "23 and 24"
    assert dealt(engine, ranks, request(9, 1, 1)) == [((1,), [9])], "25 after 23 and 24"
    assert dealt(engine, ranks, request(10, 1, 1, rollout=1)) == [((1,), [10])]


def test_instances_of_several_ranks_take_requests_while_they_work() -> None:
    """All their ranks are told; which step begins with a request, they agree on by themselves."""
    ranks = Ranks(Layout.on((1, 2), tp=2), Layout.on((3, 4), tp=2))
    engine = engine_of(ranks)
    assert dealt(engine, ranks, request(1, 1, 5), request(2, 1, 4)) == [((1, 2), [1]), ((3, 4), [2])]
    assert dealt(engine, ranks, request(3, 1, 1)) == [((3, 4), [3])]


def test_weights_are_moved_only_to_instances_that_have_nothing_in_flight() -> None:
    ranks = Ranks(Layout.on((1,)), Layout.on((2,)))
    engine = engine_of(ranks)
    first = request(1, 1, 5)
    assert dealt(engine, ranks, first) == [((1,), [1])]
    ranks.has_fresh_weights = False
    assert dealt(engine, ranks, request(2, 1, 1)) == [], "rank 1 is at work"
    ranks.finish(1, first)
    engine.advance("actor.generate")
    engine.advance("actor.generate")
    assert ranks.told[1:] == [((2,), [2])]


def test_who_drafts_is_told_what_others_have_drawn_when_all_have_ended() -> None:
    """One rank of each instance, which drafts for all of it. Of samples that may go on nobody is told before they do
    not; where nobody drafts, never."""
    for in_turns, counts in ((False, Counts()), (True, Counts()), (False, None)):
        ranks = Ranks(Layout.on((1, 2), tp=2), Layout.on((3, 4), tp=2))
        engine = engine_of(ranks)
        first, second = (replace(request(uid, uid, 5, 5), in_turns=in_turns) for uid in (1, 2))
        assert dealt(engine, ranks, first, second) == [((1, 2), [2]), ((3, 4), [1])]
        ranks.finish(3, first, counts=counts)
        engine.advance("actor.generate")
        assert ranks.recalled == [], "the other one is at work"
        ranks.finish(1, second, counts=counts)
        engine.advance("actor.generate")
        if in_turns:
            assert ranks.recalled == []
            engine.end_turns()
        assert ranks.recalled == ([] if counts is None else [([1], [(1,), (1,)]), ([3], [(1, 1), (1, 1)])])


def test_what_nobody_waits_for_is_not_told() -> None:
    ranks = Ranks(Layout.on((1,)), Layout.on((2,)))
    engine, one = engine_of(ranks), replace(request(1, 1, 5), in_turns=True)
    dealt(engine, ranks, one)
    ranks.finish(1, one, counts=Counts())
    engine.advance("actor.generate")
    engine.give_up()
    assert ranks.recalled == []


def test_after_an_error_nothing_is_held_for_samples_that_would_have_gone_on() -> None:
    """Whether they are being drawn, or all wait for replies; where nothing is held, nobody is told."""
    forget, end = Forget("actor"), EndTurns("actor")
    for in_turns, ended, told in (
        (True, True, [([1, 2], end)]),
        (True, False, [([1], forget), ([1, 2], end)]),
        (False, False, [([1], forget)]),
        (False, True, []),
    ):
        ranks = Ranks(Layout.on((1,)), Layout.on((2,)))
        engine, one = engine_of(ranks), replace(request(1, 1, 5), in_turns=in_turns)
        dealt(engine, ranks, one)
        if ended:
            ranks.finish(1, one)
            engine.advance("actor.generate")
        for _ in range(2):
            engine.give_up()
            assert not engine.has_work
        assert ranks.also_told == told


def test_samples_that_came_from_elsewhere_have_their_prompts_as_they_were_asked_for() -> None:
    """Texts and columns of the data do not travel with samples that move."""
    asked = Prompt(1, "1 + 1 =", (5, 6), {"answer": "2"})
    travelled = Sample(replace(asked, text="", columns={}), 0, (7,), (-1.0,), "2", FinishReason.STOP)
    assert Delivered([travelled], {}).as_asked({1: asked}) == [replace(travelled, prompt=asked)]
