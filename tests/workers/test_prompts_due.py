"""Prompts that an instance computes go on right behind their step: the order of what leader and instance do, where each
word arrives while the other is at its next action."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from plait.data.records import Prompt
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.kernels.noise import NoiseKey
from plait.models.parallel.team import Team
from plait.policy.batching import Scheduler
from plait.policy.prompt_pace import PromptRoom
from plait.policy.prompts_alone import due, is_computed, may_compute
from plait.policy.step import Limits
from plait.workers.call_messages import Answer, Forget, Generate, Migrate
from plait.workers.dealing import Outstanding
from plait.workers.gathering import Gathering, Said, Stage, Through
from plait.workers.lockstep_engine import LockstepEngine
from plait.workers.messages import Message
from plait.workers.remote_prompts import RemotePrompts

DRAWS, COMPUTES = 0, 1
GIVEN = ["computes 0[0:10]", "gives [0]"]


class Computing:
    """The engine of an instance that computes prompts, ten tokens a step, and its way to the other instance."""

    model = SimpleNamespace(team=Team.alone())
    state = SimpleNamespace(expect_work=lambda are_new: None)
    speculation, place, received_bytes, is_under_way = None, COMPUTES, 0, False

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.scheduler = Scheduler(Limits(8, 10, None, starts=False))
        self.last_step: Any = SimpleNamespace(waited_s=0.0, num_groups=1)
        self.said: dict[tuple[int, int], int] = {}
        self.told: set[int] = set()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def may_step(self) -> bool:
        return may_compute(self.scheduler.sequences, self.scheduler.room)

    def add(self, request: Request) -> None:
        self.scheduler.add(request.prompt.uid, len(request.prompt.token_ids), request.indices, ())

    def abort(self, uid: int) -> None:
        self.scheduler.remove([(uid, 0)])

    def step(self) -> list[Any]:
        plan = self.scheduler.plan()
        self.log.append("computes " + " ".join(f"{c.uid}[{c.start}:{c.stop}]" for c in plan.chunks))
        return []

    def do(self, number: int, gathering: Gathering) -> Said | None:
        if gathering.stage is not Stage.GIVE:
            return None
        [keys] = gathering.pairs.values()
        uids = [uid for uid, _ in keys if is_computed(self.scheduler.sequences.prompts[uid])]
        self.scheduler.remove([(uid, 0) for uid in uids])
        self.log.append(f"gives {uids}")
        return Said(Stage.GIVE, {(COMPUTES, DRAWS): Message({})})

    def news(self, wait_s: float) -> list[Any]:
        return []

    def due(self) -> list[int]:
        return self._new(due(self.scheduler.sequences, self.scheduler.room, 10))

    def computed(self) -> list[int]:
        return self._new([uid for uid, prompt in self.scheduler.sequences.prompts.items() if is_computed(prompt)])

    def _new(self, uids: list[int]) -> list[int]:
        new = [uid for uid in uids if uid not in self.told]
        self.told |= set(new)
        return new

    def forget(self) -> None:
        self.told.clear()


class Run:
    """A leader that draws, and the instance that computes prompts for it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.engine = Computing(self.log)
        engine: Any = self.engine
        self.instance = LockstepEngine(engine, Team.alone(), None, engine)
        self.outstanding = Outstanding()
        room = PromptRoom(100, most=10)
        self.prompts = RemotePrompts((COMPUTES,), self.outstanding, {}, self.tell, room, ahead=True)
        self.number = 0
        self.heard: list[tuple[int, int, Any]] = []
        """What the instance that draws answers with its next step."""

    def tell(self, stage: Gathering) -> int:
        self.number += 1
        if COMPUTES in stage.concerned:
            self.instance.hear(self.number, Migrate("actor", stage, 0))
        if stage.stage is Stage.HERE:
            self.heard.append((self.number, DRAWS, Said(Stage.HERE, {(COMPUTES, DRAWS): Message({})})))
        if stage.stage is Stage.TAKE:
            self.heard.append((self.number, DRAWS, Through()))
        return self.number

    def ask(self, *tokens: int) -> None:
        asked = [Request(Prompt(u, "", (1,) * n), 1, Sampling(max_tokens=9), NoiseKey(0)) for u, n in enumerate(tokens)]
        for share in self.prompts.deal([(DRAWS, request) for request in asked]).values():
            self.number += 1
            self.instance.hear(self.number, Generate("actor", "actor.generate", [request for _, request in share], 0))
            for target, request in share:
                self.outstanding.dealt([request], target, self.number)

    def step(self) -> list[tuple[int, Answer]]:
        """Of the instance that computes; what its answers lead to is told before it begins its next one."""
        answers = self.instance.step(lambda: None)
        for number, answer in answers:
            self.prompts.heard(number, COMPUTES, answer)  # type: ignore[arg-type]
        self.prompts.go_on()
        while self.heard:
            self.prompts.heard(*self.heard.pop(0))
            self.prompts.go_on()
        return answers


def test_what_a_step_has_computed_is_given_before_the_next_one() -> None:
    """Long prompts, one in a step, and a last step of two."""
    run = Run()
    run.ask(10, 9, 5, 4)
    while not run.instance.is_empty or run.instance.has_heard:
        run.step()
    assert run.log == [
        *("computes 0[0:10]", "gives [0]"),
        *("computes 1[0:9] 2[0:1]", "gives [1]"),
        *("computes 2[1:5] 3[0:4]", "gives [2, 3]"),
    ]
    assert not run.prompts.instances


def test_what_was_said_to_be_due_is_computed_before_anything_else_is_taken_up() -> None:
    """The command to give it has come meanwhile, and a prompt that would go first."""
    run = Run()
    run.ask(10)
    assert [type(answer).__name__ for _, answer in run.step()] == ["Computed"]
    assert run.log == [], "said before it is computed"
    assert run.instance.has_heard, "the command to give it is here"
    run.step()
    assert run.log == ["computes 0[0:10]"]
    run.step()
    assert run.log == ["computes 0[0:10]", "gives [0]"]


@pytest.mark.parametrize(("steps", "log"), [(1, []), (2, GIVEN), (3, GIVEN)])
def test_what_is_due_may_be_forgotten(steps: int, log: list[str]) -> None:
    """Nothing is computed any more, and nothing leaves that is not computed."""
    run = Run()
    run.ask(10, 10)
    for _ in range(steps):
        run.step()
    run.instance.hear(50, Forget("actor"))
    run.instance.step(lambda: None)
    assert run.log == log
    assert run.instance.is_empty
