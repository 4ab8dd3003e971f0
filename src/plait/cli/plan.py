"""`plait plan RECIPE` finds the plan whose step takes least; `plait simulate RECIPE` predicts a given one."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cyclopts import Parameter

from plait.cli.app import Number, Place, Whole
from plait.cli.output_files import files_of
from plait.cli.plan_options import Keys, OnCluster
from plait.errors import ConfigError
from plait.observe.screen import say

if TYPE_CHECKING:
    from plait.schedule.named_plans import Cut

MOST_SECONDS = 86_400
USUAL_SECONDS = 5.0
SAYS_EVERY_S = 10.0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Search:
    """How to search, and where to write; each field is an option."""

    seconds: Number | None = None
    """Seconds to try plans, by default 5 without --evaluations; Ctrl-C ends it earlier and shows the best so far."""
    evaluations: Whole | None = None
    """Plans to try: the same seed and number find the same plan. With --seconds: whichever ends first."""
    seed: Whole = 0
    """Seed of the search."""
    out: Place | None = None
    """File for the plan, which `--plan` of `plait train` takes."""

    def limits(self) -> tuple[float, int]:
        """Seconds and evaluations, of which the first that is spent ends the search.

        Raises:
            ConfigError: one of them is no budget.
        """
        seconds, evaluations = self.seconds, self.evaluations
        if seconds is not None and not 0 < seconds <= MOST_SECONDS:
            raise ConfigError(f"--seconds: expected a number above 0, at most {MOST_SECONDS}, found {seconds:g}")
        if evaluations is not None and evaluations < 1:
            raise ConfigError(f"--evaluations: expected at least 1, found {evaluations}")
        if seconds is None:
            seconds = USUAL_SECONDS if evaluations is None else math.inf
        return seconds, 10**9 if evaluations is None else evaluations


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Given:
    """Which plan, and where to write; each field is an option."""

    plan: str | None = None
    """A plan file, colocated, split, standalone, one-mesh, real, hybridflow or auto; the recipe's own when left out."""
    tp: Whole | None = None
    """For colocated, split or standalone: tensor parallelism of models that train or score; by default 1. Without this
    and the next three, the smallest that fit in memory."""
    pp: Whole | None = None
    """Their pipeline stages; by default 1."""
    decode_tp: Whole | None = None
    """Tensor parallelism of the generating model; by default as --tp."""
    offload: bool = False
    """Optimizer states are in host memory while other calls run."""
    timeline: Place | None = None
    """File for the predicted timeline."""
    picture: Place | None = None
    """File for a picture, SVG."""

    def cut(self, plan: str) -> Cut | None:
        """How a plan is cut, where that is said. Raises ConfigError where it cannot be."""
        from plait.schedule.named_plans import NAMES, Cut

        sizes = {"--tp": self.tp, "--pp": self.pp, "--decode-tp": self.decode_tp}
        stated = {option: size for option, size in sizes.items() if size is not None}
        names = [*stated, *(["--offload"] if self.offload else [])]
        if not names:
            return None
        if plan not in NAMES:
            raise ConfigError(f"{', '.join(names)}: expected --plan {', '.join(NAMES)}, found `{plan}`")
        for option, size in stated.items():
            if size < 1:
                raise ConfigError(f"{option}: expected at least 1, found {size}")
        tp = stated.get("--tp", 1)
        return Cut(tp, stated.get("--pp", 1), stated.get("--decode-tp", tp), self.offload)


ANYWHERE, BRIEFLY, OWN = OnCluster(), Search(), Given()


class Telling:
    """Says what is being done, now and then: over hundreds of devices it takes minutes."""

    def __init__(self) -> None:
        self._said_s = time.monotonic()

    def __call__(self, text: str) -> None:
        if (now_s := time.monotonic()) - self._said_s >= SAYS_EVERY_S:
            self._said_s = now_s
            say(text, file=sys.stderr)


