"""Who gets the samples of an engine that several rollouts have asked, and what is asked for again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from plait.data.records import FinishReason, Reply, Sample
from plait.generation.request import GoingOn
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.runtime.folder.moments import Moment
from plait.runtime.steps.asking import AskedRollout, Asking, Beside
from plait.runtime.steps.partial_rollout import PartialRollout
from plait.runtime.steps.step import StepState
from plait.schedule.update_rule import UpdateRule
from tests.runtime.samples import prompt, sample
from tests.runtime.scripted_engine import ScriptedEngine

OPEN = FinishReason.OPEN


@dataclass
class Rewards:
    """What was handed to reward functions: (rollout, prompt) of each group."""

    groups: list[tuple[int, int]] = field(default_factory=list)

    def submit(self, node: Any, group: Sequence[Sample], state: StepState) -> None:
        assert [member.index for member in group] == [0, 1]
        self.groups.append((node.id, group[0].prompt.uid))

    def poll(self, node: Any) -> bool:
        return False


def asked(node: int, role: str, step: int, *uids: int) -> AskedRollout:
    """Two samples of each prompt, for a batch of its own."""
    state = StepState(step, prompts=tuple(map(prompt, uids)))
    state.growing[node] = PartialRollout(state.prompts, 2)
    call: Any = SimpleNamespace(id=node, role=role, call=f"{role}.generate", prompts=None)
    return AskedRollout(call, state, state.growing[node], SamplingSettings().sampling(), NoiseKey(1))


def _told(count: int) -> None:
    """Of how many samples are asked for."""


def test_engines_of_two_roles_may_have_samples_of_one_prompt_at_a_time() -> None:
    rewards = Rewards()
    asking = Asking(rewards)
    actor, rival = asked(0, "actor", 0, 5), asked(1, "rival", 0, 5)
    of_actor, of_rival = sample(5, 0, (1,)), sample(5, 0, (2, 2))
    engines: list[Any] = [
        ScriptedEngine([[of_actor], [sample(5, 1, (1,))]]),
        ScriptedEngine([[of_rival], [sample(5, 1, (2, 2))]]),
    ]
    works = [
        asking.work(each, engine, Beside(0, (0,)), _told) for each, engine in zip((actor, rival), engines, strict=True)
    ]
    for _ in zip(*works, strict=True):  # a step of the one, a step of the other
        pass
    assert actor.growing.groups[5][0] is of_actor
    assert rival.growing.groups[5][0] is of_rival
    assert rewards.groups == [(0, 5), (1, 5)]


def test_either_of_two_batches_steps_the_engine_and_each_gets_its_own() -> None:
    """The later one halts when the step's own has ended: of its samples one has, one goes on in the next step, and of
    its other prompt nothing was said."""
    rewards = Rewards()
    asking = Asking(rewards)
    own, later = asked(0, "actor", 3, 8), asked(0, "actor", 4, 9, 10)
    begun = sample(9, 1, (7,), OPEN)
    engine: Any = ScriptedEngine(
        [[sample(8, 0)], [sample(9, 0)], [sample(8, 1)], [begun, sample(10, 0, (), OPEN), sample(10, 1, (), OPEN)]]
    )
    beside = Beside(3, (3, 4), until=frozenset({(3, 0)}))
    first, second = asking.work(own, engine, beside, _told), asking.work(later, engine, beside, _told)
    next(first)  # it has asked, and waits until the other has
    assert next(first) is None
    next(second)
    for _ in first:
        pass
    assert (engine.steps, engine.halts) == (["actor.generate"] * 3, [])
    beside.ended.add((3, 0))
    for _ in second:
        pass
    assert engine.halts == [3]
    assert len(own.growing.whole) == 1
    assert (len(later.growing.whole), later.state.begun[0]) == (0, {(9, 1): begun})
    assert rewards.groups == [(0, 8)]
    assert sorted(later.growing.unfinished) == [(9, 1), (10, 0), (10, 1)]

    # The next step asks for what is left, the one that has begun with what it has said.
    engine.script = [[sample(9, 1), sample(10, 0), sample(10, 1)]]
    engine.asked.clear()
    for _ in asking.work(later, engine, Beside(4, (4,)), _told):
        pass
    assert [(request.prompt.uid, request.indices, request.going_on.begun) for request in engine.asked] == [
        (9, (1,), (begun,)),
        (10, (0, 1), ()),
    ]
    assert len(later.growing.whole) == 2
    assert rewards.groups == [(0, 8), (0, 9), (0, 10)]


class Record:
    """All that was drawn with version 3 was kept, and samples of step 5 stop where they are told to."""

    def at(self, version: int) -> Moment | None:
        standing = {9: {0: 4, 1: 9}} if version == 5 else {}
        return Moment("keep", standing) if version <= 5 else None


def test_where_samples_go_on_counts_replies_and_nothing_is_kept_between_turns() -> None:
    """Two of prompt 9 stand at four and five tokens of the response, of which three are a reply; of prompt 10 one is
    behind a reply, and one waits for its first."""
    asking = Asking(Rewards(), Record(), UpdateRule("keep"))  # type: ignore[arg-type]
    later = asked(0, "actor", 5, 9, 10)
    reply = (Reply(1, (1, 1, 1)),)
    behind = replace(sample(9, 0, (7,), OPEN), replies=reply, policy_version=3)
    within = replace(sample(9, 1, (7, 7), OPEN), replies=reply, policy_version=3)
    other = replace(sample(10, 0, (7,), OPEN), replies=reply, policy_version=3)
    waits = replace(sample(10, 1, (7,), OPEN), turns=({"role": "assistant"},), policy_version=3)
    later.state.begun[0] = {(9, 0): behind, (9, 1): within, (10, 0): other, (10, 1): waits}
    engine: Any = ScriptedEngine([])
    for _ in asking.work(later, engine, Beside(4, (5,)), _told):
        pass
    first, second = engine.asked
    assert first.going_on == GoingOn((within,), frozenset({0}), {1: 9}, frozenset({1}), parks=True)
    assert second.going_on == GoingOn((other, waits), frozenset(), {}, frozenset(), parks=True)


class NoRecord:
    """New weights have never come in another stay of the run."""

    def at(self, version: int) -> Moment | None:
        return None


def test_samples_of_later_batches_stop_after_so_many_tokens_and_none_waits_for_the_clock() -> None:
    """Of prompt 9 the first has two tokens, and the second none yet; the step's own prompt 8 goes to its end."""
    asking = Asking(Rewards(), NoRecord(), UpdateRule("recompute", 5))  # type: ignore[arg-type]
    own, later = asked(0, "actor", 4, 8), asked(0, "actor", 5, 9)
    begun = replace(sample(9, 0, (7, 7), OPEN), policy_version=3)
    later.state.begun[0] = {(9, 0): begun}
    engine: Any = ScriptedEngine([])
    beside = Beside(4, (4, 5), frozenset())  # the step's own samples may all be there before
    works = [asking.work(one, engine, beside, _told) for one in (own, later)]
    for _ in range(3):
        for work in works:
            next(work, None)
    first, second = engine.asked
    assert first.going_on == GoingOn()
    assert second.going_on == GoingOn((begun,), stops={0: 7, 1: 5})
    assert engine.halts == []
