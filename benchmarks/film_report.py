"""What the film reviews' pipeline (recipes/film.yaml) came to: the figures of docs/film.md, from a finished run.

    python benchmarks/film_report.py runs/film [--threads 2]

Reward-model accuracy on held-out pairs, by length; reward and judge before and after, with paired intervals; KL to the
reference on the held-out prompts; the curve of reward against judge over the run; memory and time of each stage.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from plait.data.packed import pack
from plait.models.language_loading import load_model
from plait.models.scalar_loading import load_scalar
from plait.models.scalar_model import ScalarModel
from plait.observe.run_log import read_rows
from plait.recipes.recipe_file import load_recipe
from plait.rewards.statistics import Estimate, paired_difference, wilson
from plait.runtime.prepare import prepare
from plait.runtime.process import set_up

SAMPLES_PER_FORWARD = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="run_dir of the recipe")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    set_up(options.threads)
    console = Console()
    console.print(stage_table(options.run))
    console.print(accuracy_table(options.run / "reward_model"))
    console.print(gain_table(options.run / "policy"))
    kl = policy_kl(options.run / "policy")
    console.print(f"KL to the reference on the held-out prompts: {interval(kl)} nats per response")
    console.print(curve_table(options.run / "policy"))


def stage_table(run: Path) -> Table:
    table = Table("stage", "steps", "minutes in steps", "seconds per step", "peak resident", title="stages")
    for folder in sorted((path for path in run.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime):
        rows = read_rows(folder / "metrics.jsonl")
        seconds = [row["timing_s/step"] for row in rows]
        peak = max(row["perf/resident_bytes"] for row in rows)
        cells = (f"{len(rows)}", f"{sum(seconds) / 60:.1f}", f"{np.median(seconds):.2f}", f"{peak / 1e9:.1f} GB")
        table.add_row(folder.name, *cells)
    return table


def accuracy_table(folder: Path) -> Table:
    """Pairs that the final reward model orders rightly, over the held-out pairs of its stage."""
    prepared = prepare(load_recipe(folder / "recipe.yaml"))
    pairs = prepared.held_out[0].given["pairs"]
    model = load_scalar(str(folder / "final"), dtype=prepared.recipe.dtype, device="cpu", seed=0)
    scores = list(scores_of(model, [(pair.sample.prompt.token_ids, pair.sample.token_ids) for pair in pairs]))
    margins = [chosen - rejected for chosen, rejected in zip(scores[::2], scores[1::2], strict=True)]
    tokens = [len(a.sample.token_ids) + len(b.sample.token_ids) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
    longer = [len(a.sample.token_ids) > len(b.sample.token_ids) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
    table = Table("held-out pairs", "number", "accuracy [95 % interval]", title="reward model")

    def add(name: str, chosen: list[int]) -> None:
        right = sum(margins[i] > 0 for i in chosen)
        table.add_row(name, str(len(chosen)), str(wilson(right, len(chosen))) if chosen else "-")

    everything = list(range(len(margins)))
    add("all", everything)
    bounds = np.quantile(tokens, [0.25, 0.5, 0.75]).tolist()
    edges = [0.0, *bounds, math.inf]
    for low, high in itertools.pairwise(edges):
        name = f"up to {high:.0f} tokens, both together" if high < math.inf else f"above {low:.0f} tokens"
        add(name, [i for i in everything if low < tokens[i] <= high])
    add("the favourable one is longer", [i for i in everything if longer[i]])
    add("the favourable one is not longer", [i for i in everything if not longer[i]])
    return table


def gain_table(folder: Path) -> Table:
    before, after = (read_rows(path) for path in evaluation_files(folder))
    table = Table("held-out prompts", "before", "after", "gain, paired [95 % interval]", title="policy")
    names = ["reward", *before[0]["judged"]]
    for name in names:
        old, new = (
            [float(r["reward"] if name == "reward" else r["judged"][name]) for r in rows] for rows in (before, after)
        )
        gain = paired_difference(old, new)
        label = "reward model" if name == "reward" else f"judge: {name}"
        table.add_row(f"{label} ({len(old)})", f"{np.nanmean(old):.3f}", f"{np.nanmean(new):.3f}", interval(gain))
    return table


def curve_table(folder: Path) -> Table:
    """Over-optimisation would show here: the reward goes on rising and the judge no longer."""
    rows = read_rows(folder / "evaluations.jsonl")
    judges = [name for name in rows[0] if name.startswith("eval/") and name not in _NOT_JUDGES]
    table = Table("step", "reward model", *(name.removeprefix("eval/") for name in judges), title="proxy and judge")
    for row in rows:
        table.add_row(str(row["step"]), *(f"{row[name]:.3f}" for name in ("eval/reward", *judges)))
    return table


_NOT_JUDGES = {"eval/reward", "eval/dropped", "eval/response_length"}


def policy_kl(folder: Path) -> Estimate | None:
    """KL(policy ‖ reference) from the last evaluation's samples, drawn at temperature 1: mean Σ log π − log π_ref."""
    recipe = load_recipe(folder / "recipe.yaml")
    assert recipe.evaluation.temperature == recipe.sampling.temperature, "greedy answers give no KL"
    rows = read_rows(evaluation_files(folder)[1])
    prompts = {prompt.uid: prompt for one in prepare(recipe).held_out for prompt in one.prompts}
    reference = load_model(recipe.model, dtype=recipe.dtype)
    ratios = []
    for start in range(0, len(rows), SAMPLES_PER_FORWARD):
        part = rows[start : start + SAMPLES_PER_FORWARD]
        batch = pack([(prompts[int(r["uid"].split(".")[0])].token_ids, [r["token_ids"]]) for r in part])
        with torch.no_grad():
            logprobs_R = reference.logprobs(batch, recipe.sampling.temperature)[0]
        for row, own in zip(part, logprobs_R.split([len(r["token_ids"]) for r in part]), strict=True):
            ratios.append(sum(row["sampling_logprobs"]) - float(own.double().sum()))
    return paired_difference([0.0] * len(ratios), ratios)


def evaluation_files(folder: Path) -> tuple[Path, Path]:
    """Items of the first evaluation and of the last."""
    files = sorted((folder / "samples").glob("eval-*.jsonl"))
    return files[0], files[-1]


def scores_of(model: ScalarModel, pairs: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Iterator[float]:
    for start in range(0, len(pairs), SAMPLES_PER_FORWARD):
        batch = pack([(prompt, [response]) for prompt, response in pairs[start : start + SAMPLES_PER_FORWARD]])
        with torch.no_grad():
            yield from model.values_and_scores(batch)[1].tolist()


def interval(estimate: Estimate | None) -> str:
    return "-" if estimate is None else f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


if __name__ == "__main__":
    main()
