"""Samples that go on with new weights: none is older than it may be, none is lost or drawn twice, and what a run comes
to is a function of its seed and of the record of where samples stood."""

from __future__ import annotations

import json
import shutil
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from plait.errors import ConfigError, RunError
from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.folder.stored_recipe import recipe_text
from tests.cases import slow_but
from tests.forked import forked
from tests.runs.placed_runs import GRPO, PPO, SAFE, where
from tests.runs.plans import assert_equal_runs
from tests.runs.test_resume import kill, kill_and_resume, result_of
from tests.runs.test_staleness import SLOW
from tests.runs.written import samples_by_step

MakeRecipe = Callable[..., Recipe]
Placed = Callable[..., Recipe]
STEPS = 5
FEW: dict[str, Any] = {"sampling.max_running": 5, "sampling.max_response_tokens": 12}
"""Places for fewer samples than a batch has, so that the next batch begins in those that become free."""


def oldest(sample: dict[str, Any]) -> int:
    return min(sample.get("token_versions") or [sample["policy_version"]])


def check(run_dir: Path, most: int, per_step: int = 12) -> None:
    """What holds of every run: ages, and each sample once."""
    steps = samples_by_step(run_dir)
    for step, samples in enumerate(steps):
        assert len(samples) == per_step
        assert all(0 <= step - oldest(sample) <= most for sample in samples)
        for sample in samples:
            versions = sample.get("token_versions")
            assert versions is None or (len(versions) == len(sample["token_ids"]) and versions == sorted(versions))
    uids = [sample["uid"] for samples in steps for sample in samples]
    assert len(set(uids)) == len(uids)
    for row in read_rows(run_dir / "metrics.jsonl"):
        ages = [row["step"] - 1 - oldest(sample) for sample in steps[row["step"] - 1]]
        assert row["off_policy/max"] == max(ages) <= most
        assert row["off_policy/mean"] == pytest.approx(sum(ages) / len(ages))
        mixed = sum("token_versions" in sample for sample in steps[row["step"] - 1])
        assert row["off_policy/mixed"] == pytest.approx(mixed / per_step)
        assert row["off_policy/dropped"] == 0


def replayed(recipe: Recipe, name: str) -> Path:
    """The run again from its beginning, along the record of the one that was."""
    folder = recipe.run_dir.with_name(name)
    folder.mkdir()
    for file in ("recipe.yaml", "run.lock", "moments.jsonl"):
        shutil.copy(recipe.run_dir / file, folder / file)
    assert run(recipe.model_copy(update={"run_dir": folder}), resume=True).finished
    return folder


@pytest.mark.parametrize(("partial_rollout", "most"), slow_but([("recompute", 2)], [("keep", 1), ("recompute", 2)]))
def test_the_next_batch_fills_the_places_that_become_free(
    make_recipe: MakeRecipe, partial_rollout: str, most: int
) -> None:
    recipe = make_recipe(steps=STEPS, max_staleness=most, partial_rollout=partial_rollout, **FEW)
    assert run(recipe).finished
    check(recipe.run_dir, most)
    rows = read_rows(recipe.run_dir / "metrics.jsonl")
    assert sum(row["off_policy/mixed"] for row in rows) > 0, "samples went on with new weights"
    moments = read_rows(recipe.run_dir / "moments.jsonl")
    assert [row["version"] for row in moments if row["version"] < STEPS] == list(range(1, STEPS))
    assert any(tokens for row in moments for _, samples in row["open"] for _, tokens in samples)
    again = replayed(recipe, "again")
    assert result_of(again) == result_of(recipe.run_dir)
    assert (again / "moments.jsonl").read_text() == (recipe.run_dir / "moments.jsonl").read_text()


