"""Batches that are generated ahead: by which version, on any plan the same, through any kill, and none twice or
never."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.errors import ConfigError
from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.session import Session
from plait.schedule.timeline import load_any
from tests.cases import slow_but
from tests.forked import exit_code_of, forked
from tests.runs.placed_runs import GRPO, PPO, SAFE, SUMMED, where
from tests.runs.plans import assert_equal_runs
from tests.runs.test_resume import kill_and_resume
from tests.runs.written import samples_by_step

MakeRecipe = Callable[..., Recipe]
Placed = Callable[..., Recipe]
STEPS = 5


def versions(run_dir: Path) -> list[set[int]]:
    """Those of the samples that each step trained on."""
    return [{sample["policy_version"] for sample in samples} for samples in samples_by_step(run_dir)]


@pytest.mark.parametrize("most", slow_but([2], [1, 2, 4]))
def test_a_batch_is_of_the_version_that_the_seed_says(make_recipe: MakeRecipe, most: int) -> None:
    recipe = make_recipe(steps=STEPS, max_staleness=most, **{"evaluation.items": 2, "evaluation.every": 1})
    assert run(recipe).finished
    assert versions(recipe.run_dir) == [{max(0, batch - most)} for batch in range(STEPS)]
    metrics = read_rows(recipe.run_dir / "metrics.jsonl")
    assert [row["off_policy/max"] for row in metrics] == [batch - max(0, batch - most) for batch in range(STEPS)]
    assert [row["off_policy/mean"] for row in metrics] == [row["off_policy/max"] for row in metrics]
    assert [row["off_policy/dropped"] for row in metrics] == [0] * STEPS
    waiting = [12 * min(most, STEPS - 1 - batch) for batch in range(STEPS)]
    assert [row["off_policy/in_flight"] + row["off_policy/in_queue"] for row in metrics] == waiting
    uids = [
        json.loads(line)["uid"] for path in sorted((recipe.run_dir / "samples").glob("step-*")) for line in path.open()
    ]
    assert len(set(uids)) == len(uids) == 12 * STEPS
    assert [row["training/epoch"] for row in metrics] == [3 * (batch + 1) / 10 for batch in range(STEPS)]


def test_none_ahead_is_the_synchronous_run(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Its first batch is the same in any case: it is drawn by the first weights."""
    plain = make_recipe(steps=2, dtype="float64", run_dir=str(tmp_path / "plain"))
    ahead = make_recipe(steps=2, dtype="float64", run_dir=str(tmp_path / "ahead"), max_staleness=1)
    run(plain)
    run(ahead)
    first, other = (read_rows(recipe.run_dir / "metrics.jsonl")[0] for recipe in (plain, ahead))
    assert first["actor/loss"] == pytest.approx(other["actor/loss"], abs=1e-12)
    assert not [name for name in first if name.startswith("off_policy/")]


PLANS: dict[str, tuple[tuple[str, dict[str, Any]], int, str | dict[str, str]]] = {
    f"{name}-{most}": (flow, most, plan)
    for most in (1, 2)
    for name, flow, plan in (
        ("grpo-split", GRPO, "split 2"),
        ("grpo-colocated", GRPO, "colocated 2"),
        ("grpo-apart", GRPO, {"actor.generate": "1", "actor.train": "0", "ref.logprobs": "1"}),
        ("grpo-leader-generates", GRPO, {"actor.generate": "0", "actor.train": "1", "ref.logprobs": "0"}),
        ("grpo-drops", GRPO, {"actor.generate": "1 after=drop", "actor.train": "0", "ref.logprobs": "0"}),
        ("ppo-split", PPO, "split 2"),
        ("ppo-colocated", PPO, "colocated 2"),
        (
            "ppo-apart",
            PPO,
            {"actor.generate": "1", "actor.train": "0", "ref.logprobs": "0", "critic.train": "0", "critic.values": "0"},
        ),
        ("summed-split", SUMMED, "split 2"),
        ("safe-split", SAFE, "split 2"),
        ("safe-colocated", SAFE, "colocated 2"),
    )
}
QUICK = ("ppo-apart-2",)


@pytest.mark.parametrize("name", slow_but(QUICK, PLANS))
def test_a_plan_changes_nothing(name: str, place: Path, placed: Placed, reference: Callable[..., Path]) -> None:
    (flow, keys), most, plan = PLANS[name]
    recipe = placed(flow, f"stale-{name}", **keys, steps=STEPS, max_staleness=most, **where(place, name, plan))
    assert run(recipe).finished
    assert_equal_runs(recipe.run_dir, reference(flow, **keys, steps=STEPS, max_staleness=most))
    assert versions(recipe.run_dir) == [{max(0, batch - most)} for batch in range(STEPS)]


def test_the_next_batch_is_drawn_while_one_is_trained(place: Path, placed: Placed) -> None:
    """By the clock of the trace: on another rank the samples of the next batch begin before this one's update ends."""
    plan = {"actor.generate": "1", "actor.train": "0", "ref.logprobs": "0"}
    recipe = placed("grpo", "overlaps", **GRPO[1], steps=3, max_staleness=1, **where(place, "overlaps", plan))
    run(recipe)
    spans = load_any(recipe.run_dir / "trace.json").spans
    begun = {step: min(s.start_s for s in spans if s.step == step and s.kind == "PREFILL") for step in (1, 2, 3)}
    ended = {step: max(s.end_s for s in spans if s.step == step and s.action.endswith("/step")) for step in (1, 2, 3)}
    assert begun[2] < ended[1]
    assert begun[3] < ended[2]
    scored = max(s.end_s for s in spans if s.step == 2 and s.kind == "SCORE" and s.action.startswith("ref."))
    assert scored < begun[3], "a model that never changes is asked in the step that draws the samples"
    assert all(s.rank == 1 for s in spans if s.kind in ("PREFILL", "DECODE"))
    idle = read_rows(recipe.run_dir / "metrics.jsonl")[1]
    assert 0 <= idle["perf/rollouter_idle_ratio"] < 1
    assert 0 <= idle["perf/trainer_idle_ratio"] < 1


