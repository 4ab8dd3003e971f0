"""What the ranks of an instance agree on before a step; what a rank does with what it is sent between its actions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.data.records import FinishReason, Prompt, Sample
from plait.generation.engine import Engine
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.generation.step_record import StepRecord
from plait.kernels.noise import NoiseKey
from plait.layout.mesh import Layout
from plait.models.parallel.team import Team
from plait.models.parallel.transfer import Transfer
from plait.policy.step import PROMPT, StepKind
from plait.policy.turns import Turn
from plait.reallocation.offload import HostMemory
from plait.workers import follower
from plait.workers.call_messages import Delivered, Forget, ForgetCall, Generate, Migrate
from plait.workers.commands import End, command_of
from plait.workers.follower import FollowerLoop
from plait.workers.gathering import Gathering, Said, Stage
from plait.workers.lockstep_engine import LockstepEngine
from plait.workers.messages import Message
from plait.workers.rank_state import RankState
from plait.workers.status_file import StatusFile
from plait.workers.upkeep import Version
from tests.models.tiny import tiny_model


def request(uid: int, tokens: int) -> Request:
    return Request(Prompt(uid, "", (1,)), 1, Sampling(max_tokens=tokens), NoiseKey(0))


class Tokens:
    """An engine that gives each sample a token per step, and says in which steps who was there."""

    speculation = None
    model = SimpleNamespace(team=Team.alone())
    state = SimpleNamespace(expect_work=lambda are_new: None)

    def __init__(self, log: list[str] | None = None) -> None:
        self.log = [] if log is None else log
        self.left: dict[int, Request] = {}
        self.drawn: dict[int, int] = {}
        self.last_step = StepRecord(StepKind.DECODE, 1, 1, 1, 0, 0, 1, 0)

    @property
    def has_work(self) -> bool:
        return bool(self.left)

    @property
    def said(self) -> dict[tuple[int, int], int]:
        return {(uid, 0): self.drawn[uid] for uid in self.left}

    def add(self, request: Request) -> None:
        self.left[request.prompt.uid], self.drawn[request.prompt.uid] = request, 0

    def update_weights(self, version: int) -> None:
        assert not self.left
        self.log.append(f"version {version}")

    def abort(self, uid: int) -> None:
        self.left.pop(uid, None)

    def step(self) -> list[Sample]:
        self.log.append(f"step with {sorted(self.left)}")
        ended = []
        for uid, asked in list(self.left.items()):
            self.drawn[uid] += 1
            if self.drawn[uid] == asked.sampling.max_tokens:
                ended.append(Sample(self.left.pop(uid).prompt, 0, (), (), "", FinishReason.STOP))
        return ended


class Pair:
    """Two ranks of an instance, stepped one after the other; `word` is what the first has sent."""

    def __init__(self, *ranks: int) -> None:
        self.engines = [Tokens(), Tokens()]
        self.words: deque[torch.Tensor] = deque()
        self.sent: list[int] = []
        self.members = [
            LockstepEngine(engine, team(self.peers(ranks, index)), None, None)  # type: ignore[arg-type]
            for index, engine in enumerate(self.engines)
        ]

    def peers(self, ranks: tuple[int, ...], index: int) -> Any:
        def isend(word: torch.Tensor, *rest: Any) -> Transfer:
            self.words.append(word)
            self.sent.append(word.numel() * word.itemsize)
            return Transfer(word, lambda: None)

        def irecv(word: torch.Tensor, *rest: Any) -> Transfer:
            return Transfer(word, lambda: word.copy_(self.words.popleft()))

        return SimpleNamespace(ranks=ranks, index=index, size=2, isend=isend, irecv=irecv)

    def step(self, *reads: Callable[[], None]) -> None:
        """The rank that decides first: nobody takes messages in the background here."""
        pairs = zip(self.members, reads or (never, never), strict=True)
        for lockstep, read in sorted(pairs, key=lambda pair: not pair[0].decides):
            lockstep.step(read)
        assert self.engines[0].log == self.engines[1].log


def team(peers: Any) -> Any:
    return SimpleNamespace(all=peers, pp=SimpleNamespace(index=0, size=1))


def asks(requests: Sequence[Request], weights: int = 0) -> Generate:
    return Generate("actor", "actor.generate", requests, weights)


def never() -> None:
    raise AssertionError("there is nothing to wait for")


def test_a_step_begins_with_what_the_deciding_rank_has_heard() -> None:
    """The other one has heard of request 2 already, and takes it when the first has, in its third step."""
    pair = Pair(1, 2)
    for lockstep in pair.members:
        lockstep.hear(4, asks([request(1, 5)]))
    pair.members[1].hear(6, asks([request(2, 1)]))
    pair.step()
    pair.step()
    pair.members[0].hear(6, asks([request(2, 1)]))
    pair.step()
    assert pair.engines[1].log == ["step with [1]", "step with [1]", "step with [1, 2]"]
    assert pair.sent == [8, 8, 8], "bytes to each other rank"


def test_a_rank_that_lags_waits_for_what_a_step_begins_with() -> None:
    pair = Pair(1, 2)
    first, second = pair.members
    first.hear(4, asks([request(1, 5)]))
    first.hear(6, asks([request(2, 1)]))
    coming = iter([(4, asks([request(1, 5)])), (6, asks([request(2, 1)])), (9, asks([request(3, 1)]))])
    pair.step(never, lambda: second.hear(*next(coming)))
    assert pair.engines[1].log == ["step with [1, 2]"]
    assert next(coming)[0] == 9, "it has read no further"


@torch.no_grad()
def test_prefixes_stay_by_the_number_of_the_weights() -> None:
    """Not by what a rank finds written: ranks of an instance, of which some had to make room, would differ about cached
    blocks; and of weights that come as messages nothing is found written."""
    engine = Engine(tiny_model(), SamplingSettings(max_running=2, prefix_cache_tokens=64))
    weights = engine.model.weights
    memory = HostMemory({"weights": weights})
    alone, asked = LockstepEngine(engine, Team.alone(), None, None), []

    def go_and_come() -> None:
        for moving in (memory.offloading, memory.onloading):
            deque(moving(), maxlen=0)

    def go_and_be_brought() -> None:
        values = weights.clone()
        memory.drop()
        memory.allocate()
        weights.copy_(values)

    nothing: Callable[[], object] = lambda: None
    between = ((nothing, 1), (nothing, 1), (go_and_come, 1), (go_and_be_brought, 1), (nothing, 2), (go_and_come, 2))
    for number, (happens, of_weights) in enumerate(between):
        happens()
        prompt, sampling = Prompt(number, "", tuple(range(3, 23))), Sampling(max_tokens=2)
        alone.hear(number, asks([Request(prompt, 1, sampling, NoiseKey(0))], of_weights))
        alone.step(never)
        assert alone.last_step is not None
        asked.append(alone.last_step.num_prefill_tokens)
        while not alone.is_empty:
            alone.step(never)
    assert asked == [20, 4, 4, 4, 20, 4]


def test_where_the_leader_is_in_an_instance_it_decides() -> None:
    assert [lockstep.decides for lockstep in Pair(1, 2).members] == [True, False]
    assert [lockstep.decides for lockstep in Pair(1, 0).members] == [False, True]


def test_forgotten_requests_leave_at_the_same_step_and_what_came_behind_stays() -> None:
    pair = Pair(1, 2)
    for lockstep in pair.members:
        lockstep.hear(4, asks([request(1, 50), request(2, 50)]))
    pair.step()
    for lockstep in pair.members:
        lockstep.hear(5, Forget("actor"))
        lockstep.hear(6, asks([request(3, 2)]))
    pair.step()
    pair.step()
    assert pair.engines[0].log == ["step with [1, 2]", "step with [3]", "step with [3]"]
    assert all(lockstep.is_empty for lockstep in pair.members)


def test_samples_go_to_the_commands_that_asked_for_them() -> None:
    lockstep = LockstepEngine(Tokens(), team(SimpleNamespace(ranks=(1,), index=0, size=1)), None, None)  # type: ignore[arg-type]
    lockstep.hear(4, asks([request(1, 1), request(2, 2)]))
    lockstep.hear(6, asks([request(3, 1)]))
    assert delivered(lockstep) == {4: [1], 6: [3]}
    assert delivered(lockstep) == {4: [2]}


def delivered(lockstep: LockstepEngine) -> dict[int, list[int]]:
    """Command → prompts whose samples a step finishes."""
    answers = {number: answer for number, answer in lockstep.step(never) if isinstance(answer, Delivered)}
    return {number: [sample.prompt.uid for sample in answer.samples] for number, answer in answers.items()}


class Call:
    """A call of three actions, which this rank has to itself."""

    role, turn = "ref", Turn(0)

    def __init__(self, name: str, log: list[str]) -> None:
        self.call, self._log = name, log

    def layout(self, parts: Any) -> Layout:
        return Layout.on((1,))

    def run(self, parts: Any) -> Iterator[Any]:
        yield SimpleNamespace(action="")
        for number in range(3):
            self._log.append(f"{self.call} {number}")
            yield SimpleNamespace(action="", kind="", tokens=0, bytes=0)
        return self.call

    @staticmethod
    def answer(result: str) -> Message:
        return Message({"result": result})


class Rank:
    """A server, rank 1 of 2: it generates and scores alone. Each command comes when so many actions have been done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, leaves: bool = False) -> None:
        self.log: list[str] = []
        self.answers: list[int] = []
        self.coming: list[tuple[int, Message]] = []
        monkeypatch.setattr(follower, "command_of", self._command_of)
        monkeypatch.setattr(follower, "ScoreCall", Call)
        offloads = SimpleNamespace(units=(1,) if leaves else (), want=lambda *needs: None)
        alone = team(SimpleNamespace(ranks=(1,), index=0, size=1))
        roles = {"actor": SimpleNamespace(engine=Tokens(self.log), instance=alone, mover=None, prompts=None)}
        state: Any = SimpleNamespace(rank=1, offloads=offloads, roles=roles, flow=None, listeners={})
        state.take = lambda number, command: RankState.take(state, number, command)
        self._parts = state

    def _command_of(self, message: Message, flow: Any) -> Any:
        return Call(message.header["call"], self.log) if message.kind == "score" else command_of(message, flow)

    def command(self, after: int, number: int, command: Any, step: int | None = 1) -> None:
        self.coming.append((after, replace(command.to_message(), number=number, step=step)))

    def scores(self, after: int, number: int, call: str) -> None:
        self.coming.append((after, Message({"call": call}, (), "score", number, 1)))

    def asks(self, after: int, number: int, *requests: Request) -> None:
        self.command(after, number, asks(requests))

    def poll(self, sources: list[int]) -> tuple[int, Message] | None:
        return self.receive(sources) if self.coming and self.coming[0][0] <= len(self.log) else None

    def receive(self, sources: list[int], *rest: Any) -> tuple[int, Message]:
        return 0, self.coming.pop(0)[1]

    def send(self, to: int, message: Message, what: str) -> None:
        assert message.number is not None, "an answer says what it answers"
        self.answers.append(message.number)

    def serve(self) -> None:
        transport: Any = self
        FollowerLoop(self._parts, transport, StatusFile(None, 1)).serve()

    @property
    def recorded(self) -> list[tuple[int | None, str]]:
        """(step, action) of all that it did."""
        return [(span.step, span.action) for span in self._parts.offloads.recorder.take().spans]


