"""How samples are drawn: the keys of a recipe, and the resolved values that travel with a request. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from plait.errors import ConfigError

MIN_TEMPERATURE = 0.01


def _check_temperature(value: float) -> float:
    if value != 0 and value < MIN_TEMPERATURE:
        raise ValueError(
            f"expected 0 (greedy) or at least {MIN_TEMPERATURE}, found {value}: so small a one overflows; set it to 0"
        )
    return value


def _check_stop(value: tuple[str, ...]) -> tuple[str, ...]:
    if "" in value:
        raise ValueError("expected non-empty stop strings, found an empty one, which every text contains; remove it")
    return value


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of one request.

    Raises:
        ConfigError: a value out of its range.
    """

    temperature: float = 1.0
    """0 is greedy: the most probable token, the lowest id among equals."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Of these, keep the fewest whose renormalised mass reaches top_p."""
    max_tokens: int = 256
    """Tokens of the response at most; the model's positions may allow fewer."""
    stop_token_ids: tuple[int, ...] | None = None
    """Tokens that end a response and are part of it. None: the model's own end-of-sequence tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a response with the token that completes one of them."""

    def __post_init__(self) -> None:
        for key, check in (("temperature", _check_temperature), ("stop", _check_stop)):
            try:
                check(getattr(self, key))
            except ValueError as error:
                raise ConfigError(f"{key}: {error}") from error
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1 or self.max_tokens < 1:
            raise ConfigError(
                "expected temperature >= 0, top_k >= 0, 0 < top_p <= 1 and max_tokens >= 1, "
                f"found {self}: change the key that is out of range"
            )


class SamplingSettings(BaseModel):
    """Keys of the recipe's `sampling` section."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: Annotated[float, Field(ge=0), AfterValidator(_check_temperature)] = 1.0
    """Divides the logits before the softmax, in sampling and in training alike; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the fewest most probable tokens whose mass reaches top_p; 1 keeps all."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from the k most probable tokens; 0 keeps all."""
    max_response_tokens: Annotated[int, Field(ge=1)] = 256
    """A response is cut at this many tokens."""
    stop: Annotated[tuple[str, ...], AfterValidator(_check_stop)] = ()
    """Strings that end a response; it includes the token that completes one."""
    max_running: Annotated[int, Field(ge=1)] = 64
    """Samples decoded at the same time; others wait. Bounds the memory of keys and values."""
    max_prefill_tokens: Annotated[int, Field(ge=1)] = 4096
    """Prompt tokens computed in one step; a longer prompt is computed alone."""

    def sampling(self, **changes: object) -> Sampling:
        """What a request carries; `changes` (`temperature=0.0`, for an evaluation) win over the settings."""
        asked = Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            max_tokens=self.max_response_tokens,
            stop=self.stop,
        )
        return replace(asked, **changes)  # type: ignore[arg-type]
