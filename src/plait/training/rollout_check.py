"""What the first mini-batch of a step says about the rollout: does the trainer see what the sampling engine sampled?

Pure NumPy over what that forward computed anyway; the doctor reads the numbers and names the cause. A mask that is off
by one, a temperature that is not the same and stale weights all show as a large difference; the shifted match and the
temperature fit tell them apart.

Shapes: R response tokens, N samples, in row order.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from plait.data.records import FinishReason
from plait.data.rows import FloatArray, Rows

ROUNDING = 1e-12
"""Nats. Smaller differences are those of float64 sums in another order: nothing explains them."""


def rollout_comparison(
    logprobs_R: FloatArray, sampling_logprobs_R: FloatArray, entropies_R: FloatArray, rows: Rows
) -> dict[str, float]:
    """How far the trainer's log-probs are from the sampling engine's, over the tokens that were sampled.

    Empty where none was (given completions), or where the forward was not finite: its step is skipped and counted.

    Args:
        logprobs_R, entropies_R: the trainer's, of `rows`.
        sampling_logprobs_R: NaN where a token was given.

    Returns:
        Under `training/`: `rollout_probs_diff_mean|max`: |p_train − p_sampling| of the sampled tokens;
        `rollout_logprobs_diff_mean|max`: |log p_train − log p_sampling|. `rollout_kl`: k3 estimate of
        KL(sampling ‖ training), mean of w − 1 − log w with w = p_train / p_sampling (Schulman 2020). `rollout_ess`:
        effective sample size (Σw)² / Σw² over the number of tokens, 1 where they agree. And what `shift_match` and
        `temperature_fit` say.
    """
    sampled_R = np.isfinite(sampling_logprobs_R)
    if not sampled_R.any() or not np.isfinite(logprobs_R).all():
        return {}
    difference_R = np.abs(np.exp(logprobs_R) - np.exp(sampling_logprobs_R))[sampled_R]
    log_ratio_R = (logprobs_R - sampling_logprobs_R)[sampled_R]
    clipped_R = np.clip(log_ratio_R, -20.0, 20.0)
    weights_R = np.exp(clipped_R)
    return {
        "training/rollout_probs_diff_mean": float(difference_R.mean()),
        "training/rollout_probs_diff_max": float(difference_R.max()),
        "training/rollout_logprobs_diff_mean": float(np.abs(log_ratio_R).mean()),
        "training/rollout_logprobs_diff_max": float(np.abs(log_ratio_R).max()),
        "training/rollout_kl": float((weights_R - 1 - clipped_R).mean()),
        "training/rollout_ess": float(weights_R.sum() ** 2 / (weights_R**2).sum() / len(weights_R)),
        **shift_match(logprobs_R, sampling_logprobs_R, rows),
        **temperature_fit(logprobs_R[sampled_R], sampling_logprobs_R[sampled_R], entropies_R[sampled_R]),
    }


def shift_match(logprobs_R: FloatArray, sampling_logprobs_R: FloatArray, rows: Rows) -> dict[str, float]:
    """`training/rollout_shift_match`: mean |Δ log p| when the trainer's log-probs are moved by one token within each
    response, in the direction that matches better. Far below `rollout_logprobs_diff_mean`: one of the two sides reads
    its log-probs one place off. Empty where no response has two sampled tokens."""
    lengths_N = np.diff(rows.offsets)
    sample_R = np.repeat(np.arange(len(rows)), lengths_N)
    inside = sample_R[1:] == sample_R[:-1]
    earlier = np.abs(logprobs_R[1:] - sampling_logprobs_R[:-1])[inside]
    later = np.abs(logprobs_R[:-1] - sampling_logprobs_R[1:])[inside]
    means = [float(part.mean()) for part in (earlier[np.isfinite(earlier)], later[np.isfinite(later)]) if len(part)]
    return {"training/rollout_shift_match": min(means)} if means else {}


def temperature_fit(
    logprobs_R: FloatArray, sampling_logprobs_R: FloatArray, entropies_R: FloatArray
) -> dict[str, float]:
    """How much of the difference another temperature explains, and which.

    With logits z / T, log p = z_y/T − lse(z/T) and H = lse(z/T) − E[z]/T, so ∂ log p / ∂ log(1/T) = log p + H: to first
    order a token's difference is log(T_trainer / T_engine) · (log p + H). `training/rollout_temperature_ratio` is
    T_engine / T_trainer by least squares, `training/rollout_temperature_fit` the share of the squared difference that
    it explains (1: temperature alone; near 0: something else).
    """
    difference_R = sampling_logprobs_R - logprobs_R
    direction_R = logprobs_R + entropies_R
    squares, total = float(direction_R @ direction_R), float(difference_R @ difference_R)
    if squares == 0 or total <= len(difference_R) * ROUNDING**2:
        return {"training/rollout_temperature_ratio": 1.0, "training/rollout_temperature_fit": 0.0}
    slope = float(difference_R @ direction_R) / squares
    return {
        "training/rollout_temperature_ratio": float(np.exp(-slope)),
        "training/rollout_temperature_fit": slope**2 * squares / total,
    }


def coverage(rows: Rows, mask_R: FloatArray | None, stop_token_ids: Collection[int]) -> dict[str, float]:
    """What the loss reaches of the samples that are trained on, which these rows are.

    `mask_coverage`: share of response tokens that are trained. `eos_coverage`: of the samples that ended by themselves
    and are trained at all, the share whose last trained token is a stop token; where it is 0 the model is never taught
    to stop. Left out where there is no such token or sample.
    """
    kept_R = np.ones(rows.num_tokens) if mask_R is None else mask_R
    shares = {"mask_coverage": float(kept_R.mean())} if len(kept_R) else {}
    lasts = []
    for sample, start, stop in zip(rows.samples, rows.offsets, rows.offsets[1:], strict=False):
        trained = np.flatnonzero(kept_R[start:stop])
        if sample.finish_reason is FinishReason.STOP and len(trained):
            lasts.append(sample.token_ids[trained[-1]] in stop_token_ids)
    return shares | ({"eos_coverage": float(np.mean(lasts))} if lasts else {})
