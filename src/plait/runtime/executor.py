"""Runs one training step of a dataflow: what each of its calls does, action by action; `dispatch` says what goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from plait.data.rows import FloatArray, Rows, evaluate, trained_rows
from plait.dataflow import CallKind, Dataflow, Level, Node
from plait.errors import RunError
from plait.observe.progress import Progress
from plait.runtime.dispatch import Arrivals, Dispatcher, Ongoing
from plait.runtime.order import needs_of, scores_alone
from plait.runtime.ranks.commands import LEADER
from plait.runtime.recipes.recipe import Recipe
from plait.runtime.recorder import Recorder
from plait.runtime.rewarding import Rewarding
from plait.runtime.roles import ModelRole, RewardRole, RoleRuntime
from plait.runtime.rollout import Draw, Rollout
from plait.runtime.step import StepState
from plait.runtime.streams import Part, Steps, begun, in_parts
from plait.training.trainer import COUNTS, Trainer

if TYPE_CHECKING:
    from plait.runtime.ranks.crew import Crew
    from plait.runtime.ranks.crew_calls import CrewTrainer

HERE = frozenset({LEADER})


class Executor:
    """Binds a dataflow to the engines of its roles and runs steps of it.

    Args:
        crew: all ranks, where there are several.
    """

    def __init__(
        self,
        flow: Dataflow,
        roles: Mapping[str, RoleRuntime],
        recipe: Recipe,
        recorder: Recorder,
        progress: Progress,
        crew: Crew | None = None,
    ) -> None:
        self.flow = flow
        self.roles = roles
        self.recorder = recorder
        self.progress = progress
        self.is_training = False
        """Whether a step is beyond its first training call, so that weights are no longer those before it."""
        self._needs = needs_of(flow, roles)
        self._of_next_step = {node.inputs["value"] for node in flow.of_kind(CallKind.BECOMES)}
        self._rewarding = Rewarding(flow, roles, recorder, progress)
        self._rollout = Rollout(flow, self._rewarding, recipe, recorder, progress)
        self._max_response_tokens = recipe.sampling.max_response_tokens
        pools = [role.pool for role in roles.values() if isinstance(role, RewardRole) and role.pool is not None]
        self._arrivals = Arrivals(pools, crew)
        self._doing = nullcontext if crew is None else crew.board.doing

    def run_step(self, state: StepState, draw: Draw) -> None:
        """Generate, score, compute and train.

        Args:
            state: with the data of the step; the calls add to it. Its step keys the draws; logs count from 1.
            draw: gives further prompts to a flow that asks for them.

        Raises:
            RunError: every sample of the step lost its reward, or a call failed.
        """
        self.recorder.step = state.step + 1
        trained, said = _InOrder(self.flow, state), _Said(state)
        Dispatcher(
            self.flow.nodes,
            self._needs,
            early=lambda node: node.rows in state.growing and self._streams(node),
            mesh=partial(self._mesh, begins=True),
            begin=lambda node: self._begun(node, state, draw, trained),
            arrivals=self._arrivals,
            doing=self._doing,
            went_on=said.by,
        ).run()
        for table, rows in state.tables.items():  # as graph order has them, whatever ended first
            columns = sorted(rows.columns.items(), key=lambda item: item[0].producer)
            state.tables[table] = Rows(rows.samples, dict(columns))
        said.sort()
        self.is_training = False

    def evaluate_given(self, state: StepState) -> dict[str, float]:
        """The metrics that training on the given samples of `state` would have, without training on them."""
        metrics: dict[str, float] = {}

        def begin(node: Node) -> Ongoing:
            assert node.kind is not CallKind.GENERATE, "a flow that generates is evaluated by what it says"
            if node.kind is CallKind.TRAIN:
                return Ongoing(node, self._evaluated(node, state, metrics), self._mesh(node))
            return self._begun(node, state, lambda count: (), _InOrder(self.flow, state))

        for node in self.flow.nodes:  # one after another: metrics of a name are those of the last
            Dispatcher(
                [node],
                {node.id: frozenset()},
                early=lambda _: False,
                mesh=self._mesh,
                begin=begin,
                arrivals=self._arrivals,
                doing=self._doing,
            ).run()
        return metrics

    def _begun(self, node: Node, state: StepState, draw: Draw, trained: _InOrder) -> Ongoing:
        trainer = self._trainer(node)
        ongoing = Ongoing(node, self._little(node, state), self._mesh(node, begins=True))
        role = self.roles.get(str(node.role))
        if node.kind is CallKind.GENERATE:
            engine = self._model(node).engine
            assert engine is not None, f"{node.call}: role `{node.role}` has no generation engine"
            ongoing.steps = self._rollout.steps(node, engine, state, draw)
        elif node.kind is CallKind.TRAIN:
            ongoing.steps = self._trained(node, state, trained)
        elif isinstance(role, RewardRole):

            def free() -> None:
                ongoing.mesh = frozenset()

            ongoing.steps = self._rewarding.steps(node, state, self._parts(node, state), free)
        elif node.kind is CallKind.SCORE:
            ongoing.steps = self._scored(node, state)
        if trainer is not None and not isinstance(trainer, Trainer):
            ongoing.steps = self._moved_first(ongoing, trainer.freshening(node.kind), ongoing.steps)
        return ongoing

    def _moved_first(self, ongoing: Ongoing, moves: Iterator[None], steps: Steps) -> Steps:
        """The ranks that bring weights are free again when these are there."""
        for _ in moves:
            yield True
        ongoing.mesh = self._mesh(ongoing.node)
        yield from steps

    def _mesh(self, node: Node, *, begins: bool = False) -> frozenset[int]:
        """The ranks that a call keeps busy; to begin, with those that bring it weights."""
        trainer = self._trainer(node)
        if trainer is None:
            return frozenset()
        if isinstance(trainer, Trainer):
            return HERE
        mesh = trainer.mesh(node.kind, begins=begins)
        resample = node.options.get("resample") if node.kind is CallKind.GENERATE else None
        if resample is not None and (judge := self._rewarding.scorer_of(resample.reward)) is not None:
            mesh |= HERE if isinstance(judge, Trainer) else judge.mesh(CallKind.SCORE, begins=begins)
        return mesh

    def _trainer(self, node: Node) -> Trainer | CrewTrainer | None:
        """Of the model that a call asks; None: it asks none."""
        role = self.roles.get(str(node.role))
        if isinstance(role, ModelRole):
            return role.trainer
        return None if role is None else self._rewarding.scorer_of(str(node.role))

    # -- calls that score

    def _streams(self, node: Node) -> bool:
        """Whether a call scores parts of a rollout, as its samples are finished: on other ranks than those that
        generate. That is the plan's to say, not the clock's, and it computes the same parts when it begins late."""
        source, scores = self.flow.nodes[node.rows], node.kind is CallKind.SCORE
        if not scores or source.kind is not CallKind.GENERATE or source.options["resample"] is not None:
            return False
        is_reward = isinstance(self.roles[str(node.role)], RewardRole)
        return (is_reward or scores_alone(node, self.roles)) and not self._mesh(node) & self._mesh(source)

    def _parts(self, node: Node, state: StepState) -> list[Part]:
        """What is scored together: the rows of the call, or parts of them."""
        trainer = self._trainer(node)
        if self._streams(node) and trainer is not None and not isinstance(trainer, Trainer):
            return state.growing[node.rows].parts(self._max_response_tokens, trainer.tokens_of_a_part)
        return [lambda: state.born[node.rows]]

    def _scored(self, node: Node, state: StepState) -> Steps:
        call = partial(self._score, node)
        found = yield from in_parts(self._parts(node, state), call, node, self.recorder, self.progress)
        while node.rows not in state.tables:  # its last samples have been scored before it has ended
            yield False
        samples = tuple(sample for rows, _ in found for sample in rows.samples)
        state.add_scored(node.outputs[0], Rows(samples), np.concatenate([values for _, values in found]))

    def _score(self, node: Node, rows: Rows, name: str) -> Iterator[Any]:
        """The steps of a SCORE call of a model; its result is the column."""
        trainer = self._model(node).trainer
        match node.call.split("#")[0].rsplit(".", 1)[1]:
            case "logprobs":
                return trainer.logprobs(rows, call=name, temperature=self._temperature(node))
            case "values":
                return trainer.values(rows, call=name)
            case _:
                return trainer.scores(rows, call=name)

    # -- calls that train

    def _trained(self, node: Node, state: StepState, trained: _InOrder) -> Steps:
        metrics = None
        if state.step >= node.options["after"]:
            self.is_training = True
            self.progress.phase(node.call, 0, "actions")
            work, ready = begun(self._train(node, state, evaluate=False))
            metrics = yield from self.recorder.actions(work, node, self.progress, ready)
        trained.ended(node, metrics)

    def _evaluated(self, node: Node, state: StepState, metrics: dict[str, float]) -> Steps:
        self.progress.phase(node.call, 0, "actions")
        work, ready = begun(self._train(node, state, evaluate=True))
        metrics |= yield from self.recorder.actions(work, node, self.progress, ready)

    # -- calls that read and compute

    def _little(self, node: Node, state: StepState) -> Steps:
        """What is done at once."""
        match node.kind:
            case CallKind.READ:
                self._read(node, state)
            case CallKind.COMPUTE:
                self._compute(node, state)
            case CallKind.CARRIED:
                start = np.asarray(node.options["start"], dtype=np.float64)
                value = state.carried.get(node.call, start)
                state.batch[node.outputs[0]] = value
                _record(node.call, value, state)
            case CallKind.BECOMES:
                self._keep(node, state)
        return
        yield

    def _read(self, node: Node, state: StepState) -> None:
        given = sorted(state.given[node.call], key=lambda one: (one.sample.prompt.uid, one.sample.index))
        rows = Rows(tuple(one.sample for one in given))
        trained = np.array([flag for one in given for flag in one.trained], dtype=np.float64)
        margins = [one.margin for one in given]
        rows = rows.with_column(node.outputs[0], trained).with_column(node.outputs[1], margins)
        state.begin_table(node.id, rows)

    def _compute(self, node: Node, state: StepState) -> None:
        output = node.outputs[0]
        with self.recorder.span(node.call, "COMPUTE"):
            values = evaluate(node, state.tables, state.batch)
        if output.level is Level.BATCH:
            state.batch[output] = values
            if output not in self._of_next_step:
                _record(node.call, values, state)
        else:
            state.add(output, values)

    def _keep(self, node: Node, state: StepState) -> None:
        name = self.flow.nodes[node.options["carried"]].call
        value = state.batch[node.inputs["value"]]
        now = state.batch[self.flow.nodes[node.options["carried"]].outputs[0]]
        if value.shape != now.shape:
            raise RunError(f"carried({name!r}) has shape {now.shape} and cannot become one of shape {value.shape}")
        state.next_carried[name] = value

    def _train(self, node: Node, state: StepState, *, evaluate: bool) -> Iterator[Any]:
        """The steps of a TRAIN call; its result is metrics."""
        rows, columns, mask = trained_rows(node, state.tables)
        if "keep" in node.inputs:
            state.metrics[f"{node.role}/samples_left_out"] = len(state.tables[node.rows]) - len(rows)
        assert node.fn is not None
        options: dict[str, Any] = {
            "mask": mask,
            "whole_groups": node.options["whole_groups"],
            "batch_values": state.batch,
            "call": node.call,
            "temperature": self._temperature(node),
        }
        trainer = self._model(node).trainer
        if evaluate:
            return trainer.evaluate(rows, columns, node.fn, **options)
        options |= {name: node.options[name] for name in ("mini_batches", "epochs")}
        return trainer.train(rows, columns, node.fn, step=state.step, **options)

    def _temperature(self, node: Node) -> float | None:
        """Given samples were not drawn at the sampling temperature: their log-probs are those at 1."""
        return 1.0 if self.flow.nodes[node.rows].kind is CallKind.READ else None

    def _model(self, node: Node) -> ModelRole:
        role = self.roles[str(node.role)]
        assert isinstance(role, ModelRole), f"{node.call}: role `{node.role}` is no model"
        return role


class _Said:
    """Metrics in the order of the calls that say them, whichever ended first."""

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._by: dict[str, int] = dict.fromkeys(state.metrics, -1)

    def by(self, node: Node) -> None:
        """What is new is of this call."""
        for name in list(self._state.metrics)[len(self._by) :]:
            self._by[name] = node.id

    def sort(self) -> None:
        self._state.metrics = dict(sorted(self._state.metrics.items(), key=lambda item: self._by[item[0]]))


class _InOrder:
    """Takes the metrics of training calls as they end, and merges them in graph order."""

    def __init__(self, flow: Dataflow, state: StepState) -> None:
        self._left = list(flow.of_kind(CallKind.TRAIN))
        self._state = state
        self._ended: dict[int, dict[str, float] | None] = {}

    def ended(self, node: Node, metrics: dict[str, float] | None) -> None:
        """None: the call had nothing to do in this step."""
        self._ended[node.id] = metrics
        while self._left and self._left[0].id in self._ended:
            first = self._left.pop(0)
            found = self._ended[first.id]
            if found is not None:
                _merge(found, first, self._state)


def _merge(metrics: dict[str, float], node: Node, state: StepState) -> None:
    """A role that is trained twice in a step: counts add up, the second's other numbers stand under its call's name."""
    for name, value in metrics.items():
        if name in state.metrics and name.rpartition("/")[2] in COUNTS:
            state.metrics[name] += value
        else:
            state.metrics[f"{node.call}/{name.rpartition('/')[2]}" if name in state.metrics else name] = value


def _record(name: str, value: FloatArray, state: StepState) -> None:
    """A number for the whole batch is a metric of its name."""
    if value.ndim == 0:
        state.metrics[name] = float(value)
