"""What a plan is searched for: calls and their costs, and what limits the layouts of each role."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from plait.cost.costs import Costs
from plait.layout.mesh import Layout, Parallelism
from plait.schedule.plan import Mode
from plait.simulator.step_graph import StepGraph

MOST_STAGES = 16
"""The most stages of a pipeline: more are slower than tensor parallelism wherever that is allowed."""


@dataclass(frozen=True)
class RoleFacts:
    """What limits the layouts of a role's model.

    layer_work:  of each layer, in any unit; where layers are unlike, each call says what they take (`StageWork`)
    first, last: of what the first and last stage compute beside layers, in that unit
    layer_sizes: weights of each layer, as multiples of the average one's; empty: layers are alike
    max_tp:      ways in which its narrowest matrix can be cut
    whole_layers: its instances do not divide layers (`sampling.exact`): sums over ranks round in another way
    trains_whole: its training does not divide layers (`sequence_parallel`, where each rank needs all tokens)
    may_drop:    False where what is dropped could not be brought back
    one_copy:    a schedule in which it trains together with others has one copy of it (its gradients are divided)
    prompts_apart: its prompts may be computed on other devices than its samples
    shards_weights: ranks of dp that train it share its weights
    """

    layer_work: tuple[float, ...]
    first: float = 0.0
    last: float = 0.0
    layer_sizes: tuple[float, ...] = ()
    max_tp: int = 1
    whole_layers: bool = False
    trains_whole: bool = False
    may_drop: bool = True
    one_copy: bool = False
    prompts_apart: bool = False
    shards_weights: bool = False


StageWork = tuple[tuple[float, tuple[float, ...]], ...]
"""By pipeline stage: how fast its devices are with the average layer of a call, in any unit, and what each layer of the
model takes there, in such layers. Empty where all layers are alike, and all stages on devices alike."""

StageWorks = Callable[[str, Mode, Layout], StageWork]
"""Call, mode and layout → what its layers take on the devices of each stage."""


@dataclass(frozen=True)
class PlanProblem:
    """
    roles: of every role of the graph
    micro_batch_tokens: to choose from, beside the recipe's (None)
    pairs: of roles that may train together
    stage_works: asked for meshes over nodes of several kinds, and roles whose layers are unlike
    """

    graph: StepGraph
    costs: Costs
    roles: Mapping[str, RoleFacts]
    micro_batch_tokens: tuple[int, ...] = ()
    smallest_mesh: int = 1
    pairs: tuple[tuple[str, str], ...] = ()
    stage_works: StageWorks = lambda call, mode, layout: ()

    def shares(self, slot: int, sizes: Parallelism) -> bool:
        """Whether ranks of dp share the weights that a slot trains with, whatever else a plan has."""
        what = self.graph.slots[slot]
        return what.mode == "train" and sizes.dp > 1 and self.roles[what.role].shards_weights

    def may_share(self, slot: int, sizes: Parallelism) -> bool:
        """Whether a slot scores with what ranks of dp share, if a training is on its ranks in the same parallelism."""
        what, owners = self.graph.slots[slot], self.graph.owners
        return (
            what.mode == "score"
            and sizes.dp > 1
            and any(
                owners.get(role, role) == owners.get(what.role, what.role)
                for role, facts in self.roles.items()
                if facts.shards_weights
            )
        )

    @property
    def num_devices(self) -> int:
        return self.costs.cluster.mesh_cluster.num_devices
