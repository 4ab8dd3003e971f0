"""Which parts of a role's model lie in one memory on each rank: those that stay on the device, of which one contains
blocks of another. A run lays its weights out by this, and so does the forecast of its memory. Torch-free.

Not nested are models with adapters; parts that leave the device, each at its own time; shares of weights; and the
trained weights of a dtype that masters have, since there the weights are the masters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from plait.cost.offload_policy import OffloadPolicy, Owner
from plait.layout.boxes import Holding
from plait.layout.holdings import Holdings, flat_holdings, merged, weights
from plait.layout.mesh import Layout, Parallelism
from plait.layout.nesting import AliasedPart, nest
from plait.layout.params import FlatLayout, Parameters
from plait.layout.shards import Same, shard
from plait.recipes.role_models import RoleModel
from plait.schedule.placements import WHOLE, PartKey, RolePlacement, part_key, placements_of
from plait.schedule.plan import Plan
from plait.training.memory import parameter_bytes


class Aliasing:
    """Where the parts of all models lie.

    Args:
        models: which model each role begins as.
        plan: completed.
        dtype: of the weights.
        parameters: of a role's whole model; asked only of roles that could have parts to nest.
    """

    def __init__(
        self,
        models: Sequence[RoleModel],
        plan: Plan,
        offload_policy: OffloadPolicy,
        dtype: str,
        parameters: Callable[[str], Parameters],
    ) -> None:
        self._models = tuple(models)
        self._places = {model.role: placements_of(plan, model.role) for model in models}
        self._offload_policy = offload_policy
        self._dtype = dtype
        self._parameters = parameters
        self._aliased: dict[tuple[Owner, int], dict[PartKey, AliasedPart]] = {}
        self._own: dict[tuple[Owner, int], dict[PartKey, int]] = {}
        self._names: dict[Owner, dict[PartKey, str]] = {}

    def name(self, role: str, key: PartKey) -> str:
        """Name of the own buffer of a part."""
        owner = self._offload_policy.owner(role)
        if owner not in self._names:
            keys = [
                part_key(layout, rank)
                for place in self._places_of(owner)
                for layout in place.layouts
                for rank in layout.mesh.ranks
            ]
            self._names[owner] = {key: f"weights{number}" for number, key in enumerate(dict.fromkeys(keys))}
        return self._names[owner][key]

    def of(self, role: str, rank: int) -> Mapping[PartKey, AliasedPart]:
        """Where the parts of a role's model on a rank lie; empty where each has a buffer of its own."""
        at = (self._offload_policy.owner(role), rank)
        if at not in self._aliased:
            self._aliased[at] = {} if self._offload_policy.adapted else self._nested(role, rank)
        return self._aliased[at]

    def own_elements(self, role: str, rank: int) -> Mapping[PartKey, int]:
        """`AliasedPart.own` of the parts of `of`, without their places: forecasts ask for those of many plans."""
        at = (self._offload_policy.owner(role), rank)
        if at not in self._own:
            layouts = {} if self._offload_policy.adapted else self._candidates(role, rank)
            own: tuple[int, ...] = ()
            if len(layouts) > 1:
                shards, whole = [_shard_on(layout, rank) for layout in layouts.values()], self._whole(role, rank)
                same = Same(self._parameters(role))
                own = _own_elements(same, tuple(shards), tuple(key in whole for key in layouts))
            self._own[at] = dict(zip(layouts, own, strict=True)) if own else {}
        return self._own[at]

    def holdings(self, role: str, layout: Layout, ranks: Sequence[int], parameters: Parameters) -> Holdings:
        """What these ranks of a layout hold of what is trained of a role.

        Args:
            parameters: of that.
        """
        holdings, held = [], layout
        if self._offload_policy.adapted:
            held = layout.whole  # what is trained are adapters, which no ranks share
        for rank in ranks:
            key = part_key(layout, rank)
            if (nest := self.of(role, rank).get(key)) is not None:
                holdings.append(Holdings(parameters.params, self._dtype, {rank: nest.held}, {rank: nest.lengths}))
                continue
            whole = weights(parameters, held, self._dtype, self.name(role, key))
            holdings.append(Holdings(whole.params, self._dtype, {rank: whole.ranks[rank]}, {rank: whole.buffers[rank]}))
        return merged(holdings)

    def _nested(self, role: str, rank: int) -> dict[PartKey, AliasedPart]:
        layouts = self._candidates(role, rank)
        if len(layouts) < 2:
            return {}
        parameters = self._parameters(role)
        index = {param.name: number for number, param in enumerate(parameters.params)}
        names = {key: self.name(role, key) for key in layouts}
        parts: dict[str, tuple[Holding, ...]] = {
            name: flat_holdings(flat_of(parameters, layouts[key], rank), index, name) for key, name in names.items()
        }
        nests = nest(parts, parameters.params, {names[key] for key in self._whole(role, rank) if key in names})
        if all(set(part.lengths) == {name} for name, part in nests.items()):
            return {}
        return {key: nests[name] for key, name in names.items()}

    def _candidates(self, role: str, rank: int) -> dict[PartKey, Layout]:
        """Parts of a role's model on a rank that always are on the device, each with a layout that gives it."""
        layouts: dict[PartKey, Layout] = {}
        for place in self._places_of(self._offload_policy.owner(role)):
            for layout in place.layouts_on(rank):
                if not layout.shards_weights:
                    layouts.setdefault(part_key(layout, rank), layout)
        return {
            key: layout for key, layout in layouts.items() if self._offload_policy.of_weights(role, rank, key) == "keep"
        }

    def _whole(self, role: str, rank: int) -> set[PartKey]:
        """Parts that stay one buffer: of whole models, and of weights that are their own masters."""
        place = self._places[role]
        trained = next(model for model in self._models if model.role == role).trained
        train = place.train if trained and not parameter_bytes(self._dtype, trained=True).masters else None
        return {WHOLE} if train is None or rank not in train.mesh.ranks else {WHOLE, part_key(train, rank)}

    def _places_of(self, owner: Owner) -> list[RolePlacement]:
        return [self._places[model.role] for model in self._models if self._offload_policy.owner(model.role) == owner]


_Shard = tuple[Parallelism, int, int]
"""A layout of one copy, and the place of a rank along tp and pp."""


def _shard_on(layout: Layout, rank: int) -> _Shard:
    at = layout.coordinates(rank)
    return replace(layout.parallelism, dp=1), at.tp, at.pp


@lru_cache(maxsize=8192)
def _own_elements(same: Same, shards: tuple[_Shard, ...], are_whole: tuple[bool, ...]) -> tuple[int, ...]:
    """`AliasedPart.own` of several parts of a model on a rank; `are_whole`: those that stay one buffer."""
    parameters, names = same.parameters, [str(number) for number in range(len(shards))]
    index = {param.name: number for number, param in enumerate(parameters.params)}
    parts = {
        name: flat_holdings(shard(parameters, *of_part), index, name)
        for name, of_part in zip(names, shards, strict=True)
    }
    whole = {name for name, is_whole in zip(names, are_whole, strict=True) if is_whole}
    nests = nest(parts, parameters.params, whole)
    return tuple(nests[name].own for name in names)


def flat_of(parameters: Parameters, layout: Layout, rank: int) -> FlatLayout:
    """The blocks that a rank of a layout holds."""
    at = layout.coordinates(rank)
    return shard(parameters, layout.parallelism, at.tp, at.pp)
