"""The process that leads goes on with whatever can go on: calls on other ranks, scores of finished samples, functions.

What has to overlap is forced: one side waits until the other has done its part, and gives up with an error after a
minute. A leader that ran one call to its end before the next would never get there.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plait.data.records import FinishReason, Prompt, Sample
from plait.data.rows import Rows
from plait.engines import ScoredBy
from plait.models.files.saving import save_pretrained
from plait.models.scalar_loading import scalar_of
from plait.policy.score_parts import PartSize
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.steps.free_copies import Copies, where_free
from plait.runtime.steps.partial_rollout import HEARD, PartialRollout
from plait.runtime.steps.scoring_parts import Part, RolloutParts
from plait.schedule.dispatch import Task
from plait.schedule.timeline import load_any
from plait.schedule.work import MOVED_ON, nothing
from tests.models.tiny import tiny_model, tiny_tokenizer
from tests.runs.plan_files import write_plan
from tests.runs.plans import assert_equal_runs

MakeRecipe = Callable[..., Recipe]

FLOW = """
    import sys
    import time
    from pathlib import Path

    from plait.algorithms.grpo import grpo as grpo
    from plait.generation.engine import Engine
    from plait.workers.status_file import StatusFile

    # A rank that generates goes on behind its first group only when another has begun to score: `SCORES`.
    begun = Path(__file__).with_name("begun")
    step, doing = Engine.step, StatusFile.doing


    def patient(self):
        if self.occupancy.num_running + self.occupancy.num_waiting <= 8:
            for _ in range(600):
                if begun.exists():
                    break
                time.sleep(0.1)
            else:
                raise TimeoutError("nobody scores what is finished")
        return step(self)


    def watched(self, action):
        if action == "SCORES/p0":
            begun.touch()
        return doing(self, action)


    if "pytest" not in sys.modules:  # in ranks alone
        Engine.step, StatusFile.doing = patient, watched
