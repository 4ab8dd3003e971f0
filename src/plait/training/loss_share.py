"""The call of a loss, which may be the user's, and what it must return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from plait.errors import RunError
from plait.training.loss_batch import MicroBatchLoss
from plait.user_code import CALL_LIMIT_S, UserCode, is_users, saying_where, title_of


def loss_share(
    loss: Callable[..., Tensor], batch: MicroBatchLoss, columns: Mapping[str, Tensor], *, needs_gradient: bool = True
) -> Tensor:
    """Call the loss and check what it returns, a scalar.

    Args:
        columns: TOKEN and SAMPLE columns [R], BATCH columns in the shape of their value; all in the loss's dtype.

    Raises:
        RunError: it raises; or what it returns is not a scalar tensor of real numbers that (where a gradient is needed)
            depends on what the model computed.
    """
    title = title_of(loss)
    with UserCode(f"the loss `{title}`", RunError, users=is_users(loss), limit_s=CALL_LIMIT_S):
        share = loss(batch, **columns)
    if wrong := _wrong(share, title, needs_gradient):
        raise saying_where(RunError(wrong), loss)
    return share


def _wrong(share: Any, title: str, needs_gradient: bool) -> str | None:
    expected = f"the loss `{title}` must return a scalar tensor of real numbers (see batch.aggregate)"
    if not isinstance(share, Tensor):
        return f"{expected}, found {type(share).__name__} {share!r:.80}"
    if share.shape != () or not share.dtype.is_floating_point:
        return f"{expected}, found one of shape {tuple(share.shape)} and dtype {share.dtype}"
    if needs_gradient and not share.requires_grad:
        return (
            f"the loss `{title}` has no gradient: it depends neither on batch.logprobs, batch.entropies or "
            "batch.logprobs_at (a language model) nor on batch.values or batch.scores (a scalar model)"
        )
    return None
