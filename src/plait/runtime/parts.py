"""What one rank holds of the roles of a flow: its parts of their models, with trainers and engines, and their moves.

A role's own weights are those of its home layout (where it trains, else where it scores); other layouts hold copies,
which are moved there when the home has changed and before they are used. Where two layouts want the same part of a
model on one rank there is one part, and nothing is moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.dataflow import Dataflow
from plait.generation.engine import Engine
from plait.layout.holdings import Holdings, merged, weights
from plait.layout.mesh import Cluster, Layout
from plait.layout.move import plan_move
from plait.layout.move_plan import MovePlan
from plait.layout.params import Parameters
from plait.models.backbone import copy_of
from plait.models.language_model import LanguageModel
from plait.models.scalar_model import ScalarModel
from plait.models.team import Team, WaitingFor, make_teams
from plait.reallocation.mover import Moved, execute, moving
from plait.runtime.instances import engine_of
from plait.runtime.optimizer_state import loading_state, saving_state
from plait.runtime.recipe import Recipe
from plait.runtime.role_models import REWARD_ROLES, RoleModel
from plait.runtime.roles import build_models, make_trainer
from plait.schedule.generators import gpipe, one_at_a_time, one_f_one_b
from plait.schedule.placements import RolePlacement, layouts_of, placements_of
from plait.schedule.plan import Plan
from plait.training.trainer import Trainer

Model = LanguageModel | ScalarModel
Key = tuple[Any, ...]
"""Which part of a model a rank has, and with whom it computes: equal keys are one part."""

_WHOLE: Key = ("whole",)

_PIPELINES = {"1F1B": one_f_one_b, "gpipe": gpipe, "one at a time": one_at_a_time}
"""`schedule.placements.SCHEDULES`."""

WAIT_S = 1800.0
"""Of each wait for peers: longer than any legitimate action. Who dies or freezes is found by the supervisor."""


def key_of(layout: Layout, rank: int) -> Key:
    """Of a rank of the layout."""
    sizes = layout.parallelism
    if sizes.tp == sizes.pp == 1:
        return _WHOLE
    instance = next(one for one in layout.instances() if rank in one.mesh.ranks)
    return (instance.mesh.ranks, sizes.tp, sizes.pp, sizes.stages)


@dataclass
class RolePart:
    """What this rank holds of one role; None: it has no part in that."""

    one: RoleModel
    place: RolePlacement
    parts: dict[Key, Any]
    parameters: Parameters
    """Of what is trained of the whole model."""
    trainer: Trainer | None = None
    """Of the training layout."""
    scorer: Trainer | None = None
    """Of the scoring layout; the trainer where that is the same."""
    engine: Engine | None = None
    instance: Team | None = None
    """That the engine belongs to."""
    move: MovePlan | None = None
    """From the home layout to all others; None: there is none, or nothing to move."""
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def model(self) -> Model:
        """A part of the model that this rank has, that of the home layout if it has that."""
        return next(iter(self.parts.values()))


class Parts:
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
        self.teams = make_teams(layouts_of(plan), rank, timeout_s=WAIT_S, waiting_for=waiting_for)
        here = [one for one in models if rank in self.places[one.role].ranks]
        whole = build_models(here, recipe)
        shared: dict[tuple[int, Key], Any] = {}
        self._uses = Counter(id(model) for model in whole.values())
        self.roles = {one.role: self._role(one, whole[one.role], shared) for one in here}
        self.movers = {one.role: movers_of(self.places[one.role]) for one in models}

    def _role(self, one: RoleModel, whole: Model, shared: dict[tuple[int, Key], Any]) -> RolePart:
        place, rank = self.places[one.role], self.rank
        parameters = whole.trained_parameters
        mine = [layout for layout in place.layouts if rank in layout.mesh.ranks]
        keys = dict.fromkeys(key_of(layout, rank) for layout in mine)
        parts: dict[Key, Any] = {}
        for layout in mine:
            key = key_of(layout, rank)
            if key in parts:
                continue
            if (id(whole), key) not in shared:
                last = list(keys)[-1] == key and _WHOLE not in keys and self._uses[id(whole)] == 1
                shared[id(whole), key] = self._part(whole, layout, is_last=last)
            parts[key] = shared[id(whole), key]
        part = RolePart(one, place, parts, parameters)
        if place.train is not None and (team := self.teams[place.train]) is not None:
            part.trainer = self._trainer(part, place.train, team, trained=True)
        if place.score is not None and (team := self.teams[place.score]) is not None:
            same = place.score == place.train
            part.scorer = part.trainer if same else self._trainer(part, place.score, team, trained=False)
        for instance in place.generate:
            if (team := self.teams[instance]) is not None:
                model = parts[key_of(instance, rank)]
                assert isinstance(model, LanguageModel), f"role {one.role} generates with a scalar model"
                part.engine, part.instance = engine_of(model, self.recipe.sampling, team), team
        if one.trained:
            part.move, part.buffers = self._move(part)
        return part

    def _part(self, whole: Model, layout: Layout, *, is_last: bool) -> Any:
        """This rank's part of a model; the last one consumes it."""
        if layout.parallelism.tp == layout.parallelism.pp == 1:
            return whole
        from plait.models.partial import part_of

        team = self.teams[layout]
        assert team is not None, f"rank {self.rank} has no part in {layout}"
        return part_of(whole if is_last else copy_of(whole), team)

    def _trainer(self, part: RolePart, layout: Layout, team: Team, *, trained: bool) -> Trainer:
        mode = "train" if trained else "score"
        return make_trainer(
            part.one,
            part.parts[key_of(layout, self.rank)],
            self.flow,
            self.recipe,
            team=team,
            trained=trained and part.one.trained,
            micro_batch_tokens=part.place.micro_batch_tokens.get(mode),
            pipeline=_PIPELINES[part.place.schedule],
        )

    def _move(self, part: RolePart) -> tuple[MovePlan | None, dict[str, Tensor]]:
        """From the home to all parts of other layouts, and the buffers of this rank."""
        place, dtype = part.place, self.recipe.dtype.value
        names: dict[Key, str] = {}
        source = _held(part.parameters, place.home, dtype, names, place.home.mesh.ranks)
        targets: list[Holdings] = []
        covered = {(rank, key_of(place.home, rank)) for rank in place.home.mesh.ranks}
        for layout in place.layouts[1:]:
            new = [r for r in layout.mesh.ranks if (r, key_of(layout, r)) not in covered]
            covered |= {(r, key_of(layout, r)) for r in new}
            if new:
                targets.append(_held(part.parameters, layout, dtype, names, new))
        if not targets:
            return None, {}
        plan = plan_move(source, merged(targets), self.cluster)
        return plan, {names[key]: model.trained_weights for key, model in part.parts.items() if key in names}

    def moving(self, role: str) -> Iterator[Moved]:
        """Bring the weights of a role from its home to where else they are used, an action per `next()`."""
        part = self.roles.get(role)
        if part is None or part.move is None or self.rank not in part.move.rows:
            return iter(())
        return moving(
            part.move, self.rank, part.buffers, deadline_s=WAIT_S, name=f"{role}.weights", waiting_for=self._waiting_for
        )

    def gather(self, role: str) -> Any:
        """The whole model of a role on rank 0, with the weights of its home: its own, if it has that there, else a new
        one. Every rank of the home does its part; None on other ranks than 0."""
        place, dtype = self.places[role].home, self.recipe.dtype.value
        if 0 in place.mesh.ranks and key_of(place, 0) == _WHOLE:
            return self.roles[role].parts[_WHOLE] if self.rank == 0 else None
        part = self.roles.get(role)
        one = next(one for one in self._models if one.role == role)
        model = build_models([one], self.recipe)[role] if self.rank == 0 else None
        parameters = part.parameters if part is not None else model.trained_parameters
        names: dict[Key, str] = {}
        source = _held(parameters, place, dtype, names, place.mesh.ranks)
        plan = plan_move(source, weights(parameters, Layout.on((0,)), dtype, "whole"), self.cluster)
        own = {} if part is None else part.parts
        buffers = {name: own[key].trained_weights for key, name in names.items() if key in own}
        if model is not None:
            buffers["whole"] = model.trained_weights
        if self.rank in plan.rows:
            execute(plan, self.rank, buffers, deadline_s=WAIT_S, name=f"{role}.gather", waiting_for=self._waiting_for)
        return model

    def saving(self, folder: Path) -> Generator[Moved, None, dict[str, dict[str, int]]]:
        """Write what this rank holds of the optimizers' state. Returns role → counts, of what it trains."""
        counts: dict[str, dict[str, int]] = {}
        for role, trainer, _ in self._trained():
            counts[role] = yield from saving_state(trainer, self.cluster, self.rank, folder)
        return counts

    def loading(self, folder: Path, counts: Mapping[str, Mapping[str, int]] | None) -> Generator[Moved, None, None]:
        """Continue from a checkpoint of any plan; see `optimizer_state.loading_state`."""
        for role, trainer, parameters in self._trained():
            of_role = None if counts is None else counts[role]
            yield from loading_state(trainer, parameters, self.cluster, self.rank, folder, of_role, WAIT_S)

    def _trained(self) -> Iterator[tuple[str, Trainer, Parameters]]:
        """What this rank trains, in an order that all ranks share."""
        for role, part in self.roles.items():
            if part.one.trained and part.trainer is not None:
                yield role, part.trainer, part.parameters


def _held(parameters: Parameters, layout: Layout, dtype: str, names: dict[Key, str], ranks: Sequence[int]) -> Holdings:
    """Of these ranks of a layout; a buffer for every key, named in order of first use."""
    found = []
    for rank in ranks:
        name = names.setdefault(key_of(layout, rank), f"weights{len(names)}")
        whole = weights(parameters, layout, dtype, name)
        found.append(Holdings(whole.params, dtype, {rank: whole.ranks[rank]}, {rank: whole.buffers[rank]}))
    return merged(found)


def movers_of(place: RolePlacement) -> tuple[int, ...]:
    """Ranks that take part in bringing a trained role's weights from its home to where else they are used."""
    home = {(rank, key_of(place.home, rank)) for rank in place.home.mesh.ranks}
    others = {(rank, key_of(layout, rank)) for layout in place.layouts[1:] for rank in layout.mesh.ranks}
    return place.ranks if others - home else ()


def is_reward(one: RoleModel, flow: Dataflow) -> bool:
    """Whether a model's role is to score samples, without being trained."""
    return one.role in REWARD_ROLES and "train" not in flow.call_kinds(one.role)
