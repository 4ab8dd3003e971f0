"""What decides in a run which samples go on in other instances, where its recipe and its plan leave that open."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from plait.cost.sample_moves import sample_move_times
from plait.dataflow import CallKind, Node
from plait.policy.migration import MoveTimes
from plait.runtime.folder.decisions import LENGTHS_OF_STEPS, Experience, response_lengths
from plait.runtime.folder.run_files import RunFiles
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.prediction.machine import machine_of
from plait.runtime.steps.gates import AtShare, Gate
from plait.runtime.steps.rebalancing import Rebalancer
from plait.runtime.steps.roles import Roles
from plait.runtime.steps.step import StepState
from plait.runtime.steps.tail import FusionGate
from plait.schedule.fusion_times import FusionTimes
from plait.schedule.placements import placements_of
from plait.schedule.plan import FUSION
from plait.schedule.timeline import Timeline


@dataclass(frozen=True)
class RolloutMoves:
    """What decides in a run whether samples move between instances, and when."""

    gate: Gate
    """Says when the last samples of a rollout are gathered."""
    rebalancer: Rebalancer | None = None
    """Says which samples go on in another instance before that; None: none does."""
    rollout: Node | None = None
    """The first rollout of the flow, from which both learn; None: neither learns."""

    @classmethod
    def of(cls, prepared: Prepared, files: RunFiles, step: int) -> RolloutMoves:
        """For a run that has done `step` steps, of which its folder has the samples."""
        recipe, rollouts = prepared.recipe, prepared.flow.of_kind(CallKind.GENERATE)
        rule = recipe.fusion_rule
        gathers, rebalances = rule.is_open and prepared.plan.fuses(rule), recipe.rebalance == "auto"
        if not (gathers or rebalances) or not rollouts:
            return cls(AtShare(rule.share))
        lag = recipe.max_staleness
        samples = [files.samples(number) for number in range(max(1, step + 1 - LENGTHS_OF_STEPS - lag), step + 1)]
        lengths = [response_lengths(file, rollouts[0].call) for file in samples if file.is_file()]
        times = _move_times(prepared, rollouts[0])
        experience = partial(Experience, lengths=lengths, times=times, step=step, lag=lag)
        return cls(
            FusionGate(experience(files.fusion), _fusion_times(prepared)) if gathers else AtShare(rule.share),
            Rebalancer(experience(files.rebalancing)) if rebalances else None,
            rollouts[0],
        )

    def learn(self, state: StepState, timeline: Timeline, roles: Roles) -> None:
        """After a step.

        Args:
            timeline: what every rank did in it.
        """
        if self.rollout is None:
            return
        lengths = [sample.num_tokens for sample in state.generated[self.rollout.id].samples]
        engine = roles[str(self.rollout.role)].engine
        assert engine is not None, f"{self.rollout.call}: nothing generates"
        self.gate.learn(timeline, lengths, engine.traits.num_instances)
        if self.rebalancer is not None:
            self.rebalancer.learn(timeline, lengths)


def _fusion_times(prepared: Prepared) -> FusionTimes:
    """Settings of the plan's policy, which are there when a run is prepared."""
    settings = next(policy.settings for policy in prepared.plan.policies if policy.name == FUSION)
    return FusionTimes.of(settings, f"plan `{prepared.recipe.plan}`: settings of `{FUSION}`")


def _move_times(prepared: Prepared, rollout: Node) -> MoveTimes:
    """What it takes to have samples go on in other instances. Messages of NCCL meet in the order in which both sides
    post them, so that nothing can go ahead beside others."""
    recipe, plan = prepared.recipe, prepared.plan
    cluster, _ = machine_of(recipe, prepared.shape, plan.num_ranks)
    instance = placements_of(plan, str(rollout.role)).generate[0]
    times = sample_move_times(prepared.shape, recipe.dtype.value, instance, cluster)
    return replace(times, may_go_ahead=recipe.device != "cuda")