def test_a_rank_scores_and_generates_in_turns_and_takes_requests_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.asks(0, 1, request(1, 4))
    rank.scores(0, 2, "score")
    rank.asks(3, 3, request(2, 1))
    rank.command(100, 4, End())
    rank.serve()
    assert rank.log == [
        *("step with [1]", "step with [1]", "score 0"),  # its first turn brings what the call needs to the device
        *("step with [1, 2]", "score 1", "step with [1]", "score 2"),
    ]
    assert rank.answers == [3, 1, 2]


def test_steps_are_actions_of_the_call_that_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout, an evaluation, which is of no step, and right behind it a rollout again."""
    rank = Rank(monkeypatch)
    rank.asks(0, 1, request(1, 2))
    rank.command(2, 2, Generate("actor", "evaluate", [request(2, 1)], 0), step=None)
    rank.asks(3, 3, request(3, 1))
    rank.command(100, 4, End())
    rank.serve()
    assert rank.log == ["step with [1]", "step with [1]", "step with [2]", "step with [3]"]
    rollout = (1, "actor.generate/decode")
    assert rank.recorded == [rollout, rollout, (None, "evaluate/decode"), rollout]


def test_what_a_rank_does_for_nobody_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of 50 tokens is forgotten after two, a call of three actions after one; another ends with the run."""
    rank = Rank(monkeypatch)
    rank.asks(0, 1, request(1, 50))
    rank.command(2, 2, Forget("actor"))
    rank.scores(2, 3, "one")
    rank.command(3, 4, ForgetCall(3))
    rank.scores(3, 5, "two")
    rank.command(5, 6, End())
    rank.serve()
    assert rank.log == ["step with [1]", "step with [1]", "one 0", "two 0", "two 1"]
    assert rank.answers == []


