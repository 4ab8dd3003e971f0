"""Groups in rounds: when one begins, what a batch that was halted goes on with, and what stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from plait.data.records import Prompt, Sample
from plait.data.rows import FloatArray
from plait.dataflow import Resample
from plait.errors import RunError
from plait.runtime.steps.partial_rollout import PartialRollout
from plait.runtime.steps.resampling import Resampling, Rounds
from plait.runtime.steps.step import StepState
from plait.schedule.work import Work
from tests.runtime.samples import prompt, sample

RESAMPLE = Resample(keep=lambda rewards: bool(rewards.std() > 0), reward="reward", max_rounds=3)
NODE: Any = SimpleNamespace(id=0, call="actor.generate", generation=SimpleNamespace(resample=RESAMPLE))


@dataclass
class Scene:
    """A batch of two prompts whose groups of odd uids stay; rewards come after so many looks."""

    looks: int = 0
    further: list[list[int]] = field(default_factory=list)
    """Uids of the rounds that may begin."""
    stands: bool = False
    drawn: list[str] = field(default_factory=list)
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

    def more(self) -> list[Prompt] | None:
        return [prompt(uid) for uid in self.further.pop(0)] if self.further else None

    def run(self) -> Any:
        work = self.resampling.work(NODE, self.state, Rounds(self.draws, self.more, lambda: self.stands))
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