SLOW = """
    import time

    import torch.distributed as dist

    from plait.algorithms.grpo import grpo as grpo
    from plait.generation.engine import Engine
    from plait.training.trainer import Trainer

    step, train = Engine.step, Trainer.train


    def slow_step(self, *args):
        time.sleep(STEP_S if dist.is_initialized() else 0)
        return step(self, *args)


    def slow_train(self, *args, **keys):
        time.sleep(TRAIN_S if dist.is_initialized() else 0)
        return (yield from train(self, *args, **keys))


    Engine.step, Trainer.train = slow_step, slow_train
"""
"""Where there are several processes."""


@pytest.mark.slow
@pytest.mark.parametrize(("step_s", "train_s"), [(0.1, 0.0), (0.0, 1.0)], ids=["generation", "training"])
def test_a_side_that_is_far_slower_changes_nothing(
    step_s: float, train_s: float, place: Path, placed: Placed, reference: Callable[..., Path]
) -> None:
    flow = place / f"slow-{step_s}.py"
    flow.write_text(textwrap.dedent(SLOW).replace("STEP_S", str(step_s)).replace("TRAIN_S", str(train_s)))
    plan = {"actor.generate": "1", "actor.train": "0", "ref.logprobs": "0"}
    keys = {"algorithm": f"{flow}:grpo", "steps": STEPS, "max_staleness": 2}
    recipe = placed("grpo", f"slow-{step_s}", **GRPO[1] | keys, **where(place, "slow", plan))
    run(recipe)
    assert_equal_runs(recipe.run_dir, reference("grpo", **GRPO[1], steps=STEPS, max_staleness=2))


STALE: dict[str, Any] = {"max_staleness": 2}


@pytest.mark.slow
@pytest.mark.parametrize("points", [(0,), (0, 2)], ids=str)
def test_killed_runs_resume_exactly(make_recipe: MakeRecipe, tmp_path: Path, points: tuple[int, ...]) -> None:
    kill_and_resume(make_recipe, tmp_path, points=points, seed=2, **STALE)


@pytest.mark.slow
def test_killed_runs_resume_exactly_100(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    kill_and_resume(make_recipe, tmp_path, points=range(100), seed=3, **STALE)


DYNAMIC = {"dynamic_sampling": True, "max_sampling_rounds": 3, "kl_coef": 0.05}


OPTIONS: dict[str, dict[str, Any]] = {"plain": {"kl_coef": 0.05, "mini_batches": 2}, "draws again": DYNAMIC}


@pytest.mark.parametrize("which", slow_but(["draws again"], OPTIONS))
def test_a_run_is_taken_up_on_another_plan(which: str, place: Path, placed: Placed) -> None:
    """Stopped with two batches open, and resumed where others generate."""
    name = which.replace(" ", "-")
    keys: dict[str, Any] = {"options": OPTIONS[which], "max_staleness": 2, "steps": 6, "checkpoint.every": 3}
    whole = placed("grpo", f"whole-{name}", **keys)
    run(whole)

    def killed() -> None:
        record = Session.record_step

        def dying(session: Session, *args: Any) -> None:
            if session.done.step == 5:
                raise KeyboardInterrupt
            record(session, *args)

        setattr(Session, "record_step", dying)  # noqa: B010 - the child is thrown away
        run(placed("grpo", f"moved-{name}", **keys))

    assert exit_code_of(forked(killed)) != 0
    plan = {"actor.generate": "1", "actor.train": "0", "ref.logprobs": "0"}
    again = placed("grpo", f"moved-{name}", **keys, **where(place, f"moved-{name}", plan))
    assert run(again, resume=True).finished
    assert_equal_runs(again.run_dir, whole.run_dir)


def test_a_longer_run_goes_on_with_fresh_samples(make_recipe: MakeRecipe) -> None:
    """Nothing is drawn behind the last step; what a longer run draws then is by the weights that there are."""
    run(make_recipe(steps=3, max_staleness=1))
    recipe = make_recipe(steps=6, max_staleness=1)
    run(recipe, resume=True)
    assert versions(recipe.run_dir) == [{version} for version in (0, 0, 1, 3, 3, 4)]


def test_reward_functions_of_a_batch_ahead_do_not_reach_an_evaluation(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """They are slow, and are still at work when the step ends."""
    (tmp_path / "reward.py").write_text(
        "import time\n\n"
        "def count_sevens(completions, **columns):\n"
        "    time.sleep(0.05)\n"
        "    return [float(text.count('7')) for text in completions]\n"
    )
    keys = {"evaluation.items": 2, "evaluation.every": 1, "steps": 3}
    run(recipe := make_recipe(**keys, max_staleness=1))
    assert len(read_rows(recipe.run_dir / "metrics.jsonl")) == 3


REFUSED = [
    ({"algorithm": "sft", "options": {}}, "generates no samples"),
    ({"options": {"old_logprobs": "engine", "epochs": 2, "correction": "tis"}}, "takes the engine's for both"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_is_refused(make_recipe: MakeRecipe, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(make_recipe(max_staleness=1, **keys))