def test_new_weights_wait_for_samples_in_flight_and_what_comes_behind_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(monkeypatch)
    rank.asks(0, 1, request(1, 2))
    rank.command(0, 2, Version("actor", 5))
    rank.scores(0, 3, "score")
    rank.command(100, 4, End())
    rank.serve()
    assert rank.log == ["step with [1]", "step with [1]", "version 5", "score 0", "score 1", "score 2"]


def test_where_weights_leave_the_device_one_work_waits_for_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan has counted on the memory. Requests join what is at work all the same."""
    rank = Rank(monkeypatch, leaves=True)
    rank.asks(0, 1, request(1, 2))
    rank.scores(0, 2, "score")
    rank.asks(1, 3, request(2, 1))
    rank.command(100, 4, End())
    rank.serve()
    assert rank.log == ["step with [1]", "step with [1, 2]", "score 0", "score 1", "score 2"]


class Prompts:
    """Prompts of an instance that computes them for another, as far as its steps ask."""

    place, received_bytes, is_under_way, may_step = 1, 0, False, True

    def do(self, number: int, gathering: Gathering) -> Said:
        return Said(gathering.stage, {})

    def news(self, wait_s: float) -> list[Any]:
        return []

    def due(self) -> list[int]:
        return []

    def computed(self) -> list[int]:
        return []


def test_what_a_prompt_needs_to_go_on_is_told_before_the_next_step_is_computed() -> None:
    """A step of prompts takes seconds, and another instance waits meanwhile."""
    engine = Tokens()
    alone = LockstepEngine(engine, Team.alone(), None, Prompts())  # type: ignore[arg-type]
    alone.hear(3, asks([request(1, 5), request(2, 5)]))
    assert alone.step(never) == []
    gathering = Gathering({(1, 0): [(1, PROMPT)]}, {1: 3}, stage=Stage.GIVE)
    alone.hear(4, Migrate("actor", gathering, 0))
    assert alone.step(never) == [(4, Said(Stage.GIVE, {}))]
    assert alone.last_step is None
    assert engine.log == ["step with [1, 2]"]
    alone.step(never)
    assert engine.log == ["step with [1, 2]"] * 2
