"""What one rank holds of the roles of a flow: its parts of their models, with trainers and engines, and their moves.

A role's own weights are those of its home layout (where it trains, else where it scores); other layouts hold copies,
which are moved there when the home has changed, or they were dropped, and before they are used. Where two layouts want
the same part of a model on one rank there is one part, and nothing is moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from plait.cost.aliasing import Aliasing, flat_of
from plait.cost.offload_policy import Copies, OffloadPolicy, Owner
from plait.dataflow import Dataflow
from plait.generation.engine import Engine
from plait.layout.holdings import Holdings, merged, weights
from plait.layout.mesh import Cluster, Layout
from plait.layout.move import plan_move
from plait.layout.move_plan import MovePlan
from plait.layout.params import Parameters
from plait.models.files.finite import Broken
from plait.models.flat_weights import FlatWeights
from plait.models.language_model import LanguageModel
from plait.models.parallel.team import Team, WaitingFor, make_teams
from plait.models.scalar_model import ScalarModel
from plait.models.working_weights import dtype_of
from plait.reallocation.mover import MoveReport, execute, moving
from plait.reallocation.offload import HostMemory
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel
from plait.schedule.generators import gpipe, one_at_a_time, one_f_one_b
from plait.schedule.placements import (
    WHOLE,
    PartKey,
    RolePlacement,
    layouts_of,
    part_key,
    parts_of,
    placements_of,
)
from plait.schedule.plan import After, Plan
from plait.schedule.work import Work
from plait.training.trainer import Trainer
from plait.workers.instances import engine_of
from plait.workers.loading import build_models, make_trainer, part_loader
from plait.workers.offload_manager import Need, OffloadManager, OffloadUnit
from plait.workers.optimizer_state import broken_state, loading_state, saving_state
from plait.workers.ranks import WAIT_S

Model = LanguageModel | ScalarModel

_PIPELINES = {"1F1B": one_f_one_b, "gpipe": gpipe, "one at a time": one_at_a_time}
"""`schedule.placements.SCHEDULES`."""


@dataclass
class RoleState:
    """What this rank holds of one role; None: it has no part in that."""

    one: RoleModel
    place: RolePlacement
    parts: dict[PartKey, Any]
    parameters: Parameters
    """Of what is trained of the whole model."""
    trainer: Trainer | None = None
    """Of the training layout."""
    scorer: Trainer | None = None
    """Of the scoring layout; the trainer where that has the same layout and micro-batches."""
    engine: Engine | None = None
    instance: Team | None = None
    """That the engine belongs to."""
    moves: tuple[MovePlan, ...] = ()
    """From the home layout to each of `RankState.copies`."""
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """Of the moves."""
    state: OffloadUnit | None = None
    """The optimizer's, where it does not stay on the device."""

    @property
    def model(self) -> Model:
        """A part of the model that this rank has, that of the home layout if it has that."""
        return next(iter(self.parts.values()))


