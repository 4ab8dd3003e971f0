"""PROMPT nodes: a function of the flow writes another prompt for each sample, a group at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from plait.data.formats import checked_prompt
from plait.data.lineage import made_of
from plait.data.records import MADE_UID, Prompt, Sample
from plait.data.replaced_prompts import WrittenPrompts
from plait.data.rows import FloatArray
from plait.dataflow import CallKind, Node
from plait.dataflow.from_samples import title_of_call
from plait.dataflow.made_rows import samples_of_prompt
from plait.errors import PlaitError, RunError
from plait.policy.blocks import BLOCK_TOKENS
from plait.recipes.engine_checks import abilities
from plait.recipes.length_limits import longest_sample
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.inputs.prompt_encoders import AnsweredEncoder, Encodes, PromptEncoders
from plait.runtime.steps.sample_functions import SampleFunctions, grades
from plait.runtime.steps.step import StepState
from plait.user_code import saying_where


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
        self._flow, self._recipe, self._shapes = prepared.flow, prepared.recipe, prepared.shapes
        answered = AnsweredEncoder(prepared.tokenizer, prepared.recipe.data)
        self._encoders = PromptEncoders(prepared.train_set, prepared.given, answered)
        self._functions = SampleFunctions(prepared.flow, self._encoders)
        self._vocabulary = prepared.shape.vocabulary
        self._models = models = {model.role: model for model in prepared.models}
        self._readers: dict[int, list[Reader]] = {}
        """Id of a PROMPT node → the calls that score responses behind its prompts."""
        for node in prepared.flow.of_kind(CallKind.SCORE):
            if node.prompts is not None and str(node.role) in models:  # else it is not asked (`measured.of_asked`)
                model = models[str(node.role)]
                reader = Reader(node.call, model.name, model.key, prepared.shapes[model.name].max_positions)
                self._readers.setdefault(node.prompts, []).append(reader)

    def graded(self, node: Node, state: StepState) -> FloatArray:
        """See `sample_functions.grades`."""
        return grades(node, self._functions, state)

    def write(self, node: Node, state: StepState) -> WrittenPrompts:
        """The prompts that a PROMPT node writes for its samples, as they are in the step.

        Raises:
            RunError: the function raises, or does not return a text or messages for each sample; or one of these cannot
                be tokenised, or is too long for a model that is to read it.
        """
        rows, prompts = state.tables[node.rows], dict[str, Prompt]()
        for members in rows.groups.values():
            samples = [rows.samples[place] for place in members]
            written = self._of_group(node, samples, self._functions.returned(node, members, state))
            prompts |= {sample.uid: prompt for sample, prompt in zip(samples, written, strict=True)}
        return WrittenPrompts(rows, prompts)

    def _of_group(self, node: Node, samples: Sequence[Sample], returned: Sequence[Any]) -> list[Prompt]:
        """What the function returned for a group, in tokens: as before the same responses, if somebody scores these
        behind it, else as it is answered. Raises RunError."""
        is_read = node.id in self._readers
        own = self._encoders.of(self._flow.nodes[node.rows], samples[0].prompt)
        try:
            return self._encoded(node, samples, returned, own if is_read else self._encoders.answered)
        except PlaitError as error:
            assert node.fn is not None, f"{node.call} has no function"
            raise saying_where(RunError(str(error)), node.fn) from None

    def _encoded(
        self, node: Node, samples: Sequence[Sample], returned: Sequence[Any], encoder: Encodes
    ) -> list[Prompt]:
        """Raises DataError, RunError."""
        title = title_of_call(node)
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
        self._check_ids(prompt, place)
        length = len(prompt.token_ids) + sample.num_tokens
        for reader in self._readers.get(node.id, ()):
            if length > reader.max_positions:
                raise RunError(
                    f"{place}: the prompt has {len(prompt.token_ids)} tokens, {length} with the response, but "
                    f"{reader.call} reads it by `{reader.model}` (key `{reader.key}`), whose positions end at "
                    f"{reader.max_positions}; return shorter prompts, lower `sampling.max_response_tokens`, or give "
                    "another model"
                )

    def _check_ids(self, prompt: Prompt, place: str) -> None:
        if not prompt.token_ids:
            raise RunError(f"{place}: the prompt has no token")
        if (largest := max(prompt.token_ids)) >= self._vocabulary:
            raise RunError(
                f"{place}: the tokenizer writes token {largest} for the prompt, but the model has only "
                f"{self._vocabulary}; give the model its own tokenizer, or return another text"
            )

    # -- answered by a model

    def made(self, node: Node, state: StepState) -> tuple[Prompt, ...]:
        """The prompts of a GENERATE node that answers written ones: one for each sample that they were written for.

        Raises:
            RunError: one cannot be tokenised, or leaves no room for an answer.
        """
        assert node.prompts is not None, f"{node.call} answers the prompts of the step"
        writer, written = self._flow.nodes[node.prompts], state.written[node.prompts]
        prompts = []
        for sample in written.rows.samples:
            place = f"{title_of_call(writer)}, {sample.prompt.title(sample.index)}"
            prompt = written.prompts[sample.uid]
            if writer.id in self._readers:
                prompt = self._alone(writer, prompt, place)
            self._check_room(node, writer, prompt, place)
            prompts.append(replace(prompt, uid=self._uid(sample, writer.rows), made_of=made_of(sample, writer.rows)))
        return tuple(prompts)

    def _alone(self, writer: Node, prompt: Prompt, place: str) -> Prompt:
        """A written prompt in the tokens in which it is answered."""
        try:
            prompt = self._encoders.answered.written(prompt, prompt.columns["prompt"], place)
            self._check_ids(prompt, place)
        except PlaitError as error:
            assert writer.fn is not None, f"{writer.call} has no function"
            raise saying_where(RunError(str(error)), writer.fn) from None
        return prompt

    def _uid(self, sample: Sample, call: int) -> int:
        """The uid of the prompt that is made of a sample: they are in the order of the samples."""
        made, count = made_of(sample, call), self._recipe.samples_per_prompt
        number = made.uid
        for drawn_by, index in made.samples:
            number = number * samples_of_prompt(self._flow.nodes[drawn_by], count) + index
        return MADE_UID + number

    def _check_room(self, node: Node, writer: Node, prompt: Prompt, place: str) -> None:
        """Raises RunError where a prompt leaves no room for as long an answer as may be drawn."""
        sampling = self._recipe.sampling
        answer, length = node.generation.limit(sampling.max_response_tokens), len(prompt.token_ids)
        model, shape = self._models[str(node.role)], self._shapes[self._models[str(node.role)].name]
        pool = sampling.num_blocks(shape.max_positions) * BLOCK_TOKENS
        bounds = [
            (shape.max_positions, f"the positions of `{model.name}` (key `{model.key}`) end at"),
            (pool, "the tokens whose keys and values have room (`sampling.kv_tokens`) are"),
        ]
        if (program := abilities(self._recipe).program) is not None:
            makes_room = f"the tokens for which {program} makes room (`data.max_prompt_tokens` says it, if set) are"
            bounds.append((longest_sample(self._recipe, shape), makes_room))
        most, bound = min(bounds, key=itemgetter(0))
        if length + answer <= most:
            return
        assert writer.fn is not None, f"{writer.call} has no function"
        error = RunError(
            f"{place}: the prompt has {length} tokens, {length + answer} with an answer of {node.call}, but {bound} "
            f"{most}; return shorter prompts, give {node.call} a smaller `max_tokens`, or lower "
            "`sampling.max_response_tokens`"
        )
        raise saying_where(error, writer.fn)
