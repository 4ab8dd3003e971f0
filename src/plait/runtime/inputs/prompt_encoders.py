"""What makes tokens of prompts that a function of the flow has written (`plait.dataflow.build_prompts`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from plait.data.examples import ExampleSet
from plait.data.formats import Messages
from plait.data.mixture import Mixed
from plait.data.prompts import PromptEncoder, PromptSet
from plait.data.records import Prompt
from plait.data.settings import DataSettings
from plait.dataflow import LABELLED, MISMATCHED, CallKind, Node


class Encodes(Protocol):
    """`PromptEncoder`, `ExampleEncoder`, or `AnsweredEncoder`."""

    def asked(self, prompt: Prompt) -> str | Messages: ...

    def written(self, own: Prompt, asked: str | Messages, place: str) -> Prompt: ...


class AnsweredEncoder:
    """Makes tokens of prompts that a model answers: nothing is put around them of what `data` puts around its own. They
    go through the chat template, if the tokenizer has one and `data.chat_template` is not false."""

    def __init__(self, tokenizer: Any, settings: DataSettings) -> None:
        is_chat = tokenizer.chat_template is not None and settings.chat_template is not False
        nothing = {"prompt_template": None, "system_prompt": None, "examples": (), "chat_template_kwargs": {}}
        settings = settings.model_copy(update={**nothing, "chat_template": is_chat})
        self._encoder = PromptEncoder(tokenizer, settings, conversational=False)

    def asked(self, prompt: Prompt) -> str | Messages:
        """A prompt as a function of the flow has made it."""
        return prompt.columns["prompt"]

    def written(self, own: Prompt, asked: str | Messages, place: str) -> Prompt:
        """See `PromptEncoder.written`. Tools of the row are not told."""
        told = {name: value for name, value in own.columns.items() if name == "chat_template_kwargs"}
        prompt = self._encoder.written(replace(own, columns=told), asked, place)
        return replace(prompt, columns={**own.columns, "prompt": asked})


class PromptEncoders:
    """Those of a run: what is written for a sample becomes tokens as its own prompt did.

    Args:
        answered: of prompts that are made of samples.
    """

    def __init__(
        self,
        train_set: Mixed[PromptSet] | None,
        given: Mapping[str, Mixed[ExampleSet]],
        answered: AnsweredEncoder,
    ) -> None:
        self.answered = answered
        self._of_prompts = {} if train_set is None else {rows.source.label: rows.encoder for rows in train_set.sets}
        self._of_given = {
            name: {rows.source.label: rows.encoder for rows in mixed.sets} for name, mixed in given.items()
        }

    def of(self, made_by: Node, prompt: Prompt) -> Encodes:
        """That of a prompt of samples.

        Args:
            made_by: the call that makes or reads the samples.
        """
        if prompt.made_of is not None:
            return self.answered
        if made_by.kind is CallKind.GENERATE:
            return self._of_prompts[prompt.source]
        name = LABELLED if made_by.call == MISMATCHED else made_by.call
        return self._of_given[name][prompt.source]
