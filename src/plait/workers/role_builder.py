"""Makes what one rank holds of the roles of a flow: parts of their models, trainers and engines, and their moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

from plait.cost.aliasing import Aliasing, flat_of
from plait.cost.offload_policy import Owner
from plait.layout.holdings import Holdings, merged, zero_shards
from plait.layout.mesh import Layout
from plait.layout.move import plan_move
from plait.layout.move_plan import MovePlan
from plait.layout.params import Parameters
from plait.models.files.adapter_folder import adapter_of
from plait.models.flat_weights import FlatWeights
from plait.models.language_model import LanguageModel
from plait.models.parallel.peers import Peers
from plait.models.parallel.team import Team, make_teams
from plait.models.working_weights import dtype_of
from plait.reallocation.offload import HostMemory
from plait.recipes.engine_checks import abilities, of_engines
from plait.recipes.role_models import RoleModel
from plait.schedule.kept_pools import keeps_memory
from plait.schedule.placements import WHOLE, PartKey, part_key, parts_of
from plait.schedule.teams import team_layouts
from plait.training.optimizer import AVERAGED
from plait.training.trainer import Trainer
from plait.training.trainer_settings import ExecutionSettings
from plait.workers.instances import engine_of, prompt_engine_of
from plait.workers.loading import AdaptedParts, build_models, part_loader, sample_settings, update_settings
from plait.workers.migrations import SampleMoverOfRank
from plait.workers.offload_manager import OffloadManager, OffloadUnit
from plait.workers.prompt_moves import PromptMoverOfRank
from plait.workers.rank_state import RankState, RoleState, Setting
from plait.workers.ranks import WAIT_S


def make_rank_state(setting: Setting) -> RankState:
    """All roles of this rank. Every rank makes its own at the same time.

    Raises:
        ModelError: a model cannot be read, or is refused.
    """
    builder = RoleBuilder(setting)
    roles = builder.roles()
    return RankState(setting, roles, builder.follow_moves(roles), builder.joint_teams())


class RoleBuilder:
    """Every rank has one at the same time, with equal settings but for `rank`: process groups are made."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.rank, self.recipe, self.places = setting.rank, setting.recipe, setting.places
        self.offload_policy = setting.offload_policy
        self.aliasing = Aliasing(
            setting.models, setting.plan, setting.offload_policy, setting.recipe.dtype.value, self._parameters
        )
        self._teams = team_layouts(
            setting.plan, self.places, self.recipe.fusion_rule, rebalances=self.recipe.rebalance == "auto"
        )
        trained = [place.train for place in self.places.values() if place.train is not None]
        self.teams = make_teams(
            self._teams.layouts,
            setting.rank,
            timeout_s=WAIT_S,
            waiting_for=setting.waiting_for,
            splitting=trained if self.recipe.sequence_parallel else (),
        )
        self._loader = part_loader(setting.recipe)
        self._adapted = AdaptedParts(setting.recipe, self._loader)
        self._known: dict[tuple[str, bool], Parameters] = {}
        """Parameters of models with parts, by their names and whether they are scalar models."""
        self._memory: dict[Owner, dict[str, Tensor]] = {}
        """Buffers in which parts of models lie together, by name."""

    def roles(self) -> dict[str, RoleState]:
        """Those that this rank has a part in.

        Raises:
            ModelError: a model cannot be read, or is refused.
        """
        own_models = [
            role_model for role_model in self.setting.models if self.rank in self.places[role_model.role].ranks
        ]
        shared = self._whole_models(own_models)
        return {role_model.role: self._role(role_model, shared) for role_model in own_models}

    def joint_teams(self) -> dict[Layout, Team]:
        """Layouts on which several roles train together → their teams, of those that this rank is a member of."""
        orders = [place.together for place in self.places.values()]
        teams = {order.layout: self.teams[order.layout] for order in orders if order is not None}
        return {layout: team for layout, team in teams.items() if team is not None}

    def _whole_models(self, own_models: Sequence[RoleModel]) -> dict[tuple[Owner, PartKey], Any]:
        """Those that this rank computes with whole, of which roles may share some."""
        whole = [role_model for role_model in own_models if (self.rank, WHOLE) in self.places[role_model.role].uses]
        trains = any(role_model.trained for role_model in self.setting.models)
        models = build_models(whole, self.recipe, trains=trains)
        return {(self._owner(role_model), WHOLE): models[role_model.role] for role_model in whole}

    def _owner(self, role_model: RoleModel) -> Owner:
        """Roles of one owner have one model. With adapters each role has a view of its own."""
        return (role_model.role,) if self.recipe.lora.rank > 0 else self.offload_policy.owner(role_model.role)

    def _parameters(self, role: str) -> Parameters:
        """Those of the whole model of a role that has parts."""
        role_model = next(role_model for role_model in self.setting.models if role_model.role == role)
        key = (role_model.name, role_model.scalar)
        if key not in self._known:
            self._known[key] = self._loader.parameters(role_model.name, scalar=role_model.scalar)
        return self._known[key]

    def _role(self, role_model: RoleModel, shared: dict[tuple[Owner, PartKey], Any]) -> RoleState:
        """
        Args:
            shared: parts that are there already; new ones are added.
        """
        place, rank, owner = self.places[role_model.role], self.rank, self._owner(role_model)
        parts: dict[PartKey, Any] = {}
        for layout in place.layouts:
            if (team := self.teams[layout]) is not None:
                key = part_key(layout, rank)
                if (owner, key) not in shared:
                    shared[owner, key] = self._part(role_model, layout, team, shared.get((owner, WHOLE)))
                parts[key] = shared[owner, key]
        parameters = next(iter(parts.values())).trained.parameters
        role_state = RoleState(role_model, place, parts, parameters)
        if place.train is not None and (team := self.teams[place.train]) is not None:
            role_state.trainer = self._trainer(role_state, place.train, team, trained=True)
            if role_model.trained and self.recipe.lora.rank == 0 and not self.setting.loads:
                values = self._loader.stored(role_model.name, scalar=role_model.scalar)
                if values is not None:
                    role_state.trainer.optimizer.begin_with(values)
            role_state.state = self._state(role_state, role_state.trainer)
        if (team := self.teams[place.scoring]) is not None:
            tokens = place.micro_batch_tokens
            same = place.scoring == place.train and (place.score is None or tokens.get("score") == tokens.get("train"))
            role_state.scorer = (
                role_state.trainer if same else self._trainer(role_state, place.scoring, team, trained=False)
            )
            if self._teams.scores_alone and not place.scoring.shards_weights:
                instance = place.scoring.instance_of(rank)
                role_state.alone = self._trainer(role_state, instance, self.teams[instance], trained=False)
        for instance in () if abilities(self.recipe).computes_elsewhere else place.generate:
            if (team := self.teams[instance]) is not None:
                model = parts[part_key(instance, rank)]
                assert isinstance(model, LanguageModel), f"role {role_model.role} generates with a scalar model"
                trained = [role_model.role for role_model in self.setting.models if role_model.trained]
                keeps = keeps_memory(rank, self.setting.plan, self.places, trained, self.recipe.device)
                engine = prompt_engine_of if instance in place.prefill else engine_of
                role_state.engine = engine(model, of_engines(self.recipe), team, keep_memory=keeps)
                role_state.instance = team
                if (peers := self._peers(role_model.role)) is not None:
                    role_state.mover = SampleMoverOfRank(place.generate, role_state.engine, peers)
                    if place.prefill:
                        role_state.prompts = PromptMoverOfRank(
                            place.generate, role_state.engine, peers, deadline_s=self.recipe.stalled_after_s or inf
                        )
        if self.setting.copies[role_model.role] or role_model.follows:
            role_state.moves, role_state.buffers = self._moves(role_state)
        return role_state

    def _part(self, role_model: RoleModel, layout: Layout, team: Team, whole: Any) -> Any:
        """This rank's part of a role's model, which it has not yet.

        Args:
            whole: see `_memory_of`.
        """
        is_measured = not any(other.trained for other in self.setting.models)  # adapters stay beside the weights then
        if self.recipe.lora.rank > 0 or (is_measured and adapter_of(role_model.name) is not None):
            uses = self.offload_policy.uses(role_model.role, self.rank, part_key(layout, self.rank))
            return self._adapted.part(role_model, team, is_trained=any(mode == "train" for _, mode in uses))
        memory = self._memory_of(role_model, layout, whole)
        return self._loader.part(role_model.name, team, scalar=role_model.scalar, memory=memory)

    def _peers(self, role: str) -> Peers | None:
        """The ranks of all instances of the role; None: samples stay where they begin."""
        everywhere = self._teams.everywhere.get(role)
        team = None if everywhere is None else self.teams[everywhere]
        return None if team is None else team.all

    def _memory_of(self, role_model: RoleModel, layout: Layout, whole: Any) -> FlatWeights | None:
        """Where this rank's part of a role's model lies, if not alone. Buffers are made with the first of their parts,
        whichever that is: ranks that read a part together do so in one order.

        Args:
            whole: the whole model of the role, if this rank has that; the parts lie in its weights then.
        """
        aliasing, key = self.aliasing.of(role_model.role, self.rank), part_key(layout, self.rank)
        if key not in aliasing:
            return None
        buffers = self._memory.setdefault(self._owner(role_model), {})
        for other, nest in aliasing.items():
            if nest.own and (name := self.aliasing.name(role_model.role, other)) not in buffers:
                dtype, device = dtype_of(self.recipe.dtype), self.recipe.device
                own = whole.weights if other == WHOLE else torch.zeros(nest.own, dtype=dtype, device=device)
                buffers[name] = own
        blocks, mine = flat_of(self._parameters(role_model.role), layout, self.rank), aliasing[key]
        if mine.own and len(mine.lengths) == 1:
            return FlatWeights(blocks, buffers[self.aliasing.name(role_model.role, key)])
        return FlatWeights.nested(blocks, mine.held, buffers)

    def _trainer(self, role_state: RoleState, layout: Layout, team: Team | None, *, trained: bool) -> Trainer:
        role_model, flow, recipe = role_state.role_model, self.setting.flow, self.recipe
        tokens = role_state.place.micro_batch_tokens.get("train" if trained else "score")
        execution = ExecutionSettings(
            micro_batch_tokens=tokens or recipe.micro_batch_tokens,
            checkpoint_activations=recipe.checkpoint_activations,
            micro_batches=role_state.place.order.num_micro_batches if trained else None,
            pair_tokens=self.setting.plan.pair_tokens(role_model.role),
            pipeline=role_state.place.order,
        )
        updates = update_settings(role_model.role, flow, recipe) if trained and role_model.trained else None
        model = role_state.parts[part_key(layout, self.rank)]
        samples = sample_settings(role_model.role, flow, recipe)
        return Trainer(model, execution, samples, updates, role=role_model.role, team=team)

    def _moves(self, role_state: RoleState) -> tuple[tuple[MovePlan, ...], dict[str, Tensor]]:
        """From the home to the copies, and the buffers of this rank."""
        place, role, parameters = role_state.place, role_state.role_model.role, role_state.parameters
        source = self.aliasing.holdings(role, place.home, place.home.mesh.ranks, parameters)
        plans = []
        for copies in self.setting.copies[role_state.role_model.role]:
            targets: list[Holdings] = []
            missing = set(copies.parts)
            for layout in place.layouts[1:]:
                new = [rank for rank in layout.mesh.ranks if (rank, part_key(layout, rank)) in missing]
                missing -= parts_of(layout)
                if new:
                    targets.append(self.aliasing.holdings(role, layout, new, parameters))
            plans.append(plan_move(source, merged(targets), self.setting.cluster))
        alone = {
            self.aliasing.name(role, key): model.trained.updated
            for key, model in role_state.parts.items()
            if model.nested is None
        }
        return tuple(plans), {**self._memory.get(self._owner(role_state.role_model), {}), **alone}

    def follow_moves(self, roles: Mapping[str, RoleState]) -> dict[str, MovePlan]:
        """Role that follows another → the move from the average that the other's trainers keep to the role's home; of
        those that this rank has a part in.

        Args:
            roles: of this rank.
        """
        plans: dict[str, MovePlan] = {}
        for role_model in self.setting.models:
            train = self.places[role_model.follows].train if role_model.follows else None
            mine = roles.get(role_model.role) or roles.get(role_model.follows)
            if train is None or mine is None:
                continue
            compute = dtype_of(self.recipe.dtype)
            masters = str(torch.promote_types(compute, torch.float32)).removeprefix("torch.")
            source = zero_shards(mine.parameters, train, masters, AVERAGED)
            home = self.places[role_model.role].home
            target = self.aliasing.holdings(role_model.role, home, home.mesh.ranks, mine.parameters)
            plans[role_model.role] = plan_move(source, target, self.setting.cluster)
        return plans

    def _state(self, role_state: RoleState, trainer: Trainer) -> OffloadUnit | None:
        """The optimizer's buffers, in host memory at once: those of the next role are about to be made."""
        role = role_state.role_model.role
        if not trainer.is_trained or self.offload_policy.of_state(role, self.rank) == "keep":
            return None
        weights = trainer.model.trained.flat.whole
        working = None if weights is None else weights.untyped_storage().data_ptr()
        own = {  # where the dtypes agree, the working weights are the masters
            name: buffer
            for name, buffer in trainer.optimizer.buffers().items()
            if buffer.numel() and buffer.untyped_storage().data_ptr() != working
        }
        unit = OffloadUnit(HostMemory(own, scratch=trainer.optimizer.scratch(), name=role), "offload", role)
        OffloadManager({(role, "train"): [unit]}).want()
        return unit
