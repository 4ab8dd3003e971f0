"""The load-balancing loss of mixtures of experts.

Of each sample it is what Transformers' `load_balancing_loss_func` gives for that sample alone (Switch Transformer:
Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6), over all tokens of prompt and response and all layers together:

    E Σ_e f_e P_e     f_e: of how many of E experts' choices e was one, per token and layer (constant)
                      P_e: mean probability that the router gives e (differentiable)

An optimizer step has the mean over its samples (by sequence, as DeepSeek-V3, arXiv 2412.19437, equations 17 to 20): a
number that does not depend on how samples are spread over micro-batches and ranks. f over the tokens of a micro-batch,
as Transformers computes it, would.

A sample's sums over tokens and layers are all that is needed. So they go from stage to stage, and their gradients back.

Shapes: T tokens of a packed row, H hidden size, N samples of a micro-batch, E experts, K of them for each token, L
mixtures of a stage. Sums
[2, N, E] are over tokens and layers: how often each expert was chosen, and the probabilities that it was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from plait.data.host_device import uploaded
from plait.data.packed import PackedBatch
from plait.models.shape import ModelShape, config_fields
from plait.training.mini_batch import MiniBatch


@dataclass(frozen=True)
class RouterBalance:
    """The loss of one role's routers.

    coefficient: what the loss is multiplied by (`optimizer.router_aux_loss_coef`)
    num_experts: E; top_k: of them are chosen for each token
    wide:        dtype of sums
    """

    coefficient: float
    num_experts: int
    top_k: int
    wide: torch.dtype

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype, coefficient: float) -> Self:
        """That of a model which computes in `dtype`, and of whose configuration the shape says that it `balances`."""
        shape = ModelShape.from_config(config_fields(config.get_text_config()))
        assert shape.balances, "a model without such a loss is refused before it is loaded"
        return cls(coefficient, shape.experts, shape.experts_per_token, torch.promote_types(dtype, torch.float32))

    def sums(
        self,
        batch: PackedBatch,
        router_logits: Sequence[Tensor],
        before_2NE: Tensor | None,
        used: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What the mixtures of a stage add to the sums.

        Args:
            router_logits: [T, E] of each.
            before_2NE: of the stages before; None: there are none.
            used: [T, K] of each: the experts that tokens went to; None: those of the largest logits.

        Returns:
            (sums [2, N, E], differentiable; choices [L, E], each token counted once for every sample that it is of).
        """
        tokens_NT = _sample_tokens(batch, self.wide)
        own = [
            _RouterSums.apply(logits_TE, tokens_NT, self.top_k, used_TK)
            for logits_TE, used_TK in zip(router_logits, used or (None,) * len(router_logits), strict=True)
        ]
        total_2NE = tokens_NT.new_zeros(2, len(tokens_NT), self.num_experts) if before_2NE is None else before_2NE
        for sums_2NE in own:
            total_2NE = total_2NE + sums_2NE
        chosen = [sums_2NE[0].detach().sum(0, dtype=torch.float64) for sums_2NE in own]
        return total_2NE, torch.stack(chosen) if chosen else tokens_NT.new_zeros(0, self.num_experts)

    def share(self, sums_2NE: Tensor, mini_batch: MiniBatch, num_samples: int) -> Tensor:
        """A micro-batch's share of the loss of an optimizer step, times the coefficient, a scalar. Logs the loss.

        Args:
            sums_2NE: of all layers.
            num_samples: of the step, those of further losses among them.
        """
        losses_N = self.losses(sums_2NE)
        mini_batch.means.add(f"{mini_batch.role}/router_aux_loss", losses_N, len(mini_batch.rows))
        return self.coefficient * losses_N.sum() / num_samples

    def losses(self, sums_2NE: Tensor) -> Tensor:
        """[N]: the loss of each sample, from its sums over all layers. As many as `top_k` experts are chosen for each
        token, so the sums know how many tokens and layers there are."""
        chosen_NE = sums_2NE[0].detach()
        rows_N1 = chosen_NE.sum(-1, keepdim=True) / self.top_k
        return self.num_experts * (chosen_NE / rows_N1 * (sums_2NE[1] / rows_N1)).sum(-1)

    # -- between stages

    def room(self, room_TH: Tensor, num_samples: int) -> Tensor:
        """Memory for a message as of `joined`, in place of that for hidden states [T, H] alone."""
        return room_TH.new_empty(room_TH.numel() + self._bits(num_samples, room_TH))

    def parted(self, message: Tensor, num_tokens: int, num_samples: int) -> tuple[Tensor, Tensor]:
        """(hidden states [T, H], sums [2, N, E]) of a message as of `joined`, or the gradients of both."""
        behind = self._bits(num_samples, message)
        hidden, bits = message.split([len(message) - behind, behind])
        sums = bits.clone().view(self.wide)  # a clone begins where such numbers may
        return hidden.view(num_tokens, -1), sums.view(2, num_samples, self.num_experts)

    def _bits(self, num_samples: int, like: Tensor) -> int:
        """Elements of such a dtype that hold the bits of sums [2, N, E]."""
        return 2 * num_samples * self.num_experts * self.wide.itemsize // like.itemsize


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Hidden states [T, H], or their gradient, as a message to another stage; where sums [2, N, E] are beside them, one
    row of both, the bits of the sums in the dtype of the hidden states."""
    hidden_TH, *sums = (part.detach() for part in parts)
    if not sums:
        return hidden_TH
    return torch.cat([hidden_TH.reshape(-1), sums[0].contiguous().view(hidden_TH.dtype).reshape(-1)])


class _RouterSums(torch.autograd.Function):
    """Router logits [T, E] of any float dtype, the tokens of each sample [N, T], `top_k` and the experts that tokens
    went to [T, K], None for those of the largest logits, to sums [2, N, E] in the dtype of the second. For the backward
    the logits are kept, and the probabilities computed again."""

    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, tokens_NT: Tensor, top_k: int, used_TK: Tensor | None) -> Tensor:
        ctx.save_for_backward(logits_TE, tokens_NT)
        probs_TE = logits_TE.softmax(-1, dtype=tokens_NT.dtype)
        if used_TK is None:
            used_TK = probs_TE.topk(top_k, dim=-1).indices
        chosen_TE = torch.zeros_like(probs_TE).scatter_(1, used_TK, 1)
        return torch.stack([tokens_NT @ chosen_TE, tokens_NT @ probs_TE])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """[2, N, E] to [T, E]; what was chosen has no gradient."""
        logits_TE, tokens_NT = ctx.saved_tensors
        probs_TE = logits_TE.softmax(-1, dtype=tokens_NT.dtype)
        weighed_TE = probs_TE * (tokens_NT.T @ grads[0][1])
        grad_TE = weighed_TE - probs_TE * weighed_TE.sum(-1, keepdim=True)
        return grad_TE.to(logits_TE.dtype), None, None, None


def _sample_tokens(batch: PackedBatch, dtype: torch.dtype) -> Tensor:
    """[N, T]: 1 where a token is of a sample, its prompt's and the root's among them, else 0."""
    num_samples = sum(len(group.responses) for group in batch.groups)
    tokens_NT = torch.zeros(num_samples, batch.num_tokens, dtype=dtype)
    tokens_NT[:, batch.root.start : batch.root.stop] = 1
    rows_T = iter(tokens_NT)
    for group in batch.groups:
        for response in group.responses:
            row_T = next(rows_T)
            row_T[group.prompt.start : group.prompt.stop] = 1
            row_T[response.start : response.stop] = 1
    return uploaded(tokens_NT, dtype, batch.token_ids_T.device)
