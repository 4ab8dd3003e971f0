"""Published times of RLHF on clusters beside what the cost model says, every setting a recipe and a cluster file.

    python benchmarks/published.py            tables, as docs/predictions.md has them
    python benchmarks/published.py --fit      the three constants of recipes/clusters/real.yaml again

Three constants are fitted, on the 36 points of ReaL's heuristic plans; nothing is fitted to any other number here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import yaml

from plait.cost.cluster import ClusterSpec, read_cluster
from plait.cost.hardware import Software
from plait.cost.model_costs import ModelCosts
from plait.cost.workload import Lengths, SampleLengths, Workload
from plait.dataflow import CallKind
from plait.layout.mesh import Layout
from plait.recipes.recipe_file import load_recipe
from plait.runtime.prepare import outline

ROOT = Path(__file__).parents[1]
PUBLISHED = Path(__file__).parent / "published.yaml"
FITTED = ("products", "layer_s", "hop_s")


@dataclass(frozen=True)
class Point:
    """One published number: what it is of, in words; seconds; the recipe's keys; devices."""

    name: str
    seconds: float
    devices: int
    keys: tuple[tuple[str, object], ...]


@cache
def numbers() -> Mapping[str, Mapping]:
    return yaml.safe_load(PUBLISHED.read_text())


def real_points() -> Iterator[Point]:
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
                yield Point(f"{case} {size}, {tokens} tokens", seconds, devices, tuple(keys.items()))


def hybridflow_points() -> Iterator[Point]:
    """HybridFlow's throughput of PPO (figure 9), as seconds of a step of 2,097,152 tokens."""
    table = numbers()["hybridflow"]
    for devices, seconds in table["seconds"].items():
        yield Point(f"7B on {devices}", seconds, devices, ())


def costs_of(recipe_name: str, point: Point, cluster: ClusterSpec, prompt_tokens: int) -> ModelCosts:
    run = _outline(recipe_name, point.keys)
    response = run.recipe.sampling.max_response_tokens
    lengths = SampleLengths(Lengths.fixed(prompt_tokens), Lengths.fixed(response))
    shapes = {model.role: run.shapes[model.name] for model in run.models}
    workload = Workload.of(run.recipe, run.flow, lengths)
    return ModelCosts(workload, shapes, run.flow, cluster)


@cache
def _outline(recipe_name: str, keys: tuple[tuple[str, object], ...]):
    return outline(load_recipe(ROOT / f"recipes/published/{recipe_name}.yaml", keys))


def step_seconds(costs: ModelCosts, training: Layout, generation: Layout) -> float:
    """Every call one after the other, as both systems do on one mesh; the actor's weights move where layouts differ."""
    total = costs.move("actor", training, generation).seconds
    for node in costs.flow.nodes:
        match node.kind:
            case CallKind.GENERATE:
                total += costs.call(node.call, "decode", generation).seconds
            case CallKind.SCORE:
                total += costs.call(node.call, "score", training).seconds
            case CallKind.TRAIN:
                total += costs.call(node.call, "train", training).seconds
    return total


