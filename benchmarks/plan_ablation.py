"""What each part of the search for plans contributes: searches without it, at equally many proposed plans. Simulated.

    python benchmarks/plan_ablation.py                    # all settings, some minutes
    python benchmarks/plan_ablation.py --settings real    # one of them: real, rlhfuse, prompts
    python benchmarks/plan_ablation.py --tiny --repeats 1 # does the benchmark itself work?

Every search proposes `--proposals` plans, with each of `--repeats` seeds. `step` is the median of a step's predicted
seconds over seeds, `more` what that is above the step of the whole search, `fits` the share of seeds that found a plan
with room for everything, `played` the plans that had to be played, of those proposed. Nothing is timed, so the table is
the same on any machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from statistics import mean, median

from sides import positive

from plait.cost.cluster_file import read_cluster
from plait.cost.lengths import Lengths, SampleLengths
from plait.errors import ConfigError, PlaitError
from plait.planner.plan_moves import Moves
from plait.planner.plan_objective import Objective
from plait.planner.plan_problem import PlanProblem
from plait.planner.plan_search import Budget, Engine, SearchResult, search
from plait.planner.plan_space import PlanSpace
from plait.planner.slot_places import ends_of
from plait.recipes.recipe_file import load_recipe
from plait.runtime.prediction.planning import Planning
from plait.runtime.prepare import outline
from plait.schedule.plan import After
from plait.simulator.places import Place

ROOT = Path(__file__).parents[1]
State = tuple[Place, ...]


@dataclass(frozen=True)
class Setting:
    """What plans are searched for.

    recipe, cluster: files below `recipes`; keys: of the recipe, in place of the file's
    """

    title: str
    recipe: str
    cluster: str
    devices: int
    keys: tuple[tuple[str, object], ...]
    lengths: SampleLengths


REWARD = str(ROOT / "examples" / "length_reward.py:brief")
SETTINGS = {
    "real": Setting(
        "ReaL's PPO, 34B beside 7B, 384 tokens, 32 A100",
        "published/real.yaml",
        "real.yaml",
        32,
        (("model", "codellama-34b"), ("sampling.max_response_tokens", 384), ("prompts_per_step", 256)),
        SampleLengths(Lengths.fixed(128), Lengths.fixed(384)),
    ),
    "rlhfuse": Setting(
        "PPO of RLHFuse's 13B and 33B, up to 1,024 tokens, 64 H100",
        "published/rlhfuse.yaml",
        "64xH100",
        64,
        (("model", "llama-13b"), ("critic.model", "llama-33b"), ("reward.model", "llama-33b")),
        SampleLengths(Lengths.fixed(256), Lengths.lognormal(300, 0.8, 1024)),
    ),
    "prompts": Setting(
        "GRPO of 7B without a reference, prompts of 8,192 tokens, 8 H20 and 8 H100",
        "published/grpo.yaml",
        "h20_h100.yaml",
        16,
        (
            ("model", "qwen2.5-7b"),
            ("options.kl_coef", 0.0),
            ("reward.model", None),
            ("reward.functions", [REWARD]),
            ("prompts_per_step", 64),
            ("data.max_prompt_tokens", 8192),
            ("micro_batch_tokens", 16384),
        ),
        SampleLengths(Lengths.fixed(8192), Lengths.lognormal(200, 0.8, 1024)),
    ),
}
TINY = (("model", "smollm2-135m"), ("prompts_per_step", 16))


class OneLayout(PlanSpace):
    """All calls of a role are computed in one layout on the same devices, as far as their modes allow it."""

    def lawful(self, places: Sequence[Place]) -> State:
        changed = list(super().lawful(places))
        for role in self.graph.roles:
            home = changed[self.graph.home_of(role)]
            p = home.placements[0]
            for slot in self.graph.slots_of(role).values():
                if slot != home.slot:
                    form = self.forms.form_of(slot, p.ranks, home.layouts[0].parallelism)
                    changed[slot] = self.place(slot, p.ranks, form, changed[slot].placements[0].after)
        return tuple(super().lawful(changed))


class AllStays(PlanSpace):
    """What is on a device stays there."""

    def afters(self, slot: int) -> tuple[After, ...]:
        return ("keep",)


class OneByOne(Moves):
    """A plan near another differs from it in one call: no roles are moved, parted or cut together."""

    def near(self, state: State, rng: Random) -> State:
        slot = rng.randrange(len(state))
        place = self._moved(state, slot, rng) if rng.random() < 0.5 else self._reformed(state[slot], rng)
        return self._changed(state, {slot: place})


class Anywhere(Moves):
    """Plans are drawn at random."""

    def near(self, state: State, rng: Random) -> State:
        return self.random(rng) or state


class NoBound(Objective):
    """Every plan is played."""

    def bound(self, places: Sequence[Place]) -> float:
        return -inf


WHOLE = Engine()


@dataclass(frozen=True)
class Variant:
    """A search without a part of it."""

    title: str
    problem: Callable[[PlanProblem], PlanProblem] = lambda problem: problem
    space: Callable[[PlanProblem], PlanSpace] = PlanSpace
    engine: Engine = WHOLE


def one_mesh(problem: PlanProblem) -> PlanProblem:
    return replace(problem, smallest_mesh=problem.num_devices)


def prompts_with_samples(problem: PlanProblem) -> PlanProblem:
    return replace(problem, roles={role: replace(own, prompts_apart=False) for role, own in problem.roles.items()})


VARIANTS = (
    Variant("the whole search"),
    Variant("one mesh: every call on all devices", one_mesh),
    Variant("one layout for all calls of a role", space=OneLayout),
    Variant("prompts where samples are drawn", prompts_with_samples),
    Variant("roles train one after the other", partial(replace, pairs=())),
    Variant("nothing leaves a device between calls", space=AllStays),
    Variant("one call changed at a time", engine=Engine(moves=OneByOne)),
    Variant("plans drawn at random", engine=Engine(moves=Anywhere)),
    Variant("every plan is played", engine=Engine(objective=NoBound)),
)


class Counted:
    """The moves of a search, counted.

    Args:
        moves: as of `Engine`.
    """

    def __init__(self, moves: Callable[[PlanSpace], Moves]) -> None:
        self._moves, self.proposed = moves, 0

    def __call__(self, space: PlanSpace) -> Moves:
        moves = self._moves(space)
        near = moves.near

        def counted(state: State, rng: Random) -> State:
            self.proposed += 1
            return near(state, rng)

        moves.near = counted  # type: ignore[method-assign]
        return moves


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default=",".join(SETTINGS), help="which of them")
    parser.add_argument("--proposals", type=positive, default=1500)
    parser.add_argument("--repeats", type=positive, default=3, help="seeds of each search")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.settings, options.proposals = "prompts", 25
    try:
        for setting in chosen(options.settings):
            compare(planning_of(setting, tiny=options.tiny), setting.title, options)
    except PlaitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def chosen(names: str) -> list[Setting]:
    """The settings of an option, by their names with commas between. Raises ConfigError: there is none of a name."""
    if unknown := [name for name in names.split(",") if name not in SETTINGS]:
        raise ConfigError(f"--settings: expected some of {', '.join(SETTINGS)}, found {unknown[0]}")
    return [SETTINGS[name] for name in names.split(",")]


def planning_of(setting: Setting, *, tiny: bool) -> Planning:
    file = ROOT / "recipes" / "clusters" / setting.cluster
    cluster = read_cluster(str(file) if file.exists() else setting.cluster, setting.devices)
    keys = [*setting.keys, *(TINY if tiny else ())]
    run = outline(load_recipe(ROOT / "recipes" / setting.recipe, keys), device_memory=cluster.device.memory_bytes)
    return Planning(run.recipe, run.flow, run.models, run.shapes, cluster, setting.lengths)


def compare(planning: Planning, title: str, options: argparse.Namespace) -> None:
    print(f"{title}, predicted")
    asked = f"{options.proposals:,} plans proposed, seeds: {options.repeats}"
    print(f"  {asked:<38}{'step':>9}{'more':>8}{'fits':>7}{'played':>9}")
    whole_s: float | None = None
    for variant in VARIANTS:
        problem = variant.problem(planning.space.problem)
        space = variant.space(problem)
        found = [found_by(variant, problem, space, options.proposals, seed) for seed in range(options.repeats)]
        steps = [value for run, _ in found if (value := best_of(run, space)) < inf]
        played = mean(run.evaluations / max(run.evaluations, proposed) for run, proposed in found)
        step_s = median(steps) if steps else None
        if whole_s is None:
            whole_s = step_s
        step = "-" if step_s is None else f"{step_s:.4g} s"
        more = "-" if step_s is None or whole_s is None else f"{step_s / whole_s - 1:+.1%}"
        print(f"  {variant.title:<38}{step:>9}{more:>8}{len(steps) / len(found):>7.0%}{played:>9.0%}", flush=True)


def best_of(run: SearchResult, space: PlanSpace) -> float:
    """Of the plans that the variant may propose: those of other systems, which every search tries, may be others."""
    values = [inf]
    for leader in run.leaders:
        meshes = {tuple(range(*ends_of(place))) for place in leader.places}
        if meshes <= {*space.meshes} and space.lawful(leader.places) == leader.places:
            values.append(leader.valued.value)
    return min(values)


def found_by(
    variant: Variant, problem: PlanProblem, space: PlanSpace, proposals: int, seed: int
) -> tuple[SearchResult, int]:
    """And how many plans were proposed; fewer than asked for where all plans there are were tried."""
    counted = Counted(variant.engine.moves)
    budget = Budget(10**9, asked=lambda: counted.proposed >= proposals)
    engine = replace(variant.engine, moves=counted)
    return search(problem, budget, seed=seed, space=space, engine=engine), counted.proposed


if __name__ == "__main__":
    sys.exit(main())
