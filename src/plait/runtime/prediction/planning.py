"""Plans for a recipe, found and predicted: what search and simulator need of it, put together. Loads no weights."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from plait.cost.calibration import VENDORS, Calibration, uncorrected
from plait.cost.cluster import ClusterSpec
from plait.cost.drafts import NO_DRAFTS, Drafts
from plait.cost.engine_memory import engine_bytes
from plait.cost.fusion_times import with_fusion_times
from plait.cost.lengths import SampleLengths
from plait.cost.model_costs import ModelCosts
from plait.cost.model_parameters import parameters_of
from plait.cost.move_bound import LARGE, BoundedMoves
from plait.cost.offload_policy import OffloadPolicy
from plait.cost.placed import Facts, Placed
from plait.cost.placement import check_layouts, check_plan, on_cluster, on_nodes, planned_models, with_room
from plait.cost.shape_parameters import parameters_of_shape
from plait.cost.spent_memory import is_open, with_all_kept, with_idle_away, with_memory_spent, with_pools_kept
from plait.cost.workload import Workload
from plait.dataflow import CallKind, Dataflow
from plait.errors import ConfigError, LayoutError
from plait.layout.params import Parameters
from plait.models.files.known_shapes import is_shape
from plait.models.shape import ModelShape
from plait.planner.plan_baselines import MAKERS
from plait.planner.plan_problem import PlanProblem
from plait.planner.plan_space import PlanSpace
from plait.policy.fusion_gate import LEAST_SHARE
from plait.recipes.engine_checks import abilities, check_engine_plan, of_engines
from plait.recipes.plan_files import EVERY_NAME, plan_file
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import REWARD_ROLES, RoleModel, function_names, unchanging
from plait.runtime.prediction.draft_forecast import NOTHING_STATED, Acceptance, draft_forecast
from plait.runtime.prediction.predictable import Coming
from plait.runtime.prediction.remedies import remedies
from plait.runtime.prediction.search_facts import facts_of_roles, joint_pairs
from plait.schedule.completion import complete
from plait.schedule.kept_pools import pools_stay
from plait.schedule.named_plans import AUTO, NAMES, Cut, PlannedModel, named_plan
from plait.schedule.plan import FUSION, POOL, SHARES, Plan, PolicyChoice
from plait.schedule.stage_fusion import nothing_to_hide
from plait.simulator.places import Place
from plait.simulator.step_graph import Rollouts, StepGraph
from plait.simulator.steps import Prediction, predict, step_seconds


@dataclass(frozen=True)
class Planning:
    """All that plans of one recipe are searched, completed and predicted by.

    calibration: where the seconds of predictions come from; corrected: by what runs have measured, too
    drafts:      what draft tokens came to in the run whose lengths are taken; None: it made none
    acceptance:  how often draft tokens are accepted, as a user states it
    pools_stay:  whether pools and graphs of GPUs stay from one rollout to the next
    to_come:     models that earlier stages of the recipe make
    """

    recipe: Recipe
    flow: Dataflow
    models: Sequence[RoleModel]
    shapes: Mapping[str, ModelShape]
    cluster: ClusterSpec
    lengths: SampleLengths
    calibration: Calibration = VENDORS
    corrected: bool = True
    drafts: Drafts | None = None
    acceptance: Acceptance = NOTHING_STATED
    pools_stay: bool = False
    to_come: Coming = field(default_factory=dict)
    _followed: dict[object, Planning] = field(default_factory=dict, init=False, compare=False)
    """Kept, as each has costs of its own."""
    _spent: dict[object, Recipe] = field(default_factory=dict, init=False, compare=False)
    """Kept: whether pools stay is a part of what is found, not of what it is found for."""

    @cached_property
    def parameters(self) -> Mapping[str, Parameters]:
        """By the role."""
        keeps_states = any(self.shapes[model.name].recurrent for model in self.models)  # of these no shape says enough
        if any(is_shape(model.name) for model in self.models) and not keeps_states:
            heads = [(model.role, self.shapes[model.name], 1 if model.scalar else None) for model in self.models]
            return {role: parameters_of_shape(shape, rows) for role, shape, rows in heads}
        return parameters_of(self.models)

    @cached_property
    def _function_s(self) -> dict[str, float]:
        """Role that functions alone score for → their seconds for a sample, where runs have measured them."""
        profile = self.calibration.profile
        names = {role: function_names(self.recipe, role) for role in REWARD_ROLES}
        models = {model.role for model in self.models}
        measured = {} if profile is None else {role: profile.function_s(key) for role, key in names.items() if key}
        return {role: seconds for role, seconds in measured.items() if seconds is not None and role not in models}

    @cached_property
    def workload(self) -> Workload:
        workload, name = Workload.of(self.recipe, self.flow, self.lengths), self.recipe.sampling.draft_model
        profile, drawn = self.calibration.profile, {node.role for node in self.flow.of_kind(CallKind.GENERATE)}
        generating = [model for model in self.models if model.role in drawn]
        forecast = draft_forecast(of_engines(self.recipe), profile, self.drafts, self.acceptance)
        return replace(
            workload,
            function_s=max(self._function_s.values(), default=0.0),
            drafts=NO_DRAFTS if forecast is None else forecast.drafts,
            draft_model=None if name is None else self.shapes[name],
            engine_bytes=engine_bytes(self.recipe, self.shapes, generating),
            elsewhere=abilities(self.recipe).computes_elsewhere,
            pools_stay=self.pools_stay,
        )

    @cached_property
    def costs(self) -> ModelCosts:
        shapes = {model.role: self.shapes[model.name] for model in self.models}
        profile = self.calibration.profile
        if profile is not None and not self.corrected:
            profile = uncorrected(profile)
        return ModelCosts(self.workload, shapes, self.flow, self.cluster, parameters=self.parameters, profile=profile)

    @cached_property
    def graph(self) -> StepGraph:
        recipe, adapted = self.recipe, self.recipe.lora.rank > 0
        owners: dict[str, object] = {}
        for model in self.models:
            if adapted:
                owners[model.role] = ("base", model.name, model.has_head)
            elif not model.changes:
                owners[model.role] = ("frozen", model.name, model.scalar)
        root = self.lengths.prompts.root
        samples = self.workload.samples_of(self.flow, self.flow.main_rows).per_prompt
        group = self.lengths.prompts.mean - root + samples * self.lengths.responses.mean
        graph = StepGraph.of(
            self.flow,
            [model.role for model in self.models],
            [model.role for model in self.models if model.is_reward],
            functions=[role for role in self.flow.roles if role in self._function_s],
            owners=owners,  # type: ignore[arg-type]
            rollouts=Rollouts(recipe.prompts_per_step, round(group), recipe.micro_batch_tokens, root),
            nested=recipe.dtype == "bfloat16" and not adapted,
            fuses=recipe.fusion_rule.may_fuse,
            ahead=recipe.max_staleness > 0,
            frozen=unchanging(self.models) if recipe.update_rule.waits else (),
            pools_stay=self.pools_stay,
            rebalances=recipe.rebalance == "auto",
            follows={model.role: model.follows for model in self.models if model.follows},
        )
        return replace(graph, follow_steps=max(1, recipe.reference.sync_every))

    @cached_property
    def space(self) -> PlanSpace:
        tokens = self.recipe.micro_batch_tokens
        halves = (tokens // 2, tokens // 4)[: 1 + self.recipe.finds_lengths] if tokens >= 1024 else ()
        costs: Any = BoundedMoves(self.costs) if self.cluster.num_devices > LARGE else self.costs
        facts = facts_of_roles(self.recipe, self.models, self.shapes, self.parameters)
        pairs = joint_pairs(self.recipe, self.flow, self.models)
        stage_works = self.costs.stage_works
        return PlanSpace(PlanProblem(self.graph, costs, facts, halves, pairs=pairs, stage_works=stage_works))

    @cached_property
    def _planned(self) -> dict[str, PlannedModel]:
        return planned_models(self.recipe, self.models, self.shapes)

    def _completed(self, plan: Plan, label: str) -> Plan:
        """Raises UserError where a run could not follow it."""
        whole = complete(plan, self.flow, self._planned, label)
        check_plan(self.recipe, whole, self.models, self.shapes, label)
        check_layouts(whole, self.parameters, label)
        check_engine_plan(self.recipe, whole.name, whole.num_ranks)
        return whole

    @cached_property
    def named(self) -> Mapping[str, Plan]:
        """By name, the named plans of the devices that the flow, the devices and the models allow."""
        plans: dict[str, Plan] = {}
        for name in NAMES:
            with contextlib.suppress(ConfigError, LayoutError):
                plans[name] = self._by_name(name)
        return plans

    def _by_name(self, name: str) -> Plan:
        """By the rules of a run: cut where parameters would leave no room, and on GPUs that have none for all of it
        what idles is in host memory."""
        recipe, models, memory = self.recipe, self._planned, self.cluster.device.memory_bytes
        label = f"`plan` {name}"
        plan = named_plan(name, self.flow, models, self.cluster.num_devices)
        plan = self._completed(on_nodes(plan, self.cluster.nodes, label), label)
        if plan.num_ranks > 1:
            placed = Placed(recipe, self.models, self.shapes, self.parameters, plan)
            plan = self._completed(with_room(self.flow, models, placed, memory), label)
        if recipe.device == "cuda":
            run = self.followed(plan)
            plan = run._with_pools_kept(with_idle_away(run._memory_facts(plan), memory))
        return plan

    def _memory_facts(self, plan: Plan) -> Facts:
        return Facts(self.recipe, self.models, self.shapes, self.parameters, plan, self.flow, self.lengths)

    def _with_pools_kept(self, plan: Plan) -> Plan:
        """As a run would have it; where a cluster's pools take what nothing else does, none stays."""
        if self.cluster.software.pool_share:
            return plan
        return with_pools_kept(self._memory_facts(plan), self.cluster.device.memory_bytes)

    def given(self, name: str, cut: Cut | None = None) -> Plan:
        """The plan that `name` means on the cluster's devices, as a run would follow it: a named plan (`auto` is the
        one of a single device), a plan as other systems make it (`plan_baselines`), or the plan in a file.

        Args:
            cut: how models are sharded, for a plan of `NAMES`; whether it fits in memory is then not asked.

        Raises:
            UserError: no plan has this name, or a run could not follow it.
        """
        if cut is not None:
            plan = named_plan(name, self.flow, self._planned, self.cluster.num_devices, cut=cut)
            return self._completed(plan, f"`plan` {name}")
        if name in MAKERS:
            places = MAKERS[name](self.space)
            if places is None:
                helps = remedies("weights", devices := self.cluster.num_devices)
                fault = f"sharded as it says, a model does not fit on {devices} devices; {helps}, or another plan"
                raise ConfigError(f"plan `{name}`: {fault}")
            return self.plan_of(places, name)
        name = NAMES[0] if name == AUTO else name
        if name in NAMES:
            return self.named[name] if name in self.named else self._by_name(name)
        label = f"plan `{name}`"
        return self._completed(on_cluster(plan_file(name, EVERY_NAME), self.cluster, label), label)

    def followable(self, plan: Plan) -> Plan:
        """A plan of a recipe that has other keys, completed for this one. Raises UserError where no run of this one
        could follow it."""
        return self._completed(replace(plan, policies=()), f"plan `{plan.name}`")

    def predict(self, plan: Plan) -> Prediction:
        """Play a completed plan as a run would follow it; with scoring in parts, where it lets a run have that, and the
        recipe or what is predicted says so."""
        if (run := self.followed(plan)) is not self:
            return run.predict(plan)
        rule = self.recipe.fusion_rule
        fused = plan.fuses(rule) and (rule.is_stated or self._gains_by_fusion(plan))
        return predict(plan, replace(self.graph, fuses=fused, gathers=plan.fuses(rule)), self.costs)

    def followed(self, plan: Plan) -> Planning:
        """The planning of a run that follows a completed plan: its recipe states what memory of GPUs is spent on; where
        pools stay nothing is captured, as a step is none of the first."""
        recipe = self._spending(plan) if is_open(self.recipe) else self.recipe
        stays = self.pools_stay or (recipe.device == "cuda" and pools_stay(plan))
        if recipe is self.recipe and stays == self.pools_stay:
            return self
        key = recipe.micro_batch_tokens, recipe.checkpoint_activations, stays
        return self._followed.setdefault(key, replace(self, recipe=recipe, pools_stay=stays))

    def _spending(self, plan: Plan) -> Recipe:
        """The recipe with what a run of a completed plan finds. From a plan by name nothing has left by then."""
        by_name = plan.name in NAMES
        key = plan.placements, tuple(policy for policy in plan.policies if policy.name != POOL), by_name
        if key not in self._spent:
            facts = self._memory_facts(with_all_kept(plan) if by_name else plan)
            room_bytes, is_alike = self.cluster.device.memory_bytes, not self.cluster.kinds
            self._spent[key] = with_memory_spent(facts, room_bytes, may_leave=by_name, is_alike=is_alike)
        return self._spent[key]

    def plan_of(self, places: Sequence[Place], name: str) -> Plan:
        """A completed plan of what a search found; a call that is not on its own stands where its role does. Where
        scoring could begin on ranks that generate, the plan lets it, and the run decides in each step; samples are
        divided by predicted time. Pools of GPUs stay where there is room for them."""
        placed = self.space.plain(places)
        plan = Plan(name, self.cluster.num_devices, tuple(p for place in placed for p in place.placements))
        completed = self._completed(replace(plan, nodes=self.cluster.nodes), f"plan {name}")
        names = [FUSION] if self._may_fuse(completed) else []
        if any(p.dp > 1 and p.mode in ("train", "score") for p in completed.placements):
            names.append(SHARES)
        completed = self._completed(replace(completed, policies=tuple(map(PolicyChoice, names))), f"plan {name}")
        run = self.followed(completed)
        completed = run._with_pools_kept(completed)
        return with_fusion_times(completed, run.costs, self._scores_with_copies(completed))

    def _may_fuse(self, plan: Plan) -> bool:
        """Whether a run of the plan may score in parts on ranks that generate."""
        return self.recipe.fusion_rule.is_open and abilities(self.recipe).moves and not self.nothing_to_hide(plan)

    def _gains_by_fusion(self, plan: Plan) -> bool:
        """Whether a step is predicted to be shorter, by what is worth it, where samples are scored in parts on ranks
        that have none left to generate: parts take longer for each token, and do not end together."""
        if self.nothing_to_hide(plan):
            return False
        plain_s, fused_s = (step_seconds(plan, replace(self.graph, fuses=way), self.costs) for way in (False, True))
        return fused_s <= (1 - LEAST_SHARE) * plain_s

    def nothing_to_hide(self, plan: Plan) -> str:
        """See `stage_fusion.nothing_to_hide`."""
        models, copied = [model.role for model in self.models], self._scores_with_copies(plan)
        return nothing_to_hide(plan, self.flow, models, copied, self.workload.scores_ahead)

    def _scores_with_copies(self, plan: Plan) -> frozenset[str]:
        return OffloadPolicy(self.models, plan, adapted=self.recipe.lora.rank > 0).scores_with_copies