"""


def recipes(make_recipe: MakeRecipe, tmp_path: Path, plan: dict[str, str], scores: str, **keys: Any) -> list[Recipe]:
    """The same run in one process, and under a plan whose ranks wait for each other: one group is generated at a time,
    and scored by itself."""
    (tmp_path / "flow.py").write_text(textwrap.dedent(FLOW).replace("SCORES", scores))
    common = {
        "dtype": "float64",
        "steps": 1,
        "sampling.max_running": 4,
        "micro_batch_tokens": 64,
        **keys,
    }
    where = {"algorithm": f"{tmp_path}/flow.py:grpo", "plan": str(write_plan(tmp_path, "apart", plan))}
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    return [make_recipe(run_dir=one, algorithm="grpo", **common), make_recipe(run_dir=two, **common, **where)]


def test_the_leader_scores_what_others_have_finished(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    plan = {"actor.generate": "1", "actor.train": "0", "ref.logprobs": "0"}
    one, two = recipes(make_recipe, tmp_path, plan, "ref.logprobs")
    run(one)
    run(two)
    assert_equal_runs(two.run_dir, one.run_dir)
    spans = load_any(two.run_dir / "trace.json").spans
    scored = [s for s in spans if s.action.startswith("ref.logprobs/")]
    generated = [s for s in spans if s.action.startswith("actor.generate/")]
    assert {s.rank for s in scored} == {0}
    assert {s.rank for s in generated} == {1}
    assert min(s.start_s for s in scored) < max(s.end_s for s in generated)


@pytest.mark.slow
def test_a_reward_model_scores_on_another_rank_while_the_leader_generates(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    """Beside functions: both count, and the sums are those of one process."""
    plan = {"actor.generate": "0", "actor.train": "0", "ref.logprobs": "0", "reward.score": "1"}
    model = scalar_of(tiny_model("llama", dtype=torch.float32), seed=3)
    model.tokenizer = tiny_tokenizer()
    save_pretrained(model, tmp_path / "reward_model")
    keys = {"reward.model": str(tmp_path / "reward_model"), "reward.model_weight": 0.5}
    one, two = recipes(make_recipe, tmp_path, plan, "reward.score", **keys)
    run(one)
    run(two)
    assert_equal_runs(two.run_dir, one.run_dir)
    spans = load_any(two.run_dir / "trace.json").spans
    scored = [s for s in spans if s.action.startswith("reward.score/") and s.lane == "compute"]
    generated = [s for s in spans if s.action.startswith("actor.generate/")]
    assert {s.rank for s in scored} == {1}
    assert {s.action for s in scored} == {f"reward.score/p{part}/mb0" for part in range(3)}
    assert min(s.start_s for s in scored) < max(s.end_s for s in generated)


def test_functions_score_while_the_reference_does(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process: the function answers when the reference has scored."""
    (tmp_path / "reward.py").write_text(
        "import time\nfrom pathlib import Path\n\n"
        "def count_sevens(completions, **columns):\n"
        "    for _ in range(250):\n"
        f"        if Path('{tmp_path}/scored').exists():\n"
        "            return [float(text.count('7')) for text in completions]\n"
        "        time.sleep(0.1)\n"
        "    raise TimeoutError('the reference waits for this function')\n"
    )
    from plait.training.trainer import Trainer

    score = Trainer.score

    def told(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        found = yield from score(self, *args, **kwargs)
        (tmp_path / "scored").touch()
        return found

    monkeypatch.setattr(Trainer, "score", told)
    assert run(make_recipe(steps=1)).finished


def test_a_part_of_a_rollout_is_there_when_no_other_group_can_come_before_it() -> None:
    """Three prompts of 4 tokens with two samples each, all at a time; parts have 17 tokens. Prompt 2 ends first, with
    responses of 1 and 2 tokens; what others have said then decides. Prompt 1 has 3 and 4: its 11 tokens do not fit."""
    prompts = [Prompt(uid, "", (1,) * 4) for uid in (3, 1, 2)]
    growing = PartialRollout(prompts, 2)
    parts = RolloutParts(growing, PartSize(17), at_once=6)

    def finish(uid: int, index: int, tokens: int) -> list[Sample] | None:
        prompt = next(prompt for prompt in prompts if prompt.uid == uid)
        return growing.take(Sample(prompt, index, (7,) * tokens, (-1.0,) * tokens, "", FinishReason.STOP))

    def taken() -> tuple[str, list[str]] | None:
        part = parts.take()
        return None if part is None else (part.name, [sample.uid for sample in part.rows.samples])

    assert finish(2, 0, 1) is None
    assert [sample.index for sample in finish(2, 1, 2) or ()] == [0, 1]
    assert taken() is None, "a part has more than one group of so few tokens"
    finish(1, 1, 4)
    finish(1, 0, 3)
    assert taken() is None, "prompt 3 may end before prompt 1"
    for _ in range(HEARD):
        growing.hear({(3, 0): 1, (3, 1): 3})
    assert taken() is None, "with 4 tokens, as prompt 1, it would come first: it was asked for before"
    for _ in range(HEARD):
        growing.hear({(3, 0): 1, (3, 1): 4})
    assert taken() == ("/p0", ["2.0", "2.1"])
    assert taken() == ("/p1", ["1.0", "1.1"]), "as many tokens more would not fit"
    assert (taken(), parts.left) == (None, 1)
    finish(3, 0, 2)
    finish(3, 1, 5)
    assert taken() == ("/p2", ["3.0", "3.1"])
    assert (taken(), parts.left) == (None, 0)


def test_parts_have_samples_without_the_last_of_their_prompts() -> None:
    """Three of six samples are the last: those of 7 and 8 tokens of two prompts, and one of 6. What ended before is
    there while they are unfinished; `left` counts prompts until all their samples are taken."""
    prompts = [Prompt(uid, "", (1,) * 4) for uid in (3, 1, 2)]
    growing = PartialRollout(prompts, 2)
    parts = RolloutParts(growing, PartSize(17), at_once=6, num_split=3)

    def taken() -> tuple[str, list[str], int] | None:
        part = parts.take()
        return None if part is None else (part.name, [sample.uid for sample in part.rows.samples], parts.left)

    for place, index, tokens in ((0, 0, 1), (1, 1, 2), (2, 0, 3)):
        growing.take(Sample(prompts[place], index, (7,) * tokens, (-1.0,) * tokens, "", FinishReason.STOP))
    for _ in range(HEARD):
        growing.hear({(3, 1): 4, (1, 0): 4, (2, 1): 4})
    assert taken() == ("/p0", ["1.1", "3.0"], 3), "4 + 1 and 4 + 2 tokens; 4 + 3 more would be 18"
    assert taken() is None, "another piece of 7 tokens would fit"
    for place, index, tokens in ((0, 1, 6), (1, 0, 7), (2, 1, 8)):
        growing.take(Sample(prompts[place], index, (7,) * tokens, (-1.0,) * tokens, "", FinishReason.STOP))
    assert taken() == ("/p1", ["2.0", "3.1"], 2), "4 + 3 and 4 + 6 tokens"
    assert taken() == ("/p2", ["1.0"], 1)
    assert taken() == ("/p3", ["2.1"], 0)


def test_what_all_prompts_begin_with_is_not_of_any_part() -> None:
    """40 tokens of 44: groups of 4 + 1 and 4 + 2 behind them, with 16 together; the third would be the 17th to 23rd."""
    prompts = [Prompt(uid, "", (*range(40), uid, 1, 1, 1)) for uid in (1, 2, 3)]
    growing = PartialRollout(prompts, 2)
    assert growing.root_tokens == 40
    parts = RolloutParts(growing, PartSize(16), at_once=6)
    for prompt in prompts:
        for index in range(2):
            growing.take(Sample(prompt, index, (7,) * (index + 1), (-1.0,) * (index + 1), "", FinishReason.STOP))
    part = parts.take()
    assert part is not None
    assert ([sample.uid for sample in part.rows.samples], part.share) == (["1.0", "1.1", "2.0", "2.1"], 14 / 16)


class Numbered:
    """Parts that are all there, of a group each."""

    def __init__(self, count: int, share: float) -> None:
        self.left, self._count, self._share = count, count, share

    def take(self) -> Part | None:
        if not self.left:
            return None
        self.left -= 1
        number = self._count - self.left - 1
        return Part(f"/p{number}", Rows(()), self._share)


class Parting:
    """Parts of a call `score` of two copies, that of the leader and another, who need three rounds and four for each;
    and what happens."""

    def __init__(self, count: int, keeps: int, busy: Task | None = None, share: float = 1.0) -> None:
        self.log: list[str] = []
        self.behind: list[str] = []
        self.task = Task(((0, 1),), "score", iter(()), frozenset())
        self.task.beside = [self.task] if busy is None else [self.task, busy]
        copies = Copies((frozenset({0}), frozenset({1})), (0, 0), keeps)
        self.work = where_free(Numbered(count, share), copies, self.task, self._call, "score")
        self.found: list[Any] = []

    def _call(self, rows: Any, name: str, by: ScoredBy | None) -> Any:
        assert by is not None
        place = by.instance
        self.behind += [name] if by.is_behind else []
        self.log.append(f"begins {name} on {place}")
        yield MOVED_ON
        yield MOVED_ON if place == 0 else None
        if place == 1 and len(self.task.beside) > 1:
            while any(other.mesh for other in self.task.beside if other is not self.task):
                yield None
        self.log.append(f"ends {name}")
        return np.array([float(name[-1])])

    def round(self) -> bool:
        """Whether there are more."""
        try:
            next(self.work)
        except StopIteration as end:
            self.found = [float(values[0]) for _, values in end.value]
            return False
        return True


def test_copies_without_the_leader_are_told_of_a_part_more() -> None:
    """Six parts, two copies: the leader's takes one at a time, the other has a second one while it is at its first, as
    long as two are left. The leader computes when the other has been told. Results come in the order of the parts, and
    ranks are free at the end."""
    parting = Parting(6, keeps=2)
    kept: list[tuple[int, frozenset[int], frozenset[int]]] = []
    while parting.round():
        if sum(line.startswith("begins") for line in parting.log) == 6:
            under_way = 6 - sum(line.startswith("ends") for line in parting.log)
            kept.append((under_way, parting.task.mesh, parting.task.shares))
    under_way, mesh, shares = kept[1]
    assert under_way > 0, "a part is still computed"
    assert 1 not in mesh, "all parts are given out: another call may tell it of one"
    assert 1 in shares, "and it is still waited for"
    assert parting.found == [0, 1, 2, 3, 4, 5]
    assert parting.log[:2] == ["begins score/p0 on 1", "begins score/p2 on 1"]
    assert "begins score/p1 on 0" in parting.log
    assert len({line.split()[1] for line in parting.log if line.startswith("begins")}) == 6
    assert parting.task.mesh == parting.task.shares == frozenset()


def test_of_small_parts_they_are_told_of_more() -> None:
    """Of 0.4 of a full one each: a third while what they have is no more than a full one, 0.8, and not a fourth."""
    parting = Parting(12, keeps=2, share=0.4)
    for _ in range(3):
        assert parting.round()
    assert parting.log == [f"begins score/p{number} on 1" for number in (0, 2, 3)]
    while parting.round():
        pass
    assert parting.found == [float(str(number)[-1]) for number in range(12)]


def test_who_still_generates_is_told_of_one_part_behind_that() -> None:
    """The leader is free first and begins; the other has one part before its samples have ended, and no second one; it
    goes on with that and gets further ones when they have."""
    rollout = Task(((0, 0),), "generate", iter(()), frozenset({1}))
    parting = Parting(8, keeps=2, busy=rollout)
    while len([line for line in parting.log if line.endswith("on 0")]) < 3:
        assert parting.round()
    assert parting.log[:2] == ["begins score/p0 on 0", "begins score/p1 on 1"]
    assert [line for line in parting.log if line.endswith("on 1")] == ["begins score/p1 on 1"]
    assert (1 in parting.task.shares, 1 in parting.task.mesh) == (True, False)
    assert parting.behind == ["score/p1"]
    rollout.release()
    while parting.round():
        pass
    assert parting.found == [0, 1, 2, 3, 4, 5, 6, 7]
    assert len([line for line in parting.log if line.endswith("on 1")]) > 1
    assert parting.task.mesh == parting.task.shares == frozenset()


@pytest.mark.parametrize(("node", "count"), [(5, 8), (0, 6)])
def test_nobody_is_told_behind_other_calls_or_where_little_is_left(node: int, count: int) -> None:
    """Ranks that another call than the rollout keeps busy; a call of which, when the leader has one of six groups and
    the next is taken, no more than two for each copy are left."""
    other = Task(((0, node),), "other", iter(()), frozenset({1}))
    parting = Parting(count, keeps=0, busy=other)
    for _ in range(12):
        parting.round()
    assert not [line for line in parting.log if line.endswith("on 1")]


class Coming:
    """Parts of a group each, as they come."""

    def __init__(self, count: int) -> None:
        self.left, self.there, self._number = count, 0, 0

    def take(self) -> Part | None:
        if not self.there:
            return None
        self.there, self.left, self._number = self.there - 1, self.left - 1, self._number + 1
        return Part(f"/p{self._number - 1}", Rows(()))


def test_calls_on_ranks_of_their_own_leave_them_while_they_wait_for_samples() -> None:
    """Both copies compute each part together. When a part of the first call is computed and no other is there, the
    second gets the ranks, and the first again when that has ended its part."""
    ranks, log = frozenset({1, 2}), list[str]()

    def call(rows: Any, name: str, by: ScoredBy | None) -> Any:
        assert by is None, "nobody alone"
        log.append(f"begins {name}")
        yield MOVED_ON
        yield MOVED_ON
        log.append(f"ends {name}")
        return np.zeros(1)

    tasks = [Task(((0, number),), f"call{number}", nothing(), frozenset()) for number in (1, 2)]
    parts = [Coming(2), Coming(1)]
    for task, of_task in zip(tasks, parts, strict=True):
        task.beside = tasks
        task.work = where_free(of_task, Copies((ranks,), (0, 0), alone=False), task, call, task.name)

    def rounds(count: int) -> None:
        for _ in range(count):
            for task in list(tasks):
                try:
                    next(task.work)
                except StopIteration:
                    tasks.remove(task)

    rounds(2)
    assert all(task.mesh == frozenset() for task in tasks), "nothing is there"
    parts[0].there = parts[1].there = 1
    rounds(1)
    assert [task.mesh for task in tasks] == [ranks, frozenset()]
    rounds(8)
    assert log == ["begins call1/p0", "ends call1/p0", "begins call2/p0", "ends call2/p0"]
    assert [task.mesh for task in tasks] == [frozenset()], "the second call has ended, the first keeps no rank"
    parts[0].there = 1
    rounds(8)
    assert log[4:] == ["begins call1/p1", "ends call1/p1"]
    assert tasks == []
