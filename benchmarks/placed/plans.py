"""Plans of two workers that a benchmark of predictions runs, and what is predicted of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.dataflow import CallName
from plait.recipes.recipe import Recipe
from plait.runtime.prediction.lengths import lengths_of
from plait.runtime.prediction.machine import machine_of
from plait.runtime.prediction.planning import Planning
from plait.runtime.prepare import data_lengths, outline

BOTH = "0,1 dp2"
GRPO: Mapping[str, Mapping[str, str]] = {
    "all on both": {"actor.generate": BOTH, "actor.train": BOTH, "ref.logprobs": BOTH},
    "reference on one": {"actor.generate": BOTH, "actor.train": BOTH, "ref.logprobs": "1"},
    "train in stages": {"actor.generate": BOTH, "actor.train": "0,1 pp2", "ref.logprobs": BOTH},
    "train cut": {"actor.generate": BOTH, "actor.train": "0,1 tp2", "ref.logprobs": BOTH},
    "generate cut": {"actor.generate": "0,1 tp2", "actor.train": BOTH, "ref.logprobs": BOTH},
    "generate on one": {"actor.generate": "0", "actor.train": BOTH, "ref.logprobs": "1"},
    "train on one": {"actor.generate": BOTH, "actor.train": "0", "ref.logprobs": "1"},
}
PPO: Mapping[str, Mapping[str, str]] = {
    "all on both": {},
    "critic on one": {"critic.train": "1", "critic.values": "1"},
    "one each": {"actor.generate": "0", "actor.train": "0", "ref.logprobs": "0", "critic.train": "1"}
    | {"critic.values": "1", "reward.score": "1"},
    "actor in stages": {"actor.train": "0,1 pp2"},
    "both cut": {"actor.train": "0,1 tp2", "critic.train": "0,1 tp2"},
    "reference beside": {"ref.logprobs": "1", "reward.score": "1", "actor.generate": "0"},
    "scores on one": {"ref.logprobs": "1", "reward.score": "1", "critic.values": BOTH},
}
PLANS = {"grpo": GRPO, "ppo": PPO}
"""Of each algorithm, by name."""
PPO_CALLS = ("actor.generate", "actor.train", "ref.logprobs", "critic.train", "critic.values", "reward.score")


def write_plans(folder: Path, algorithm: str) -> dict[str, Path]:
    """By name; calls that a plan does not name are on both."""
    folder.mkdir(parents=True, exist_ok=True)
    calls = tuple(GRPO["all on both"]) if algorithm == "grpo" else PPO_CALLS
    files = {}
    for name, places in PLANS[algorithm].items():
        placements = [_placement(call, places.get(call, BOTH)) for call in calls]
        record = {"format": "plait-plan", "version": 1, "name": name, "num_ranks": 2, "placements": placements}
        files[name] = folder / f"{name.replace(' ', '-')}.json"
        files[name].write_text(json.dumps(record))
    return files


def _placement(call: str, where: str) -> dict[str, Any]:
    ranks, *sizes = where.split()
    asked = CallName.of(call).asks
    mode = {"generate": "decode", "train": "train"}.get(asked, "score")
    cut = {size[:2]: int(size[2:]) for size in sizes}
    return {"call": call, "mode": mode, "ranks": [int(rank) for rank in ranks.split(",")], **cut}


def planning_of(
    recipe: Mapping[str, Any], devices: int, *, corrected: bool = True, lengths: Path | None = None
) -> Planning:
    """Of a recipe on this machine.

    Args:
        lengths: folder of a run whose samples' lengths are taken; None: all responses are as long as they may be.
    """
    read = Recipe.model_validate(dict(recipe) | {"plan": "colocated", "devices": devices})
    run = outline(read)
    cluster, source = machine_of(run.recipe, run.shapes[read.model], devices)
    text = None if lengths is None else str(lengths)
    sizes = lengths_of(text, run, lambda: data_lengths(run))
    return Planning(run.recipe, run.flow, run.models, run.shapes, cluster, sizes, source, corrected)