def plan(recipe: Place, /, *keys: Keys, where: OnCluster = ANYWHERE, how: Search = BRIEFLY) -> int:
    """Find the plan of a recipe whose step takes least time and fits in memory. Nothing is run or loaded.

    Parameters
    ----------
    recipe
        A recipe; its models may be known by their shapes alone.
    keys
        Keys of the recipe, `--key value`, in place of the file's.
    """
    seconds, evaluations = how.limits()
    names = [key.partition("=")[0] for key in keys]
    if given := [name for name in names if name == "--plan" or (name.startswith("--") and name.endswith(".plan"))]:
        raise ConfigError(f"{given[0]}: a plan is searched here; `plait simulate` predicts a given one")
    files_of(where.overwrite, out=how.out)
    planning = where.planning(recipe, keys, offered=("--seconds", "--evaluations"))
    from plait.cli.plan_following import following
    from plait.cli.plan_report import Report
    from plait.cli.plan_text import plan_text
    from plait.cli.plan_variants import SHARE, variants
    from plait.planner.plan_search import Budget
    from plait.planner.search import interruptible
    from plait.runtime.prediction.choosing import choose, choose_best

    telling = Telling()
    with interruptible() as interrupted:
        choice = choose(planning, Budget(evaluations, seconds, time.monotonic, interrupted, telling), how.seed)
        shorter = Budget(-(-evaluations // SHARE), seconds / SHARE, time.monotonic, interrupted, telling)
        others = variants(planning, lambda other: choose_best(other, shorter, how.seed, choice.best.plan))
    report = Report(planning, choice, others, where.lengths is not None)
    if how.out is not None:
        replace(choice.best.plan, predicted=choice.best.prediction.timeline).save(how.out)
    if where.as_json:
        say(json.dumps(report.record()))
    else:
        how_to = following(planning, report.plan, recipe, keys, how.out, where.stage)
        say(plan_text(report, following=how_to), end="")
    return 0


def simulate(recipe: Place, /, *keys: Keys, where: OnCluster = ANYWHERE, which: Given = OWN) -> int:
    """Predict the steps of a recipe on a plan: seconds, memory, a timeline. Nothing is run or loaded.

    Parameters
    ----------
    recipe
        A recipe; its models may be known by their shapes alone.
    keys
        Keys of the recipe, `--key value`, in place of the file's.
    """
    files_of(where.overwrite, timeline=which.timeline, picture=which.picture)
    planning = where.planning(recipe, keys, which.plan, offered=("--timeline", "--picture"))
    from plait.cli.plan_report import Report
    from plait.cli.plan_text import plan_text
    from plait.cli.plan_variants import variants
    from plait.output import write_file
    from plait.planner.plan_search import Budget
    from plait.runtime.prediction.choosing import (
        AUTO_EVALUATIONS,
        beside_others,
        choose_best,
        choose_for_run,
        predicted,
    )
    from plait.schedule.gantt import svg_gantt
    from plait.schedule.named_plans import AUTO

    name, telling = which.plan or planning.recipe.plan, Telling()
    cut = which.cut(name)
    if name == AUTO and planning.cluster.num_devices > 1:
        tries = f"{AUTO_EVALUATIONS} plans as a run does, and as many for each variant of the recipe"
        say(f"trying {tries}; --plan predicts a given one", file=sys.stderr)
        choice, budget = choose_for_run(planning, telling), Budget(AUTO_EVALUATIONS, tell=telling)
        others = variants(planning, lambda other: choose_best(other, budget, other.recipe.seed, choice.best.plan))
    else:
        choice = beside_others(planning, planning.given(name, cut), telling)
        others = variants(planning, lambda other: predicted(other, other.given(name, cut)))
    report, prediction = Report(planning, choice, others, where.lengths is not None), choice.best.prediction
    if which.timeline is not None:
        prediction.timeline.save(which.timeline)
    if which.picture is not None:
        title = f"{choice.best.plan.name}: {prediction.seconds_per_step:.4g} s a step, predicted"
        write_file(which.picture, svg_gantt(prediction.timeline, title))
    say(json.dumps(report.record()) if where.as_json else plan_text(report), end="\n" if where.as_json else "")
    return 0