def test_one_process_repeats_what_devices_of_their_own_recorded(make_recipe: MakeRecipe) -> None:
    """The first time generation was faster than training, so that all of batch 1 was there when version 1 came; then it
    was slower, and had come into the middle of batch 2 when version 2 came. One process alone would have drawn nothing
    of batch 2 in the step of batch 1, which had all of its samples."""
    recipe = make_recipe(steps=3, max_staleness=1, partial_rollout="keep", **FEW)
    stood = RECORDS["whole, then begun"]
    folder = begun_along(recipe, [{"version": at, "kv": "keep", "open": stood[at]} for at in stood])
    assert run(recipe, resume=True).finished
    check(folder, 1)
    steps = samples_by_step(folder)
    assert {version for step in steps[:2] for one in step for version in versions_of(one)} == {0}
    of_two = {one["uid"]: versions_of(one) for one in steps[2]}
    assert of_two["8.1"] == [1] * 7 + [2] * 5
    assert of_two["8.2"] == [1] * 3 + [2] * 9
    assert of_two["8.3"] == [2] * 12
    assert {version for uid, versions in of_two.items() if uid < "8.1" for version in versions} == {1}


def versions_of(sample: dict[str, Any]) -> list[int]:
    """The version of each token."""
    return sample.get("token_versions") or [sample["policy_version"]] * len(sample["token_ids"])