def real_seconds(point: Point, software: Software | None = None) -> float:
    """Of the heuristic: every call on all devices, tensor parallel inside a node, a pipeline stage on each node."""
    cluster = read_cluster(str(ROOT / "recipes/clusters/real.yaml"), point.devices)
    cluster = cluster if software is None else replace(cluster, software=software)
    layout = Layout.on(range(point.devices), tp=8, pp=point.devices // 8)
    return step_seconds(costs_of("real", point, cluster, 128), layout, layout)


def hybridflow_layouts(devices: int) -> tuple[Layout, Layout]:
    """Of models of 7B: training in groups of eight, generation in groups of two (figure 14)."""
    return Layout.on(range(devices), dp=devices // 8, tp=8), Layout.on(range(devices), dp=devices // 2, tp=2)


def hybridflow_seconds(point: Point, layer_s: float | None = None) -> float:
    cluster = read_cluster(str(ROOT / "recipes/clusters/hybridflow.yaml"), point.devices)
    if layer_s is not None:
        cluster = replace(cluster, software=replace(cluster.software, layer_s=layer_s))
    training, generation = hybridflow_layouts(point.devices)
    alone = costs_of("hybridflow", point, cluster, 1024)
    trained = {node.role for node in alone.flow.of_kind(CallKind.TRAIN)}
    held = sum(max(alone.held_bytes(role, training, trained=role in trained)) for role in alone.shapes)
    cluster = replace(cluster, software=replace(cluster.software, pool_taken_bytes=held))
    return step_seconds(costs_of("hybridflow", point, cluster, 1024), training, generation)


def transition_seconds(size: str, devices: int) -> float:
    """Of HybridFlow's actor from training to generation (figure 14)."""
    cluster = read_cluster(str(ROOT / "recipes/clusters/hybridflow.yaml"), devices)
    row = numbers()["hybridflow"]["transition"][size]
    tp, pp, into = row["tp"], row["pp"], row["generation_tp"]
    keys = (("model", row["model"]), ("critic.model", row["model"]), ("reward.model", row["model"]))
    costs = costs_of("hybridflow", Point(size, 0.0, devices, keys), cluster, 1024)
    training = Layout.on(range(devices), dp=devices // tp // pp, tp=tp, pp=pp)
    return costs.move("actor", training, Layout.on(range(devices), dp=devices // into, tp=into)).seconds


def mean_error(points: list[Point], seconds: Callable[[Point], float]) -> float:
    """Mean of |predicted / published - 1|."""
    return sum(abs(seconds(point) / point.seconds - 1) for point in points) / len(points)


def fit() -> tuple[Software, float]:
    """The three constants with the least mean error on ReaL's heuristic points: a grid, made finer round its best."""
    points = list(real_points())
    best = read_cluster(str(ROOT / "recipes/clusters/real.yaml")).software
    error = mean_error(points, lambda point: real_seconds(point, best))
    for step in (0.2, 0.1, 0.05, 0.025):
        centre = best
        for factors in product((1 - step, 1.0, 1 + step), repeat=len(FITTED)):
            values = {name: getattr(centre, name) * by for name, by in zip(FITTED, factors, strict=True)}
            tried = replace(centre, **values)
            tried_error = mean_error(points, lambda point, tried=tried: real_seconds(point, tried))
            best, error = (
                min((error, 0, best), (tried_error, 1, tried), key=lambda candidate: candidate[:2])[2],
                min(error, tried_error),
            )
    return best, error


def tables() -> tuple[Iterator[str], ...]:
    """Lines in Markdown, each computed when it is asked for."""
    return _real_table(), _step_table(), _transition_table()


def _real_table() -> Iterator[str]:
    yield "| ReaL's heuristic, seconds of a step | published | predicted | error |"
    yield "|---|---|---|---|"
    for point in real_points():
        yield _row(point.name, point.seconds, real_seconds(point))
    yield f"| mean of the errors' sizes | | | {mean_error(list(real_points()), real_seconds):.1%} |"


def _step_table() -> Iterator[str]:
    layer_s = read_cluster(str(ROOT / "recipes/clusters/real.yaml")).software.layer_s
    yield "| HybridFlow, seconds of a step of PPO | published | predicted | error | with ReaL's floor | error |"
    yield "|---|---|---|---|---|---|"
    for point in hybridflow_points():
        other = hybridflow_seconds(point, layer_s)
        row = _row(point.name, point.seconds, hybridflow_seconds(point))
        yield f"{row} {other:.0f} | {other / point.seconds - 1:+.0%} |"


def _transition_table() -> Iterator[str]:
    yield "| HybridFlow, seconds of a transition | published | predicted | error |"
    yield "|---|---|---|---|"
    for size, row in numbers()["hybridflow"]["transition"].items():
        for devices, seconds in row["seconds"].items():
            yield _row(f"{size} on {devices}", seconds, transition_seconds(size, devices))


def _row(name: str, published: float, predicted: float) -> str:
    digits = 0 if published >= 100 else 1 if published >= 10 else 2
    return f"| {name} | {published:g} | {predicted:.{digits}f} | {predicted / published - 1:+.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the constants again")
    if parser.parse_args().fit:
        software, error = fit()
        print(", ".join(f"{name} {getattr(software, name):.3g}" for name in FITTED), f"mean error {error:.1%}")
    else:
        print("\n\n".join(map("\n".join, tables())))


if __name__ == "__main__":
    main()
