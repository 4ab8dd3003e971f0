"""Plans for a recipe, found and foretold: what search and simulator need of it, put together. Loads no weights."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

from plait.cost.cluster import ClusterSpec
from plait.cost.hardware import DEVICES, Device, Link, Software
from plait.cost.model_costs import ModelCosts, parameters_of_shape
from plait.cost.move_bound import LARGE, BoundedMoves
from plait.cost.placement import check_layouts, num_devices, parameters_of, planned_models
from plait.cost.workload import Lengths, SampleLengths, Workload
from plait.dataflow import CallKind, Dataflow
from plait.errors import ConfigError, LayoutError
from plait.layout.params import Parameters
from plait.layout.shards import most_tp
from plait.models.files.known_shapes import is_shape
from plait.models.shape import ModelShape
from plait.observe.run_log import read_rows
from plait.planner.plan_search import Budget, Found, search
from plait.planner.plan_space import MOST_STAGES, PlanProblem, PlanSpace, RoleFacts
from plait.recipes.keys import nearest
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel, is_reward
from plait.schedule.completion import complete
from plait.schedule.named_plans import AUTO, NAMES, named_plan
from plait.schedule.plan import Plan
from plait.simulator.places import Place
from plait.simulator.step_graph import Rollouts, StepGraph
from plait.simulator.steps import Prediction, places_of, predict


@dataclass(frozen=True)
class Planning:
    """shapes: by the model's name; calibration: where the numbers of the cluster come from"""

    recipe: Recipe
    flow: Dataflow
    models: Sequence[RoleModel]
    shapes: Mapping[str, ModelShape]
    cluster: ClusterSpec
    lengths: SampleLengths
    calibration: str = "vendors' numbers and default shares of them"

    @cached_property
    def parameters(self) -> Mapping[str, Parameters]:
        """By the role."""
        if any(is_shape(one.name) for one in self.models):
            return {
                one.role: parameters_of_shape(self.shapes[one.name], 1 if one.scalar else None) for one in self.models
            }
        return parameters_of(self.models)

    @cached_property
    def workload(self) -> Workload:
        return Workload.of(self.recipe, self.flow, self.lengths)

    @cached_property
    def costs(self) -> ModelCosts:
        shapes = {one.role: self.shapes[one.name] for one in self.models}
        return ModelCosts(self.workload, shapes, self.flow, self.cluster, parameters=self.parameters)

    @cached_property
    def graph(self) -> StepGraph:
        recipe, adapted = self.recipe, self.recipe.lora.rank > 0
        owners: dict[str, object] = {}
        for one in self.models:
            if adapted:
                owners[one.role] = ("base", one.name, one.has_head)
            elif not one.trained:
                owners[one.role] = ("frozen", one.name, one.scalar)
        longest = self.lengths.prompts.longest
        group = longest + recipe.samples_per_prompt * recipe.sampling.max_response_tokens
        return StepGraph.of(
            self.flow,
            [one.role for one in self.models],
            [one.role for one in self.models if is_reward(one, self.flow)],
            owners=owners,  # type: ignore[arg-type]
            rollouts=Rollouts(recipe.prompts_per_step, group, recipe.micro_batch_tokens),
        )

    @cached_property
    def problem(self) -> PlanProblem:
        tokens = self.recipe.micro_batch_tokens
        halves = (tokens // 2,) if tokens >= 1024 else ()
        large = self.cluster.num_devices > LARGE
        costs = BoundedMoves(self.costs) if large else self.costs
        return PlanProblem(self.graph, costs, {one.role: self._facts(one) for one in self.models}, halves)

    def _facts(self, one: RoleModel) -> RoleFacts:
        shape, adapted = self.shapes[one.name], self.recipe.lora.rank > 0
        return RoleFacts(
            (1.0,) * shape.layers,
            last=shape.head_in_layers(1 if one.scalar else shape.vocabulary),
            max_tp=1 if adapted else most_tp(self.parameters[one.role]),
            max_pp=1 if adapted else MOST_STAGES,
            one_device=self.recipe.sampling.exact,
            may_drop=not adapted,
        )

    @cached_property
    def space(self) -> PlanSpace:
        return PlanSpace(self.problem)

    def completed(self, plan: Plan, label: str) -> Plan:
        """Raises UserError where a run could not follow it."""
        whole = complete(plan, self.flow, planned_models(self.models, self.shapes), label)
        check_layouts(whole, self.parameters, label)
        return whole

    def named(self) -> dict[str, tuple[Place, ...]]:
        """Named plans of the devices, with the least tensor parallelism that has room, that the models allow."""
        found: dict[str, tuple[Place, ...]] = {}
        for name in NAMES:
            with contextlib.suppress(ConfigError, LayoutError):
                found[name] = tuple(places_of(self.given(name), self.space.places))
        return found

    def given(self, name: str) -> Plan:
        """A named plan of the cluster's devices, with the least tensor parallelism that has room, or that of a file.

        Raises:
            UserError: there is none, or a run could not follow it.
        """
        if name == AUTO:
            return auto_plan(self)
        if name not in NAMES:
            plan = plan_file(name)
            return self.completed(plan, f"plan `{name}`")
        devices, tp, found = self.cluster.num_devices, 1, None
        models = planned_models(self.models, self.shapes)
        while tp <= self.cluster.devices_per_node:
            try:
                plan = self.completed(named_plan(name, self.flow, models, devices, tp=tp), f"`plan` {name}")
            except LayoutError:
                if found is None:
                    raise
                break
            found = plan
            if self.predict(plan).feasible:
                break
            tp *= 2
        assert found is not None
        return found

    def predict(self, plan: Plan) -> Prediction:
        """Play a completed plan."""
        return predict(plan, self.graph, self.costs)

    def search(self, budget: Budget, seed: int = 0, warm: Plan | None = None) -> Found:
        """Baselines are the named plans, and those that others would make."""
        given = tuple(self.named().items())
        start = None if warm is None else tuple(places_of(warm, self.space.places))
        return search(self.problem, budget, seed=seed, given=given, warm=start, space=self.space)

    def plan_of(self, places: Sequence[Place], name: str) -> Plan:
        """A completed plan of what a search found; a call that is not on its own stands where its role does."""
        plan = Plan(name, self.cluster.num_devices, tuple(p for place in places for p in place.placements))
        return self.completed(plan, f"plan {name}")


AUTO_EVALUATIONS = 3000
"""Plans that a run tries: a number, not seconds, so that all of its processes find the same."""


def found_for_run(found: Outline, longest_tokens: int) -> Plan:
    """The plan of a run with `plan` auto on several devices: for the longest prompts and responses that there may be,
    on this machine by conservative numbers.

    Raises:
        ConfigError: none fits in memory.
    """
    recipe = found.recipe
    cluster = machine_cluster(recipe, num_devices(recipe))
    lengths = lengths_of(None, recipe, lambda: Lengths.fixed(longest_tokens))
    return auto_plan(Planning(recipe, found.flow, found.models, found.shapes, cluster, lengths, MACHINE))


MACHINE = "conservative numbers of this machine"


class Outline(Protocol):
    """What predictions ask of `runtime.prepare`."""

    @property
    def recipe(self) -> Recipe: ...

    @property
    def flow(self) -> Dataflow: ...

    @property
    def models(self) -> Sequence[RoleModel]: ...

    @property
    def shapes(self) -> Mapping[str, ModelShape]: ...


def auto_plan(planning: Planning) -> Plan:
    """The plan of a run that leaves it to be found, with its predicted timeline.

    Raises:
        ConfigError: none fits in memory; says what is too large.
    """
    found = planning.search(Budget(AUTO_EVALUATIONS), planning.recipe.seed)
    if found.best is None:
        raise ConfigError(f"`plan` auto: {misfit(planning, found)}")
    plan = planning.plan_of(found.best.places, AUTO)
    return replace(plan, predicted=planning.predict(plan).timeline)


def misfit(planning: Planning, found: Found) -> str:
    """Why no plan can be used, which part of the memory is too large, and what would help."""
    devices, limit = planning.cluster.num_devices, planning.cluster.device.memory_bytes
    for number, slot in enumerate(planning.graph.slots):
        if not any(planning.space.forms(number, ranks) for ranks in planning.space.meshes):
            return (
                f"no plan on {devices} devices of {_gib(limit)} has room for {slot.role} ({slot.mode}), however it is "
                f"cut; {_remedies(slot.mode)}"
            )
    if found.nearest is None:
        return f"no plan on {devices} devices was found"
    prediction = planning.predict(planning.plan_of(found.nearest.places, "nearest"))
    worst = max(prediction.memory, key=lambda one: one.peak_bytes)
    what, count = max(worst.terms.items(), key=lambda item: item[1])
    return (
        f"no plan on {devices} devices of {_gib(limit)} was found that fits: what comes nearest needs "
        f"{_gib(worst.peak_bytes)} on rank {worst.rank}, of which {what} takes {_gib(count)}; {_remedies(what)}"
    )


def _remedies(what: str) -> str:
    if "decode" in what:
        return "lower `sampling.max_running` or `sampling.max_response_tokens`, or take more devices"
    if "state" in what or "train" in what:
        return "take more devices, a smaller model, `lora.rank`, or lower `micro_batch_tokens`"
    return "take more devices, a smaller model, or lower `micro_batch_tokens`"


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"


def lengths_of(text: str | None, recipe: Recipe, prompts_there: Callable[[], Lengths]) -> SampleLengths:
    """Read `--lengths`: a number of response tokens, `MEDIAN~SIGMA` of a log-normal distribution, or the folder of a
    run whose samples are taken. `PROMPT:` before one of the first two is the length of prompts. None: responses are as
    long as they may be.

    Args:
        prompts_there: asked where nothing is said of prompts.

    Raises:
        ConfigError: it is none of these, or longer than the recipe allows.
    """
    most = recipe.sampling.max_response_tokens
    if text is None:
        return SampleLengths(prompts_there(), Lengths.fixed(most))
    if Path(os.path.expanduser(text)).is_dir():
        return _recorded(Path(os.path.expanduser(text)), most)
    match = re.fullmatch(r"(?:(\d{1,7}):)?(\d{1,7})(?:~(\d{1,2}(?:\.\d{1,6})?))?", text)
    if match is None or int(match[2]) < 1 or match[1] == "0":
        raise ConfigError(
            f"--lengths: expected a number of response tokens (512), MEDIAN~SIGMA (300~0.8), either after PROMPT: "
            f"(128:512), or the folder of a run, found `{text:.80}`"
        )
    if match[3] is None and int(match[2]) > most:
        raise ConfigError(
            f"--lengths: {match[2]} tokens are more than `sampling.max_response_tokens` of the recipe, {most}"
        )
    prompts = Lengths.fixed(int(match[1])) if match[1] else prompts_there()
    if match[3] is not None:
        return SampleLengths(prompts, Lengths.lognormal(float(match[2]), float(match[3]), most))
    return SampleLengths(prompts, Lengths.fixed(int(match[2])))


def _recorded(folder: Path, most: int) -> SampleLengths:
    files = sorted((folder / "samples").glob("step-*.jsonl"))[-20:]
    rows = [row for file in files for row in read_rows(file)]
    prompts = [len(row["prompt_ids"]) for row in rows if row.get("prompt_ids")]
    responses = [min(most, len(row["token_ids"])) for row in rows if row.get("token_ids")]
    if not prompts or not responses:
        raise ConfigError(f"--lengths: {folder} has no samples of steps (`samples/step-*.jsonl`); give a run's folder")
    return SampleLengths(Lengths.recorded(prompts), Lengths.recorded(responses))


def machine_cluster(recipe: Recipe, devices: int) -> ClusterSpec:
    """The devices of this machine by conservative numbers, nothing measured: those of a run without a profile."""
    if recipe.device == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(0)
        known = next((one for name, one in DEVICES.items() if name.split("-")[0] in properties.name), None)
        flops, bandwidth = (known.flops, known.memory_bandwidth) if known is not None else (100e12, 1e12)
        device = Device(properties.name, flops, properties.total_memory, bandwidth)
        near = Link(50e9, 10e-6)
        return ClusterSpec(1, devices, device, near, near, Link(20e9, 10e-6), name="this machine")
    cores = os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // devices
    device = Device("cpu", 20e9 * cores / devices, memory, 8e9 / devices, 1e-6, 20e9 * cores / devices)
    link = Link(0.5e9, 200e-6)
    software = Software(products=0.5, memory=0.8, links=0.8, layer_s=300e-6, hop_s=400e-6)
    return ClusterSpec(1, devices, device, link, link, Link(4e9, 1e-5), name="this machine", software=software)


def tokens_of(planning: Planning) -> float:
    """Prompt and response tokens of a step."""
    workload = planning.workload
    rows = [node for node in planning.flow.nodes if node.kind in (CallKind.GENERATE, CallKind.READ)]
    samples = [workload.samples_of(planning.flow, node) for node in rows]
    lengths = workload.lengths
    return math.fsum(one.prompts * lengths.prompts.mean + one.count * lengths.responses.mean for one in samples)


def plan_file(name: str) -> Plan:
    """Raises ConfigError where there is no such file."""
    path = Path(os.path.expanduser(name))
    if not path.is_file():
        raise ConfigError(f"`plan`: expected {', '.join(NAMES)} or a plan file, found `{name}`{nearest(name, NAMES)}")
    return Plan.load(path)


def ranks_of(name: str) -> int:
    """Ranks of a plan file; 0 for a named plan."""
    return 0 if name in (*NAMES, AUTO) else plan_file(name).num_ranks
