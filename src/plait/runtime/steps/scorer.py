"""A reward model that scores what the actor said: in its own tokens and its own chat template, where these differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from plait.data.assistant_turns import SpokenFinder
from plait.data.chat import READS_TO_MARKER, Ids, left_out, not_found, render
from plait.data.formats import Row
from plait.data.records import FinishReason, Sample, conversation
from plait.data.rows import FloatArray, Rows
from plait.dataflow import Score
from plait.engines import ScoredBy, TrainingEngine
from plait.errors import ModelError, RunError
from plait.policy.packing import common_length
from plait.rewards.settings import OnError
from plait.schedule.work import Work


@dataclass(frozen=True)
class ModelScorer:
    """The score is read at the last real token of a response, after a stop token where the response has one."""

    trainer: TrainingEngine
    translator: Translator | None
    """None where actor and reward model read the same token ids."""
    max_positions: int
    """Tokens of a sample at most, its own."""
    weight: float = 1.0
    key: str = "reward.model"
    on_error: OnError = OnError.STOP
    """What follows on a score that is not finite."""
    vocabulary: int | None = None
    """Tokens of the reward model, where its tokenizer may write others; None: it writes none."""

    def scores(self, samples: Sequence[Sample], *, call: str) -> Work[FloatArray]:
        """[samples] float64, unweighted; NaN where the score is not finite and `on_error` drops such samples.

        Raises:
            ModelError, DataError: as `read`.
            RunError: a score is not finite, and `on_error` is to stop.
        """
        scores = yield from self.call(Rows(tuple(samples)), call)
        return self.checked(samples, scores)

    def call(self, rows: Rows, name: str, by: ScoredBy | None = None) -> Work[FloatArray]:
        """The model's scores of these samples as they are, [len(rows)] float64.

        Raises:
            ModelError, DataError: as `read`.
        """
        return self.trainer.score(self.read(rows.samples), Score.SCORE, call=name, by=by)

    def read(self, samples: Sequence[Sample]) -> Rows:
        """The samples in the reward model's tokens.

        Raises:
            ModelError: one is longer than its positions, or as `translated`.
            DataError: as `translated`.
        """
        read = self.translated(samples)
        for sample in read:
            length = len(sample.prompt.token_ids) + sample.num_tokens
            if length > self.max_positions:
                raise ModelError(
                    f"`{self.key}`: {sample.prompt.title(sample.index)} has {length} of its tokens, but its positions "
                    f"end at {self.max_positions}; lower `data.max_prompt_tokens` or `sampling.max_response_tokens`, "
                    "or take another reward model"
                )
        return Rows(read)

    def translated(self, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        """The samples in the reward model's tokens, however long they are.

        Raises:
            ModelError: a sample has a token that is not in the model's vocabulary.
            DataError: its chat template refuses one.
        """
        read = tuple(samples) if self.translator is None else self.translator.translate_all(samples)
        if self.vocabulary is None:
            return read
        for sample in read:
            last = max((*sample.prompt.token_ids, *sample.all_ids), default=0)
            if last >= self.vocabulary:
                raise ModelError(
                    f"`{self.key}`: its tokenizer writes token {last} for {sample.prompt.title(sample.index)}, but the "
                    f"model has only {self.vocabulary}; give the model its own tokenizer, or take another reward model"
                )
        return read

    def checked(self, samples: Sequence[Sample], scores: FloatArray) -> FloatArray:
        """What the model said of them, NaN where that is not finite and `on_error` drops such samples.

        Raises:
            RunError: a score is not finite, and `on_error` is to stop.
        """
        failed = np.flatnonzero(~np.isfinite(scores))
        if len(failed) and self.on_error is OnError.STOP:
            section = self.key.rpartition(".")[0]
            first = samples[failed[0]]
            raise RunError(
                f"`{self.key}` gives {first.prompt.title(first.index)} the score {scores[failed[0]]} ({len(failed)} of "
                f"{len(scores)} scores are not finite): its weights may be damaged, or not fit `dtype` "
                f"(`{section}.on_error: drop` leaves such samples out and goes on)"
            )
        scores[failed] = np.nan
        return scores


class Translator:
    """Renders a sample for another tokenizer.

    A reward model with a chat template reads the conversation: the messages that the policy was asked, those of the
    recipe's `data` among them (a text prompt is the user's message), and the response as the assistant's, or its turns
    and the replies between them: all that the template writes, as such models are trained elsewhere, or up to the
    marker that closes the answer, as by plait. The column `tools` is written as this template writes tools, where the
    policy was told of them. Without a template it reads the prompt's text with the response behind it, and its end
    token where the response ended by itself.

    Args:
        tell: is told once of each kind of what the template does not write, so that the model does not read it: tools,
            calls, or messages of a role that it does not know.
    """

    def __init__(self, tokenizer: Any, key: str, tell: Callable[[str], None] | None = None) -> None:
        self._tokenizer = tokenizer
        self._key = key
        self._tell = tell
        self._looked_at: set[tuple[bool, bool, frozenset[str]]] = set()
        """Conversations of which is known what the template leaves out: whether with tools, with calls, and roles of
        messages that stand nowhere in what it writes."""
        self._told: set[str] = set()
        self._to_marker = SpokenFinder(tokenizer, Ids(tokenizer)) if READS_TO_MARKER in tokenizer.init_kwargs else None

    def translate_all(self, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        """The same samples in the reward model's tokens. Raises DataError where its chat template refuses one.

        Where a prompt ends may differ from sample to sample, as tokens may reach over the boundary. What the samples of
        a prompt begin with in common is their prompt, which is computed once; each has at least its last token apart.
        """
        ids = [self._ids(sample) for sample in samples]
        by_prompt: dict[int, list[tuple[int, ...]]] = {}
        for sample, token_ids in zip(samples, ids, strict=True):
            by_prompt.setdefault(sample.prompt.uid, []).append(token_ids[:-1])
        common = {uid: common_length(group) for uid, group in by_prompt.items()}
        return tuple(
            replace(
                sample,
                prompt=replace(sample.prompt, token_ids=token_ids[:cut]),
                token_ids=token_ids[cut:],
                logprobs=(),
                replies=(),
            )
            for sample, token_ids in zip(samples, ids, strict=True)
            for cut in (common[sample.prompt.uid],)
        )

    def _ids(self, sample: Sample) -> tuple[int, ...]:
        tokenizer = self._tokenizer
        if tokenizer.chat_template is not None:
            prompt = list(sample.prompt.asked) or sample.prompt.columns.get("prompt", sample.prompt.text)
            tools = sample.prompt.columns.get("tools") if sample.prompt.is_chat else None
            row = Row({"tools": tools}, f"`{self._key}`: {sample.prompt.title(sample.index)}")
            turns = conversation(prompt, sample.messages)
            how = {"remedy": f"`{self._key}`, `data.system_prompt`, or the prompts", "begin_answer": False}
            text = render(tokenizer, turns, row, **how)
            self._tell_of_left_out(turns, row, text, how)
            ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
            return ids if self._to_marker is None else ids[: self._to_marker.closed(ids, 0, len(ids))]
        ids = tuple(tokenizer(sample.prompt.text + sample.text)["input_ids"])
        end = tokenizer.eos_token_id
        if sample.finish_reason is FinishReason.STOP and end is not None and ids[-1:] != (end,):
            ids += (end,)
        return ids

    def _tell_of_left_out(self, turns: list[dict[str, Any]], row: Row, text: str, how: Mapping[str, Any]) -> None:
        has_calls = any(message.get("tool_calls") for message in turns)
        absent = frozenset(turns[place]["role"] for place in not_found(turns, text))
        kind = (bool(row.columns["tools"]), has_calls, absent)
        if self._tell is None or kind in self._looked_at:
            return
        self._looked_at.add(kind)
        for what, place in left_out(self._tokenizer, turns, row, text, how):
            words = what if place is None else f"messages of {what}"
            if words not in self._told:
                self._told.add(words)
                self._tell(
                    f"`{self._key}`: its chat template does not write {words}, so it scores conversations without them"
                )


def translator_for(
    actor: Any, scorer: Any, key: str = "reward.model", tell: Callable[[str], None] | None = None
) -> Translator | None:
    """None where two tokenizers give every conversation the same ids: one vocabulary, one chat template.

    Args:
        key: of the recipe that says whose tokenizer `scorer` is, for messages.
        tell: see `Translator`.
    """
    same = actor.chat_template == scorer.chat_template and _program(actor) == _program(scorer)
    return None if same else Translator(scorer, key, tell)


def _program(tokenizer: Any) -> dict[str, Any]:
    """How a tokenizer makes ids of a text. How it pads and cuts is left out: whoever saves one after use, as trainers
    do, saves that too, and nothing is padded or cut here."""
    program = json.loads(tokenizer.backend_tokenizer.to_str())
    return {part: how for part, how in program.items() if part not in ("padding", "truncation")}
