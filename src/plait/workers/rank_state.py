"""What one rank holds of the roles of a flow: its parts of their models, with trainers and engines, and their moves.

The home layout of a role (where it trains, else where it scores) owns its weights. Other layouts hold copies: weights
are moved there before they are used, if the home has changed or the copy was dropped. If two layouts need the same part
of a model on one rank there is one part, and nothing is moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from torch import Tensor

from plait.cost.offload_policy import Copies, OffloadPolicy
from plait.dataflow import Dataflow
from plait.generation.engine import Engine
from plait.layout.holdings import weights
from plait.layout.mesh import Cluster, Layout
from plait.layout.move import plan_move
from plait.layout.move_plan import MovePlan
from plait.layout.params import Parameters
from plait.models.model import Model
from plait.models.parallel.team import Team
from plait.models.parallel.transfer import WaitingFor
from plait.reallocation.communicator import Channel
from plait.reallocation.mover import moving
from plait.reallocation.offload import HostMemory
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel
from plait.schedule.placements import WHOLE, PartKey, RolePlacement, part_key, parts_of, placements_of
from plait.schedule.plan import After, Mode, Plan
from plait.schedule.work import Work, nothing, to_the_end
from plait.training.trainer import Trainer
from plait.workers.call_messages import Forget, Generate, Halt, InstanceCommand, Listener, Migrate
from plait.workers.loading import room_for
from plait.workers.offload_manager import Need, OffloadManager, OffloadUnit
from plait.workers.rank_optimizers import RankOptimizers
from plait.workers.ranks import WAIT_S
from plait.workers.recorder import Recorder

if TYPE_CHECKING:
    from plait.workers.migrations import SampleMoverOfRank
    from plait.workers.prompt_moves import PromptMoverOfRank


class RankCommand(Protocol):
    """A command of the leader, as a value that travels: a call, or upkeep (`commands`)."""

    kind: ClassVar[str]
    """Names the command in its message."""

    def run(self, rank_state: RankState) -> Work[Any]:
        """This rank's part of it."""
        ...


@dataclass
class RoleState:
    """What this rank holds of one role; a field is None if the rank has no part in it."""

    role_model: RoleModel
    place: RolePlacement
    parts: dict[PartKey, Any]
    parameters: Parameters
    """The trained parameters of the whole model."""
    trainer: Trainer | None = None
    """Trains in the training layout."""
    scorer: Trainer | None = None
    """Scores in the scoring layout; the trainer itself if that has the same layout and micro-batches."""
    alone: Trainer | None = None
    """Scores in this rank's instance of the scoring layout, for calls that one instance computes."""
    engine: Engine | None = None
    instance: Team | None = None
    """The instance that the engine belongs to."""
    mover: SampleMoverOfRank | None = None
    """Moves samples to other instances; None: they stay where they begin."""
    prompts: PromptMoverOfRank | None = None
    """Moves prompts to other instances; None: they are computed where their samples are drawn."""
    moves: tuple[MovePlan, ...] = ()
    """From the home layout to each of `Setting.copies`."""
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """Buffers of the moves, by name."""
    state: OffloadUnit | None = None
    """The optimizer's state, if it does not stay on the device."""

    @property
    def model(self) -> Model:
        """A part of the model that this rank has; that of the home layout if it has one."""
        return next(iter(self.parts.values()))


@dataclass(frozen=True)
class Setting:
    """What a rank is told of a run, and what follows from it.

    plan:        completed: every call has its place
    waiting_for: context in which a rank waits for another one, for the errors of waits
    ahead_s:     how far this rank's clock is ahead of the one that all ranks tell times by (`worker_context.Place`)
    loads:       whether a checkpoint is loaded next: what optimizers begin with is not read before
    """

    recipe: Recipe
    flow: Dataflow
    models: Sequence[RoleModel]
    plan: Plan
    rank: int
    waiting_for: WaitingFor
    ahead_s: float = 0.0
    loads: bool = False

    @cached_property
    def cluster(self) -> Cluster:
        return self.plan.cluster

    @cached_property
    def places(self) -> dict[str, RolePlacement]:
        return {model.role: placements_of(self.plan, model.role) for model in self.models}

    @cached_property
    def offload_policy(self) -> OffloadPolicy:
        return OffloadPolicy(self.models, self.plan, adapted=self.recipe.lora.rank > 0)

    @property
    def moves_samples(self) -> bool:
        """Whether unfinished samples may go on in other instances."""
        return self.recipe.rebalance == "auto" or self.plan.fuses(self.recipe.fusion_rule)

    @cached_property
    def copies(self) -> dict[str, tuple[Copies, ...]]:
        """Role → its copies, each moved together; the number of a copy is its place there."""
        return {model.role: self.offload_policy.copies(model.role) for model in self.models}


