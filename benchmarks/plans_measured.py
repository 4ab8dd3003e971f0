"""Plans predicted and run: of two workers seven each for GRPO and PPO beside the one that `plan: auto` finds, and eight
settings of the shipped recipes of the demo and the film, on one device and on two.

    python benchmarks/plans_measured.py --repeats 2            # on two idle cores, about an hour
    python benchmarks/plans_measured.py --parts plans          # or settings
    python benchmarks/plans_measured.py --parts plans --algorithms ppo --steps 6
    python benchmarks/plans_measured.py --parts plans --algorithms ppo --plans "all on both" "one each"   # fewer
    python benchmarks/plans_measured.py --tiny --repeats 1     # does the benchmark itself work?

A profile of this machine is measured first, in whole. One run of each algorithm (the first plan, the first setting)
then corrects it, as any run of a user does; it counts in no figure. All others are predicted before they run,
and each is a run of its own, its first step left out. What is measured is printed at once; a benchmark that is
interrupted or terminated prints the table of what it has.

    plans      predicted and measured seconds of a step, Kendall's tau of each algorithm's plans (Kendall 1938: the
               share of pairs in the right order less that of pairs in the wrong one), of those pairs, too, that differ
               by more than what was measured of them varies, and how far from the best measured plan the one is that
               the prediction puts first. Each plan steps in turns with the first: its seconds are the median of the
               steps' ratios times the median of all steps of the first, so that minutes in which the machine was
               faster favour no plan. `found` is what `plan: auto` finds by itself in the whole space once the profile
               is corrected; it is measured first, and how far it is from the best measured plan is said, too. `one
               each` of PPO is the named plan `split`
    settings   the error of step seconds, for samples as long as the correcting run of the same recipe had them, and of
               the peak memory of the rank that holds most (predicted: the estimate of a dry run), and the mean of both
               errors' sizes
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from ending import ends_when_terminated
from placed.plans import PLANS, planning_of, write_plans
from placed.recipes import grpo, write_reward_model
from placed.runs import Finished, RunFailed, run_alone
from placed.settings import CORRECTING, SETTINGS, recipe_of_setting
from placed.step_by_step import in_turns
from sides import positive, row

from plait.data.package_file import cache_folder
from plait.runtime.prediction.choosing import choose_for_run
from plait.runtime.prediction.forecast import read_forecast

PARTS = ("plans", "settings")
WARM_UP = 1
FOUND = "found"
"""The plan that a search finds, among the others."""


@dataclass(frozen=True)
class Beside:
    """spread: how far the middle half of what was measured lies apart, over the square root of how many there were"""

    predicted: float
    measured: float
    spread: float = 0.0

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0


@dataclass
class Turns:
    """Plans of an algorithm that step in turns with the first of them, and what was measured so far.

    files:     of each plan; the first stands at the front
    predicted: seconds of a step
    plain:     the same by the profile before any run has corrected it
    base:      seconds of all steps of the first plan
    ratios:    of another plan's steps over those of the first that were taken beside them
    """

    files: Mapping[str, Path]
    predicted: Mapping[str, float]
    plain: Mapping[str, float]
    base: list[float] = field(default_factory=list)
    ratios: dict[str, list[float]] = field(default_factory=dict)

    @property
    def first(self) -> str:
        return next(iter(self.files))

    def add(self, name: str, first: Sequence[float], other: Sequence[float]) -> None:
        """Steps of the first plan, and those of another that were taken in turns with them."""
        self.base += first
        self.ratios.setdefault(name, []).extend(b / a for a, b in zip(first, other, strict=True))

    def beside(self) -> dict[str, Beside]:
        """Of every plan that was measured."""
        if not self.base:
            return {}
        base = median(self.base)
        plans = {self.first: Beside(self.predicted[self.first], base)}
        for name, ratios in self.ratios.items():
            plans[name] = Beside(self.predicted[name], base * median(ratios), base * spread(ratios))
        return plans


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if expected := _expected(options):
        print(expected, file=sys.stderr)
        return 2
    parts, algorithms = options.parts.split(","), options.algorithms.split(",")
    try:
        with ends_when_terminated(), tempfile.TemporaryDirectory(prefix="plait-plans-") as name:
            measure(parts, algorithms, Path(name), options)
    except RunFailed as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _expected(options: argparse.Namespace) -> str:
    """What is wrong with the options, if anything is."""
    parts, algorithms = options.parts.split(","), options.algorithms.split(",")
    plans = [name for algorithm in algorithms for name in PLANS.get(algorithm, ())]
    for option, words, known in (
        ("parts", parts, PARTS),
        ("algorithms", algorithms, PLANS),
        ("plans", options.plans, plans),
    ):
        if not set(words) <= set(known):
            return f"--{option}: expected some of {', '.join(dict.fromkeys(known))}, found {', '.join(words)}"
    return ""


def measure(parts: Sequence[str], algorithms: Sequence[str], folder: Path, options: argparse.Namespace) -> None:
    """Raises RunFailed."""
    os.environ["PLAIT_CACHE"] = str(own_cache(folder / "cache", empty=options.tiny))
    if "plans" in parts:
        for algorithm in algorithms:
            measure_plans(algorithm, folder / algorithm, options)
    if "settings" in parts:
        report_settings(settings(folder / "settings", options))


def own_cache(folder: Path, *, empty: bool) -> Path:
    """A cache without profiles: what other runs have measured has no say here, and nothing stays in the user's.

    Args:
        empty: without models and data, too.
    """
    folder.mkdir()
    for entry in () if empty or not cache_folder().is_dir() else cache_folder().iterdir():
        if entry.name != "profiles":
            (folder / entry.name).symlink_to(entry.resolve())
    return folder


def recipe_of(algorithm: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    folder.mkdir(parents=True)
    steps = WARM_UP + options.steps
    recipe = grpo(folder, is_tiny=options.tiny, prompts=options.prompts, samples=options.samples, steps=steps)
    recipe["sampling"] = {**recipe["sampling"], "max_response_tokens": 6 if options.tiny else options.tokens}
    recipe["micro_batch_tokens"] = 1024
    if algorithm == "ppo":
        scorer = write_reward_model(recipe["model"], folder / "reward")
        recipe |= {"algorithm": "ppo", "reward": {"model": [scorer]}}
    return recipe


def measure_plans(algorithm: str, folder: Path, options: argparse.Namespace) -> None:
    """All plans of an algorithm; whatever ends it, what was measured is reported. Raises RunFailed."""
    recipe = recipe_of(algorithm, folder, options)
    turns = predicted(algorithm, recipe, folder, options)
    others = [FOUND, *(name for name in turns.files if name not in (FOUND, turns.first))]
    try:
        for repeat in range(options.repeats):
            for name in others[:: -1 if repeat % 2 else 1]:
                places = [folder / f"{repeat}-{turns.files[name].stem}-{which}" for which in ("first", "other")]
                pair = [recipe | {"plan": str(turns.files[which])} for which in (turns.first, name)]
                steps = [run.steps() for run in in_turns(pair, places, WARM_UP)]
                turns.add(name, *steps)
                seconds = "; ".join(" ".join(f"{step:.3f}" for step in of_plan) for of_plan in steps)
                print(f"{algorithm}, steps of `{turns.first}` and of `{name}`, s: {seconds}", flush=True)
    finally:
        report_plans(algorithm, turns, left_out=len(turns.files) - len(turns.beside()))


def predicted(algorithm: str, recipe: Mapping[str, Any], folder: Path, options: argparse.Namespace) -> Turns:
    """The plans, and seconds of their steps, before any of them is measured. Raises RunFailed."""
    have_profile(recipe, quick=options.tiny)
    files = write_plans(folder / "plans", algorithm)
    first = next(iter(files))
    files = {name: file for name, file in files.items() if name == first or name in (options.plans or files)}
    one_run({**recipe, "plan": str(files[first])}, folder / "correcting")
    files[FOUND] = found_plan(recipe, folder / "plans")
    predicted, plain = ({}, {})
    for corrected, predictions in ((True, predicted), (False, plain)):
        planning = planning_of(recipe, 2, corrected=corrected)
        for name, file in files.items():
            predictions[name] = planning.predict(planning.given(str(file))).seconds_per_step
    return Turns(files, predicted, plain)


def spread(ratios: Sequence[float]) -> float:
    """The distance of the quartiles over the square root of their number: about what a median of them may be off."""
    lower, _, upper = quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return (upper - lower) / len(ratios) ** 0.5


def found_plan(recipe: Mapping[str, Any], folder: Path) -> Path:
    """A file of the plan that a run of `plan: auto` on two devices would follow now."""
    file = folder / f"{FOUND}.json"
    choose_for_run(planning_of(recipe, 2)).best.plan.save(file)
    return file


def settings(folder: Path, options: argparse.Namespace) -> Iterator[tuple[str, Beside, Beside]]:
    """A setting's name, seconds of a step, bytes at the peak. Raises RunFailed."""
    shared, steps = folder / "shared", WARM_UP + options.steps
    shared.mkdir(parents=True)
    samples: dict[str, Path] = {}
    for name, setting in CORRECTING.items():
        recipe = recipe_of_setting(setting, shared, steps=steps, is_tiny=options.tiny)
        have_profile(recipe, quick=options.tiny)
        samples[name] = one_run(recipe, folder / f"correcting-{name}", launched=False).run_dir
    for number, (name, setting) in enumerate(SETTINGS.items()):
        recipe = recipe_of_setting(setting, shared, steps=steps, is_tiny=options.tiny)
        planning = planning_of(recipe, setting.devices, lengths=samples[setting.recipe])
        seconds = planning.predict(planning.given(setting.plan)).seconds_per_step
        places = [folder / f"{number}-{repeat}" for repeat in range(options.repeats)]
        runs = [one_run(recipe, place, launched=setting.devices > 1) for place in places]
        step_s = median(step for run in runs for step in run.steps())
        yield name, Beside(seconds, step_s), fullest(run.run_dir for run in runs)


