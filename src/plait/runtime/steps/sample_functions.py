"""PROMPT and GRADE nodes: functions of the flow that get the texts of a group, as a reward function does."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np

from plait.data.computing import belonging, of_group
from plait.data.records import Sample
from plait.data.rows import FloatArray
from plait.dataflow import Dataflow, Node
from plait.dataflow.from_samples import title_of_call
from plait.dataflow.graph import texts_of
from plait.dataflow.prompt_call import taken
from plait.errors import DataError, RunError
from plait.rewards.call_results import as_number
from plait.rewards.calls import call_arguments
from plait.runtime.inputs.prompt_encoders import PromptEncoders
from plait.runtime.steps.step import StepState
from plait.user_code import CALL_LIMIT_S, UserCode, is_users, saying_where


class SampleFunctions:
    """Calls them.

    Args:
        encoders: know the prompts as they stood in the data.
    """

    def __init__(self, flow: Dataflow, encoders: PromptEncoders) -> None:
        self._flow, self._encoders = flow, encoders

    def returned(self, node: Node, members: Sequence[int], state: StepState) -> list[Any]:
        """What the function of a node returns for a group of its rows, one entry for each sample.

        Args:
            members: positions of the group.

        Raises:
            RunError: it raises, or does not return a list of so many.
        """
        fn, title = node.fn, title_of_call(node)
        assert fn is not None, f"{node.call} has no function"
        rows = state.tables[node.rows]
        samples = [rows.samples[place] for place in members]
        given = self._arguments(node, title, samples)
        columns = of_group(node, members, state.tables, state.batch)
        texts = {name: self._texts(node, members, call, state) for name, call in texts_of(node).items()}
        # Each entry is the function's own: it may change messages, which are the data's, in their place.
        own = {name: [copy.deepcopy(value) for value in values] for name, values in taken(fn, given).items()}
        users, where = is_users(fn), f"{title}, {samples[0].prompt.title()}"
        with UserCode(where, RunError, users=users, limit_s=CALL_LIMIT_S if users else None):
            returned = fn(**{**own, **taken(fn, {**columns, **texts})})
        is_other = not isinstance(returned, Collection) or isinstance(returned, str | bytes | Mapping | Set)
        count = None if is_other else len(returned)
        if count != len(samples):
            found = f"{type(returned).__name__} {returned!r:.60}" if count is None else str(count)
            what = "prompt" if not node.outputs else "number or None"
            error = RunError(f"{where}: expected a list with one {what} per sample ({len(samples)}), found {found}")
            raise saying_where(error, fn)
        return list(returned)

    def _arguments(self, node: Node, title: str, samples: Sequence[Sample]) -> dict[str, list[Any]]:
        """What a reward function would get of these samples; the prompt as it stood in the data, or as it was made."""
        prompt = samples[0].prompt
        encoder = self._encoders.of(self._flow.nodes[node.rows], prompt)
        try:
            asked = encoder.asked(prompt)
        except DataError as error:
            raise RunError(f"{title}: {error}") from None
        columns = {name: value for name, value in prompt.columns.items() if name != "prompt"}
        prompt = replace(prompt, columns={"prompt": asked, **columns})
        return call_arguments([replace(sample, prompt=prompt) for sample in samples])

    def _texts(self, node: Node, members: Sequence[int], call: int, state: StepState) -> list[list[str]]:
        """For each of these samples what was said to the prompts that are made of it."""
        rows, others = state.tables[node.rows], state.tables[call]
        return [
            [others.samples[i].text for i in belonging(rows, node.rows, (place,), others, call)] for place in members
        ]


def grades(node: Node, functions: SampleFunctions, state: StepState) -> FloatArray:
    """The column of a GRADE node, [samples]; NaN where the function read nothing.

    Raises:
        RunError: as `SampleFunctions.returned`; or something else than a number, or None, for each sample.
    """
    rows = state.tables[node.rows]
    values = np.full(len(rows), math.nan)
    for members in rows.groups.values():
        for place, grade in zip(members, functions.returned(node, members, state), strict=True):
            if grade is not None:
                values[place] = _number(node, rows.samples[place], grade)
    return values


def _number(node: Node, sample: Sample, grade: Any) -> float:
    value = as_number(grade)
    if value is None or math.isinf(value):
        assert node.fn is not None, f"{node.call} has no function"
        where = f"{title_of_call(node)}, {sample.prompt.title(sample.index)}"
        raise saying_where(RunError(f"{where}: expected a finite number or None, found {grade!r:.80}"), node.fn)
    return value
