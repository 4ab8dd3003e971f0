"""What a step works on: a prompt instance, and the samples drawn for it. Frozen, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class FinishReason(StrEnum):
    STOP = "stop"
    """A stop token or stop string; the response includes it."""
    LENGTH = "length"
    """Truncated at the response limit."""
    ABORTED = "aborted"
    OPEN = "open"
    """Unfinished: it goes on with later weights."""


@dataclass(frozen=True)
class Prompt:
    """One prompt instance: a row of the data set as it is asked at one place of the run.

    Two instances of one row (another epoch) have different uids; groups are keyed by uid, never by text.
    """

    uid: int
    text: str
    """After the chat template."""
    token_ids: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row of the data set, `prompt` as it stood there included; reaches the reward."""
    source: str = ""
    """Label of its source, where the data have several."""


@dataclass(frozen=True)
class Sample:
    """One prompt with one response. The sampled token ids are kept and never re-tokenised."""

    prompt: Prompt
    index: int
    """0 … samples_per_prompt − 1 within its group."""
    token_ids: tuple[int, ...]
    """The response, its stop token included; no prompt token."""
    logprobs: tuple[float, ...]
    """Log-probs of the sampled tokens under softmax(logits / temperature), from the forward that sampled them."""
    text: str
    """The response without special tokens."""
    finish_reason: FinishReason
    policy_version: int = 0
    """Version of the weights that gave its last token."""
    token_versions: tuple[int, ...] | None = None
    """The version of each token, where the weights changed on the way; None: all are of `policy_version`."""

    @property
    def uid(self) -> str:
        return f"{self.prompt.uid}.{self.index}"

    @property
    def versions(self) -> tuple[int, ...]:
        """The policy version of each token."""
        return self.token_versions or (self.policy_version,) * len(self.token_ids)

    @property
    def oldest_version(self) -> int:
        """The policy version of its oldest token."""
        return min(self.token_versions or (self.policy_version,))