def fullest(folders: Iterable[Path]) -> Beside:
    """What the rank that held most of runs of a setting was predicted to hold, and held.

    Raises:
        RunFailed: a run has no forecast.
    """
    forecasts = [read_forecast(folder) for folder in folders]
    ranks = [(one.measured, one.predicted) for forecast in forecasts if forecast is not None for one in forecast.memory]
    known = [(held, said) for held, said in ranks if held is not None and said is not None]
    if not known or None in forecasts:
        raise RunFailed("a run has no memory in its forecast")
    held, said = max(known)
    return Beside(said, held)


def have_profile(recipe: Mapping[str, Any], *, quick: bool) -> None:
    """Raises RunFailed where it cannot be measured."""
    if planning_of(recipe, 1).calibration.exact:
        return
    command = [sys.executable, "-m", "plait", "profile", "--model", recipe["model"], "--dtype", recipe["dtype"]]
    ended = subprocess.run([*command, *(["--quick"] if quick else [])], capture_output=True, text=True)
    if ended.returncode:
        raise RunFailed(f"`plait profile` ended with {ended.returncode}:\n{ended.stderr[-2000:]}")


def one_run(recipe: Mapping[str, Any], place: Path, *, launched: bool = True) -> Finished:
    """Raises RunFailed."""
    return run_alone({"recipe": recipe, "launched": launched}, place, WARM_UP)


