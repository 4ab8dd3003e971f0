"""Samples that go on with new weights after so many tokens: what a run comes to is a function of its seed, its recipe
and n, on any plan, without a record of what the clock said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.errors import ConfigError
from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.schedule.timeline import load_any
from tests.cases import slow_but
from tests.forked import forked
from tests.runs.placed_runs import GRPO, where
from tests.runs.plans import assert_equal_runs
from tests.runs.test_partial_rollout import APART, FEW, SHAPES, check, versions_of, wait_until
from tests.runs.test_resume import kill, kill_and_resume, result_of
from tests.runs.test_turns import keys_of
from tests.runs.written import samples_by_step

MakeRecipe = Callable[..., Recipe]
Placed = Callable[..., Recipe]
STEPS = 5
TOKENS = 5
PACED: dict[str, Any] = FEW | {"tokens_per_version": TOKENS, "sampling.stop_token_ids": [*range(3, 300, 30)]}


def version_of(token: int, batch: int, most: int, tokens: int) -> int:
    """The version that draws a token, from 0, of a batch, from 0: so many tokens with each version from the one that
    opens the batch, and the rest with the one that it is trained from."""
    return min(max(0, batch - most) + token // tokens, batch)


def check_versions(run_dir: Path, most: int, tokens: int = TOKENS) -> None:
    for batch, samples in enumerate(samples_by_step(run_dir)):
        for sample in samples:
            expected = [version_of(token, batch, most, tokens) for token in range(len(sample["token_ids"]))]
            assert versions_of(sample) == expected, f"{sample['uid']} of batch {batch}"


@pytest.mark.parametrize(
    ("partial_rollout", "most"),
    slow_but([("recompute", 2)], [(how, n) for how in ("keep", "recompute") for n in (1, 2, 3)]),
)
def test_a_tokens_version_follows_from_its_place(make_recipe: MakeRecipe, partial_rollout: str, most: int) -> None:
    recipe = make_recipe(steps=STEPS, max_staleness=most, partial_rollout=partial_rollout, **PACED)
    assert run(recipe).finished
    check(recipe.run_dir, most)
    check_versions(recipe.run_dir, most)
    rows = read_rows(recipe.run_dir / "metrics.jsonl")
    assert sum(row["off_policy/mixed"] for row in rows) > 0, "samples went on with new weights"


def test_what_no_sample_reaches_is_the_run_that_waits(make_recipe: MakeRecipe) -> None:
    """All samples then end in the step that opens their batch, as with `partial_rollout: off`; to the bit with exact
    arithmetic, as the samples that an engine draws together are others."""
    keys: dict[str, Any] = FEW | {"steps": 4, "max_staleness": 1, "sampling.exact": True}
    waits = make_recipe(**keys)
    paced = make_recipe(**keys, partial_rollout="recompute", tokens_per_version=12)
    results = []
    for name, recipe in (("waits", waits), ("paced", paced)):
        recipe = recipe.model_copy(update={"run_dir": recipe.run_dir.with_name(name)})
        assert run(recipe).finished
        results.append(result_of(recipe.run_dir))
    assert results[0] == results[1]


HALVES: dict[str, Any] = FEW | {"sampling.max_response_tokens": 8, "tokens_per_version": 4, "max_staleness": 2}
"""A batch has all of its tokens before its own step, in which only later ones are drawn."""


def test_later_batches_are_drawn_when_their_devices_are_free(make_recipe: MakeRecipe) -> None:
    """Where no rollout of the step itself has them: not while a score computes there, whose weights may have to come
    and go."""
    run(recipe := make_recipe(steps=4, partial_rollout="recompute", micro_batch_tokens=30, **HALVES))
    spans = load_any(recipe.run_dir / "trace.json").spans
    drawn = [span for span in spans if span.action.startswith("actor.generate/")]
    for step in range(1, 5):
        scored = [span for span in spans if span.action.startswith("ref.logprobs/") and span.step == step]
        assert len(scored) > 2
        begin_s, end_s = min(span.start_s for span in scored), max(span.end_s for span in scored)
        assert not [span for span in drawn if begin_s < span.start_s < end_s]
    third = [span for span in spans if span.step == 3 and span.action.startswith(("actor.train", "ref.logprobs"))]
    begin_s, end_s = min(span.start_s for span in third), max(span.end_s for span in third)
    assert {span.step for span in drawn if begin_s < span.start_s < end_s} == {4}, "they were drawn in between"


PLANS = {
    f"{name}-{partial_rollout}": (flow, partial_rollout, plan)
    for partial_rollout in ("keep", "recompute")
    for name, flow, plan in SHAPES
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_any_plan_comes_to_the_run_of_one_process(name: str, place: Path, placed: Placed) -> None:
    """Nothing is handed from one run to the other: neither has a record of the other's."""
    (flow, keys), partial_rollout, plan = PLANS[name]
    keys = {
        **keys,
        **PACED,
        "steps": STEPS,
        "max_staleness": 2,
        "partial_rollout": partial_rollout,
        "checkpoint.every": 2,
    }
    recipe = placed(flow, f"paced-{name}", **keys, **where(place, f"paced-{name}", plan))
    assert run(recipe).finished
    check(recipe.run_dir, 2, len(samples_by_step(recipe.run_dir)[0]))
    check_versions(recipe.run_dir, 2)
    alone = placed(flow, f"paced-alone-{name}", **keys)
    assert run(alone).finished
    assert_equal_runs(alone.run_dir, recipe.run_dir)
    assert (alone.run_dir / "moments.jsonl").read_text() == (recipe.run_dir / "moments.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("speculation", ["auto", 3])
def test_drafts_change_nothing(speculation: str | int, make_recipe: MakeRecipe) -> None:
    keys: dict[str, Any] = PACED | {
        "steps": 4,
        "max_staleness": 2,
        "partial_rollout": "recompute",
        "sampling.exact": True,
    }
    results = []
    for drafts in ("off", speculation):
        recipe = make_recipe(**keys, **{"sampling.speculation": drafts})
        recipe = recipe.model_copy(update={"run_dir": recipe.run_dir.with_name(f"drafts-{drafts}")})
        assert run(recipe).finished
        results.append(samples_by_step(recipe.run_dir))
    assert results[0] == results[1]


@pytest.mark.parametrize("partial_rollout", slow_but(["recompute"], ["keep", "recompute"]))
def test_killed_runs_resume_exactly(make_recipe: MakeRecipe, tmp_path: Path, partial_rollout: str) -> None:
    keys = PACED | {"steps": 4, "max_staleness": 2, "partial_rollout": partial_rollout}
    kill_and_resume(make_recipe, tmp_path, points=(1,), seed=4, **keys)


@pytest.mark.slow
@pytest.mark.parametrize("partial_rollout", ["keep", "recompute"])
@pytest.mark.parametrize("point", range(3))
def test_a_killed_run_of_two_ends_as_one_process_undisturbed(
    partial_rollout: str, point: int, place: Path, placed: Placed
) -> None:
    """Killed whenever, resumed; the other run knows nothing of it."""
    keys = {
        **GRPO[1],
        **PACED,
        "steps": STEPS,
        "max_staleness": 2,
        "partial_rollout": partial_rollout,
        "checkpoint.every": 2,
    }
    name = f"paced-killed-{partial_rollout}-{point}"
    recipe = placed("grpo", name, **keys, **where(place, name, APART))
    pid = forked(lambda: run(recipe))
    rows = recipe.run_dir / "moments.jsonl"
    wait_until(lambda: rows.is_file() and len(rows.read_text().splitlines()) > point)
    assert kill(pid)
    assert run(recipe, resume=True).finished
    check(recipe.run_dir, 2)
    alone = placed("grpo", f"undisturbed-{name}", **keys)
    assert run(alone).finished
    assert_equal_runs(alone.run_dir, recipe.run_dir)


CONVERSING: dict[str, Any] = {"sampling.max_running": 5, "sampling.exact": True, "sampling.max_response_tokens": 60}
"""Few places, and turns that a budget cuts in two."""


@pytest.mark.parametrize("partial_rollout", slow_but(["keep"], ["keep", "recompute"]))
def test_nothing_depends_on_how_long_replies_take(
    make_recipe: MakeRecipe, tmp_path: Path, partial_rollout: str
) -> None:
    """Samples stop within a turn, behind a reply and where they wait for one, by the clock of nobody."""
    folders = []
    for function in ("reply", "slow_reply"):
        keys = keys_of(
            tmp_path, function, steps=4, max_staleness=2, partial_rollout=partial_rollout, tokens_per_version=9
        )
        run(recipe := make_recipe(**(keys | CONVERSING), run_dir=str(tmp_path / function)))
        check(recipe.run_dir, 2)
        folders.append(recipe.run_dir)
    rows = read_rows(folders[0] / "metrics.jsonl")
    assert sum(row["off_policy/mixed"] for row in rows) > 0
    assert min(row["turns/mean"] for row in rows) > 1.3
    assert result_of(folders[0]) == result_of(folders[1])
    moments = [(folder / "moments.jsonl").read_text() for folder in folders]
    assert moments[0] == moments[1]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["apart", "two"])
