"""PROMPT nodes: a function of the flow writes another prompt for each sample, a group at a time."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from plait.data.behind import WrittenPrompts
from plait.data.formats import checked_prompt
from plait.data.records import Prompt, Sample
from plait.data.rows import of_group
from plait.dataflow import Node
from plait.dataflow.prompt_call import taken
from plait.errors import DataError, PlaitError, RunError
from plait.rewards.calls import call_arguments
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.inputs.prompt_encoders import Encodes, PromptEncoders
from plait.runtime.steps.step import StepState
from plait.user_code import CALL_LIMIT_S, UserCode, is_users, saying_where, title_of


@dataclass(frozen=True)
class Reader:
    """A call that reads written prompts, each with the response behind it."""

    call: str
    model: str
    key: str
    """The recipe's, which names the model."""
    max_positions: int


class PromptWriting:
    """The PROMPT nodes of a flow, bound to the data of a run."""

    def __init__(self, prepared: Prepared) -> None:
        self._flow = prepared.flow
        self._encoders = PromptEncoders(prepared.train_set, prepared.given)
        self._vocabulary = prepared.shape.vocabulary
        models = {model.role: model for model in prepared.models}
        self._readers: dict[int, list[Reader]] = {}
        for node in prepared.flow.nodes:
            if node.prompts is not None and str(node.role) in models:  # else it is not asked (`measured.of_asked`)
                model = models[str(node.role)]
                reader = Reader(node.call, model.name, model.key, prepared.shapes[model.name].max_positions)
                self._readers.setdefault(node.prompts, []).append(reader)

    def write(self, node: Node, state: StepState) -> WrittenPrompts:
        """The prompts that a PROMPT node writes for its samples, as they are in the step.

        Raises:
            RunError: the function raises, or does not return a text or messages for each sample; or one of these cannot
                be tokenised as the run's prompts are, or is too long for a model that is to read it.
        """
        assert node.fn is not None, f"{node.call} has no function"
        rows, prompts = state.tables[node.rows], dict[str, Prompt]()
        for uid, members in rows.groups.items():
            samples = [rows.samples[place] for place in members]
            written = self._of_group(node, samples, of_group(node, uid, state.tables, state.batch))
            prompts |= {sample.uid: prompt for sample, prompt in zip(samples, written, strict=True)}
        return WrittenPrompts(rows, prompts)

    def _of_group(self, node: Node, samples: Sequence[Sample], columns: Mapping[str, Any]) -> list[Prompt]:
        fn, title = node.fn, _title(node)
        assert fn is not None, f"{node.call} has no function"
        encoder = self._encoders.of(self._flow.nodes[node.rows], samples[0].prompt)
        try:
            asked = encoder.asked(samples[0].prompt)
        except DataError as error:
            raise RunError(f"{title}: {error}") from None
        data = {name: value for name, value in samples[0].prompt.columns.items() if name != "prompt"}
        data = {"prompt": asked, **data}
        given = call_arguments([replace(sample, prompt=replace(sample.prompt, columns=data)) for sample in samples])
        # Each entry is the function's own: it may change messages, which are the data's, in their place.
        own = {name: [copy.deepcopy(value) for value in values] for name, values in taken(fn, given).items()}
        users, where = is_users(fn), f"{title}, {samples[0].prompt.title()}"
        with UserCode(where, RunError, users=users, limit_s=CALL_LIMIT_S if users else None):
            returned = fn(**{**own, **taken(fn, columns)})
        try:
            return self._checked(node, samples, returned, encoder)
        except PlaitError as error:
            raise saying_where(RunError(str(error)), fn) from None

    def _checked(self, node: Node, samples: Sequence[Sample], returned: Any, encoder: Encodes) -> list[Prompt]:
        """What the function returned for a group, in tokens. Raises DataError, RunError."""
        title = _title(node)
        is_other = not isinstance(returned, Collection) or isinstance(returned, str | bytes | Mapping | Set)
        count = None if is_other else len(returned)
        if count != len(samples):
            found = f"{type(returned).__name__} {returned!r:.60}" if count is None else count
            raise RunError(
                f"{title}, {samples[0].prompt.title()}: expected a list with one prompt per sample ({len(samples)}), "
                f"found {found}"
            )
        prompts: list[Prompt] = []
        for sample, asked, before in zip(samples, returned, (None, *returned), strict=False):
            place = f"{title}, {sample.prompt.title(sample.index)}"
            if not prompts or asked != before:  # else it was just encoded
                prompts.append(encoder.written(sample.prompt, checked_prompt(asked, place), place))
            else:
                prompts.append(prompts[-1])
            self._check(node, sample, prompts[-1], place)
        return prompts

    def _check(self, node: Node, sample: Sample, prompt: Prompt, place: str) -> None:
        """Raises RunError where no model could read it."""
        if not prompt.token_ids:
            raise RunError(f"{place}: the prompt has no token")
        if (largest := max(prompt.token_ids)) >= self._vocabulary:
            raise RunError(
                f"{place}: the tokenizer writes token {largest} for the prompt, but the model has only "
                f"{self._vocabulary}; give the model its own tokenizer, or return another text"
            )
        length = len(prompt.token_ids) + sample.num_tokens
        for reader in self._readers.get(node.id, ()):
            if length > reader.max_positions:
                raise RunError(
                    f"{place}: the prompt has {len(prompt.token_ids)} tokens, {length} with the response, but "
                    f"{reader.call} reads it by `{reader.model}` (key `{reader.key}`), whose positions end at "
                    f"{reader.max_positions}; return shorter prompts, lower `sampling.max_response_tokens`, or give "
                    "another model"
                )


def _title(node: Node) -> str:
    assert node.fn is not None, f"{node.call} has no function"
    return f"prompts_from({title_of(node.fn)})"
