"""Settings of a plan's policy `fusion`: what things take, by which each step of a run is scored in parts or is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf

from plait.errors import ConfigError


@dataclass(frozen=True)
class FusionTimes:
    """Seconds, predicted once for a run.

    step_s, more_s: of an instance with one sample until that has a token more, and more for each further one: of a
                    decode step, or of its share where draft tokens are accepted
    token_s:        of an instance to score a token behind the root, by all models that score where samples are
                    generated
    parts_s:        instance seconds of scoring in parts more than in whole calls, ends that are apart included
    prompt_tokens:  of a prompt behind the root that all begin with, in the mean
    step_tokens:    that a sample gets in a decode step, in the mean; plans of older versions do not state it
    """

    step_s: float
    more_s: float
    token_s: float
    parts_s: float
    prompt_tokens: float
    step_tokens: float = 1.0

    @classmethod
    def of(cls, settings: Sequence[tuple[str, object]], label: str) -> FusionTimes:
        """From those of a plan.

        Raises:
            ConfigError: a setting is missing, unknown, or no number from 0 on; it begins with the label.
        """
        stated, names = dict(settings), [field.name for field in fields(cls)]
        if not {*names} - {"step_tokens"} <= {*stated} <= {*names}:
            raise ConfigError(f"{label}: expected none, or all of {', '.join(names)}, found {', '.join(stated)}")
        numbers = {}
        for name, value in stated.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
                raise ConfigError(f"{label}: `{name}`: expected a number from 0 on, found {value!r}")
            numbers[name] = float(value)
        return cls(**numbers)

    def settings(self) -> tuple[tuple[str, float], ...]:
        """As a plan has them."""
        return tuple((field.name, getattr(self, field.name)) for field in fields(self))
