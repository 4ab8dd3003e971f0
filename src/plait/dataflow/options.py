"""Options of the calls of a flow, by kind of call: recorded and checked while the flow is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral
from typing import Any


@dataclass(frozen=True)
class Resample:
    """Dynamic sampling: draw further prompts until enough groups are worth training on (DAPO, arXiv 2503.14476, §3.2).

    Groups that `keep` refuses are left out of the step; the prompts of the next ones take their places, until the
    step has its number of groups or `max_rounds` rounds were drawn. A further round has as many groups as are likely to
    yield those that are missing; what it draws too many is left out too.
    """

    keep: Callable[[Any], bool]
    """Rewards of a group, [samples] float64 → whether it stays."""
    reward: Any
    """The role whose score decides; in a traced graph its name."""
    max_rounds: int = 10
    """The first one included; in all they draw at most so many times the groups of the step."""


class Score(StrEnum):
    """What a SCORE call asks of a role: one number for a token, or for a sample."""

    LOGPROBS = "logprobs"
    """Log-probs of the response tokens, by a language model."""
    ENTROPIES = "entropies"
    """Entropies, in nats, of the distributions of the response tokens, by a language model."""
    VALUES = "values"
    """Values of the states before the response tokens, by a scalar model."""
    SCORE = "score"
    """One number per sample, of a scalar model or of reward functions."""


@dataclass(frozen=True)
class Top:
    """What a SCORE call asks of a language model: the likeliest tokens in the place of each response token, with their
    log-probs and that of all others together."""

    count: int
    """How many tokens, K."""
    among: int | None = None
    """They are chosen from the first so many token ids; None: all that the model has."""

    value = "top_logprobs"
    """Its name, as that of a member of `Score`."""

    def __str__(self) -> str:
        return self.value

    @property
    def width(self) -> int:
        """Numbers of a token: ids, their log-probs, and that of the rest."""
        return 2 * self.count + 1

    @property
    def problem(self) -> str | None:
        """What is wrong with it, for a message; None: nothing."""
        return _counts({"k": self.count}, least=1)


Asked = Score | Top
"""What a SCORE call asks."""


@dataclass(frozen=True)
class GenerateOptions:
    """How a GENERATE call generates."""

    samples_per_prompt: int | None = None
    """None: the recipe's number."""
    greedy: bool = False
    """Decode at temperature 0: a baseline, not what is trained on."""
    resample: Resample | None = None
    max_tokens: int | None = None
    """Tokens of a response at most; None: the recipe's number."""
    prompts: int | None = None
    """Id of the PROMPT call whose prompts it answers; None: those of the step."""

    @property
    def problem(self) -> str | None:
        """What is wrong with them, for a message; None: nothing."""
        stated = {"samples_per_prompt": self.samples_per_prompt, "max_tokens": self.max_tokens}
        counts = {name: count for name, count in stated.items() if count is not None}
        return _first(_counts(counts, least=1), _flags(greedy=self.greedy))

    def limit(self, max_response_tokens: int) -> int:
        """Tokens of a response at most, in a recipe with this number of them."""
        return max_response_tokens if self.max_tokens is None else min(self.max_tokens, max_response_tokens)

    def num_samples(self, samples_per_prompt: int) -> int:
        """Samples of each prompt, in a recipe with this number of them."""
        return samples_per_prompt if self.samples_per_prompt is None else self.samples_per_prompt


@dataclass(frozen=True)
class ScoreOptions:
    """What a SCORE call scores by."""

    what: Asked
    prompts: int | None = None
    """Id of the PROMPT call behind whose prompts it scores the responses; None: behind their own."""


@dataclass(frozen=True)
class TrainOptions:
    """How a TRAIN call trains: `epochs` passes over `mini_batches` mini-batches, one optimizer step each."""

    mini_batches: int = 1
    epochs: int = 1
    whole_groups: bool = False
    """Never split the samples of one prompt over mini-batches or micro-batches (a loss over pairs)."""
    after: int = 0
    """Training steps at the beginning of a run in which the call does nothing."""
    with_next: bool = False
    """Leave the gradients to the role's next call, which makes each optimizer step out of both."""

    @property
    def problem(self) -> str | None:
        """What is wrong with them, for a message; None: nothing."""
        counts = {"mini_batches": self.mini_batches, "epochs": self.epochs}
        flags = _flags(whole_groups=self.whole_groups, with_next=self.with_next)
        return _first(_counts(counts, least=1), _counts({"after": self.after}, least=0), flags)

    @property
    def passes(self) -> int:
        """Mini-batches of a training step, in all epochs."""
        return self.mini_batches * self.epochs

    def optimizer_steps(self, steps: int) -> int:
        """Optimizer steps in the first `steps` training steps; those that it leaves to the next call are that one's."""
        return 0 if self.with_next else max(0, steps - self.after) * self.passes


@dataclass(frozen=True)
class ComputeOptions:
    """What a COMPUTE call computes with."""

    constants: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of its function beside the columns, by name."""
    least_samples: int = 1
    """That a group needs for its function to say anything."""


@dataclass(frozen=True)
class TextOptions:
    """What the function of a PROMPT or GRADE call gets beside columns."""

    texts: Mapping[str, int] = field(default_factory=dict)
    """Argument → id of a call whose prompts were made from this call's samples. The argument gets, for each sample, the
    texts of the samples that were drawn from its prompt."""


@dataclass(frozen=True)
class CarriedOptions:
    """How a CARRIED value begins."""

    start: float | tuple[float, ...]
    """The value in the first step."""


@dataclass(frozen=True)
class BecomesOptions:
    """What a BECOMES node changes."""

    carried: int
    """Id of the CARRIED node whose next value it makes."""


Options = GenerateOptions | ScoreOptions | TrainOptions | ComputeOptions | TextOptions | CarriedOptions | BecomesOptions


def _counts(counts: Mapping[str, Any], *, least: int) -> str | None:
    for name, count in counts.items():
        if not isinstance(count, Integral) or isinstance(count, bool):
            return f"{name} must be a whole number, found {count!r:.80}"
        if int(count) < least:
            return f"{name} must be at least {least}, found {count}"
    return None


def _flags(**flags: Any) -> str | None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            return f"{name} must be True or False, found {flag!r:.80}"
    return None


def _first(*problems: str | None) -> str | None:
    return next((problem for problem in problems if problem is not None), None)
