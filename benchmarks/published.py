"""Published times of RLHF on clusters beside what `plait simulate` says: every row is a recipe, a cluster file, a plan.

    python benchmarks/published.py            tables, as docs/predictions.md has them
    python benchmarks/published.py --commands the command of each row
    python benchmarks/published.py --fit      the three constants of recipes/clusters/real.yaml again

Three constants are fitted, on the 36 points of ReaL's heuristic plans; nothing is fitted to any other number here, but
for the last columns of the transitions, which say so.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import yaml

from plait.cost.cluster_file import read_cluster
from plait.cost.hardware import Software
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.model_costs import ModelCosts
from plait.layout.mesh import Layout
from plait.recipes.recipe_file import load_recipe
from plait.runtime.prediction.planning import Planning
from plait.runtime.prepare import outline
from plait.schedule.named_plans import Cut
from plait.schedule.plan import Plan
from plait.simulator.steps import Prediction, predict

ROOT = Path(__file__).parents[1]
PUBLISHED = Path(__file__).parent / "published.yaml"
FITTED = ("products", "layer_s", "hop_s")
ALGORITHMS = {"PPO": "hybridflow", "ReMax": "remax", "Safe-RLHF": "safe_rlhf", "GRPO": "grpo"}
"""Recipe of each in HybridFlow's setting."""
PLACEMENTS = ("colocated", "split", "standalone", "hybridflow")
WAYS = (1, 2, 4, 8)
"""In which the model that generates is cut (figure 15)."""


@dataclass(frozen=True)
class Row:
    """A step that a user can predict.

    name:    in words; seconds: published, None: not known here
    setting: the cluster's file; recipe: the recipe's; keys: of the recipe, in place of the file's
    cut:     of a named plan
    """

    name: str
    setting: str
    recipe: str
    devices: int
    plan: str
    keys: tuple[tuple[str, object], ...] = ()
    cut: Cut | None = None
    seconds: float | None = None

    @property
    def prompt_tokens(self) -> int:
        return {"real": 128, "hybridflow": 1024}[self.setting]


@cache
def numbers() -> Mapping[str, Mapping]:
    return yaml.safe_load(PUBLISHED.read_text())


def real_points() -> Iterator[Row]:
    """ReaL's heuristic plans (version 1, figure 10): which models are large, response tokens, size, seconds."""
    table = numbers()["real"]
    for case, rows in table["seconds"].items():
        for tokens, row in rows.items():
            for size, seconds in zip(table["models"], row, strict=True):
                small, large = table["models"]["7B"]["model"], table["models"][size]["model"]
                keys = {
                    "model": small if case == "Critic" else large,
                    "critic.model": small if case == "Actor" else large,
                    "reward.model": small if case == "Actor" else large,
                    "prompts_per_step": table["prompts"][tokens],
                    "sampling.max_response_tokens": tokens,
                }
                devices = table["models"][size]["devices"] * (2 if case == "Both" else 1)
                name = f"{case} {size}, {tokens} tokens"
                yield Row(name, "real", "real", devices, "real", tuple(keys.items()), None, seconds)


def hybridflow_points() -> Iterator[Row]:
    """HybridFlow's throughput of PPO (figure 9), as seconds of a step of 2,097,152 tokens."""
    for devices, seconds in numbers()["hybridflow"]["seconds"].items():
        yield replace(hybridflow_row("7B", devices), seconds=seconds)


def hybridflow_row(
    size: str, devices: int, algorithm: str = "PPO", plan: str = "colocated", decode_tp: int | None = None
) -> Row:
    """Any step in its setting, all models of one size, cut as in figure 14; by its mapper as that cuts them. The states
    of Safe-RLHF's three trained models leave no room for keys and values on the fewest devices: they are offloaded."""
    row, recipe = numbers()["hybridflow"]["transition"][size], ALGORITHMS[algorithm]
    keys: dict[str, object] = dict.fromkeys(("model", "reward.model"), row["model"])
    if recipe == "safe_rlhf":
        keys["cost.model"] = row["model"]
    cut = Cut(row["tp"], row["pp"], decode_tp or row["generation_tp"], recipe == "safe_rlhf")
    cut = cut if plan in PLACEMENTS[:3] else None
    return Row(f"{size} on {devices}", "hybridflow", recipe, devices, plan, tuple(keys.items()), cut)


def command(row: Row) -> list[str]:
    """The words behind `plait`."""
    tokens = dict(row.keys).get("sampling.max_response_tokens", 1024)
    words = ["simulate", f"recipes/published/{row.recipe}.yaml"]
    words += [word for key, value in row.keys for word in (f"--{key}", str(value))]
    words += ["--cluster", f"recipes/clusters/{row.setting}.yaml", "--devices", str(row.devices), "--plan", row.plan]
    if row.cut is not None:
        sizes = {"--tp": row.cut.tp, "--pp": row.cut.pp, "--decode-tp": row.cut.decode_tp}
        words += [word for option, size in sizes.items() for word in (option, str(size))]
        words += ["--offload"] * row.cut.offload
    return [*words, "--lengths", f"{row.prompt_tokens}:{tokens}"]


