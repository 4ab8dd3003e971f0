"""Groups in rounds: when one begins, what a batch that was halted goes on with, and what stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.data.records import Prompt, Sample
from plait.data.rows import FloatArray
from plait.dataflow import Resample
from plait.errors import RunError
from plait.runtime.steps.partial_rollout import PartialRollout
from plait.runtime.steps.resampling import Resampling, Rounds, next_round
from plait.runtime.steps.step import StepState
from plait.schedule.work import Work
from tests.runtime.samples import prompt, sample

RESAMPLE = Resample(keep=lambda rewards: bool(rewards.std() > 0), reward="reward", max_rounds=3)


def node_of(resample: Resample) -> Any:
    return SimpleNamespace(id=0, call="actor.generate", generation=SimpleNamespace(resample=resample))


NODE = node_of(RESAMPLE)


@dataclass
class Scene:
    """A batch of two prompts whose groups of odd uids stay; rewards come after so many looks."""

    looks: int = 0
    further: list[list[int]] = field(default_factory=list)
    """Uids of the rounds that may begin."""
    stands: bool = False
    drawn: list[str] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    """How many prompts each further round was asked to have."""
    said: list[str] = field(default_factory=list)
    state: StepState = field(default_factory=lambda: StepState(4, prompts=(prompt(2), prompt(3))))

    def __post_init__(self) -> None:
        self.growing = self.state.growing[0] = PartialRollout(self.state.prompts, 2)
        progress: Any = SimpleNamespace(message=self.said.append)
        self.resampling = Resampling(self, progress, 7)

    def rewards_of(
        self, rollout: Any, role: str, groups: Sequence[Sequence[Sample]], state: StepState
    ) -> Work[list[FloatArray]]:
        for _ in range(self.looks):
            yield None
        return [np.array([0.0, group[0].prompt.uid % 2]) for group in groups]

    def draws(self, name: str, prompts: Sequence[Prompt]) -> Work[None]:
        self.drawn.append(f"{name}: {[one.uid for one in prompts]}")
        for one in prompts if self.growing.num_finished < self.growing.num_asked else ():
            for index in range(2):
                self.growing.take(sample(one.uid, index))
        yield None

    def more(self, count: int) -> list[Prompt] | None:
        self.asked.append(count)
        return [prompt(uid) for uid in self.further.pop(0)] if self.further else None

    def run(self, node: Any = NODE) -> Any:
        work = self.resampling.work(node, self.state, Rounds(self.draws, self.more, lambda: self.stands))
        while True:
            try:
                next(work)
            except StopIteration as end:
                return end.value


def uids(groups: Sequence[Sequence[Sample]]) -> list[int]:
    return [group[0].prompt.uid for group in groups]


def test_rounds_are_drawn_until_enough_groups_stay() -> None:
    scene = Scene(looks=2, further=[[4, 5], [7, 9]])
    kept, drawn = scene.run()
    assert (uids(kept), uids(drawn)) == ([3, 5], [2, 3, 4, 5])
    assert scene.drawn == ["actor.generate: [2, 3]", "actor.generate/r2: [4, 5]"]
    assert scene.state.metrics == {"dynamic/rounds": 2, "dynamic/groups_drawn": 4, "dynamic/groups_refused": 2}


def test_a_batch_whose_next_round_is_for_a_later_step_goes_on_there() -> None:
    """It has the groups of its first round still, and counts once."""
    scene = Scene()
    assert scene.run() is None
    assert scene.state.metrics == {}
    scene.further = [[4, 6], [7, 9]]
    kept, drawn = scene.run()
    assert (uids(kept), uids(drawn)) == ([3, 7], [2, 3, 4, 6, 7, 9])
    assert scene.state.metrics["dynamic/groups_drawn"] == 6


def test_nobody_waits_for_rewards_of_a_batch_that_stands() -> None:
    scene = Scene(looks=1, stands=True)
    assert scene.run() is None
    scene.stands, scene.further = False, [[5, 7]]
    kept, _ = scene.run()
    assert uids(kept) == [3, 5]


def test_with_the_last_round_fewer_may_stay_and_none_is_an_error() -> None:
    scene = Scene(further=[[4, 6], [8, 10]])
    kept, drawn = scene.run()
    assert (uids(kept), len(drawn)) == ([3], 6)
    assert scene.said == ["step 5: 1 of 2 groups are worth training on after 3 rounds"]
    scene = Scene(state=StepState(4, prompts=(prompt(2), prompt(4))), further=[[6, 8], [10, 12]])
    with pytest.raises(RunError, match=r"step 5: actor\.generate drew 6 groups in 3 rounds and kept none; `<lambda>`"):
        scene.run()


def test_a_round_has_as_many_groups_as_are_likely_to_yield_those_that_are_missing() -> None:
    # 12 of 16 stayed, a rate of 13/17: the 4 that are missing are likely among 4 · 17 / 13 = 5.2 groups.
    assert next_round(16, 12, 16, 10) == 6
    assert next_round(16, 15, 16, 10) == 2, "17 / 16 of a group"
    assert next_round(16, 16, 16, 10) == next_round(16, 17, 18, 10) == 0
    # 2 of 16: 14 · 17 / 3 = 79, but no more than were drawn; then 12 · 33 / 5 = 79 again, of which 32 are tried.
    assert [next_round(16, 2, 16, 10), next_round(16, 4, 32, 10)] == [16, 32]
    assert [next_round(3, 0, drawn, 4) for drawn in (3, 6, 12)] == [3, 6, 0], "4 · 3 groups in all at most"
    assert next_round(16, 0, 16, 1) == 0


@given(st.integers(1, 40), st.integers(1, 12), st.data())
def test_rounds_end_and_cost_no_more_than_full_ones(wanted: int, max_rounds: int, data: st.DataObject) -> None:
    drawn, kept, rounds = wanted, data.draw(st.integers(0, wanted)), 1
    while size := next_round(wanted, kept, drawn, max_rounds):
        assert 1 <= size <= drawn
        kept, drawn, rounds = kept + data.draw(st.integers(0, size)), drawn + size, rounds + 1
    assert kept >= wanted or drawn == wanted * max_rounds
    assert wanted <= drawn <= wanted * max_rounds


def test_rounds_of_other_sizes_are_drawn_and_judged_whole() -> None:
    """A batch that waited for its third round goes on with it; a round on record has its own size."""
    scene = Scene(further=[[5, 8, 10]], state=StepState(4, prompts=(prompt(2), prompt(4), prompt(6))))
    node = node_of(replace(RESAMPLE, max_rounds=5))
    assert scene.run(node) is None
    assert scene.asked == [3, 6], "as many as were drawn: 7 are likely to hold 2 more where one of 6 stayed"
    scene.further = [[7], [9, 11]]
    kept, drawn = scene.run(node)
    assert scene.asked == [3, 6, 6, 3]
    assert (uids(kept), uids(drawn)) == ([5, 7, 9], [2, 4, 6, 5, 8, 10, 7, 9, 11])
    assert scene.drawn[-2:] == ["actor.generate/r3: [7]", "actor.generate/r4: [9, 11]"]
    assert scene.state.metrics == {"dynamic/rounds": 4, "dynamic/groups_drawn": 9, "dynamic/groups_refused": 5}
