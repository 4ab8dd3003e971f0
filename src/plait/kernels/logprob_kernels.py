"""What kernels of log-probs compute: the interface of `fused_rows`, on a CPU, and of `device_logprobs`, on a GPU.

Shapes: C rows of a chunk, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class LogprobKernels(Protocol):
    """A module that computes with the logits of a whole linear head without bias, a chunk of rows at a time."""

    def takes(self, *tensors: Tensor) -> bool:
        """Whether it computes with these, of any shapes: by their device and dtype."""
        ...

    def logprobs(
        self,
        logits_CV: Tensor,
        temperature: float,
        targets_C: Tensor,
        logprobs_C: Tensor,
        entropies_C: Tensor,
        lse_C: Tensor,
        likeliest_C: Tensor,
    ) -> None:
        """Read from softmax(logits / temperature) log-probs of the targets, entropies and log-sum-exps.

        Args:
            logits_CV: contiguous, of a dtype that is taken.
            targets_C: int64.
            logprobs_C, entropies_C, lse_C: float32, are filled.
            likeliest_C: bool, is filled: whether no token is likelier than the target.
        """
        ...

    def logprobs_backward_(
        self,
        logits_CV: Tensor,
        temperature: float,
        targets_C: Tensor,
        lse_C: Tensor,
        entropies_C: Tensor,
        grad_logprobs_C: Tensor | None,
        grad_entropies_C: Tensor | None,
    ) -> Tensor:
        """The gradient of the logits [C, V], written over them.

        Args:
            lse_C, entropies_C: as `logprobs` says them.
            grad_logprobs_C, grad_entropies_C: float32; None: it is 0. One of the two is there.
        """
        ...