def kendall(pairs: Iterable[tuple[Beside, Beside]]) -> float:
    """tau-a: pairs of plans in the right order less those in the wrong one, of all."""
    signs = [(a.predicted - b.predicted) * (a.measured - b.measured) for a, b in pairs]
    return sum((sign > 0) - (sign < 0) for sign in signs) / max(1, len(signs))


def are_apart(a: Beside, b: Beside) -> bool:
    """Whether two plans differ by more than what was measured of either varies."""
    return abs(a.measured - b.measured) > max(a.spread, b.spread)


def report_plans(algorithm: str, turns: Turns, *, left_out: int) -> None:
    """
    Args:
        left_out: plans that were not measured.
    """
    plans = turns.beside()
    if len(plans) < 2:
        return
    print(row(f"{algorithm}, two workers", ["profile", "predicted", "measured", "spread", "error"], ""))
    for name, plan in sorted(plans.items(), key=lambda item: item[1].measured):
        cells = [f"{turns.plain[name]:.3f}", f"{plan.predicted:.3f}", f"{plan.measured:.3f}", f"{plan.spread:.3f}"]
        print(row(name, [*cells, f"{plan.error:+.0%}"], ""))
    if left_out:
        print(f"broken off: {left_out} plans were not measured, and count in nothing below")
    pairs = list(combinations(plans.values(), 2))
    apart = [pair for pair in pairs if are_apart(*pair)]
    picked = min(plans, key=lambda name: plans[name].predicted)
    best = min(plan.measured for plan in plans.values())
    mean = sum(abs(plan.error) for plan in plans.values()) / len(plans)
    print(f"Kendall tau {kendall(pairs):.2f}; picked `{picked}`, {plans[picked].measured / best - 1:.1%} from the best")
    if FOUND in plans:
        print(f"`plan: auto` finds `{FOUND}`, {plans[FOUND].measured / best - 1:.1%} from the best")
    print(f"tau of the {len(apart)} of {len(pairs)} pairs further apart than measurements vary {kendall(apart):.2f}")
    print(f"mean of the errors' sizes {mean:.1%}\n", flush=True)


def report_settings(settings: Iterable[tuple[str, Beside, Beside]]) -> None:
    """Each as soon as it is measured; whatever ends them, the means of those that were."""
    errors: list[tuple[float, float]] = []
    try:
        for name, seconds, memory in settings:
            if not errors:
                print(row("settings", ["predicted", "measured", "error", "MiB", "peak", "error"], ""))
            cells = [f"{seconds.predicted:.3f}", f"{seconds.measured:.3f}", f"{seconds.error:+.0%}"]
            cells += [f"{memory.predicted / 2**20:.0f}", f"{memory.measured / 2**20:.0f}", f"{memory.error:+.0%}"]
            print(row(name, cells, ""), flush=True)
            errors.append((abs(seconds.error), abs(memory.error)))
    finally:
        for number, what in enumerate(("step seconds", "peak memory") if errors else ()):
            mean = sum(sizes[number] for sizes in errors) / len(errors)
            print(f"{what}: mean of the errors' sizes {mean:.1%}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="random models of two layers")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--algorithms", default=",".join(PLANS), help="of the part `plans`")
    parser.add_argument(
        "--plans", nargs="+", default=(), help="those that are measured beside the first and `found`; none given: all"
    )
    parser.add_argument("--steps", type=positive, default=3, help="of each run, behind its first")
    parser.add_argument("--repeats", type=positive, default=1, help="of each plan and setting")
    parser.add_argument("--prompts", type=positive, default=4)
    parser.add_argument("--samples", type=positive, default=4)
    parser.add_argument("--tokens", type=positive, default=24, help="of each response")
    return parser


if __name__ == "__main__":
    sys.exit(main())
