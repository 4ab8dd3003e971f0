"""How a request draws: the resolved values that travel with it. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from plait.errors import ConfigError

MIN_TEMPERATURE = 0.01


def check_temperature(value: float) -> float:
    """The value. Raises ValueError where it is neither 0 nor a temperature that a float32 logit can be divided by."""
    if value != 0 and not MIN_TEMPERATURE <= value < math.inf:
        small = ": so small a one overflows; set it to 0" if value > 0 else ""
        raise ValueError(f"expected 0 (greedy) or at least {MIN_TEMPERATURE}, found {value}{small}")
    return value


def check_stop(value: tuple[str, ...]) -> tuple[str, ...]:
    """The value. Raises ValueError where one of the strings is empty."""
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
    """Keep the fewest of these whose renormalised mass reaches top_p."""
    max_tokens: int = 256
    """Tokens of the response at most; the model's positions may allow fewer."""
    stop_token_ids: tuple[int, ...] | None = None
    """Tokens that end a response and are part of it. None: the model's own end-of-sequence tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a response with the token that completes one of them."""
    min_p: float = 0.0
    """Keep of what top-p keeps the tokens that are at least so many times as probable as the most probable one."""
    keeps_support: bool = False
    """Each token of a sample has with it what these left of the vocabulary (`Sample.supports`), and its log-prob is of
    that. Nothing is kept where greedy."""
    keeps_experts: bool = False
    """A sample has with it which experts its tokens went to (`Sample.experts`). Only of an engine that keeps them."""
    greedy_logprobs_at: float = 1.0
    """The temperature of log-probs where greedy: of a flow's rollout the sampling temperature, as the trainer's are."""

    def __post_init__(self) -> None:
        for key, check in (("temperature", check_temperature), ("stop", check_stop)):
            try:
                check(getattr(self, key))
            except ValueError as error:
                raise ConfigError(f"{key}: {error}") from error
        for key, holds, expected in (
            ("top_k", self.top_k >= 0, "at least 0 (0 keeps all)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 (0 keeps all) and below 1"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("greedy_logprobs_at", self.greedy_logprobs_at >= MIN_TEMPERATURE, f"at least {MIN_TEMPERATURE}"),
        ):
            if not holds:
                raise ConfigError(f"{key}: expected {expected}, found {getattr(self, key)}")

    @property
    def divisor(self) -> float:
        """What logits are divided by: the temperature of the log-probs."""
        return self.temperature or self.greedy_logprobs_at

    @property
    def keeps(self) -> bool:
        """Whether a sample keeps what its tokens are drawn from."""
        return self.keeps_support and self.temperature > 0
