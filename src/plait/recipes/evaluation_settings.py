"""The section `evaluation` of a recipe. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from plait.data.settings import label_of
from plait.generation.sampling import check_temperature
from plait.paths import path_key
from plait.rewards.answers import AnswerFormat
from plait.settings import Seed, Settings, word_or_number

HELD_OUT = "held_out"
"""Name of a set that is held out of `data`, among several."""
OF_SOURCE = (
    "parameters",
    "seed",
    "rows",
    "prompt_column",
    "system_prompt",
    "prompt_template",
    "examples",
    "max_prompt_tokens",
)
"""Keys of a set that are about a source of its own."""
NO_ROWS = "none"
"""As `rows` of a set: its rows are read as they stand, though those of `data` are made by a function."""
_ITEMS = word_or_number(("all",), int, lambda number: number >= 0, "all or a number of items")
_SET_ITEMS = word_or_number(("all",), int, lambda number: number >= 1, "all or a number of items from 1 on")
_PassAt = tuple[Annotated[int, Field(ge=1)], ...]


class EvaluationSetSettings(Settings):
    """One of `evaluation.sets`. What it leaves out of how prompts are answered is as in `evaluation`, what it leaves
    out of how they are written as in `data`."""

    source: str | None = Field(
        default=None, description="where its items come from, as data.source; by default they are held out of data"
    )
    name: str | None = Field(
        default=None,
        pattern=r"^[\w.-]+$",
        description="its metrics are eval/NAME/…; by default of several sets the file or task, of one none: eval/…",
    )
    items: Annotated[int | Literal["all"], _SET_ITEMS] | None = Field(
        default=None, description="how many of its rows are asked, or all"
    )
    parameters: dict[str, Any] = Field(default_factory=dict, description="as data.parameters, of its source")
    seed: Seed | None = Field(default=None, description="as data.seed: which of its rows are asked")
    rows: str | None = Field(default=None, description="as data.rows; none: its rows are read as they stand")
    prompt_column: str | None = Field(default=None, min_length=1, description="as data.prompt_column")
    system_prompt: str | None = Field(default=None, description="as data.system_prompt")
    prompt_template: str | None = Field(default=None, description='as data.prompt_template; "{question}": none')
    examples: tuple[tuple[str, str], ...] | None = Field(default=None, description="as data.examples")
    max_prompt_tokens: int | None = Field(default=None, ge=1, description="as data.max_prompt_tokens")
    temperature: Annotated[float, AfterValidator(check_temperature)] | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, lt=1)
    max_response_tokens: int | None = Field(default=None, ge=1)
    samples_per_prompt: int | None = Field(default=None, ge=1)
    pass_at: _PassAt | None = Field(default=None)

    _paths = path_key("source", "rows")

    @model_validator(mode="before")
    @classmethod
    def _of_source(cls, value: Any) -> Any:
        """A text is its source."""
        return {"source": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.source is not None:
            return self
        for key in OF_SOURCE:
            if getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True):
                raise ValueError(
                    f"`{key}` is set, but without a `source` of its own a set is held out of `data` and goes by the "
                    "keys of that; set `source`, or remove it"
                )
        if self.items == "all":
            raise ValueError("`items` is all, but the set is held out of `data`; give a number, or its own `source`")
        return self

    def label_among(self, count: int) -> str:
        """Its name in metrics, where there are so many sets; empty: they have none of it."""
        by_itself = "" if count == 1 else HELD_OUT if self.source is None else label_of(self.source)
        return self.name or by_itself


class EvaluationSettings(Settings):
    every: int = Field(default=0, ge=0, description="evaluate every N steps; 0: only before and after")
    items: Annotated[int | Literal["all"], _ITEMS] = Field(
        default=0,
        description="held-out items per evaluation, of each source of the data, or of each of evaluation.sets (there "
        "also all); 0: no evaluation",
    )
    sets: tuple[EvaluationSetSettings, ...] = Field(
        default=(),
        description="sources of held-out items, names or sections [{source: …, name: …, items: …, temperature: …}] "
        "(docs/recipes.md); by default one set, held out of data",
    )
    temperature: Annotated[float, AfterValidator(check_temperature)] = Field(
        default=0.0, ge=0, description="at which held-out prompts are answered; 0: greedily"
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="as sampling.top_p, of held-out prompts' answers")
    top_k: int = Field(default=0, ge=0, description="as sampling.top_k, of these")
    min_p: float = Field(default=0.0, ge=0, lt=1, description="as sampling.min_p, of these")
    max_response_tokens: int | None = Field(
        default=None, ge=1, description="longest answer; by default sampling.max_response_tokens"
    )
    samples_per_prompt: int = Field(
        default=1, ge=1, description="answers drawn to each held-out prompt; above 1 at a temperature above 0"
    )
    pass_at: _PassAt = Field(default=(), description="numbers k of pass@k, each at most evaluation.samples_per_prompt")
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
        "lowest; unset: the accuracy, else the mean reward, and of given data the loss; of several sets that of the "
        "first",
    )
    patience: int = Field(
        default=0,
        ge=0,
        description="end the run when so many evaluations in a row are no better by evaluation.best_by; 0: never",
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
        has_items = all(one.items is not None for one in self.stated_sets)
        if not has_items:
            keys = [key for key in type(self).model_fields if key != "items"]
            self._check_switch("items", "`evaluation.items` above 0", *keys)
        if has_items or self.items != 0:
            self._check_switch("every", "`evaluation.every` above 0", "best_by", "patience")
            self._check_switch("best_by", "`evaluation.best_by`, the metric that is to get better", "patience")

    @property
    def stated_sets(self) -> tuple[EvaluationSetSettings, ...]:
        """The sets; where none is named, one that says nothing of its own."""
        return self.sets or (EvaluationSetSettings(),)

    @model_validator(mode="after")
    def _check_sets(self) -> Self:
        labels = [one.label_among(len(self.sets)) for one in self.sets]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"two sets are named `{twice[0]}`; set `name` in one of them")
        for place, one in enumerate(self.stated_sets):
            where = f"sets.{place}: " if self.sets else ""
            if one.source is None and one.items is None and self.items == "all":
                raise ValueError(
                    f"{where}items is all, but they are held out of `data`, of which nothing would be left to train "
                    "on; give a number, or sources of their own (`evaluation.sets`)"
                )
            _check_drawn(self, one, where)
        return self


def _check_drawn(settings: EvaluationSettings, own: EvaluationSetSettings, where: str) -> None:
    """Raises ValueError where answers are all the same, or fewer than pass@k asks for; `where` begins the message."""
    temperature, samples, pass_at = (
        stated(own, settings, key) for key in ("temperature", "samples_per_prompt", "pass_at")
    )
    if samples > 1 and temperature == 0:
        raise ValueError(
            f"{where}samples_per_prompt is {samples}, but at temperature 0 all answers to a prompt are the same; set "
            "`evaluation.temperature` above 0"
        )
    for key in ("top_p", "top_k", "min_p"):
        value, default = stated(own, settings, key), EvaluationSettings.model_fields[key].default
        # What all sets go by may be meant for those of them that draw.
        if value != default and temperature == 0 and (getattr(own, key) is not None or not settings.sets):
            raise ValueError(
                f"{where}{key} is {value}, but at temperature 0 the most probable token is taken; set "
                f"`evaluation.temperature` above 0, or leave {key} out"
            )
    if any(k > samples for k in pass_at):
        raise ValueError(
            f"{where}pass_at has {max(pass_at)}, but each prompt is answered {samples} times; raise "
            "`evaluation.samples_per_prompt`"
        )


def stated(own: EvaluationSetSettings, settings: EvaluationSettings, key: str) -> Any:
    """What a set says, or else the section."""
    value = getattr(own, key)
    return getattr(settings, key) if value is None else value
