"""From logits to tokens: temperature, top-k, top-p, min-p, renormalise, in that order, then a draw by keyed Gumbel
noise.

The draw is exact and touches the noise of few tokens (papers/rlhfspec.md §3, `lazy_gumbel`): the argmax of
log p + Gumbel over all tokens equals the argmax over the most probable *candidates* and one more entry for the rest,
log(tail mass) + its own Gumbel; when the rest wins, an inverse CDF picks within it. The law is the filtered softmax
exactly, whatever the number of candidates; a rounding of the logits flips a token only when two sums nearly tie.

Filters are thresholds on the logit, so tokens that tie with the last one kept are kept too: which tokens survive is
then a function of the logits alone, not of a sort's order. Candidates are closed the other way (a tie with the first
token left out leaves out), for the same reason.

Shapes: B rows, V tokens of the vocabulary, C candidates, W the top of the vocabulary that is looked at, or bytes of a
row of bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.data.host_device import uploaded
from plait.data.supports import bits_of
from plait.generation.candidates import among_candidates, largest
from plait.kernels import device_draw, draw, noise, paged_attention
from plait.speculation.drafter import SampledBy

NUM_CANDIDATES = 64

_COMPILED = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class SamplingRows:
    """The sampling parameters of the rows of one batch. `None` says that no row asks for it."""

    temperature_B1: Tensor | None
    """float64; what logits are divided by (`Sampling.divisor`), greedy rows' too."""
    greedy_B: Tensor | None
    """bool."""
    top_k_B: Tensor | None
    """int64; the size of the vocabulary or more where a row has none."""
    top_p_B: Tensor | None
    """float64; 1 where a row has none."""
    all_greedy: bool
    most_top_k: int
    """The largest top-k of the rows that have one; 0: none has."""
    min_p_B: Tensor | None = None
    """float64; 0 where a row has none."""
    keeps_B: Tensor | None = None
    """bool: whether what the filters leave is kept, and log-probs are of that; never where a row is greedy."""
    all_keep: bool = False

    @property
    def filters(self) -> bool:
        """Whether a row has one."""
        return not self.all_greedy and any(p is not None for p in (self.top_k_B, self.top_p_B, self.min_p_B))

    @classmethod
    def of(cls, samplings: Sequence[SampledBy], vocab_size: int, device: torch.device) -> SamplingRows:
        greedy = [s.temperature == 0 for s in samplings]
        temperature = [s.divisor for s in samplings]
        # Filters never remove the most probable token, so a greedy row needs none.
        top_k = [s.top_k if 0 < s.top_k < vocab_size and s.temperature else vocab_size for s in samplings]
        top_p = [s.top_p if s.temperature else 1.0 for s in samplings]
        min_p = [s.min_p if s.temperature else 0.0 for s in samplings]
        keeps = [s.keeps for s in samplings]

        def column(values: list, default: object, dtype: torch.dtype) -> Tensor | None:
            if all(value == default for value in values):
                return None
            return uploaded(values, dtype, device)

        temperature_B = column(temperature, 1.0, torch.float64)
        return cls(
            temperature_B1=None if temperature_B is None else temperature_B[:, None],
            greedy_B=column(greedy, False, torch.bool),
            top_k_B=column(top_k, vocab_size, torch.int64),
            top_p_B=column(top_p, 1.0, torch.float64),
            all_greedy=all(greedy),
            most_top_k=max((k for k in top_k if k < vocab_size), default=0),
            min_p_B=column(min_p, 0.0, torch.float64),
            keeps_B=column(keeps, False, torch.bool),
            all_keep=all(keeps),
        )


