"""Runs one training step of a dataflow on one device: every call in graph order, each as small actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from plait.data.rows import FloatArray, Rows, evaluate, spread_to
from plait.dataflow import CallKind, Dataflow, Level, Node
from plait.errors import RunError
from plait.observe.progress import Progress
from plait.runtime.recipe import Recipe
from plait.runtime.recorder import Recorder
from plait.runtime.rewarding import Rewarding
from plait.runtime.roles import ModelRole, RewardRole, RoleRuntime
from plait.runtime.rollout import Draw, Rollout
from plait.runtime.step import StepState
from plait.training.trainer import COUNTS


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
        for node in self.flow.nodes:
            if node.kind is CallKind.GENERATE:
                engine = self._model(node).engine
                assert engine is not None, f"{node.call}: role `{node.role}` has no generation engine"
                self._rollout.run(node, engine, state, draw)
            elif node.kind is CallKind.TRAIN:
                if state.step >= node.options["after"]:
                    self.is_training = True
                    _merge(self._train(node, state, evaluate=False), node, state)
            else:
                self._run(node, state)
        self.is_training = False

    def evaluate_given(self, state: StepState) -> dict[str, float]:
        """The metrics that training on the given samples of `state` would have, without training on them."""
        metrics: dict[str, float] = {}
        for node in self.flow.nodes:
            assert node.kind is not CallKind.GENERATE, "a flow that generates is evaluated by what it says"
            if node.kind is CallKind.TRAIN:
                metrics |= self._train(node, state, evaluate=True)
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
                state.add(node.outputs[0], self._score(node, state))
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

    def _score(self, node: Node, state: StepState) -> FloatArray:
        trainer, rows = self._model(node).trainer, state.tables[node.rows]
        match node.call.split("#")[0].rsplit(".", 1)[1]:
            case "logprobs":
                work = trainer.logprobs(rows, call=node.call, temperature=self._temperature(node))
            case "values":
                work = trainer.values(rows, call=node.call)
            case _:
                work = trainer.scores(rows, call=node.call)
        return self.recorder.drive(work, node, self.progress)

    def _train(self, node: Node, state: StepState, *, evaluate: bool) -> dict[str, float]:
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
            work = trainer.evaluate(rows, columns, node.fn, **options)
        else:
            options |= {name: node.options[name] for name in ("mini_batches", "epochs")}
            work = trainer.train(rows, columns, node.fn, step=state.step, **options)
        return self.recorder.drive(work, node, self.progress)

    def _temperature(self, node: Node) -> float | None:
        """Given samples were not drawn at the sampling temperature: their log-probs are those at 1."""
        return 1.0 if self.flow.nodes[node.rows].kind is CallKind.READ else None

    def _model(self, node: Node) -> ModelRole:
        role = self.roles[str(node.role)]
        assert isinstance(role, ModelRole), f"{node.call}: role `{node.role}` is no model"
        return role


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
