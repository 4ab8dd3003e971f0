"""Runs one training step of a dataflow: every call in graph order, each as small actions.

Calls that run on other ranks only begin as soon as what they need is there and their ranks are free, and go on beside
what runs here. Their results are taken in as graph order would have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plait.data.rows import FloatArray, Rows, evaluate, spread_to
from plait.dataflow import CallKind, Dataflow, Level, Node
from plait.errors import RunError
from plait.observe.progress import Progress
from plait.runtime.commands import LEADER
from plait.runtime.crew import CrewCall
from plait.runtime.order import needs_of
from plait.runtime.recipe import Recipe
from plait.runtime.recorder import Recorder
from plait.runtime.rewarding import Rewarding
from plait.runtime.roles import ModelRole, RewardRole, RoleRuntime
from plait.runtime.rollout import Draw, Rollout
from plait.runtime.scorer import ModelScorer
from plait.runtime.step import StepState
from plait.training.trainer import COUNTS, Trainer


class Executor:
    """Binds a dataflow to the engines of its roles and runs steps of it."""

    def __init__(
        self,
        flow: Dataflow,
        roles: Mapping[str, RoleRuntime],
        recipe: Recipe,
        recorder: Recorder,
        progress: Progress,
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

    def run_step(self, state: StepState, draw: Draw) -> None:
        """Generate, score, compute and train, in the order of the graph.

        Args:
            state: with the data of the step; the calls add to it. Its step keys the draws; logs count from 1.
            draw: gives further prompts to a flow that asks for them.

        Raises:
            RunError: every sample of the step lost its reward, or a call failed.
        """
        self.recorder.step = state.step + 1
        waiting = list(self.flow.nodes)
        elsewhere: list[_Elsewhere] = []
        trained = _InOrder(self.flow, state)
        while waiting or elsewhere:
            left = {node.id for node in waiting} | {one.node.id for one in elsewhere}
            ready = [node for node in waiting if not self._needs[node.id] & left]
            for node in ready:
                if (begun := self._begun_elsewhere(node, state, elsewhere)) is not None:
                    elsewhere.append(begun)
                    waiting.remove(node)
            busy = {rank for one in elsewhere for rank in one.mesh}
            node = next((node for node in ready if node in waiting and not self._mesh(node) & busy), None)
            if node is None:
                self._land(elsewhere, state, trained)
            else:
                self._run_here(node, state, draw, trained)
                waiting.remove(node)
        for table, rows in state.tables.items():  # as graph order has them, whatever ended first
            columns = sorted(rows.columns.items(), key=lambda item: item[0].producer)
            state.tables[table] = Rows(rows.samples, dict(columns))
        self.is_training = False

    def _run_here(self, node: Node, state: StepState, draw: Draw, trained: _InOrder) -> None:
        if node.kind is CallKind.GENERATE:
            engine = self._model(node).engine
            assert engine is not None, f"{node.call}: role `{node.role}` has no generation engine"
            self._rollout.run(node, engine, state, draw)
        elif node.kind is CallKind.TRAIN:
            metrics = None
            if state.step >= node.options["after"]:
                self.is_training = True
                metrics = self.recorder.drive(self._train(node, state, evaluate=False), node, self.progress)
            trained.ended(node, metrics)
        else:
            self._run(node, state)

    def _mesh(self, node: Node) -> frozenset[int]:
        """The ranks that a call of a model needs, where there are several."""
        match self.roles.get(str(node.role)):
            case ModelRole(trainer=trainer) | RewardRole(scorer=ModelScorer(trainer=trainer)):
                return frozenset() if isinstance(trainer, Trainer) else trainer.mesh(node.kind)
            case _:
                return frozenset()

    def _begun_elsewhere(self, node: Node, state: StepState, others: Sequence[_Elsewhere]) -> _Elsewhere | None:
        """Begin a call in which this rank has no part; None where it has, or other calls have its ranks."""
        mesh = self._mesh(node)
        if isinstance(self.roles.get(str(node.role)), RewardRole):  # its functions report to this rank
            return None
        if not mesh or LEADER in mesh or any(mesh & other.mesh for other in others):
            return None
        if node.kind is CallKind.TRAIN:
            if state.step < node.options["after"]:
                return None
            self.is_training = True
            work = self._train(node, state, evaluate=False)
        elif node.kind is CallKind.SCORE:
            work = self._score(node, state)
        else:
            return None
        assert isinstance(work, CrewCall), f"{node.call} runs on other ranks"
        work.begin()
        return _Elsewhere(node, work, mesh, state.tables[node.rows])

    def _land(self, elsewhere: list[_Elsewhere], state: StepState, trained: _InOrder) -> None:
        """Wait for a call on other ranks: one that has ended already, or the first."""
        one = next((one for one in elsewhere if one.work.ready), elsewhere[0])
        result = self.recorder.drive(one.work, one.node, self.progress)
        elsewhere.remove(one)
        if one.node.kind is CallKind.TRAIN:
            trained.ended(one.node, result)
            return
        rows = state.tables[one.node.rows]
        if rows.samples != one.rows.samples:  # some have been left out meanwhile
            output = one.node.outputs[0]
            places = {(sample.prompt.uid, sample.index): i for i, sample in enumerate(one.rows.samples)}
            kept = [places[sample.prompt.uid, sample.index] for sample in rows.samples]
            result = one.rows.with_column(output, result).select(kept).columns[output]
        state.add(one.node.outputs[0], result)

    def evaluate_given(self, state: StepState) -> dict[str, float]:
        """The metrics that training on the given samples of `state` would have, without training on them."""
        metrics: dict[str, float] = {}
        for node in self.flow.nodes:
            assert node.kind is not CallKind.GENERATE, "a flow that generates is evaluated by what it says"
            if node.kind is CallKind.TRAIN:
                metrics |= self.recorder.drive(self._train(node, state, evaluate=True), node, self.progress)
            else:
                self._run(node, state)
        return metrics

    def _run(self, node: Node, state: StepState) -> None:
        """A call that reads, scores or computes."""
        match node.kind:
            case CallKind.READ:
                self._read(node, state)
            case CallKind.SCORE if isinstance(self.roles[str(node.role)], RewardRole):
                self._rewarding.score(node, state)
            case CallKind.SCORE:
                values = self.recorder.drive(self._score(node, state), node, self.progress)
                state.add(node.outputs[0], values)
            case CallKind.COMPUTE:
                self._compute(node, state)
            case CallKind.CARRIED:
                start = np.asarray(node.options["start"], dtype=np.float64)
                value = state.carried.get(node.call, start)
                state.batch[node.outputs[0]] = value
                _record(node.call, value, state)
            case CallKind.BECOMES:
                self._keep(node, state)

    def _read(self, node: Node, state: StepState) -> None:
        given = sorted(state.given[node.call], key=lambda one: (one.sample.prompt.uid, one.sample.index))
        rows = Rows(tuple(one.sample for one in given))
        trained = np.array([flag for one in given for flag in one.trained], dtype=np.float64)
        margins = [one.margin for one in given]
        state.tables[node.id] = rows.with_column(node.outputs[0], trained).with_column(node.outputs[1], margins)

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

    def _score(self, node: Node, state: StepState) -> Iterator[Any]:
        """The steps of a SCORE call; its result is the column."""
        trainer, rows = self._model(node).trainer, state.tables[node.rows]
        match node.call.split("#")[0].rsplit(".", 1)[1]:
            case "logprobs":
                return trainer.logprobs(rows, call=node.call, temperature=self._temperature(node))
            case "values":
                return trainer.values(rows, call=node.call)
            case _:
                return trainer.scores(rows, call=node.call)

    def _train(self, node: Node, state: StepState, *, evaluate: bool) -> Iterator[Any]:
        """The steps of a TRAIN call; its result is metrics."""
        rows = state.tables[node.rows]
        columns = dict(node.inputs)
        for column in columns.values():
            if column.level is not Level.BATCH and column.rows != node.rows:
                rows = rows.with_column(column, spread_to(column, state.tables[column.rows], rows, node.call))
        keep, mask = columns.pop("keep", None), columns.pop("mask", None)
        if keep is not None:
            kept = np.flatnonzero(rows.columns[keep])
            state.metrics[f"{node.role}/samples_left_out"] = len(rows) - len(kept)
            rows = rows.select(kept.tolist())
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


@dataclass(frozen=True)
class _Elsewhere:
    """A call on its way, on ranks of which this is none."""

    node: Node
    work: CrewCall
    mesh: frozenset[int]
    rows: Rows
    """As they were when it began."""


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