@cache
def planning_of(row: Row) -> Planning:
    cluster = read_cluster(str(ROOT / f"recipes/clusters/{row.setting}.yaml"), row.devices)
    recipe = load_recipe(ROOT / f"recipes/published/{row.recipe}.yaml", row.keys)
    run = outline(recipe, device_memory=cluster.device.memory_bytes)
    response = run.recipe.sampling.max_response_tokens
    lengths = SampleLengths(Lengths.fixed(row.prompt_tokens), Lengths.fixed(response))
    return Planning(run.recipe, run.flow, run.models, run.shapes, cluster, lengths)


@cache
def plan_of(row: Row) -> Plan:
    return planning_of(row).given(row.plan, row.cut)


def predicted(row: Row, software: Software | None = None) -> Prediction:
    """By the cluster's software, or another in its place."""
    planning, plan = planning_of(row), plan_of(row)
    if software is None:
        return planning.predict(plan)
    known, cluster = planning.costs, replace(planning.cluster, software=software)
    costs = ModelCosts(known.workload, known.shapes, known.flow, cluster, parameters=planning.parameters)
    return predict(plan, replace(planning.graph, fuses=plan.fuses(planning.recipe.fusion_rule)), costs)


@cache
def seconds_of(row: Row, software: Software | None = None) -> float:
    return predicted(row, software).seconds_per_step