class RankState:
    """All roles of this rank.

    Args:
        follow_moves: role that follows another → the move of the other's average to the role's home.
        joint_teams: of the layouts on which several roles train together, where this rank is a member.
    """

    def __init__(
        self,
        setting: Setting,
        roles: dict[str, RoleState],
        follow_moves: Mapping[str, MovePlan],
        joint_teams: Mapping[Layout, Team],
    ) -> None:
        self.rank, self.recipe, self.flow, self.ahead_s = setting.rank, setting.recipe, setting.flow, setting.ahead_s
        self.cluster, self.places, self.copies = setting.cluster, setting.places, setting.copies
        self.fuses = setting.plan.fuses(setting.recipe.fusion_rule)
        self.moves_samples = setting.moves_samples
        self.pair_tokens = {model.role: setting.plan.pair_tokens(model.role) for model in setting.models}
        """See `Plan.pair_tokens`."""
        self.roles = roles
        self.follow_moves, self.joint_teams = dict(follow_moves), dict(joint_teams)
        self._models = tuple(setting.models)
        self.follows = {model.role: model.follows for model in setting.models if model.follows}
        """Role → the role whose weights its own are brought towards."""
        self._channel = Channel(deadline_s=WAIT_S, waiting_for=setting.waiting_for)
        self._offload_policy = setting.offload_policy
        self.held_copies = {
            role: setting.offload_policy.held_copies(role) if self.recipe.max_staleness else () for role in self.places
        }
        """Role → numbers of the copies that keep the weights that were published last while the role is trained."""
        self._units: dict[int, OffloadUnit] = {}
        """Id of a buffer that leaves the device and comes back → its unit."""
        self.offloads = self._offloads()
        self.offloads.want()
        self.listeners: dict[str, Listener] = {}
        """Role → this rank as a member of its instance."""
        trained = {
            role: (role_state.trainer, role_state.parameters)
            for role, role_state in roles.items()
            if role_state.role_model.trained and role_state.trainer is not None
        }
        self.optimizers = RankOptimizers(trained, self.offloads, self.cluster, self.rank)

    @property
    def recorder(self) -> Recorder:
        """Records what this rank does."""
        assert self.offloads.recorder is not None, f"nothing records rank {self.rank}"
        return self.offloads.recorder

    def take(self, number: int, command: RankCommand | InstanceCommand) -> Work[Any]:
        """This rank's part of a command, on the leader as on any other rank. A word is heard at once and leaves nothing
        to do: the instance takes it up in one of its steps."""
        match command:
            case Generate() | Migrate() | Halt() | Forget():
                self.listeners[command.role].hear(number, command)
                return nothing()
            case _:
                return command.run(self)

    @property
    def keeps_all(self) -> bool:
        """Whether nothing ever leaves its device."""
        return self._offload_policy.keeps_all

    def copies_for(self, role: str, mode: Mode) -> frozenset[tuple[str, int]]:
        """The copies that a role's calls of a mode need, as (role, number in `copies`)."""
        return frozenset((role, n) for n, copies in enumerate(self.copies[role]) if mode in copies.modes)

    def moving_all(self, role: str, numbers: Sequence[int]) -> Work[None]:
        """Move a role's weights from its home to some of its copies."""
        self.make_room(role, numbers)
        if (role_state := self.roles.get(role)) is not None:
            for number in numbers:
                yield from self.moving_by(role_state.moves[number], role_state.buffers, f"{role}.weights")

    def moving_by(self, plan: MovePlan, buffers: Mapping[str, Tensor], name: str) -> Work[None]:
        """Do this rank's row of a move between `buffers` (by name, flat), if it has one."""
        if self.rank in plan.rows:
            yield from moving(plan, self.rank, buffers, self._channel, name=name)

    def make_room(self, role: str, numbers: Sequence[int]) -> None:
        """Before weights move to these copies: load what this rank sends, and make room for what comes."""
        role_state = self.roles.get(role)
        if role_state is None:
            return
        sends = (
            any(self.rank in role_state.moves[number].rows for number in numbers)
            and self.rank in role_state.place.home.mesh.ranks
        )
        mine = [key for number in numbers for rank, key in self.copies[role][number].parts if rank == self.rank]
        filled = [self._units.get(id(role_state.parts[key].trained.flat.whole)) for key in mine]
        needs: list[Need] = [(role, "home")] if sends else []
        self.offloads.want(*needs, filled=[unit for unit in filled if unit is not None])

    # -- what leaves the device

    def _offloads(self) -> OffloadManager:
        needs: dict[Need, list[OffloadUnit]] = {}
        for role, role_state in self.roles.items():
            place = role_state.place
            layouts_of_uses: tuple[tuple[Literal["train", "score", "decode", "home"], Sequence[Layout | None]], ...] = (
                ("train", (place.train,)),
                ("score", (place.scoring,)),
                ("decode", place.generate),
                ("home", (place.home,)),
            )
            for use, layouts in layouts_of_uses:
                for layout in layouts:
                    if layout is not None and self.rank in layout.mesh.ranks:
                        needs[role, use] = self._units_of(role_state, part_key(layout, self.rank))
            if role_state.state is not None:
                needs[role, "train"].append(role_state.state)
        return OffloadManager(needs)

    def _units_of(self, role_state: RoleState, key: PartKey) -> list[OffloadUnit]:
        """The units of a part of a model that leave the device: its weights, and the role's own adapter."""
        role, model = role_state.role_model.role, role_state.parts[key]
        changes = role_state.role_model.changes and model.own is None
        kind = "weights" if (self.rank, key) in parts_of(role_state.place.home) else "copy"
        after = self._offload_policy.of_weights(role, self.rank, key)
        units = [self._unit(model.weights, after, role, kind, keep=not changes)]
        if model.own is not None:
            after = self._offload_policy.of_adapter(role, self.rank, key)
            units.append(self._unit(model.own.weights, after, role, "adapter", keep=not role_state.role_model.trained))
        return [unit for unit in units if unit is not None]

    def _unit(self, buffer: Tensor, after: After, role: str, what: str, *, keep: bool) -> OffloadUnit | None:
        """The unit of a buffer, which roles may share; None if the buffer stays on the device."""
        if after == "keep":
            return None
        if id(buffer) not in self._units:
            self._units[id(buffer)] = OffloadUnit(HostMemory({what: buffer}, keep=keep, name=role), after, role)
        return self._units[id(buffer)]

    def gather(self, role: str) -> Any:
        """The whole model of a role on rank 0, with the weights of its home; None on other ranks. Rank 0 returns its
        own model if it has the whole one there, else a new one in host memory, to which each rank of the home sends
        its part."""
        place, dtype = self.places[role].home, self.recipe.dtype.value
        if self.rank in place.mesh.ranks:
            self.offloads.want((role, "home"))
        if 0 in place.mesh.ranks and part_key(place, 0) == WHOLE:
            return self.roles[role].parts[WHOLE] if self.rank == 0 else None
        role_state = self.roles.get(role)
        role_model = next(role_model for role_model in self._models if role_model.role == role)
        model = room_for(role_model, self.recipe) if self.rank == 0 else None
        if role_state is not None:
            parameters = role_state.parameters
        else:
            assert model is not None, f"rank {self.rank} has no part in gathering {role}"
            parameters = model.trained.parameters
        held = place.whole if self.recipe.lora.rank > 0 else place  # adapters are whole on each rank
        source, target = weights(parameters, held, dtype, "part"), weights(parameters, Layout.on((0,)), dtype, "whole")
        plan = plan_move(source, target, self.cluster)
        buffers = {}
        if role_state is not None and self.rank in place.mesh.ranks:
            buffers["part"] = role_state.parts[part_key(place, self.rank)].trained.flat.flat("cpu")
        if model is not None:
            buffers["whole"] = model.trained.weights
        if self.rank in plan.rows:
            to_the_end(moving(plan, self.rank, buffers, self._channel, name=f"{role}.gather"))
        return model
