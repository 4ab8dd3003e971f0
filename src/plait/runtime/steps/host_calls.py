"""Calls that no model computes: to read what the data give, and the functions of a flow, where the rows live."""

from __future__ import annotations

import numpy as np

from plait.data.computing import evaluate
from plait.data.given_rows import given_rows
from plait.data.rows import FloatArray
from plait.dataflow import CallKind, Level, Node
from plait.errors import RunError
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.steps.prompting import PromptWriting
from plait.runtime.steps.step import StepState
from plait.user_draws import drawing
from plait.workers.recorder import Recorder


class HostCalls:
    """READ, COMPUTE, PROMPT, GRADE, CARRIED and BECOMES nodes of a flow."""

    def __init__(self, prepared: Prepared, recorder: Recorder) -> None:
        self._flow, self._seed, self._recorder = prepared.flow, prepared.recipe.seed, recorder
        self._of_next_step = {node.next_value for node in prepared.flow.of_kind(CallKind.BECOMES)}
        self.writing = PromptWriting(prepared)

    def run(self, node: Node, state: StepState) -> None:
        """Do a call. Raises RunError: a function of the flow fails, or a carried value would change its shape."""
        match node.kind:
            case CallKind.READ:
                state.begin_table(node.id, given_rows(state.given[node.call], node.outputs))
            case CallKind.CARRIED:
                value = state.carried.get(node.call, np.asarray(node.start, dtype=np.float64))
                state.batch[node.outputs[0]] = value
                _record(node.call, value, state)
            case CallKind.BECOMES:
                self._keep(node, state)
            case _:
                noise = f"{self._seed} {state.step} {node.call}"
                with self._recorder.span(node.call, "COMPUTE"), drawing(noise):
                    self._compute(node, state)

    def _compute(self, node: Node, state: StepState) -> None:
        """A function of the flow."""
        if node.kind is CallKind.PROMPT:
            state.written[node.id] = self.writing.write(node, state)
            return
        is_grade, output = node.kind is CallKind.GRADE, node.outputs[0]
        values = self.writing.graded(node, state) if is_grade else evaluate(node, state.tables, state.batch)
        if output.level is not Level.BATCH:
            state.add(output, values)
            return
        state.batch[output] = values
        if output not in self._of_next_step:
            _record(node.call, values, state)

    def _keep(self, node: Node, state: StepState) -> None:
        name = self._flow.nodes[node.carried].call
        value = state.batch[node.next_value]
        now = state.batch[self._flow.nodes[node.carried].outputs[0]]
        if value.shape != now.shape:
            raise RunError(f"carried({name!r}) has shape {now.shape} and cannot become one of shape {value.shape}")
        state.next_carried[name] = value


def _record(name: str, value: FloatArray, state: StepState) -> None:
    """A number for the whole batch is a metric of its name."""
    if value.ndim == 0:
        state.metrics[name] = float(value)