def transition_seconds(size: str, devices: int, switch_s: float = 0.0) -> float:
    """Of HybridFlow's actor from training to generation (figure 14)."""
    row = numbers()["hybridflow"]["transition"][size]
    tp, pp, into = row["tp"], row["pp"], row["generation_tp"]
    planning = planning_of(hybridflow_row(size, devices))
    software = replace(planning.cluster.software, switch_s=switch_s)
    costs = replace(planning, cluster=replace(planning.cluster, software=software)).costs
    training = Layout.on(range(devices), dp=devices // tp // pp, tp=tp, pp=pp)
    return costs.move("actor", training, Layout.on(range(devices), dp=devices // into, tp=into)).seconds


def switch_seconds() -> float:
    """What the first published transition takes beside its bytes."""
    return numbers()["hybridflow"]["transition"]["7B"]["seconds"][8] - transition_seconds("7B", 8)


def mean_error(rows: Sequence[Row], seconds: Callable[[Row], float] = seconds_of) -> float:
    """Mean of |predicted / published - 1|."""
    return sum(abs(seconds(row) / row.seconds - 1) for row in rows if row.seconds) / len(rows)


def fit() -> tuple[Software, float]:
    """The three constants with the least mean error on ReaL's heuristic points: a grid, made finer round its best."""
    points = list(real_points())
    best = read_cluster(str(ROOT / "recipes/clusters/real.yaml")).software
    error = mean_error(points, lambda point: seconds_of(point, best))
    for step in (0.2, 0.1, 0.05, 0.025):
        centre = best
        for factors in product((1 - step, 1.0, 1 + step), repeat=len(FITTED)):
            values = {name: getattr(centre, name) * by for name, by in zip(FITTED, factors, strict=True)}
            tried = replace(centre, **values)
            tried_error = mean_error(points, lambda point, tried=tried: seconds_of(point, tried))
            best, error = (
                min((error, 0, best), (tried_error, 1, tried), key=lambda candidate: candidate[:2])[2],
                min(error, tried_error),
            )
    return best, error


def tables() -> tuple[Iterator[str], ...]:
    """Lines in Markdown, each computed when it is asked for."""
    return _real_table(), _step_table(), _transition_table(), _algorithm_table(), _placement_table(), _ways_table()


def _real_table() -> Iterator[str]:
    yield "| ReaL's heuristic, seconds of a step | published | predicted | error |"
    yield "|---|---|---|---|"
    for row in real_points():
        yield _line(row.name, row.seconds, seconds_of(row))
    yield f"| mean of the errors' sizes | | | {mean_error(list(real_points())):.1%} |"


def _step_table() -> Iterator[str]:
    layer_s = read_cluster(str(ROOT / "recipes/clusters/real.yaml")).software.layer_s
    yield "| HybridFlow, seconds of a step of PPO | published | predicted | error | with ReaL's floor | error |"
    yield "|---|---|---|---|---|---|"
    rows = list(hybridflow_points())
    software = replace(planning_of(rows[0]).cluster.software, layer_s=layer_s)
    for row in rows:
        yield _line(row.name, row.seconds, seconds_of(row), seconds_of(row, software))
    means = [mean_error(rows, seconds) for seconds in (seconds_of, lambda row: seconds_of(row, software))]
    yield f"| mean of the errors' sizes | | | {means[0]:.1%} | | {means[1]:.1%} |"


def _transition_table() -> Iterator[str]:
    yield (
        "| HybridFlow, seconds of a transition | published | predicted | error "
        "| with `switch_us` fitted to the first row | error |"
    )
    yield "|---|---|---|---|---|---|"
    switch_s = switch_seconds()
    for size, row in numbers()["hybridflow"]["transition"].items():
        for devices, seconds in row["seconds"].items():
            both = [transition_seconds(size, devices, more) for more in (0.0, switch_s)]
            yield _line(f"{size} on {devices}", seconds, *both)


def sizes_of_figures() -> list[tuple[str, int]]:
    return [(size, n) for size, row in numbers()["hybridflow"]["transition"].items() for n in row["seconds"]]


def _algorithm_table() -> Iterator[str]:
    yield f"| HybridFlow's setting, predicted seconds of a step | {' | '.join(ALGORITHMS)} |"
    yield f"|---|{'---|' * len(ALGORITHMS)}"
    for size, devices in sizes_of_figures():
        rows = [hybridflow_row(size, devices, algorithm) for algorithm in ALGORITHMS]
        yield f"| {size} on {devices} | {' | '.join(map(_seconds, rows))} |"


def _placement_table() -> Iterator[str]:
    yield f"| PPO by placement, predicted seconds of a step | {' | '.join(PLACEMENTS)} |"
    yield f"|---|{'---|' * len(PLACEMENTS)}"
    for size, devices in sizes_of_figures():
        if size in ("13B", "34B"):
            cells = [_placed(size, devices, plan) for plan in PLACEMENTS]
            yield f"| {size} on {devices} | {' | '.join(cells)} |"


def _placed(size: str, devices: int, plan: str) -> str:
    meshes = {"split": 2, "standalone": 4}.get(plan, 1)
    row = hybridflow_row(size, devices, plan=plan)
    return "too few devices" if row.cut is not None and devices < meshes * row.cut.copy else _seconds(row)


def _ways_table() -> Iterator[str]:
    yield "| PPO on 16 devices by --decode-tp, predicted seconds of generation and transition | " + (
        " | ".join(map(str, WAYS)) + " | least | least as published |"
    )
    yield f"|---|{'---|' * len(WAYS)}---|---|"
    for size, best in numbers()["hybridflow"]["best_generation_tp"].items():
        found = {ways: _generation_s(hybridflow_row(size, 16, decode_tp=ways)) for ways in WAYS}
        least = min(found, key=lambda ways: found[ways])
        yield f"| {size} | {' | '.join(f'{seconds:.1f}' for seconds in found.values())} | {least} | {best} |"


def _generation_s(row: Row) -> float:
    calls = predicted(row).calls
    return sum(call.seconds for call in calls if call.kind == "MOVE" or call.call == "actor.generate")


def _seconds(row: Row) -> str:
    prediction = predicted(row)
    return _rounded(prediction.seconds_per_step) if prediction.feasible else "does not fit"


def _line(name: str, published: float | None, *predicted: float) -> str:
    assert published is not None, f"{name} has no published number"
    cells = [f" {_rounded(seconds)} | {seconds / published - 1:+.0%} |" for seconds in predicted]
    return f"| {name} | {published:g} |{''.join(cells)}"


def _rounded(seconds: float) -> str:
    digits = 0 if seconds >= 100 else 1 if seconds >= 10 else 2
    return f"{seconds:.{digits}f}"


def all_rows() -> Iterator[Row]:
    """Of all tables."""
    yield from real_points()
    for size, devices in sizes_of_figures():
        yield from (hybridflow_row(size, devices, algorithm) for algorithm in ALGORITHMS)
        yield from (hybridflow_row(size, devices, plan=plan) for plan in PLACEMENTS[1:] if size in ("13B", "34B"))
    for size in numbers()["hybridflow"]["best_generation_tp"]:
        yield from (hybridflow_row(size, 16, decode_tp=ways) for ways in WAYS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the constants again")
    parser.add_argument("--commands", action="store_true", help="print the command of each row")
    options = parser.parse_args()
    if options.fit:
        software, error = fit()
        print(", ".join(f"{name} {getattr(software, name):.3g}" for name in FITTED), f"mean error {error:.1%}")
    elif options.commands:
        print("\n".join(f"plait {shlex.join(command(row))}" for row in all_rows()))
    else:
        print("\n\n".join(map("\n".join, tables())))


if __name__ == "__main__":
    main()
