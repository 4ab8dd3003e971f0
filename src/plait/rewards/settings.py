"""What a user says about rewards. Torch-free."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar, Self

from pydantic import Field, model_validator

from plait.paths import path_key
from plait.rewards.answers import AnswerFormat
from plait.settings import Settings


class OnError(StrEnum):
    """What follows when a function fails on a sample."""

    STOP = "stop"
    DROP = "drop"


class WaitFor(StrEnum):
    """Whose turns and replies a next turn waits for."""

    AUTO = "auto"
    STEP = "step"
    """Those of all samples that are drawn with it: what is computed together depends on what was said alone."""
    PROMPT = "prompt"
    """Those of the samples of its prompt: what is computed together depends on how long replies take, too."""


class TurnSettings(Settings):
    """What answers the model within a response: a tool, an environment or a user."""

    reply: str | None = Field(
        default=None,
        description="FILE.py:FUNCTION or package.module:function that says what follows a turn of the model, or None; "
        "by default a response is one turn",
    )
    tools: tuple[str, ...] = Field(
        default=(),
        description="in place of `reply`: each FILE.py:FUNCTION or package.module:function that the model may call, as "
        "its chat template tells it of them by their signatures and docstrings",
    )
    max_turns: int = Field(default=8, ge=2, le=1000, description="turns of the model in a response, at most")
    timeout_s: float = Field(
        default=30.0, gt=0, description="wall-clock limit of one call of `reply`, or of all tools that a turn calls"
    )
    workers: int = Field(default=1, ge=1, le=1024, description="worker processes that run `reply`, or tools")
    max_concurrency: int = Field(
        default=8, ge=1, le=1024, description="calls of a coroutine function that a worker has under way at a time"
    )
    on_error: OnError = Field(
        default=OnError.STOP,
        description="stop, or drop the samples on which `reply` fails (of tools: which hang, or end their process): "
        "they end and train nothing",
    )
    wait_for: WaitFor = Field(
        default=WaitFor.AUTO,
        description="whose turns a next turn waits for: step (all samples drawn with it, so that runs repeat to the "
        "bit), prompt (those of its prompt, for slow replies), or auto (prompt where samples outlive their "
        "step, by `partial_rollout`)",
    )

    memory_bytes: ClassVar[None] = None
    """A worker may have as much data as there is room for."""

    _paths = path_key("reply", "tools")

    @model_validator(mode="after")
    def _one_replies(self) -> Self:
        if self.reply is not None and self.tools:
            raise ValueError("`reply` and `tools` are both set; give one of them (a function `reply` may call tools)")
        return self

    @property
    def replier(self) -> str | None:
        """The key that says who replies; None: nobody does."""
        if self.reply is not None:
            return "turns.reply"
        return "turns.tools" if self.tools else None

    def check_read(self) -> None:
        """Raises ValueError where a key has no effect, as there is one turn."""
        keys = ("max_turns", "timeout_s", "workers", "max_concurrency", "on_error", "wait_for")
        if not self.tools:
            self._check_switch("reply", "`turns.reply` or `turns.tools`", *keys)


class RewardSettings(Settings):
    functions: tuple[str, ...] = Field(
        default=(),
        description="each FILE.py:FUNCTION, package.module:function, or task (the task's scorer) or well_formed; "
        "by default task, or none where there is a model",
    )
    weights: tuple[float, ...] = Field(default=(), description="one per function; by default 1 each")
    model: tuple[str, ...] | None = Field(
        default=None,
        description="a reward model, or several: each a folder or hub id with one score; alone, or beside functions",
    )
    model_weight: tuple[float, ...] = Field(
        default=(1.0,), description="weight of the model's score in the sum: one per model; by default 1 each"
    )
    timeout_s: float = Field(
        default=30.0, gt=0, description="wall-clock limit of one call of a function, for one group"
    )
    workers: int = Field(default=1, ge=1, le=1024, description="worker processes that run the functions")
    max_concurrency: int = Field(
        default=8, ge=1, le=1024, description="calls of coroutine functions that a worker has under way at a time"
    )
    memory_gb: float | None = Field(
        default=None,
        ge=0.1,
        description="most data of one worker process, GB, on Linux: a function that asks for more gets a MemoryError; "
        "none: as much as there is, and where memory is out the kernel ends workers first",
    )
    on_error: OnError = Field(
        default=OnError.STOP, description="stop, or drop the samples on which a function fails; never scored as zero"
    )
    answer: AnswerFormat = Field(
        default=AnswerFormat.TAGS,
        description="where task looks for the answer: tags (<answer>…</answer>), line, number or whole",
    )
    partial_credit: bool = Field(
        default=False, description="task gives its scorer's partial credit; false: 1 if exact, else 0"
    )

    _paths = path_key("functions", "model")

    @property
    def memory_bytes(self) -> int | None:
        """Most data of a worker (`worker.bound_memory`); None: no limit."""
        return None if self.memory_gb is None else round(self.memory_gb * 1e9)

    @property
    def models(self) -> tuple[str, ...]:
        """Those that `model` names."""
        return self.model or ()

    @property
    def model_weights(self) -> tuple[float, ...]:
        """One for each of `models`."""
        return self.model_weight if len(self.model_weight) == len(self.models) else self.model_weight * len(self.models)

    def keyed_models(self, section: str) -> dict[str, str]:
        """Key → model, for each that `model` names, in their order: `reward.model`, or of several `reward.model[0]`,
        `reward.model[1]`, … in a section `reward`."""
        key = f"{section}.model"
        if len(self.models) == 1:
            return {key: self.models[0]}
        return {f"{key}[{place}]": name for place, name in enumerate(self.models)}

    @model_validator(mode="after")
    def _one_weight_each_model(self) -> Self:
        if twice := next((name for name in self.models if self.models.count(name) > 1), None):
            raise ValueError(f"`model` names `{twice}` twice; name it once, with the sum of its weights")
        is_default = self.model_weight == type(self).model_fields["model_weight"].default
        if self.models and not is_default and len(self.model_weight) != len(self.models):
            raise ValueError(
                f"`model_weight` has {len(self.model_weight)} numbers for {len(self.models)} models; give one each"
            )
        return self

    @model_validator(mode="after")
    def _one_weight_each(self) -> Self:
        if self.weights and len(self.weights) != len(self.functions or ("task",)):
            raise ValueError(
                f"`weights` has {len(self.weights)} numbers for {len(self.functions or ('task',))} functions"
            )
        return self
