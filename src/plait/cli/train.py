"""`plait train RECIPE [--key value …]`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from plait.cli.help import Option, usage_of
from plait.cli.opening import opening, recipe_facts, title_of
from plait.errors import ConfigError
from plait.observe.screen import say
from plait.paths import at_home

if TYPE_CHECKING:
    from plait.dataflow import Dataflow
    from plait.launch.nodes.place import Attached, NodeOptions
    from plait.recipes.recipe import Recipe
    from plait.recipes.role_models import ToCome

TRUST = {"--trust-run-code": "run the flow and rewards that a recipe in a run's own folder names"}
FLAGS = {
    "--dry-run": "resolve everything, print the batch, the placement and a memory estimate; load no weights",
    "--resume": "continue the run in run_dir from its last checkpoint",
    **TRUST,
}


NODE_OPTIONS = {
    "--nodes": "commands that make up the run, one on each node, all with the same recipe and keys; or, with "
    "`launcher` ray, the nodes that Ray is to give",
    "--node": "which of them this is, from 0 on; 0 leads",
    "--leader": "HOST:PORT where node 0 listens until all nodes have joined",
    "--address": "host name or address of this node, on which its ranks talk to those of others; by default the one by "
    "which it reaches the leader",
}
"""Options of a run on several nodes (docs/cluster.md): they differ from node to node, so they are no recipe keys."""


def train(*tokens: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> int:
    """Train a model by a recipe."""
    tokens, place = node_options(tokens)
    path, overrides, flags = read_recipe("train", tokens, {**FLAGS, **NODE_OPTIONS})

    from plait.recipes.plan_files import check_plan
    from plait.recipes.stages import stage_names
    from plait.recipes.trust import user_recipe

    trust = "--trust-run-code" in flags
    if path is not None and stage_names(path):
        from plait.cli.train_stages import train_stages

        return train_stages(path, overrides, place, flags)
    loaded = user_recipe(path, overrides, trust_run_code=trust, trains=True)
    flow = None if "--resume" in flags else check_flow(loaded)
    attached = attached_by(loaded, place)
    if attached is not None and not attached.leads:
        from plait.runtime.folder.node_files import ALONE

        return 0 if "--dry-run" in flags else serve(attached, loaded.run_dir, {ALONE: loaded})
    told = attached if "--dry-run" not in flags else None
    with refusals_told(told, loaded.run_dir):
        check_plan(loaded.plan)
        if "--resume" not in flags:
            check_inputs(flow, loaded)  # a node that serves reads none of them
        if told is not None:
            from plait.recipes.device_checks import check_divided

            check_divided(loaded, told.num_nodes, told.tasks)
        if "--dry-run" not in flags:
            check_place(loaded, resume="--resume" in flags)
    if "--dry-run" in flags:
        say("checking everything but the weights …", file=sys.stderr)
        from plait.cli.dry_run import dry_run

        nodes = (place.nodes or 1) if attached is None else attached.num_nodes
        return dry_run(loaded, resume="--resume" in flags, nodes=nodes)
    return _run(loaded, path, attached, place.nodes or 0, resume="--resume" in flags)


def node_options(tokens: Sequence[str]) -> tuple[list[str], NodeOptions]:
    """The tokens that are none of `NODE_OPTIONS`, and what these say.

    Raises:
        ConfigError: one has no value, or a number is none.
    """
    from plait.launch.nodes.place import NodeOptions

    values: dict[str, str] = {}
    rest, queue = [], list(tokens)
    while queue:
        token = queue.pop(0)
        name, equals, value = token.partition("=")
        if name not in NODE_OPTIONS:
            rest.append(token)
            continue
        if not equals and (not queue or queue[0].startswith("--")):
            raise ConfigError(f"`{name}` needs a value: {NODE_OPTIONS[name]}")
        values[name] = value if equals else queue.pop(0)
    numbers: dict[str, int] = {}
    for name in ("--nodes", "--node"):
        if name in values:
            if re.fullmatch(r"\d{1,6}", values[name]) is None:
                raise ConfigError(f"`{name}`: expected a whole number, found `{values[name]}`")
            numbers[name] = int(values[name])
    return rest, NodeOptions(
        numbers.get("--nodes"), numbers.get("--node"), values.get("--leader"), values.get("--address")
    )


def attached_by(recipe: Recipe, place: NodeOptions) -> Attached | None:
    """The part of this command in a run on several nodes; None where it runs on this machine alone.

    Raises:
        ConfigError: options or variables contradict each other or the recipe.
    """
    from plait.launch.nodes.place import attached

    return attached(recipe.launcher, place, os.environ)


def serve(attached: Attached, folder: Path, recipes: Mapping[str, Recipe]) -> int:
    """Serve the run that node 0 leads; what is to be trained it says.

    Args:
        folder: of the run; of several stages that of them all.
        recipes: as of `node_files.given`.
    """
    from plait.launch.nodes.joining import join
    from plait.runtime.folder.node_files import given

    return join(attached, folder, lambda text: say(text, file=sys.stderr), **given(recipes)._asdict())


def refusals_told(attached: Attached | None, folder: Path) -> AbstractContextManager[None]:
    """See `launch.nodes.refusing.refusals_told`, which is imported where there are other commands."""
    if attached is None:
        return nullcontext()
    from plait.launch.nodes.refusing import refusals_told

    return refusals_told(attached, folder, lambda text: say(text, file=sys.stderr))


def _run(recipe: Recipe, path: Path | None, attached: Attached | None, num_nodes: int, *, resume: bool) -> int:
    with opening(title_of("train", path), recipe_facts(recipe, resume=resume)):
        from plait.cli.report import ended_with, print_outcome
        from plait.runtime.api import run
        from plait.runtime.processes.nodes import gathered_nodes

        gathering = partial(gathered_nodes, attached=attached, num_nodes=num_nodes)
        outcome = run(recipe, resume=resume, recipe_file=path, gathering=gathering)
    print_outcome(recipe, outcome)
    return ended_with(outcome)


def check_flow(
    recipe: Recipe, to_come: Mapping[str, ToCome] = MappingProxyType({}), *, trains: bool = True
) -> Dataflow | None:
    """See now, and not when torch is there, that a built-in algorithm can be used as the recipe says. A file of the
    user's is imported once, when the run begins; a run that is resumed has begun with what it is.

    Args:
        to_come, trains: as of `prepare`.

    Returns:
        The flow, if it is built in.

    Raises:
        UserError: it cannot; names the key and the remedy.
    """
    from plait.recipes.flow_checks import checked_flow

    return checked_flow(recipe, to_come=to_come, trains=trains) if recipe.algorithm.isidentifier() else None


def check_inputs(flow: Dataflow | None, recipe: Recipe) -> None:
    """See now, and not when torch is there, that the files of a recipe are there, and that small ones of data hold the
    rows that a built-in flow reads.

    Raises:
        UserError: as of `check_files` and `check_rows`.
    """
    from plait.runtime.inputs.opened_rows import check_rows
    from plait.runtime.inputs.reading import check_files

    check_files(recipe)
    if flow is not None:
        check_rows(flow, recipe)


def check_place(recipe: Recipe, *, resume: bool) -> None:
    """See now, and not when torch is there, that the folder of the run can be taken, and what it needs is installed.

    Raises:
        ConfigError, ModelError: it cannot, or is not; says what can be done.
    """
    from plait.runtime.folder.claim import check_packages
    from plait.runtime.folder.directory import RunDirectory

    check_packages(recipe)
    if resume:
        RunDirectory.resume(recipe.run_dir).close()
    else:
        RunDirectory.claim(recipe.run_dir, overwrite=recipe.overwrite).close()


def read_recipe(
    command: str, tokens: Sequence[str], flags: Sequence[str] | dict[str, str]
) -> tuple[Path | None, list[tuple[str, Any]], set[str]]:
    """The recipe's path, if the first token is one; the `--key value` pairs after it; and the flags that were given.

    Raises:
        ConfigError: there is neither a recipe nor a key, or a token is not understood.
    """
    from plait.recipes.keys import is_setting, parse_overrides
    from plait.recipes.stages import stage_names, unknown_in

    given = {token for token in tokens if token in flags}
    rest = [token for token in tokens if token not in flags]
    path = at_home(Path(rest.pop(0)), "`RECIPE`") if rest and not is_setting(rest[0]) else None
    if path is None and not rest:
        raise ConfigError(f"give a recipe: `{usage_of(command)}`; `plait {command} --help` lists the keys")
    offered = (*flags, "--help", "--help-all")
    return path, parse_overrides(rest, offered, stage_names(path), partial(unknown_in, path)), given


def options() -> Iterator[Option]:
    """Flags, the keys of a recipe, and those of the built-in algorithms."""
    from plait.recipes.algorithm import BUILT_IN, load_flow, options_class
    from plait.recipes.keys import describe_keys

    for flag, text in FLAGS.items():
        yield Option(flag, "", text)
    for name, text in NODE_OPTIONS.items():
        yield Option(name, "", text)
    keys = {key: (default, text) for key, default, text in describe_keys() if key != "options"}
    for key, default, text in describe_keys(options_class(load_flow("grpo"))):
        keys[f"options.{key}"] = default, text
    kinds = {name: getattr(options_class(load_flow(name)), "model_fields", {}) for name in BUILT_IN}
    for algorithm in BUILT_IN:  # of the others what the default one has not, or with other values; by name what differs
        for key, default, text in describe_keys(options_class(load_flow(algorithm))):
            first, said = keys.get(f"options.{key}", (default, ""))
            common = kinds["grpo"].get(key)
            is_own = common is None or common.annotation != kinds[algorithm][key].annotation
            if is_own and text not in said:
                own = f"{algorithm}: {text}" if default == first else f"{algorithm} ({default}): {text}"
                keys[f"options.{key}"] = first, f"{said}; {own}" if said else own
    for key, (default, text) in keys.items():
        yield Option(f"--{key}", "" if default in ("None", "none") else default, text)
