"""What makes tokens of prompts that a function of the flow has written (`plait.dataflow.prompts_from`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from plait.data.examples import ExampleSet
from plait.data.formats import Messages
from plait.data.mixture import Mixed
from plait.data.prompts import PromptSet
from plait.data.records import Prompt
from plait.dataflow import LABELLED, MISMATCHED, CallKind, Node


class Encodes(Protocol):
    """`PromptEncoder` or `ExampleEncoder`."""

    def asked(self, prompt: Prompt) -> str | Messages: ...

    def written(self, own: Prompt, asked: str | Messages, place: str) -> Prompt: ...


class PromptEncoders:
    """Those of a run's data: what is written for a sample becomes tokens as its own prompt did."""

    def __init__(self, train_set: Mixed[PromptSet] | None, given: Mapping[str, Mixed[ExampleSet]]) -> None:
        self._of_prompts = {} if train_set is None else {rows.source.label: rows.encoder for rows in train_set.sets}
        self._of_given = {
            name: {rows.source.label: rows.encoder for rows in mixed.sets} for name, mixed in given.items()
        }

    def of(self, made_by: Node, prompt: Prompt) -> Encodes:
        """That of a prompt of samples.

        Args:
            made_by: the call that makes or reads the samples.
        """
        if made_by.kind is CallKind.GENERATE:
            return self._of_prompts[prompt.source]
        name = LABELLED if made_by.call == MISMATCHED else made_by.call
        return self._of_given[name][prompt.source]