def sample(
    logits_BV: Tensor, noise_B: noise.DrawNoise, rows: SamplingRows, *, num_candidates: int = NUM_CANDIDATES
) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits_BV: any float dtype; computed in float32, float64 if given so. Not changed.
        noise_B: of the draws.
        rows: the parameters of each row.
        num_candidates: how many of the most probable tokens get Gumbel noise of their own. Part of the definition of
            the draw (the law is the same for every value, the tokens are not).

    Returns:
        token_ids_B (int64), and logprobs_B in the dtype of computation: log softmax(logits / temperature) of the drawn
        tokens over the whole vocabulary, unfiltered. NaN where a row's logits hold NaN or +infinity.
    """
    if rows.min_p_B is not None:
        scaled_BV, kept_BV = _filtered(logits_BV, rows)
        token_ids_B, _ = _sample_within(scaled_BV, kept_BV, noise_B, rows, num_candidates)
        return _with_logprobs(scaled_BV, token_ids_B, scaled_BV.logsumexp(-1))
    if paged_attention.AVAILABLE and logits_BV.device.type == "cpu" and logits_BV.dtype in _COMPILED:
        return draw.draw(
            logits_BV,
            noise_B.keys,
            num_candidates,
            temperature_B=None if rows.temperature_B1 is None else rows.temperature_B1[:, 0],
            greedy_B=rows.greedy_B,
            top_k_B=rows.top_k_B,
            top_p_B=rows.top_p_B,
        )
    if device_draw.takes(logits_BV):
        threshold_B = None
        if rows.filters:
            scaled_BV = _scaled(logits_BV, rows)
            weights_BV = (scaled_BV - scaled_BV.amax(-1, keepdim=True)).exp_()
            threshold_B = filter_threshold(scaled_BV, weights_BV, rows)
        return device_draw.draw(
            logits_BV,
            noise_B,
            num_candidates,
            temperature_B=None if rows.temperature_B1 is None else rows.temperature_B1[:, 0],
            greedy_B=rows.greedy_B,
            all_greedy=rows.all_greedy,
            threshold_B=threshold_B,
        )
    return sample_plain(logits_BV, noise_B.keys, rows, num_candidates=num_candidates)


def sample_kept(logits_BV: Tensor, noise_B: noise.DrawNoise, rows: SamplingRows) -> tuple[Tensor, Tensor, Tensor]:
    """`sample`, with what the filters left of the vocabulary in the rows that keep it (`SamplingRows.keeps_B`); their
    log-probs are those of the softmax over that.

    Returns:
        token_ids_B, logprobs_B, and bits_BW: the tokens that each row could draw (`supports.bits_of`); all of them in
        rows that do not keep.
    """
    scaled_BV, kept_BV = _filtered(logits_BV, rows)
    token_ids_B, logprobs_B = _sample_within(scaled_BV, kept_BV, noise_B, rows, NUM_CANDIDATES)
    if not rows.all_keep:  # who does not keep it has the bits of `sample`
        keeps_B = torch.zeros_like(token_ids_B, dtype=torch.bool) if rows.keeps_B is None else rows.keeps_B
        plain_ids_B, plain_B = sample(logits_BV, noise_B, rows)
        token_ids_B = torch.where(keeps_B, token_ids_B, plain_ids_B)
        logprobs_B = torch.where(keeps_B, logprobs_B, plain_B)
        kept_BV |= ~keeps_B[:, None]
    return token_ids_B, logprobs_B, bits_of(kept_BV)


def _filtered(logits_BV: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """The logits over the temperature [B, V], and which of them the filters leave, bool [B, V]. Of NaN nothing is left
    out: the log-prob says it."""
    scaled_BV = _scaled(logits_BV, rows)
    if not rows.filters:
        return scaled_BV, torch.ones_like(scaled_BV, dtype=torch.bool)
    weights_BV = (scaled_BV - scaled_BV.amax(-1, keepdim=True)).exp_()
    return scaled_BV, ~(scaled_BV < filter_threshold(scaled_BV, weights_BV, rows)[:, None])


def _sample_within(
    scaled_BV: Tensor, kept_BV: Tensor, noise_B: noise.DrawNoise, rows: SamplingRows, num_candidates: int
) -> tuple[Tensor, Tensor]:
    """Draw from the kept tokens alone. A sample draws the same token as it would from the whole vocabulary with the
    others masked out, as the candidates are the same. Returns tokens [B], and their log-probs [B] over what is kept."""
    within_BV = scaled_BV.masked_fill(~kept_BV, -torch.inf)
    whole = SamplingRows(None, rows.greedy_B, None, None, rows.all_greedy, 0)
    return sample(within_BV, noise_B, whole, num_candidates=num_candidates)


def sample_plain(
    logits_BV: Tensor, draw_keys_B: Tensor, rows: SamplingRows, *, num_candidates: int = NUM_CANDIDATES
) -> tuple[Tensor, Tensor]:
    """`sample` by torch's operators, for other dtypes and other devices; the oracle of `kernels.draw` and
    `kernels.device_draw`.

    Args:
        draw_keys_B: int64 keys of the draws (`noise.draw_keys`); the others are those of `sample`.
    """
    logits_BV = _scaled(logits_BV, rows)
    if rows.all_greedy:
        return _with_logprobs(logits_BV, logits_BV.argmax(-1), logits_BV.logsumexp(-1))

    vocab_size = logits_BV.shape[1]
    top_logits_BW, top_ids_BW = largest(logits_BV, min(num_candidates + 1, vocab_size))
    max_B1 = top_logits_BW[:, :1]
    weights_BV = (logits_BV - max_B1).exp_()  # softmax numerators, the largest is 1
    log_total_B = max_B1[:, 0] + weights_BV.sum(-1).log_()

    kept_BW = torch.ones_like(top_ids_BW, dtype=torch.bool)
    if top_ids_BW.shape[1] < vocab_size:
        kept_BW = top_logits_BW > top_logits_BW[:, -1:]
    if rows.filters:
        threshold_B1 = filter_threshold(logits_BV, weights_BV, rows)[:, None]
        kept_BW &= top_logits_BW >= threshold_B1
        weights_BV.masked_fill_(logits_BV < threshold_B1, 0.0)
    token_ids_B = among_candidates(top_logits_BW - max_B1, top_ids_BW, kept_BW, weights_BV, draw_keys_B)
    if rows.greedy_B is not None:
        token_ids_B = torch.where(rows.greedy_B, logits_BV.argmax(-1), token_ids_B)
    return _with_logprobs(logits_BV, token_ids_B, log_total_B)


def _scaled(logits_BV: Tensor, rows: SamplingRows) -> Tensor:
    """The logits over the temperature, in the dtype of computation."""
    logits_BV = logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float()
    return logits_BV if rows.temperature_B1 is None else logits_BV / rows.temperature_B1.to(logits_BV.dtype)


def filter_threshold(logits_BV: Tensor, weights_BV: Tensor, rows: SamplingRows) -> Tensor:
    """[B]: the smallest logit that each row keeps under its top-k, then top-p, and min-p; −inf where it keeps all.

    Top-p keeps the fewest of the most probable tokens whose mass, renormalised over those that top-k kept, reaches
    top_p: it looks at the top of the vocabulary only, in growing pieces, instead of sorting it. Min-p keeps tokens at
    least min_p times as probable as the most probable one, whatever is renormalised.

    Args:
        logits_BV: after temperature.
        weights_BV: exp(logits − row maximum).
    """
    threshold_B = _ranked_threshold(logits_BV, weights_BV, rows)
    if rows.min_p_B is None:
        return threshold_B
    return torch.maximum(threshold_B, logits_BV.amax(-1) + rows.min_p_B.log().to(logits_BV.dtype))


def _ranked_threshold(logits_BV: Tensor, weights_BV: Tensor, rows: SamplingRows) -> Tensor:
    """That of top-k, then top-p [B]."""
    vocab_size = logits_BV.shape[1]
    threshold_B = torch.full_like(logits_BV[:, 0], -torch.inf)
    if rows.top_k_B is not None:
        asked_B, most = rows.top_k_B < vocab_size, rows.most_top_k
        top_BK = logits_BV.topk(most, dim=-1).values
        kth_B = top_BK.gather(1, (rows.top_k_B.clamp(max=most) - 1)[:, None])[:, 0]
        threshold_B = torch.where(asked_B, kth_B, threshold_B)
    if rows.top_p_B is None:
        return threshold_B
    if logits_BV.device.type != "cpu":
        return whole_top_p(logits_BV, weights_BV, rows.top_p_B, threshold_B)

    pending = (rows.top_p_B < 1).nonzero()[:, 0]
    weights_PV = weights_BV[pending].masked_fill_(logits_BV[pending] < threshold_B[pending, None], 0.0)
    # A scan adds in one order; how a sum is split may depend on the number of rows.
    target_P = rows.top_p_B[pending] * weights_PV.cumsum(-1, dtype=torch.float64)[:, -1]
    width = min(64, vocab_size)
    while pending.numel():
        top_PW = logits_BV[pending].topk(width, dim=-1).values
        mass_PW = (top_PW - top_PW[:, :1]).exp_().cumsum(-1, dtype=torch.float64)
        reached_P = mass_PW[:, -1] >= target_P
        if width == vocab_size:  # a target missed by a rounding: the last token completes it
            mass_PW[:, -1] = torch.inf
            reached_P = torch.ones_like(reached_P)
        place_P = torch.searchsorted(mass_PW, target_P[:, None])[:, 0].clamp_(max=width - 1)
        value_P = torch.maximum(top_PW.gather(1, place_P[:, None])[:, 0], threshold_B[pending])
        threshold_B[pending[reached_P]] = value_P[reached_P]
        pending, target_P = pending[~reached_P], target_P[~reached_P]
        width = min(4 * width, vocab_size)
    return threshold_B


def whole_top_p(logits_BV: Tensor, weights_BV: Tensor, top_p_B: Tensor, threshold_B: Tensor) -> Tensor:
    """The threshold of top-p, and `threshold_B` in rows without one, by sorting the whole vocabulary: taken in pieces,
    the host would have to ask how many rows are left."""
    kept_BV = weights_BV.masked_fill(logits_BV < threshold_B[:, None], 0.0)
    target_B1 = top_p_B[:, None] * kept_BV.sum(-1, dtype=torch.float64, keepdim=True)
    sorted_BV = logits_BV.sort(dim=-1, descending=True).values
    mass_BV = (sorted_BV - sorted_BV[:, :1]).exp_().cumsum(-1, dtype=torch.float64)
    place_B1 = torch.searchsorted(mass_BV, target_B1).clamp_(max=logits_BV.shape[1] - 1)
    found_B = torch.maximum(sorted_BV.gather(1, place_B1)[:, 0], threshold_B)
    return torch.where(top_p_B < 1, found_B, threshold_B)


def _with_logprobs(logits_BV: Tensor, token_ids_B: Tensor, log_total_B: Tensor) -> tuple[Tensor, Tensor]:
    return token_ids_B, logits_BV.gather(1, token_ids_B[:, None])[:, 0] - log_total_B