def begun_along(recipe: Recipe, rows: Sequence[dict[str, Any]]) -> Path:
    """The folder of a run that was killed before its first checkpoint, and left this record."""
    recipe.run_dir.mkdir()
    (recipe.run_dir / "recipe.yaml").write_text(recipe_text(recipe))
    (recipe.run_dir / "run.lock").touch()
    (recipe.run_dir / "moments.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return recipe.run_dir


@pytest.mark.parametrize(
    ("partial_rollout", "point"),
    slow_but([("keep", 0)], [("keep", 0), ("keep", 1), ("recompute", 0), ("recompute", 1)]),
)
def test_killed_runs_resume_exactly(make_recipe: MakeRecipe, tmp_path: Path, partial_rollout: str, point: int) -> None:
    """On one process the order of all steps is one, so the record of a run is a function of its seed, too."""
    keys = FEW | {"steps": 4, "max_staleness": 2, "partial_rollout": partial_rollout}
    kill_and_resume(make_recipe, tmp_path, points=(point,), seed=4, **keys)
    rows = read_rows(tmp_path / "whole" / "metrics.jsonl")
    assert sum(row["off_policy/mixed"] for row in rows) > 0, "samples went on with new weights"


@pytest.mark.slow
@pytest.mark.parametrize("partial_rollout", ["keep", "recompute"])
def test_killed_runs_resume_exactly_50(make_recipe: MakeRecipe, tmp_path: Path, partial_rollout: str) -> None:
    kill_and_resume(
        make_recipe, tmp_path, points=range(50), seed=5, max_staleness=2, partial_rollout=partial_rollout, **FEW
    )


APART = {"actor.generate": "1", "actor.train": "0", "ref.logprobs": "0"}
LEADS = {"actor.generate": "0", "actor.train": "1", "ref.logprobs": "0"}
RING = {"actor.generate": "1,2 pp2", "actor.train": "0", "ref.logprobs": "0"}
PARTS = {"actor.generate": "1,2 tp2", "actor.train": "0", "ref.logprobs": "0"}
Flow = tuple[str, dict[str, Any]]
Plan = str | dict[str, str]
SHAPES: tuple[tuple[str, Flow, Plan], ...] = (
    ("apart", GRPO, APART),
    ("leads", GRPO, LEADS),
    ("split", GRPO, "split 2"),
    ("colocated", GRPO, "colocated 2"),
    ("two", GRPO, {"actor.generate": "1,2 dp2", "actor.train": "0", "ref.logprobs": "1"}),
    ("ring", GRPO, RING),
    ("parts", GRPO, PARTS),
    ("ppo", PPO, APART | {"critic.train": "0", "critic.values": "0"}),
)
"""Where generation, training and scoring are: a name, what trains, the plan."""
PLANS: dict[str, tuple[Flow, str, int, Plan]] = {
    f"{name}-{partial_rollout}-{most}": (flow, partial_rollout, most, plan)
    for partial_rollout, most in (("keep", 1), ("recompute", 2))
    for name, flow, plan in (
        *SHAPES,
        ("ring-scores", GRPO, RING | {"ref.logprobs": "1,2 pp2"}),
        ("away", GRPO, APART | {"ref.logprobs": "1 after=offload"}),
        ("safe", SAFE, "split 2"),
    )
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_a_run_is_a_function_of_its_seed_and_its_record(name: str, place: Path, placed: Placed) -> None:
    """Whatever the clock did the first time: again along its record, and then by one process alone."""
    (flow, keys), partial_rollout, most, plan = PLANS[name]
    keys = {
        **keys,
        **FEW,
        "steps": STEPS,
        "max_staleness": most,
        "partial_rollout": partial_rollout,
        "checkpoint.every": 2,
    }
    recipe = placed(flow, f"goes-on-{name}", **keys, **where(place, f"goes-on-{name}", plan))
    assert run(recipe).finished
    check(recipe.run_dir, most, len(samples_by_step(recipe.run_dir)[0]))
    alone = placed(flow, f"goes-on-{name}", **keys)
    assert_equal_runs(replayed(alone, f"alone-{name}"), recipe.run_dir)
    assert_equal_runs(replayed(recipe, f"again-{name}"), recipe.run_dir)


NOTHING_AHEAD = [[uid, [[index, 0] for index in range(4)]] for uid in (3, 4, 5)]
RECORDS: dict[str, dict[int, list[Any]]] = {
    "whole, then begun": {1: [], 2: [[8, [[1, 7], [2, 3], [3, 0]]]], 3: []},
    "nothing, then whole": {1: NOTHING_AHEAD, 2: [], 3: []},
}
"""Version → what stood where in a run of three steps."""


@pytest.mark.slow
@pytest.mark.parametrize("record", RECORDS)
def test_all_plans_repeat_a_record_alike(record: str, place: Path, placed: Placed) -> None:
    """Which of them would have recorded it, or neither."""
    keys = {**GRPO[1], **FEW, "steps": 3, "max_staleness": 1, "partial_rollout": "keep"}
    rows = [{"version": at, "kv": "keep", "open": stood} for at, stood in RECORDS[record].items()]
    alone = placed("grpo", f"alone-{record}", **keys)
    begun_along(alone, rows)
    assert run(alone, resume=True).finished
    for name, plan in (("apart", APART), ("leads", LEADS), ("colocated", "colocated 2")):
        recipe = placed("grpo", f"{name}-{record}", **keys, **where(place, name, plan))
        begun_along(recipe, rows)
        assert run(recipe, resume=True).finished
        assert_equal_runs(recipe.run_dir, alone.run_dir)


RACES = """
    import time

    import torch.distributed as dist

    from plait.algorithms.grpo import grpo as grpo
    from plait.generation.engine import Engine
    from plait.training.trainer import Trainer

    step, train, begun = Engine.step, Trainer.train, []


    def slow_step(self, *args):
        time.sleep(0.2 if dist.is_initialized() and self.policy_version == 1 else 0)
        return step(self, *args)


    def slow_train(self, *args, **keys):
        begun.append(self)
        time.sleep(4.0 if dist.is_initialized() and len(begun) == 1 else 0)
        return (yield from train(self, *args, **keys))


    Engine.step, Trainer.train = slow_step, slow_train
"""
"""The first update is slow, and so is the generation beside the second."""


@pytest.mark.slow
@pytest.mark.parametrize("partial_rollout", ["keep", "recompute"])
def test_a_batch_that_is_whole_before_its_step_and_one_that_is_not(
    partial_rollout: str, place: Path, placed: Placed
) -> None:
    """In either order: what is drawn beside a step does not depend on whether its own samples are all there."""
    flow = place / f"races-{partial_rollout}.py"
    flow.write_text(textwrap.dedent(RACES))
    keys = {
        **GRPO[1],
        **FEW,
        "steps": STEPS,
        "max_staleness": 1,
        "partial_rollout": partial_rollout,
        "checkpoint.every": 2,
    }
    keys |= {"algorithm": f"{flow}:grpo"}
    recipe = placed("grpo", f"races-{partial_rollout}", **keys, **where(place, f"races-{partial_rollout}", APART))
    assert run(recipe).finished
    stood = {row["version"]: row["open"] for row in read_rows(recipe.run_dir / "moments.jsonl")}
    assert stood[1] == [], "all samples of the next batch were there when version 1 came"
    assert any(tokens for _, samples in stood[2] for _, tokens in samples), "and some were being drawn at version 2"
    check(recipe.run_dir, 1)
    alone = placed("grpo", f"races-{partial_rollout}", **keys)
    assert_equal_runs(replayed(alone, f"races-alone-{partial_rollout}"), recipe.run_dir)
    assert_equal_runs(replayed(recipe, f"races-again-{partial_rollout}"), recipe.run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("partial_rollout", ["keep", "recompute"])
@pytest.mark.parametrize("point", range(6))
def test_a_killed_run_of_two_ends_as_its_record_says(
    partial_rollout: str, point: int, place: Path, placed: Placed
) -> None:
    """Killed whenever, resumed, and then undisturbed along the record that both stays have left."""
    keys = {
        **GRPO[1],
        **FEW,
        "steps": STEPS,
        "max_staleness": 2,
        "partial_rollout": partial_rollout,
        "checkpoint.every": 2,
    }
    name = f"killed-{partial_rollout}-{point}"
    recipe = placed("grpo", name, **keys, **where(place, name, APART))
    pid = forked(lambda: run(recipe))
    rows = recipe.run_dir / "moments.jsonl"
    wait_until(lambda: rows.is_file() and len(rows.read_text().splitlines()) > point % STEPS)
    assert kill(pid)
    assert run(recipe, resume=True).finished
    check(recipe.run_dir, 2)
    assert_equal_runs(replayed(placed("grpo", name, **keys), f"undisturbed-{name}"), recipe.run_dir)


def wait_until(holds: Callable[[], bool], limit_s: float = 120.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


def test_a_run_that_fits_its_record_no_longer_says_so(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe(steps=3, max_staleness=1, partial_rollout="recompute", **FEW)
    run(recipe)
    rows = read_rows(recipe.run_dir / "moments.jsonl")
    samples = next(samples for _, samples in rows[0]["open"] if any(tokens for _, tokens in samples))
    for sample in samples:
        sample[1] += 50
    (recipe.run_dir / "moments.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(RunError, match=r"after step 1 unfinished samples are not where .*moments.jsonl says"):
        replayed(recipe, "other")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_staleness": 0}, "with `max_staleness` 0 no sample is running when new weights come"),
    ({"algorithm": "remax"}, "generates more than once"),
    ({"fusion": 0.5}, "`fusion` is 0.5: instances whose samples end early"),
    ({"rebalance": "auto"}, "`rebalance` is auto"),
    ({"sampling.kv_tokens": 64, "sampling.max_running": 64}, "keys and values have room for 64 tokens"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_is_refused(make_recipe: MakeRecipe, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(make_recipe(**{"max_staleness": 1, "partial_rollout": "keep", "data.max_prompt_tokens": 20, **keys}))


@pytest.mark.slow
@pytest.mark.parametrize("partial_rollout", ["keep", "recompute"])
@pytest.mark.parametrize(("step_s", "train_s"), [(0.1, 0.0), (0.0, 1.0)], ids=["generation", "training"])
def test_a_side_that_is_far_slower(
    step_s: float, train_s: float, partial_rollout: str, place: Path, placed: Placed
) -> None:
    """Nobody waits for ever, no sample gets too old, and the record tells the same run to a machine of other speed."""
    name = f"slower-{partial_rollout}-{step_s}"
    flow = place / f"{name}.py"
    flow.write_text(textwrap.dedent(SLOW).replace("STEP_S", str(step_s)).replace("TRAIN_S", str(train_s)))
    keys = {
        **GRPO[1],
        **FEW,
        "steps": STEPS,
        "max_staleness": 2,
        "partial_rollout": partial_rollout,
        "algorithm": f"{flow}:grpo",
    }
    recipe = placed("grpo", name, **keys, **where(place, name, APART))
    assert run(recipe).finished
    check(recipe.run_dir, 2)
    assert_equal_runs(replayed(placed("grpo", name, **keys), f"other-{name}"), recipe.run_dir)