class RankState:
    """All roles of this rank.

    Every rank makes one at the same time, with equal arguments but `rank`: process groups are made.

    Raises:
        ModelError: a model cannot be read, or is refused.
    """

    def __init__(
        self,
        recipe: Recipe,
        flow: Dataflow,
        models: Sequence[RoleModel],
        plan: Plan,
        rank: int,
        *,
        waiting_for: WaitingFor,
    ) -> None:
        self.rank = rank
        self.recipe = recipe
        self.flow = flow
        self._models = tuple(models)
        self.cluster = Cluster(1, plan.num_ranks)
        self._waiting_for = waiting_for
        self.places = {one.role: placements_of(plan, one.role) for one in models}
        self.offload_policy = OffloadPolicy(models, plan, adapted=recipe.lora.rank > 0)
        self.aliasing = Aliasing(models, plan, self.offload_policy, recipe.dtype.value, self._parameters)
        self.copies: dict[str, tuple[Copies, ...]] = {one.role: self.offload_policy.copies(one.role) for one in models}
        """Of every role, what is moved together; a copy's number is its place there."""
        self.teams = make_teams(layouts_of(plan), rank, timeout_s=WAIT_S, waiting_for=waiting_for)
        here = [one for one in models if rank in self.places[one.role].ranks]
        self._loader = part_loader(recipe)
        self._known: dict[tuple[str, bool], Parameters] = {}
        """Parameters of models with parts, by their names and whether they are scalar models."""
        shared = self._whole_models(here)
        self._memory: dict[Owner, dict[str, Tensor]] = {}
        """Buffers in which parts of models lie together, by name."""
        self.roles = {one.role: self._role(one, shared) for one in here}
        self._units: dict[int, OffloadUnit] = {}
        """By the buffer (its id) that leaves and comes back."""
        self.offloads = self._offloads()
        self.offloads.want()
        self.movers = {one.role: movers_of(self.places[one.role]) for one in models}

    def _whole_models(self, here: Sequence[RoleModel]) -> dict[tuple[Owner, PartKey], Any]:
        """Those that this rank computes with whole, of which roles may share some."""
        whole = [one for one in here if (self.rank, WHOLE) in self.places[one.role].uses]
        models = build_models(whole, self.recipe)
        return {(self._owner(one), WHOLE): models[one.role] for one in whole}

    def _owner(self, one: RoleModel) -> Owner:
        """Roles of one owner have one model. With adapters each role has a view of its own."""
        return (one.role,) if self.recipe.lora.rank > 0 else self.offload_policy.owner(one.role)

    def _parameters(self, role: str) -> Parameters:
        """Of the whole model of a role that has parts."""
        one = next(one for one in self._models if one.role == role)
        key = (one.name, one.scalar)
        if key not in self._known:
            self._known[key] = self._loader.parameters(one.name, scalar=one.scalar)
        return self._known[key]

    def _role(self, one: RoleModel, shared: dict[tuple[Owner, PartKey], Any]) -> RoleState:
        """
        Args:
            shared: parts that are there already; new ones are added.
        """
        place, rank, owner = self.places[one.role], self.rank, self._owner(one)
        parts: dict[PartKey, Any] = {}
        for layout in place.layouts:
            if (team := self.teams[layout]) is not None:
                key = part_key(layout, rank)
                if (owner, key) not in shared:
                    memory = self._memory_of(one, layout, shared.get((owner, WHOLE)))
                    shared[owner, key] = self._loader.part(one.name, team, scalar=one.scalar, memory=memory)
                parts[key] = shared[owner, key]
        parameters = next(iter(parts.values())).trained_parameters
        part = RoleState(one, place, parts, parameters)
        if place.train is not None and (team := self.teams[place.train]) is not None:
            part.trainer = self._trainer(part, place.train, team, trained=True)
            part.state = self._state(part, part.trainer)
        if (team := self.teams[place.scoring]) is not None:
            tokens = place.micro_batch_tokens
            same = place.scoring == place.train and (place.score is None or tokens.get("score") == tokens.get("train"))
            part.scorer = part.trainer if same else self._trainer(part, place.scoring, team, trained=False)
        for instance in place.generate:
            if (team := self.teams[instance]) is not None:
                model = parts[part_key(instance, rank)]
                assert isinstance(model, LanguageModel), f"role {one.role} generates with a scalar model"
                only = not self._trains_or_scores
                part.engine = engine_of(model, self.recipe.sampling, team, keep_memory=only)
                part.instance = team
        if self.copies[one.role]:
            part.moves, part.buffers = self._moves(part)
        return part

    def _memory_of(self, one: RoleModel, layout: Layout, whole: Any) -> FlatWeights | None:
        """Where this rank's part of a role's model lies, if not alone. Buffers are made with the first of their parts,
        whichever that is: ranks that read a part together do so in one order.

        Args:
            whole: the whole model of the role, if this rank has that; the parts lie in its weights then.
        """
        aliasing, key = self.aliasing.of(one.role, self.rank), part_key(layout, self.rank)
        if key not in aliasing:
            return None
        buffers = self._memory.setdefault(self._owner(one), {})
        for other, nest in aliasing.items():
            if nest.own and (name := self.aliasing.name(one.role, other)) not in buffers:
                dtype, device = dtype_of(self.recipe.dtype), self.recipe.device
                own = whole.weights if other == WHOLE else torch.zeros(nest.own, dtype=dtype, device=device)
                buffers[name] = own
        blocks, mine = flat_of(self._parameters(one.role), layout, self.rank), aliasing[key]
        if mine.own and len(mine.lengths) == 1:
            return FlatWeights(blocks, buffers[self.aliasing.name(one.role, key)])
        return FlatWeights.nested(blocks, mine.held, buffers)

    @property
    def _trains_or_scores(self) -> bool:
        """Whether this rank has something else to do than to generate."""
        places = [self.places[one.role] for one in self._models]
        layouts = [
            *(place.score for place in places),
            *(place.train for one, place in zip(self._models, places, strict=True) if one.trained),
        ]
        return any(layout is not None and self.rank in layout.mesh.ranks for layout in layouts)

    def _trainer(self, part: RoleState, layout: Layout, team: Team, *, trained: bool) -> Trainer:
        mode = "train" if trained else "score"
        return make_trainer(
            part.one,
            part.parts[part_key(layout, self.rank)],
            self.flow,
            self.recipe,
            team=team,
            trained=trained and part.one.trained,
            micro_batch_tokens=part.place.micro_batch_tokens.get(mode),
            pipeline=_PIPELINES[part.place.schedule],
        )

    def _moves(self, part: RoleState) -> tuple[tuple[MovePlan, ...], dict[str, Tensor]]:
        """From the home to the copies, and the buffers of this rank."""
        place, role, parameters = part.place, part.one.role, part.parameters
        source = self.aliasing.holdings(role, place.home, place.home.mesh.ranks, parameters)
        plans = []
        for copies in self.copies[part.one.role]:
            targets: list[Holdings] = []
            left = set(copies.parts)
            for layout in place.layouts[1:]:
                new = [rank for rank in layout.mesh.ranks if (rank, part_key(layout, rank)) in left]
                left -= parts_of(layout)
                if new:
                    targets.append(self.aliasing.holdings(role, layout, new, parameters))
            plans.append(plan_move(source, merged(targets), self.cluster))
        alone = {
            self.aliasing.name(role, key): model.trained_weights
            for key, model in part.parts.items()
            if model.nested is None
        }
        return tuple(plans), {**self._memory.get(self._owner(part.one), {}), **alone}

    def moving(self, role: str, number: int) -> Work[MoveReport | None]:
        """Bring the weights of a role from its home to some of its copies; None: this rank has no part in it."""
        part = self.roles.get(role)
        if part is None or self.rank not in part.moves[number].rows:
            return None
        work = moving(
            part.moves[number],
            self.rank,
            part.buffers,
            deadline_s=WAIT_S,
            name=f"{role}.weights",
            waiting_for=self._waiting_for,
        )
        return (yield from work)

    def make_room(self, role: str, numbers: Sequence[int]) -> None:
        """Before `moving` to these copies: have what is moved on the device, and memory for what comes."""
        part = self.roles.get(role)
        if part is None:
            return
        sends = (
            any(self.rank in part.moves[number].rows for number in numbers) and self.rank in part.place.home.mesh.ranks
        )
        mine = [key for number in numbers for rank, key in self.copies[role][number].parts if rank == self.rank]
        filled = [self._units.get(id(part.parts[key].flat.whole)) for key in mine]
        needs: list[Need] = [(role, "home")] if sends else []
        self.offloads.want(*needs, filled=[unit for unit in filled if unit is not None])

    # -- what leaves the device

    def _state(self, part: RoleState, trainer: Trainer) -> OffloadUnit | None:
        """The optimizer's buffers, in host memory at once: those of the next role are about to be made."""
        role, buffers = part.one.role, trainer.buffers()
        if not buffers or self.offload_policy.of_state(role, self.rank) == "keep":
            return None
        whole = trainer.model.flat.whole
        working = None if whole is None else whole.untyped_storage().data_ptr()
        own = {  # where the dtypes agree, the working weights are the masters
            name: buffer
            for name, buffer in buffers.items()
            if buffer.numel() and buffer.untyped_storage().data_ptr() != working
        }
        unit = OffloadUnit(HostMemory(own, scratch=trainer.scratch(), name=role), "offload", role)
        OffloadManager({(role, "train"): [unit]}).want()
        return unit

    def _offloads(self) -> OffloadManager:
        needs: dict[Need, list[OffloadUnit]] = {}
        for role, part in self.roles.items():
            place = part.place
            asked: tuple[tuple[Literal["train", "score", "decode", "home"], Sequence[Layout | None]], ...] = (
                ("train", (place.train,)),
                ("score", (place.scoring,)),
                ("decode", place.generate),
                ("home", (place.home,)),
            )
            for what, layouts in asked:
                for layout in layouts:
                    if layout is not None and self.rank in layout.mesh.ranks:
                        needs[role, what] = self._units_of(part, part_key(layout, self.rank))
            if part.state is not None:
                needs[role, "train"].append(part.state)
        return OffloadManager(needs)

    def _units_of(self, part: RoleState, key: PartKey) -> list[OffloadUnit]:
        """What does not stay on the device of a part of a model: its weights, and those that are the role's alone."""
        role, model = part.one.role, part.parts[key]
        changes = part.one.trained and model.own is None
        what = "weights" if (self.rank, key) in parts_of(part.place.home) else "copy"
        found = [
            self._unit(
                model.weights, self.offload_policy.of_weights(role, self.rank, key), role, what, keep=not changes
            )
        ]
        if model.own is not None:
            after = self.offload_policy.of_adapter(role, self.rank, key)
            found.append(self._unit(model.own.weights, after, role, "adapter", keep=not part.one.trained))
        return [unit for unit in found if unit is not None]

    def _unit(self, buffer: Tensor, after: After, role: str, what: str, *, keep: bool) -> OffloadUnit | None:
        """The one of a buffer, which roles may share; None where it stays."""
        if after == "keep":
            return None
        if id(buffer) not in self._units:
            self._units[id(buffer)] = OffloadUnit(HostMemory({what: buffer}, keep=keep, name=role), after, role)
        return self._units[id(buffer)]

    def gather(self, role: str) -> Any:
        """The whole model of a role on rank 0, with the weights of its home: its own, if it has that there, else a new
        one in host memory, to which each rank of the home gives its part; None on other ranks than 0."""
        place, dtype = self.places[role].home, self.recipe.dtype.value
        if self.rank in place.mesh.ranks:
            self.offloads.want((role, "home"))
        if 0 in place.mesh.ranks and part_key(place, 0) == WHOLE:
            return self.roles[role].parts[WHOLE] if self.rank == 0 else None
        part = self.roles.get(role)
        one = next(one for one in self._models if one.role == role)
        host = self.recipe.model_copy(update={"device": "cpu"})
        model = build_models([one], host)[role] if self.rank == 0 else None
        if part is not None:
            parameters = part.parameters
        else:
            assert model is not None, f"rank {self.rank} has no part in gathering {role}"
            parameters = model.trained_parameters
        source = weights(parameters, place, dtype, "part")
        plan = plan_move(source, weights(parameters, Layout.on((0,)), dtype, "whole"), self.cluster)
        buffers = {}
        if part is not None and self.rank in place.mesh.ranks:
            buffers["part"] = part.parts[part_key(place, self.rank)].flat.flat("cpu")
        if model is not None:
            buffers["whole"] = model.trained_weights
        if self.rank in plan.rows:
            execute(plan, self.rank, buffers, deadline_s=WAIT_S, name=f"{role}.gather", waiting_for=self._waiting_for)
        return model

    @property
    def trained(self) -> tuple[str, ...]:
        """Roles of which this rank trains a part, in an order that all ranks share."""
        return tuple(role for role, part in self.roles.items() if part.one.trained and part.trainer is not None)

    def broken(self, role: str) -> list[Broken]:
        """What this rank has of a trained role's optimizer that is not finite."""
        self.offloads.want((role, "train"))
        return broken_state(self._trainer_of(role), self.rank)

    def saving(self, role: str, folder: Path) -> Work[dict[str, int]]:
        """Write what this rank holds of a trained role's optimizer. Returns its counts."""
        self.offloads.want((role, "train"))
        return saving_state(self._trainer_of(role), self.cluster, self.rank, folder)

    def loading(self, role: str, folder: Path, counts: Mapping[str, int] | None) -> Work[None]:
        """Continue from a checkpoint of any plan; see `optimizer_state.loading_state`."""
        self.offloads.want((role, "train"))
        parameters = self.roles[role].parameters
        return loading_state(self._trainer_of(role), parameters, self.cluster, self.rank, folder, counts, WAIT_S)

    def _trainer_of(self, role: str) -> Trainer:
        trainer = self.roles[role].trainer
        assert trainer is not None, f"role {role} is not trained on rank {self.rank}"
        return trainer


def movers_of(place: RolePlacement) -> tuple[int, ...]:
    """Ranks that take part in bringing a role's weights from its home to where else they are used."""
    return () if place.uses.keys() <= parts_of(place.home) else place.ranks
