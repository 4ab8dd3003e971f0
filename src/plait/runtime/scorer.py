"""A reward model that scores what the actor said: in its own tokens and its own chat template, where these differ."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plait.data.records import FinishReason, Sample
from plait.data.rows import FloatArray, Rows
from plait.errors import ModelError
from plait.training.trainer import Done, Trainer


@dataclass(frozen=True)
class ModelScorer:
    """The score is read at the last real token of a response, after a stop token where the response has one."""

    trainer: Trainer
    translator: Translator | None
    """None where actor and reward model read the same token ids."""
    weight: float = 1.0
    key: str = "reward.model"

    def scores(self, samples: Sequence[Sample], *, call: str) -> Generator[Done, None, FloatArray]:
        """[samples] float64, unweighted.

        Raises:
            ModelError: a sample is longer than the reward model's positions.
        """
        read = tuple(samples) if self.translator is None else tuple(map(self.translator.translate, samples))
        limit = self.trainer.model.max_positions
        for sample in read:
            length = len(sample.prompt.token_ids) + len(sample.token_ids)
            if length > limit:
                raise ModelError(
                    f"`{self.key}`: sample {sample.uid} has {length} of its tokens, but its positions end at {limit}; "
                    "lower `data.max_prompt_tokens` or `sampling.max_response_tokens`, or take another reward model"
                )
        return (yield from self.trainer.scores(Rows(read), call=call))


class Translator:
    """Renders a sample for another tokenizer.

    A reward model with a chat template reads the conversation: the prompt's messages (a text prompt is the user's
    message) and the response as the assistant's. Without one it reads the prompt's text with the response behind it,
    and its end token where the response ended by itself.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def translate(self, sample: Sample) -> Sample:
        """The same sample in the reward model's tokens; the response keeps at least its last token apart."""
        ids = self._ids(sample)
        prompt = replace(sample.prompt, token_ids=ids[:-1])
        return replace(sample, prompt=prompt, token_ids=ids[-1:], logprobs=())

    def _ids(self, sample: Sample) -> tuple[int, ...]:
        tokenizer = self._tokenizer
        if tokenizer.chat_template is not None:
            asked = sample.prompt.columns.get("prompt", sample.prompt.text)
            turns = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
            turns.append({"role": "assistant", "content": sample.text})
            text = tokenizer.apply_chat_template(turns, tokenize=False)
            return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        ids = tuple(tokenizer(sample.prompt.text + sample.text)["input_ids"])
        end = tokenizer.eos_token_id
        if sample.finish_reason is FinishReason.STOP and end is not None and ids[-1:] != (end,):
            ids += (end,)
        return ids


def translator_for(actor: Any, scorer: Any) -> Translator | None:
    """None where two tokenizers give every conversation the same ids: one vocabulary, one chat template."""
    same = (
        actor.backend_tokenizer.to_str() == scorer.backend_tokenizer.to_str()
        and actor.chat_template == scorer.chat_template
    )
    return None if same else Translator(scorer)
