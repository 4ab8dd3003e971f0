"""The sets that the evaluations of a recipe are made on, each with all that it goes by. Torch-free.

A recipe that names none has one: held out of its data, answered as `evaluation` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from plait.data.movie_reviews import PREFIX
from plait.data.settings import TASK_PREFIX, DataSettings
from plait.errors import DataError
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.recipes.evaluation_settings import NO_ROWS, OF_SOURCE, EvaluationSetSettings, stated
from plait.recipes.recipe import Recipe


@dataclass(frozen=True)
class Answering:
    """How the prompts of a set are answered.

    Truncation (`top_p`, `top_k`, `min_p`) only changes what is drawn: nothing learns from the answers, so the log-probs
    that they are recorded with are of the whole vocabulary.
    """

    temperature: float = 0.0
    """0 answers greedily. Above it the draws are those of the run's seed, the same in every evaluation."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_response_tokens: int = 256
    samples_per_prompt: int = 1
    pass_at: tuple[int, ...] = ()
    """Numbers k of pass@k that are asked for."""

    @property
    def filters(self) -> bool:
        """Whether top-k, top-p or min-p chooses tokens."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def sampling(self, settings: SamplingSettings) -> Sampling:
        """What a request carries; where a response stops is said by `settings`."""
        drawn = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        return settings.sampling(temperature=self.temperature, max_tokens=self.max_response_tokens, **drawn)


@dataclass(frozen=True)
class EvaluationSet:
    """A set of held-out items, before they are read."""

    label: str
    """Its metrics are `eval/LABEL/…`; empty: they are `eval/…`."""
    section: str
    """The section of the recipe that says its keys: `evaluation`, or `evaluation.sets.N`."""
    source: DataSettings | None
    """None: it is held out of `data`."""
    items: int | None
    """None: all rows of its source."""
    answering: Answering

    @contextmanager
    def in_keys(self) -> Iterator[None]:
        """What is wrong with its source is told by the keys of its section: raises DataError as what is done inside
        does, so worded."""
        try:
            yield
        except DataError as error:
            text = str(error)
            for key in ("source", "items", *OF_SOURCE) if self.source is not None else ():
                text = text.replace(f"`data.{key}`", f"`{self.section}.{key}`")
            raise error.worded(f"evaluation set `{self.label}`: {text}" if self.label else text) from None


def evaluation_sets(recipe: Recipe) -> tuple[EvaluationSet, ...]:
    """Those that have items; none where nothing is evaluated."""
    settings, named = recipe.evaluation, recipe.evaluation.stated_sets
    found: list[EvaluationSet] = []
    for place, own in enumerate(named):
        items = stated(own, settings, "items")
        if items == 0:
            continue
        found.append(
            EvaluationSet(
                own.label_among(len(named)),
                f"evaluation.sets.{place}" if settings.sets else "evaluation",
                None if own.source is None else _source_of(own.source, own, recipe.data),
                None if items == "all" else items,
                _answering(own, recipe),
            )
        )
    return tuple(found)


def draws_filtered(recipe: Recipe) -> bool:
    """Whether top-k, top-p or min-p chooses tokens, in training or in an evaluation."""
    return recipe.sampling.filters or any(one.answering.filters for one in evaluation_sets(recipe))


def _answering(own: EvaluationSetSettings, recipe: Recipe) -> Answering:
    keys = ("temperature", "top_p", "top_k", "min_p", "samples_per_prompt", "pass_at", "max_response_tokens")
    values = {key: stated(own, recipe.evaluation, key) for key in keys}
    if values["max_response_tokens"] is None:
        values["max_response_tokens"] = recipe.sampling.max_response_tokens
    return Answering(**values)


def _source_of(source: str, own: EvaluationSetSettings, data: DataSettings) -> DataSettings:
    """A source of items as one of data: it goes by the keys of `data` where the set says nothing, but for those that
    are about the rows of another source."""
    is_file = not source.startswith((TASK_PREFIX, PREFIX))
    said: dict[str, Any] = {key: value for key in OF_SOURCE if (value := getattr(own, key)) is not None}
    if own.rows == NO_ROWS:
        said["rows"] = None
    plain = {"more": (), "name": None, "weight": None, "size": None, "parameters": {}}
    if not is_file:
        plain |= {"prompt_column": "prompt", "rows": None}
    return data.model_copy(update={**plain, **said, "source": source})
