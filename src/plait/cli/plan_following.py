"""How a run follows a plan that was found: the command of `plait train`, and what has to be done beside it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.launch.machine import visible_devices
from plait.models.files.known_shapes import is_shape
from plait.runtime.prediction.planning import Planning
from plait.schedule.named_plans import AUTO, BASELINES, NAMES
from plait.schedule.plan import Plan


@dataclass(frozen=True)
class Following:
    """beside: what has to be done besides, in words (may be empty); command: quoted for a shell"""

    beside: str
    command: str


def following(
    planning: Planning, plan: Plan, recipe: Path, keys: Sequence[str], out: Path | None, stage: str | None
) -> Following:
    """
    Args:
        keys: of the recipe, as they were given.
        out: the file that has the plan; None: it is not kept.
        stage: of the recipe, that the plan is for; None: it has none.
    """
    of_stage = "--" if stage is None else f"--{stage}."
    words = ["plait", "train", str(recipe), *keys, f"{of_stage}plan", "FILE" if out is None else _as_file(out)]
    if planning.recipe.devices not in (0, plan.num_ranks):
        words += [f"{of_stage}devices", str(plan.num_ranks)]
    beside = ["keep the plan with `--out FILE`"] if out is None else []
    if plan.nodes > 1:
        words += _on_nodes(planning.recipe.launcher, plan.nodes)
        if planning.recipe.launcher != "ray":
            beside.append("on each node, I from 0 on")
    if lacking := _lacking(planning.recipe.device, plan):
        beside.append(lacking)
    if shapes := _without_weights(planning):
        beside.append(f"with weights in place of the shape{'s' * (len(shapes) > 1)} {', '.join(shapes)}")
    return Following("; ".join(beside), shlex.join(words))


def _lacking(device: str, plan: Plan) -> str:
    """What the command needs that this machine has not, its dry run as well; empty: nothing."""
    gpus, here = plan.num_ranks // plan.nodes, visible_devices()
    if device != "cuda" or here >= gpus:
        return ""
    of_each = " on each node" if plan.nodes > 1 else ""
    needed = "is a GPU" if gpus == 1 else f"are {gpus} GPUs"
    return f"where there {needed}{of_each}: this machine has {here or 'none'}"


def _on_nodes(launcher: str, nodes: int) -> list[str]:
    """The options of a run on several nodes, and a launcher that takes them."""
    if launcher == "ray":
        return ["--nodes", str(nodes)]
    usual = ["--launcher", "auto"] if launcher == "local" else []
    return [*usual, "--nodes", str(nodes), "--node", "I", "--leader", "HOST:PORT"]


def _as_file(path: Path) -> str:
    """A path that is taken for no name of a plan, option or home."""
    name = str(path)
    return f"./{name}" if name in (AUTO, *NAMES, *BASELINES) or name.startswith(("-", "~")) else name


def _without_weights(planning: Planning) -> list[str]:
    """Models that are known by their shapes alone."""
    names = [model.name for model in planning.models]
    if (draft := planning.recipe.sampling.draft_model) is not None:
        names.append(draft)
    return [name for name in dict.fromkeys(names) if is_shape(name)]