def test_turns_come_to_the_run_of_one_process(plan: str, place: Path, placed: Placed) -> None:
    on = {"apart": APART, "two": {"actor.generate": "1,2 dp2", "actor.train": "0", "ref.logprobs": "0"}}[plan]
    keys = {**GRPO[1], **CONVERSING, "max_staleness": 2, "partial_rollout": "recompute", "tokens_per_version": 9}
    folders = []
    for function, at in (("reply", {}), ("slow_reply", where(place, f"turns-{plan}", on))):
        name = f"turns-{plan}-{function}"
        recipe = placed("grpo", name, **(keys_of(place, function, steps=4) | keys), **at)
        assert run(recipe).finished
        folders.append(recipe.run_dir)
    assert_equal_runs(folders[1], folders[0])


@pytest.mark.slow
def test_an_adapted_policy_comes_to_the_run_of_one_process(place: Path, placed: Placed) -> None:
    keys = {**GRPO[1], **PACED, "steps": 4, "max_staleness": 2, "partial_rollout": "recompute", "lora.rank": 2}
    alone = placed("grpo", "paced-lora-alone", **keys)
    apart = placed("grpo", "paced-lora", **keys, **where(place, "paced-lora", APART))
    for recipe in (alone, apart):
        assert run(recipe).finished
        check_versions(recipe.run_dir, 2)
    assert_equal_runs(apart.run_dir, alone.run_dir)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"partial_rollout": "off"}, "`tokens_per_version` is 5, but with `partial_rollout` off samples end"),
    ({"options": {"dynamic_sampling": True}}, "draws again by what rewards say"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_is_refused(make_recipe: MakeRecipe, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(make_recipe(**{"max_staleness": 1, "partial_rollout": "recompute", **PACED, **keys}))
