"""Ranks that generate together, as processes: what joins them while they work, what makes them stop, and that the
result is that of one process."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.errors import RunError
from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from tests.runs.plan_files import write_plan
from tests.runs.plans import assert_equal_runs

MakeRecipe = Callable[..., Recipe]

# The process of the tests loads these flows, too, and is to stay as it is.
LATE = """
    import sys
    from pathlib import Path

    from plait.algorithms.grpo import grpo as grpo
    from plait.generation.engine import Engine
    from plait.workers.remote_engine import RemoteEngine
    from plait.workers.lockstep_engine import LockstepEngine

    # The second prompt is asked for in the leader's fourth step. A rank that decides for an instance of others looks
    # for it behind the third step of that, if it has not come. Each rank writes what its engine is given, and when.
    is_rank = "pytest" not in sys.modules
    held, leads, late = [], [0], []
    add_to_all, advance_of_all = RemoteEngine.add, RemoteEngine.advance
    has_work, ready = RemoteEngine.has_work, RemoteEngine.ready
    add, step, lockstep_step = Engine.add, Engine.step, LockstepEngine.step
    steps = [0]


    def hold(self, request):
        if request.prompt.uid == 1:
            held.append(request)
        else:
            add_to_all(self, request)


    def advancing(self, call):
        leads[0] += 1
        if leads[0] == 4:
            for request in held:
                add_to_all(self, request)
            held.clear()
        return advance_of_all(self, call)


    def given(self, request):
        with Path(__file__).with_name(f"rank{self.model.team.rank}").open("a") as out:
            out.write(f"{request.prompt.uid} {steps[0]} {self.has_work}\\n")
        add(self, request)
        late.extend([request] * (request.prompt.uid == 1))


    def counted(self):
        steps[0] += 1
        return step(self)


    def patient(self, read):
        decides_for_others = self.decides and self._peers.ranks[self._peers.index] != 0
        if decides_for_others and steps[0] == 3 and not late and self.next_number is None:
            read()
        return lockstep_step(self, read)


    if is_rank:
        RemoteEngine.add, RemoteEngine.advance = hold, advancing
        RemoteEngine.has_work = property(lambda self: bool(held) or has_work.fget(self))
        RemoteEngine.ready = property(lambda self: bool(held) or ready.fget(self))
        Engine.add, Engine.step, LockstepEngine.step = given, counted, patient
"""

WHERE = {
    "tp2": {"actor.generate": "0,1 tp2", "actor.train": "0,1 tp2", "ref.logprobs": "0"},
    "pp2": {"actor.generate": "1,0 pp2", "actor.train": "0,1 pp2", "ref.logprobs": "1"},
    "elsewhere": {"actor.generate": "1,2 tp2", "actor.train": "0", "ref.logprobs": "0"},
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", WHERE)
def test_a_request_that_comes_while_ranks_generate_together_joins_them(
    make_recipe: MakeRecipe, tmp_path: Path, plan: str
) -> None:
    """Before the third step is over it is asked for; it is taken at the same step everywhere, when others are still in
    flight, and says what it says in one process. DAPO's draws come on top: groups that are refused are drawn anew."""
    (tmp_path / "flow.py").write_text(textwrap.dedent(LATE))
    options = {"kl_coef": 0.05, "dynamic_sampling": True, "max_sampling_rounds": 2}
    common: dict[str, Any] = {"dtype": "float64", "steps": 1, "options": options, "sampling.max_response_tokens": 8}
    one = make_recipe(run_dir=str(tmp_path / "one"), **common)
    run(one)
    where = {"algorithm": f"{tmp_path}/flow.py:grpo", "plan": str(write_plan(tmp_path, plan, WHERE[plan]))}
    together = make_recipe(run_dir=str(tmp_path / "together"), **common, **where)
    run(together)
    assert_equal_runs(together.run_dir, one.run_dir)
    assert read_rows(together.run_dir / "metrics.jsonl")[0]["dynamic/rounds"] == 2
    ranks = [int(rank) for rank in WHERE[plan]["actor.generate"].split()[0].split(",")]
    first, second = ((tmp_path / f"rank{rank}").read_text().splitlines() for rank in ranks)
    assert first == second
    assert first[:2] == ["0 0 False", "2 0 True"]
    uid, step, others = first[2].split()
    assert (uid, others) == ("1", "True")
    assert int(step) == 3 or (plan == "elsewhere" and 1 <= int(step) <= 3)


