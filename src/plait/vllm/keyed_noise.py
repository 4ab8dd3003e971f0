"""A logits processor of vLLM that draws with plait's sampler and a sample's own noise, and lets that token alone pass.

vLLM then takes the most probable token of what is left, which is the drawn one: tokens are a function of the logits,
the sample's key and the place in its response, as they are in plait's own engine. In place of the drawn token's logit
stands its log-prob; with `logprobs_mode="processed_logits"` it comes back beside the token.

Runs in vLLM's environment. Shapes: B requests of a step, V vocabulary.
"""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from plait.data.host_device import uploaded
from plait.generation.sampler import SamplingRows, sample
from plait.kernels import noise


@dataclass(frozen=True)
class Draws:
    """How the sample of a row of the batch draws."""

    noise_key: int
    temperature: float
    greedy_logprobs_at: float
    top_k: int
    top_p: float
    num_begun: int
    """Tokens of its response that it goes on behind."""
    said: list[int]
    """Its tokens since: vLLM's own list, which grows."""
    min_p: ClassVar[float] = 0.0
    keeps: ClassVar[bool] = False

    @property
    def divisor(self) -> float:
        """See `generation.sampling.Sampling`."""
        return self.temperature or self.greedy_logprobs_at

    @property
    def place(self) -> int:
        """Where its next token stands in its response."""
        return self.num_begun + len(self.said)


class KeyedNoise(LogitsProcessor):
    """See the module."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: dict[int, Draws] = {}
        self._parameters: SamplingRows | None = None
        """Parameters of the rows as they are; None: they have changed."""

    def is_argmax_invariant(self) -> bool:
        """See LogitsProcessor."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """See LogitsProcessor: rows that left, came and moved, in this order."""
        if batch_update is None:
            return
        rows, self._parameters = self._rows, None
        for index in batch_update.removed:
            rows.pop(index, None)
        for index, params, _, token_ids in batch_update.added:
            rows[index] = Draws(**params.extra_args, said=token_ids)
        for source, target, direction in batch_update.moved:
            from_source, from_target = rows.pop(source, None), rows.pop(target, None)
            if from_source is not None:
                rows[target] = from_source
            if from_target is not None and direction == MoveDirectionality.SWAP:
                rows[source] = from_target

    def apply(self, logits: Tensor) -> Tensor:
        """See LogitsProcessor.

        Args:
            logits: [B, V] float32; overwritten.
        """
        rows = [self._rows[index] for index in range(len(logits))]
        if self._parameters is None:
            self._parameters = SamplingRows.of(rows, logits.shape[1], self._device)
        numbers = [[row.noise_key for row in rows], [row.place for row in rows]]
        noise_keys_B, places_B = uploaded(numbers, torch.int64, self._device).unbind(0)
        token_ids_B, logprobs_B = sample(logits, noise.DrawNoise(noise_keys_B, places_B), self._parameters)
        logits.fill_(-torch.inf)
        return logits.scatter_(1, token_ids_B[:, None], logprobs_B[:, None].to(logits.dtype))
