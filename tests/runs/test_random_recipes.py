"""Recipes of any options, run in any way, killed and resumed on another plan: the same as by one plain process. The
test's id is the seed of all, and they are printed where it fails. float64, as in `test_placements`."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from plait.errors import UserError
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.prepare import prepare
from tests.cases import slow_but
from tests.forked import exit_code_of, forked
from tests.models.tiny import save_tiny
from tests.runs.broad_recipes import BROAD_HOW, BROAD_WHAT, broad_recipe
from tests.runs.placed_runs import where
from tests.runs.plans import assert_equal_runs
from tests.runs.random_flows import fill_more, make_family
from tests.runs.random_recipes import ALGORITHMS, GIVEN, HOW, REPLIES, SHARING, WHAT, Drawn, random_recipe
from tests.runs.test_partial_rollout import wait_until
from tests.runs.test_resume import kill
from tests.runs.wide_recipes import schedules_of, wide_recipe

Way = Callable[[Drawn, str, Any], Recipe]
SEEDS = (*range(30), 332, 696, 760, 1387)
"""332 keeps prefixes while one rank of its instance makes room. The last but one has tools, turns and stop strings."""
QUICK = (696, 1387)
"""On one rank each. The first is killed; the second has turns and stop strings."""
WIDE = range(16)
BROAD = range(12)
"""9 keeps more of what samples began with than there is room for at a time."""
UNFIT = range(60)
QUICK_UNFIT = range(6)


@pytest.fixture
def way(place: Path, placed: Callable[..., Recipe]) -> Way:
    """`way(drawn, name, plan)`: the recipe in the way that was drawn with it, on a plan; None: plainly."""
    (place / "replies.py").write_text(REPLIES)
    fill_more(place)
    if not (place / "draft").exists():
        save_tiny(place / "draft")

    def make(drawn: Drawn, name: str, plan: Any) -> Recipe:
        algorithm, keys = drawn.flow
        make_family(place, keys)
        if (
            drawn.ends is not None
        ):  # of both: with `partial_rollout` keep a checkpoint has keys and values computed again
            keys = keys | {"checkpoint.every": 1}
        if plan is None:
            ways = {} if algorithm in GIVEN else {"sampling.speculation": "off"}
            return placed(algorithm, name, **keys, **ways)
        return placed(algorithm, name, **keys, **drawn.ways, **where(place, f"plan-{name}", plan, schedules_of(plan)))

    return make


@pytest.mark.parametrize("seed", slow_but(QUICK, SEEDS))
def test_no_way_to_run_a_recipe_changes_what_it_comes_to(seed: int, way: Way) -> None:
    check(random_recipe(seed), str(seed), way)


@pytest.mark.slow
@pytest.mark.parametrize("seed", WIDE)
def test_no_way_to_run_a_recipe_on_four_ranks_changes_what_it_comes_to(seed: int, way: Way) -> None:
    check(wide_recipe(seed), f"wide-{seed}", way)


@pytest.mark.slow
@pytest.mark.parametrize("seed", BROAD)
def test_no_way_to_run_a_recipe_of_more_keys_changes_what_it_comes_to(seed: int, way: Way) -> None:
    check(broad_recipe(seed), f"broad-{seed}", way)


def check(drawn: Drawn, name: str, way: Way) -> None:
    """In its way, ended and resumed where that was drawn, it is the run of one plain process."""
    print(drawn)
    plain, other = way(drawn, f"plain-{name}", None), way(drawn, f"other-{name}", drawn.plan)
    run(plain)
    if drawn.ends is None:
        run(other)
    else:
        ended_in_step(other, drawn.ends, drawn.by)
        run(way(drawn, f"other-{name}", drawn.then), resume=True)
    # Adam makes of the rounding of a gradient that is almost nothing, which goes by who adds what, 1e-7 of an update.
    assert_equal_runs(other.run_dir, plain.run_dir, tolerance=1e-7)


def ended_in_step(recipe: Recipe, steps: int, by: str) -> None:
    """Run, and end it when so many steps are recorded, wherever it is by then. Where it ends before that it has
    failed."""
    running, rows = forked(lambda: run(recipe)), recipe.run_dir / "metrics.jsonl"
    recorded = lambda: rows.is_file() and len(rows.read_text().splitlines()) >= steps
    wait_until(lambda: recorded() or os.waitid(os.P_PID, running, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)
    if by == "kill":
        kill(running)
    else:
        end_by_itself(running, by, random.Random(recipe.run_dir.name))
    assert recorded(), f"it ended before it had recorded {steps} steps; its error is in what was captured of stderr"


def end_by_itself(running: int, by: str, chance: random.Random) -> None:
    """At a random moment of a second, one of its processes is killed, or it is interrupted; what it does then is its
    own."""
    time.sleep(chance.random())
    ranks = psutil.Process(running).children(recursive=True) if by == "rank" else []
    with contextlib.suppress(ProcessLookupError):
        os.kill(chance.choice(ranks).pid, signal.SIGKILL) if ranks else os.kill(running, signal.SIGINT)
    exit_code_of(running, 300.0)


@pytest.mark.parametrize("seed", slow_but(QUICK_UNFIT, UNFIT))
def test_what_does_not_go_together_is_refused_before_work_by_a_key(seed: int, way: Way) -> None:
    drawn = random_recipe(seed, fits=False)
    print(drawn)
    keys = {*drawn.flow[1], *drawn.ways, *(f"options.{key}" for key in drawn.flow[1]["options"]), "plan"}
    keys |= {key.partition(".")[0] for key in keys}
    for name, plan in ((f"unfit-{seed}", drawn.plan), (f"unfit-plain-{seed}", None)):
        if said := refusal(partial(way, drawn, name, plan)):
            assert keys.intersection(re.findall(r"`([a-z_.]+)`", said)), f"it names none of what was drawn: {said}"


def refusal(make: Callable[[], Recipe]) -> str:
    """What a recipe is refused with as it is read, or as its run is prepared; empty: it is not."""
    try:
        prepare(make())
    except UserError as error:
        return str(error)
    return ""


def test_every_key_is_drawn_in_the_end() -> None:
    drawn = [random_recipe(seed) for seed in range(600)]
    assert drawn[:20] == [random_recipe(seed) for seed in range(20)], "a seed says all"
    assert {one.flow[0] for one in drawn} == set(ALGORITHMS)
    assert {*SHARING, *(key for draw in (*WHAT, *HOW) for values in draw.among for key in values)} <= keys_of(drawn)
    assert {type(one.plan) for one in drawn} == {type(one.then) for one in drawn} == {str, dict}
    assert any(one.ends is not None and one.plan != one.then for one in drawn)
    more = keys_of([broad_recipe(seed) for seed in range(600)])
    assert {key for draw in (*BROAD_WHAT, *BROAD_HOW) for values in draw.among for key in values} <= more


def keys_of(drawn: Sequence[Drawn]) -> set[str]:
    keys = {key for one in drawn for key in (*one.flow[1], *one.ways)}
    return keys | {f"options.{key}" for one in drawn for key in one.flow[1]["options"]}