FAILING = """
    import sys
    import time
    from pathlib import Path

    from plait.algorithms.grpo import grpo as grpo
    from plait.generation.engine import Engine
    from plait.workers.remote_engine import RemoteEngine
    from plait.workers.lockstep_engine import LockstepEngine
    from plait.schedule.work import MOVED_ON

    # When the reward has failed no rank begins a step before the leader has given up; how many they do then is counted.
    failed, given_up = (Path(__file__).with_name(name) for name in ("failed", "given_up"))
    step, lockstep_step = Engine.step, LockstepEngine.step
    advance, give_up = RemoteEngine.advance, RemoteEngine.give_up
    told, is_rank = [], "pytest" not in sys.modules


    def waiting(self, call):
        if failed.exists():
            time.sleep(0.01)
            return MOVED_ON, []
        return advance(self, call)


    def giving_up(self):
        left = sum(self.running)
        give_up(self)
        given_up.write_text(str(left))


    def counted(self):
        while 0 not in self.model.team.all.ranks and failed.exists() and not given_up.exists():
            time.sleep(0.01)
        if given_up.exists():
            with Path(__file__).with_name(f"steps{self.model.team.rank}").open("a") as out:
                out.write("x")
        return step(self)


    def patient(self, read):
        decides_for_others = self.decides and self._peers.ranks[self._peers.index] != 0
        if decides_for_others and given_up.exists() and not told and not self._heard:
            told.append(True)
            read()
        return lockstep_step(self, read)


    if is_rank:
        Engine.step, LockstepEngine.step = counted, patient
        RemoteEngine.advance, RemoteEngine.give_up = waiting, giving_up
"""


@pytest.mark.slow
@pytest.mark.parametrize("plan", WHERE)
def test_an_error_ends_generation_of_ranks_together_and_the_run_goes_on(
    make_recipe: MakeRecipe, tmp_path: Path, plan: str
) -> None:
    """A reward fails in step 2. Of the samples in flight ranks compute at most the token that they are at; the last
    step is saved."""
    (tmp_path / "reward.py").write_text(
        "from pathlib import Path\n\n"
        "def count_sevens(completions, **columns):\n"
        "    place = Path(__file__)\n"
        "    if place.with_name('fails').exists():\n"
        "        with place.with_name('calls').open('a') as calls:\n"
        "            calls.write('x')\n"
        "        if place.with_name('calls').stat().st_size > 4:\n"
        "            place.with_name('failed').touch()\n"
        "            raise ValueError('planted')\n"
        "    return [float(text.count('7')) for text in completions]\n"
    )
    (tmp_path / "flow.py").write_text(textwrap.dedent(FAILING))
    keys: dict[str, Any] = {
        "dtype": "float64",
        "prompts_per_step": 4,
        "sampling.max_running": 4,
        "sampling.max_response_tokens": 40,
    }
    one = make_recipe(run_dir=str(tmp_path / "one"), **keys)
    run(one)
    where = {"algorithm": f"{tmp_path}/flow.py:grpo", "plan": str(write_plan(tmp_path, plan, WHERE[plan]))}
    together = make_recipe(run_dir=str(tmp_path / "together"), **keys, **where)
    (tmp_path / "fails").touch()
    with pytest.raises(RunError, match=r"ValueError: planted[\s\S]*the checkpoint of step 1 is good"):
        run(together)
    assert int((tmp_path / "given_up").read_text()) > 0, "samples were in flight"
    assert all(path.read_text() == "x" for path in tmp_path.glob("steps*"))
    for name in ("fails", "failed", "given_up"):
        (tmp_path / name).unlink()
    run(together, resume=True)
    assert_equal_runs(together.run_dir, one.run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp2", "elsewhere"])
def test_an_evaluation_that_is_left_lets_ranks_go_that_generate_together(
    make_recipe: MakeRecipe, tmp_path: Path, plan: str
) -> None:
    """The leader is asked to stop in the third step of the evaluation before the first step of the run."""
    (tmp_path / "flow.py").write_text(
        "import os, sys\n"
        "from plait.algorithms.grpo import grpo as grpo\n"
        "from plait.runtime.stopping import LEADERS_SIGNAL\n"
        "from plait.workers.remote_engine import RemoteEngine\n\n"
        "advance, steps = RemoteEngine.advance, []\n\n"
        "def advancing(self, call):\n"
        "    steps.append(1)\n"
        "    if len(steps) == 3:\n"
        "        os.kill(os.getpid(), LEADERS_SIGNAL)\n"
        "    return advance(self, call)\n\n"
        "if 'pytest' not in sys.modules:\n"
        "    RemoteEngine.advance = advancing\n"
    )
    where = {"algorithm": f"{tmp_path}/flow.py:grpo", "plan": str(write_plan(tmp_path, plan, WHERE[plan]))}
    recipe = make_recipe(**{"evaluation.items": 3, "sampling.max_response_tokens": 200, "steps": 1}, **where)
    outcome = run(recipe)
    assert (outcome.finished, outcome.step, outcome.before) == (False, 0, None)
