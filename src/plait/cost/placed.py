"""What the memory of a plan's devices depends on: models, their parameters, and where they lie. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from plait.cost.aliasing import Aliasing
from plait.cost.call_lengths import lengths_by_call
from plait.cost.connections import Connected, Connections, Placing, Sending, heads_of_keys
from plait.cost.draft_memory import drafts_on
from plait.cost.held_memory import share_elements
from plait.cost.kept_sets import KeptSets, sets_of
from plait.cost.lengths import SampleLengths
from plait.cost.offload_policy import OffloadPolicy
from plait.dataflow import Dataflow, Node
from plait.layout.params import Parameters
from plait.layout.shards import held_elements, zero_range
from plait.models.shape import ModelShape
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel
from plait.schedule.placements import PartKey, RolePlacement, part_key, placements_of
from plait.schedule.plan import Plan
from plait.schedule.teams import team_layouts

Kind = tuple[object, ...]


@dataclass(frozen=True)
class Placed:
    """What the memory of a device's parameters depends on.

    shapes:         by the model's name
    parameters:     by the role
    """

    recipe: Recipe
    models: Sequence[RoleModel]
    shapes: Mapping[str, ModelShape]
    parameters: Mapping[str, Parameters]
    plan: Plan

    @cached_property
    def places(self) -> Mapping[str, RolePlacement]:
        """By the role."""
        return {model.role: placements_of(self.plan, model.role) for model in self.models}

    @cached_property
    def offload_policy(self) -> OffloadPolicy:
        return OffloadPolicy(self.models, self.plan, adapted=self.recipe.lora.rank > 0)

    @cached_property
    def aliasing(self) -> Aliasing:
        return Aliasing(self.models, self.plan, self.offload_policy, self.recipe.dtype, self.parameters.__getitem__)

    @cached_property
    def moved(self) -> Mapping[str, Mapping[int, frozenset[PartKey]]]:
        """Role → rank that takes part in a move of its weights → the parts that it needs for that."""
        moved: dict[str, dict[int, frozenset[PartKey]]] = {}
        for role, place in self.places.items():
            needed: dict[int, set[PartKey]] = {}
            for copies in self.offload_policy.copies(role):
                for rank in copies.ranks:
                    needed.setdefault(rank, set())
                for rank, key in copies.parts:
                    needed[rank].add(key)
            for rank in needed.keys() & set(place.home.mesh.ranks):
                needed[rank].add(part_key(place.home, rank))
            moved[role] = {rank: frozenset(keys) for rank, keys in needed.items()}
        return moved

    @cached_property
    def connects(self) -> Connected:
        """Who computes together, and who sends whom weights (from a role's home to its copies, and to the home of a
        role that follows another) and samples."""
        rebalances = self.recipe.rebalance == "auto"
        teams = team_layouts(self.plan, self.places, self.recipe.fusion_rule, rebalances=rebalances)
        found = []
        for model in self.models:
            home = self.places[model.role].home.mesh.ranks
            if model.follows and (train := self.places[model.follows].train) is not None:
                found.append(Sending(train.mesh.ranks, home))
            for copies in self.offload_policy.copies(model.role):
                found.append(Sending(home, tuple(sorted({rank for rank, _ in copies.parts}))))
        trained = [(model.role, self.places[model.role].train) for model in self.models if model.trained]
        placings = [Placing(layout) for layout in teams.layouts]
        placings += [Placing(layout, trains=role) for role, layout in trained if layout is not None]
        return Connected(placings, found, [self.places[role].generate for role in teams.everywhere])

    @cached_property
    def connected(self) -> Sequence[tuple[int, int]]:
        """By rank, what NCCL takes for the connections of a plan, in bytes: `Connections.group_bytes`, and
        `message_bytes`."""
        if self.recipe.device == "cpu" or self.plan.num_ranks == 1:
            return ((0, 0),) * self.plan.num_ranks
        shapes = {model.role: self.shapes[model.name] for model in self.models}
        connections = Connections(self.plan.cluster, self.plan.num_ranks, heads_of_keys(shapes))
        groups, messages = connections.group_bytes(self.connects.placings), connections.message_bytes(self.connects)
        return [(int(count), int(more)) for count, more in zip(groups, messages, strict=True)]

    def kind(self, rank: int) -> Kind:
        """Equal for ranks that differ in nothing that decides how much they hold."""
        if rank not in self._kinds:
            self._kinds[rank] = _kind(rank, self)
        return self._kinds[rank]

    @cached_property
    def _kinds(self) -> dict[int, Kind]:
        """What `kind` has answered."""
        return {}

    @property
    def alike(self) -> list[list[int]]:
        """All ranks, ascending; together those of a kind."""
        ranks_by_kind: dict[Kind, list[int]] = {}
        for rank in range(self.plan.num_ranks):
            ranks_by_kind.setdefault(self.kind(rank), []).append(rank)
        return list(ranks_by_kind.values())


@dataclass(frozen=True)
class Facts(Placed):
    """What all of its memory depends on.

    lengths: of the prompts; where nothing is generated, of the given samples
    """

    flow: Dataflow
    lengths: SampleLengths

    @cached_property
    def lengths_of(self) -> Mapping[int, SampleLengths]:
        """See `lengths_by_call`."""
        return lengths_by_call(self.flow, self.lengths, self.recipe.samples_per_prompt)

    def spending(self, recipe: Recipe) -> Facts:
        """The same of a recipe with other `MEMORY_KEYS`, on which nothing depends that is kept here."""
        facts = replace(self, recipe=recipe)
        facts.__dict__.update({name: getattr(self, name) for name in _KEPT})
        return facts

    def sets_of(self, node: Node) -> KeptSets:
        """See `kept_sets.sets_of`."""
        names = {model.role: model.name for model in self.models}
        return sets_of(self.flow, node, self.recipe.sampling, lambda role: self.shapes[names[role]])

    def together(self, role: str) -> tuple[str, ...]:
        """The roles that train when this one does."""
        return self.places[role].trains_with


_KEPT = tuple(name for name, member in vars(Placed).items() if isinstance(member, cached_property))


def _kind(rank: int, placed: Placed) -> Kind:
    """All that the memory of a device depends on: its coordinates in the layouts of each role, who computes there,
    which of these parts are one, and what leaves. Devices of one kind hold as much."""
    numbers: dict[PartKey, int] = {}
    sampling = placed.recipe.sampling
    kinds: list[object] = [placed.connected[rank], rank == 0 and (sampling.filters or sampling.router_replay)]
    for role, place in placed.places.items():
        for layout in place.layouts_on(rank):
            number = numbers.setdefault(part_key(layout, rank), len(numbers))
            at, sizes = layout.coordinates(rank), layout.parallelism
            generates = layout == place.instance_on(rank)
            uses = (layout == place.train, layout == place.score, generates, generates and layout in place.prefill)
            kinds.append((role, uses, at.tp, at.pp, sizes, number))
            if layout.shards_weights:
                kinds.append(share_elements(placed.parameters[role], layout, rank))
            if uses[0]:
                once = held_elements(placed.parameters[role], sizes, at.tp, at.pp, once=True)
                start, stop = zero_range(once, at.dp, sizes.dp)
                kinds.append(stop - start)
        kinds += [place.after.get((mode, rank)) for mode in ("train", "score", "decode")]
        if (instance := place.drawing_on(rank)) is not None:
            kinds.append(drafts_on(placed.recipe, rank, instance))
        if (needed := placed.moved[role].get(rank)) is not None:
            kinds.append(frozenset(numbers[key] for key in needed))
    return tuple(kinds)
