"""The section `evaluation` of a recipe. Torch-free."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from plait.paths import path_key
from plait.rewards.answers import AnswerFormat
from plait.settings import Settings


class EvaluationSettings(Settings):
    every: int = Field(default=0, ge=0, description="evaluate every N steps; 0: only before and after")
    items: int = Field(
        default=0, ge=0, description="held-out items per evaluation, of each source of the data; 0: no evaluation"
    )
    temperature: float = Field(default=0.0, ge=0, description="at which held-out prompts are answered; 0: greedily")
    samples_per_prompt: int = Field(
        default=1, ge=1, description="answers drawn to each held-out prompt; above 1 at a temperature above 0"
    )
    pass_at: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(), description="numbers k of pass@k, each at most evaluation.samples_per_prompt"
    )
    functions: tuple[str, ...] = Field(
        default=(),
        description="further reward functions that score the answers and never train, each a metric eval/NAME; with "
        "task (the task's scorer) eval/accuracy is measured",
    )
    answer: AnswerFormat = Field(
        default=AnswerFormat.TAGS, description="where task and well_formed look for the answer, as reward.answer"
    )
    best_by: str | None = Field(
        default=None,
        description="metric of evaluations by whose highest value best/ is chosen, as eval/NAME, or -eval/NAME for the "
        "lowest; unset: the accuracy, else the mean reward, and of given data the loss",
    )
    show: int = Field(default=6, ge=0, description="sample answers printed at the end")

    _paths = path_key("functions")

    @field_validator("best_by")
    @classmethod
    def _check_metric(cls, name: str | None) -> str | None:
        if name is not None and not name.removeprefix("-").startswith("eval/"):
            raise ValueError(f"expected eval/NAME (the highest is best) or -eval/NAME (the lowest), found {name!r}")
        return name

    def check_read(self) -> None:
        keys = ("every", "temperature", "samples_per_prompt", "pass_at", "functions", "answer", "best_by", "show")
        self._check_switch("items", "`evaluation.items` above 0", *keys)
        if self.items > 0:
            self._check_switch("every", "`evaluation.every` above 0", "best_by")

    @model_validator(mode="after")
    def _check_samples(self) -> Self:
        if self.samples_per_prompt > 1 and self.temperature == 0:
            raise ValueError(
                f"samples_per_prompt is {self.samples_per_prompt}, but at temperature 0 all answers to a prompt are "
                "the same; set `evaluation.temperature` above 0"
            )
        if any(k > self.samples_per_prompt for k in self.pass_at):
            raise ValueError(
                f"pass_at has {max(self.pass_at)}, but each prompt is answered {self.samples_per_prompt} times; raise "
                "`evaluation.samples_per_prompt`"
            )
        return self
