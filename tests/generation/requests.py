"""Requests of recorded lengths over prompts of made-up tokens, for models of `models.tiny`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plait.data.records import Prompt
from plait.generation.engine import Engine
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.kernels.noise import NoiseKey

FREE = Sampling(max_tokens=40, stop_token_ids=())
"""Ends at its length alone."""


def request(uid: int, num_tokens: int, lengths: Sequence[int] = (), **sampling: Any) -> Request:
    """A prompt unlike all others, with samples of recorded lengths, or `num_samples` that end by themselves."""
    token_ids = tuple((7 * at + 31 * uid) % 290 + 5 for at in range(num_tokens))
    count = sampling.pop("num_samples", len(lengths))
    asked = Sampling(**{"max_tokens": 60, **({"stop_token_ids": ()} if lengths else {}), **sampling})
    return Request(Prompt(uid, "", token_ids), count, asked, NoiseKey(5), lengths=tuple(lengths) or None)


def with_head(uid: int, num_tokens: int, lengths: Sequence[int], head: int = 0) -> Request:
    """A prompt whose tokens but the last are those of every prompt with this head."""
    token_ids = [(7 * at + 31 * head) % 290 + 5 for at in range(num_tokens - 1)] + [uid + 5]
    return Request(Prompt(uid, "", tuple(token_ids)), len(lengths), FREE, NoiseKey(5), lengths=tuple(lengths))


def is_packed(engine: Engine) -> bool:
    """Whether something computes of which weights have been made ready: packed once more, where it packs any."""
    return any(backend.is_prepared for backend in engine.state.forward.backends)
