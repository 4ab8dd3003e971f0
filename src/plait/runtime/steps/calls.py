"""What each call of a flow does, one action at a time: read, compute, generate, score or train.

A SCORE call may begin while the samples that it scores are still being drawn: `ScoringMode` says how.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from functools import partial

import numpy as np

from plait.data.computing import trained_rows
from plait.data.rows import FloatArray, Rows
from plait.dataflow import CallKind, Node
from plait.engines import GenerationEngine, LossOver, ScoredBy, TrainingEngine
from plait.observe.progress import ProgressSink
from plait.policy.score_parts import PartSize
from plait.recipes.generated_ahead import scores_ahead
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.steps.free_copies import Copies, where_free
from plait.runtime.steps.host_calls import HostCalls
from plait.runtime.steps.rewarding import RewardCalls
from plait.runtime.steps.roles import ModelRole, Roles, models_of, rewards_of
from plait.runtime.steps.rollout import Draw, Rollout
from plait.runtime.steps.scoring_parts import RolloutParts, Spread, Table, in_parts
from plait.runtime.steps.step import StepState
from plait.schedule.dispatch import Task
from plait.schedule.joint_training import fused_calls
from plait.schedule.needs import may_stream
from plait.schedule.work import Work, at_once
from plait.workers.recorder import Recorder


class ScoringMode(Enum):
    """When and where a SCORE call computes. All modes but the first score in parts (`scoring_parts`), which are the
    same however late the call begins."""

    AFTER = auto()
    """When the rollout has ended: all samples at once."""
    BESIDE = auto()
    """As samples end, on ranks that do not generate (or on none: a reward function's)."""
    IN_TURNS = auto()
    """As samples end, on ranks that do not generate. While it waits for samples other calls may use them, as nothing
    has to leave the devices for that."""
    WHERE_FREE = auto()
    """On the ranks that generate, as soon as they have no samples left."""


class Calls:
    """The calls of a flow, bound to the engines of its roles."""

    def __init__(self, prepared: Prepared, roles: Roles, recorder: Recorder, progress: ProgressSink) -> None:
        self._flow = flow = prepared.flow
        recipe = prepared.recipe
        self._roles, self._models, self._rewards = roles, models_of(roles), rewards_of(roles)
        self._recorder = recorder
        self._progress = progress
        self.rewarding = RewardCalls(flow, roles, recorder, progress)
        self.rollout = Rollout(flow, self.rewarding, recipe, progress)
        self._host = HostCalls(prepared, recorder)
        self._recipe = recipe
        self.ahead = scores_ahead(flow, recipe)
        """Ids of the SCORE calls that score samples in the step that draws them; None: all do, as no batch is drawn
        ahead of its step."""
        self._groups = self._groups_of()

    def mesh(self, node: Node, step: int, *, begins: bool = False) -> frozenset[int]:
        """The ranks that a call keeps busy in a step. With `begins` the ranks that send it weights are included. Empty
        for a call that takes ranks only when they are free."""
        mode = self.scoring_mode(node, step)
        is_free = mode is ScoringMode.WHERE_FREE or (mode is ScoringMode.IN_TURNS and not begins)
        return frozenset() if is_free else self._mesh(node, begins=begins)

    def _mesh(self, node: Node, *, begins: bool = False) -> frozenset[int]:
        trainer = self.trainer(node)
        if trainer is None:
            return frozenset()
        mesh = trainer.mesh(node.kind, begins=begins)
        resample = node.generation.resample if node.kind is CallKind.GENERATE else None
        asked = None if resample is None else self._rewards.get(resample.reward)
        for scorer in () if asked is None else asked.scorers.values():
            mesh |= scorer.trainer.mesh(CallKind.SCORE, begins=begins)
        return mesh

    def trainer(self, node: Node) -> TrainingEngine | None:
        """The engine of the model that a call asks; None: it asks no model."""
        role = self._roles.get(str(node.role))
        return None if role is None else role.trainer

    def scoring_mode(self, node: Node, step: int) -> ScoringMode:
        """How a SCORE call computes in a step; AFTER for any other call. The plan decides between the modes; whether
        ranks that generate also score is decided by the recipe, or by the run's gate for this step."""
        if not may_stream(node, self._flow):
            return ScoringMode.AFTER
        source, engine = self._rollout_of(node)
        if self._mesh(node).isdisjoint(self._mesh(source)):
            return ScoringMode.IN_TURNS if engine.traits.shares_devices else ScoringMode.BESIDE
        trainer = self.trainer(node)
        is_drawn = self.ahead is not None and node.id not in self.ahead  # all samples are there when its step begins
        if is_drawn or trainer is None or not trainer.scoring_instances:
            return ScoringMode.AFTER
        if engine.moves is None or not engine.moves.gathers:
            return ScoringMode.AFTER
        pays = self.rollout.gate.early(step, source.call, self.rollout.size_of(source, engine)).pays
        return ScoringMode.WHERE_FREE if pays else ScoringMode.AFTER

    def _scores_where_free(self, rows: int, step: int) -> list[Node]:
        """The calls that score the samples of a rollout (by its id) on its own ranks, in the order of the flow."""
        readers = [node for node in self._flow.nodes if node.rows == rows]
        return [node for node in readers if self.scoring_mode(node, step) is ScoringMode.WHERE_FREE]

    def work(self, node: Node, state: StepState, draw: Draw, task: Task, *, is_ahead: bool = False) -> Work[None]:
        """The actions of a call that does not train (`trained`), whose weights are already where it needs them.

        Args:
            task: of the call; its mesh changes while the call takes and frees ranks.
            is_ahead: a later step trains on the batch: of a reward its model is asked alone.

        Raises:
            RunError: a carried value would change its shape; and what the engine that is asked raises.
        """
        match node.kind:
            case CallKind.GENERATE:
                if node.prompts is not None:
                    state.made[node.id] = self._host.writing.made(node, state)
                is_fused = bool(self._scores_where_free(node.id, state.step))
                return self.rollout.work(node, self._engine(node), state, draw, task if is_fused else None)
            case CallKind.SCORE if str(node.role) not in self._models:
                # Looked up only if the model is asked: where it has scored the batch before, there may be no rollout.
                spread = lambda call, name: self._spread(node, state, task)(call, name)
                return self.rewarding.work(node, state, spread, task.release, is_ahead=is_ahead)
            case CallKind.SCORE:
                return self._scored(node, state, self._spread(node, state, task))
            case _:
                return at_once(self._host.run)(node, state)

    def keeps_weights(self, node: Node) -> bool:
        """Whether a GENERATE call can go on with the last published weights while its role is trained."""
        return self._engine(node).traits.keeps_weights

    def runs_beside(self, node: Node) -> bool:
        """Whether a GENERATE call may go on while calls of other batches compute. Its engine must have its own copy of
        the weights, nothing may have to leave the device for the other calls, and ranks that generate together must
        not compute other calls."""
        engine, mesh = self._engine(node), self._mesh(node)
        if not engine.traits.keeps_weights or not engine.traits.shares_devices:
            return False
        others = [other for other in self._flow.nodes if other.kind is not CallKind.GENERATE]
        return len(mesh) == engine.traits.num_instances or all(mesh.isdisjoint(self._mesh(other)) for other in others)

    # -- score

    def _spread(self, node: Node, state: StepState, task: Task) -> Spread:
        """How a SCORE call is computed: all rows at once or in parts as samples end, by which copies of the model."""
        mode, trainer = self.scoring_mode(node, state.step), self.trainer(node)
        if mode is ScoringMode.AFTER or trainer is None:
            written = None if node.prompts is None else state.written[node.prompts]
            return partial(in_parts, Table(lambda: state.born[node.rows] if written is None else written.rows))
        rollout, behind = state.growing[node.rows], (state.step, node.rows)
        part_tokens = trainer.tokens_of_a_part(rollout.root_tokens)
        if mode is ScoringMode.WHERE_FREE:
            instances, order = trainer.scoring_instances, self._scores_where_free(node.rows, state.step)
            is_last, copies = node is order[-1], len(instances)
            size = PartSize(part_tokens // copies, node is order[0], copies if is_last else None)
            num_split = self.rollout.num_split(*self._rollout_of(node), state.step)
            parts = RolloutParts(rollout, size, self._running(node), num_split)
            return partial(where_free, parts, Copies(instances, behind, copies if is_last else 0), task)
        parts = RolloutParts(rollout, PartSize(part_tokens), self._running(node))
        if mode is ScoringMode.IN_TURNS:
            return partial(where_free, parts, Copies((self._mesh(node),), behind, alone=False), task)
        return partial(in_parts, parts)

    def _running(self, node: Node) -> int:
        """How many samples run at a time in the rollout that a call scores; 1 for an engine that does not tell the
        lengths of running samples."""
        traits = self._rollout_of(node)[1].traits
        return traits.num_instances * self._recipe.sampling.max_running if traits.tells_lengths else 1

    def _scored(self, node: Node, state: StepState, spread: Spread) -> Work[None]:
        self._progress.phase(node.call, 0, "actions")
        scored = yield from spread(partial(self._score, node, state), node.call)
        while node.rows not in state.tables:  # all samples are scored, and the rollout has not ended yet
            yield None
        samples = tuple(sample for rows, _ in scored for sample in rows.samples)
        state.add_scored(node.outputs, Rows(samples), np.concatenate([values for _, values in scored]))
        state.scored.add(node.id)

    def _score(self, node: Node, state: StepState, rows: Rows, name: str, by: ScoredBy | None) -> Work[FloatArray]:
        """A SCORE call of a model; its result is the column."""
        temperature = self._temperature(node)
        if node.prompts is not None:
            rows = state.written[node.prompts].behind(rows)
        return self._model(node).trainer.score(rows, node.scoring, temperature=temperature, call=name, by=by)

    # -- train

    def partners(self, node: Node, step: int) -> tuple[Node, ...]:
        """All calls that one schedule computes together with this one in a step, itself included, in the order of the
        flow: training calls of the same optimizer steps, and of roles that train together by the plan. One that does
        nothing in this step is alone."""
        if node.id not in self._groups or step < node.training.after:
            return (node,)
        return tuple(partner for partner in self._groups[node.id] if step >= partner.training.after)

    def _groups_of(self) -> dict[int, tuple[Node, ...]]:
        """Id of each training call that trains together with others → all of these calls."""
        trainers = [role.trainer for role in self._roles.values() if role.trainer is not None]
        updates = [update for role in self._flow.trained_roles for update in self._flow.updates(role)]
        together = {trainer.trains_with for trainer in trainers if len(trainer.trains_with) > 1}
        groups = [*updates, *(group for roles in together for group in fused_calls(self._flow, roles))]
        return {node.id: group for group in groups for node in group}

    def over(self, node: Node, state: StepState) -> LossOver:
        """What a TRAIN call trains on in this step: rows with the columns that its loss reads."""
        rows = trained_rows(node, state.tables)
        if node.keep is not None:
            state.count(f"{node.role}/samples_left_out", len(state.tables[node.rows]) - len(rows))
        return LossOver(node, rows, self._temperature(node), state.batch)

    def trained(self, overs: Sequence[LossOver], step: int) -> Work[list[dict[str, float]]]:
        """Train by the calls of `partners`; the metrics of each."""
        self._progress.phase(" + ".join(over.node.call for over in overs), 0, "actions")
        return self._model(overs[0].node).trainer.train(overs, step=step)

    def evaluated(self, node: Node, state: StepState) -> Work[dict[str, float]]:
        """The metrics that training on the samples would have, without training on them."""
        self._progress.phase(node.call, 0, "actions")
        return self._model(node).trainer.evaluate(self.over(node, state))

    def _temperature(self, node: Node) -> float | None:
        """Given samples were not drawn at the sampling temperature: their log-probs are those at 1."""
        return 1.0 if self._flow.nodes[node.rows].kind is CallKind.READ else None

    def _model(self, node: Node) -> ModelRole:
        role = self._models.get(str(node.role))
        assert role is not None, f"{node.call}: role `{node.role}` is no model"
        return role

    def _engine(self, rollout: Node) -> GenerationEngine:
        """The engine of a GENERATE call."""
        engine = self._model(rollout).engine
        assert engine is not None, f"{rollout.call}: role `{rollout.role}` has no generation engine"
        return engine

    def _rollout_of(self, node: Node) -> tuple[Node, GenerationEngine]:
        """The GENERATE call whose samples a SCORE call scores, and its engine."""
        rollout = self._flow.nodes[node.rows]
        return rollout, self._engine(rollout)
