"""What samples of other weights than those that a step begins with count in its policy loss, and which of them do not
count any more as it goes on.

There are three policies then: the one that drew the samples (its log-probs are what the engine recorded), the one that
the step begins with (old: the trainer's), and the one that is trained. The clipped surrogate keeps the third near the
second; a constant weight of each token corrects for the first (decoupled PPO: Hilton et al. 2021, arXiv 2110.00641).

Shapes: R response tokens of a micro-batch. Tensors come in; torch is not imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

Tensor = Any


class Correction(StrEnum):
    """What becomes of w_t = π_old / π_sampling of token t."""

    OFF = "off"
    """Nothing: each token counts once."""
    TIS = "tis"
    """min(w_t, high): truncated importance sampling (as in IMPALA: Espeholt et al. 2018, arXiv 1802.01561)."""
    ICEPOP = "icepop"
    """w_t within low … high, else 0 (IcePop)."""
    SEQ_TIS = "seq_tis"
    """min(Π_t w_t, high) for all tokens of a response: truncated importance sampling of whole responses."""
    SEQ_ICEPOP = "seq_icepop"
    """Π_t w_t within low … high, else 0, for all tokens of a response."""
    SEQ_MASK = "seq_mask"
    """1 for all tokens of a response whose Π_t w_t is within low … high, else 0."""
    GEO_MASK = "geo_mask"
    """The same of the geometric mean, exp(mean_t log w_t)."""


BOUNDS: dict[Correction, tuple[float | None, float]] = {
    Correction.TIS: (None, 2.0),
    Correction.ICEPOP: (0.5, 5.0),
    Correction.SEQ_TIS: (None, 2.0),
    Correction.SEQ_ICEPOP: (0.5, 5.0),
    Correction.SEQ_MASK: (0.5, 2.0),
    Correction.GEO_MASK: (0.99, 1.01),
}
"""(low, high) that are taken where a recipe says nothing: those of the field. A low of None: there is none."""


class _Batch(Protocol):
    """What is asked of a `losses.LossBatch`."""

    @property
    def logprobs(self) -> Tensor: ...

    sampling_logprobs: Tensor
    mask: Tensor

    def sequence_sum(self, values_R: Tensor) -> Tensor: ...

    def log(self, name: str, values: Tensor, per: str = "token") -> None: ...


@dataclass(frozen=True)
class Corrected:
    """A correction with its bounds; low is None where there is none."""

    how: Correction
    low: float | None
    high: float

    def weights(self, batch: _Batch, old_R: Tensor) -> Tensor:
        """[R], constant: what each token counts; logs their mean and the share that is cut.

        A completion that was given was drawn by nobody: its tokens count once.

        Args:
            old_R: log-probs [R] of the policy that the step begins with.
        """
        log_R = (old_R - batch.sampling_logprobs).nan_to_num(0.0, 0.0, 0.0)
        match self.how:
            case Correction.SEQ_TIS | Correction.SEQ_ICEPOP | Correction.SEQ_MASK:
                log_R = batch.sequence_sum(log_R)
            case Correction.GEO_MASK:
                log_R = batch.sequence_sum(log_R) / batch.sequence_sum(batch.mask).clamp(min=1)
        weights_R = log_R.clamp(-20.0, 20.0).exp()
        inside_R = weights_R <= self.high
        if self.low is not None:
            inside_R = inside_R & (weights_R >= self.low)
        match self.how:
            case Correction.TIS | Correction.SEQ_TIS:
                found_R = weights_R.clamp(max=self.high)
            case Correction.ICEPOP | Correction.SEQ_ICEPOP:
                found_R = weights_R * inside_R
            case _:
                found_R = inside_R.to(weights_R.dtype)
        batch.log("actor/correction_weight", found_R)
        batch.log("actor/correction_cut", 1 - inside_R.to(weights_R.dtype))
        return found_R


def off_policy_kept(batch: _Batch, advantages_R: Tensor, threshold: float) -> Tensor:
    """[R], constant: 0 at tokens of a negative advantage in responses that the trained policy has left behind, else 1;
    logs the share that is left out.

    Left behind is a response whose mean over trained tokens of log π_sampling − log π exceeds the threshold: a policy
    learns little from pushing further down what it would not say any more, and such steps are unstable (off-policy
    sequence masking: DeepSeek-V3.2, arXiv 2512.02556, §3.1). π_sampling is what the engine recorded, so that updates
    of this step, older weights and an engine that rounds differently all count. A completion that was given was drawn
    by nobody: it stays.

    Args:
        advantages_R: [R].
        threshold: nats per token.
    """
    behind_R = (batch.sampling_logprobs - batch.logprobs.detach()).nan_to_num(0.0)
    mean_R = batch.sequence_sum(behind_R) / batch.sequence_sum(batch.mask).clamp(min=1)
    kept_R = ((advantages_R >= 0) | (mean_R <= threshold)).to(mean_R.dtype)
    batch.log("actor/off_policy_masked", 1 - kept_R)
    return kept_R
