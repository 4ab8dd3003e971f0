"""What the leader and vLLM's process say to each other. Standard library only: both environments read it."""

from __future__ import annotations

from dataclasses import dataclass

Key = tuple[int, int]
"""(prompt uid, index) of a sample."""


@dataclass(frozen=True)
class Loading:
    """The model that vLLM is to hold; its weights come later."""

    folder: str
    """With its configuration and tokenizer."""
    dtype: str
    max_tokens: int
    """The most tokens of a prompt with its response."""
    max_running: int
    max_prefill_tokens: int
    kv_bytes: int
    device: str


@dataclass(frozen=True)
class Wanted:
    """One sample."""

    key: Key
    prompt_ids: tuple[int, ...]
    begun_ids: tuple[int, ...]
    """Tokens of the response that it goes on behind, replies included; none where it begins."""
    turn_start: int
    """The first token of the response that counts for stop strings."""
    limit: int
    """Tokens of the response at most, those included that it goes on behind."""
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    noise_key: int
    """See `generation.response.Response`."""
    temperature: float
    greedy_logprobs_at: float
    top_k: int
    top_p: float


@dataclass(frozen=True)
class Ended:
    """One sample that has ended."""

    key: Key
    token_ids: tuple[int, ...]
    """That were drawn now."""
    logprobs: tuple[float, ...]
    stopped: bool
    """By a stop token or a stop string; else it reached its limit."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in the shared memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class StoredWeights:
    """A file without a name, of the process that made it."""

    pid: int
    fd: int
    num_bytes: int
    tensors: tuple[StoredTensor, ...]
