"""The doctor's rules by name: each reads the numbers of a step and says what is off, or nothing.

A rule is a pure function of a `Reading`. The numbers are the step's metrics (docs/metrics.md) and facts that only the
runtime can establish, under `doctor/`; a rule whose numbers are absent is silent.
"""

from __future__ import annotations

from collections.abc import Callable

from plait.observe.doctor_agreement import (
    frozen_role_changed,
    off_policy,
    rollout_mismatch,
    stale_policy_version,
    stale_reference,
    weights_do_not_move,
    wrong_reference,
)
from plait.observe.doctor_reading import Reading, Severity, Sign
from plait.observe.doctor_training import (
    broken_policy,
    clip_share,
    dead_groups,
    entropy_collapse,
    explained_variance,
    kl_too_large,
    loss_depends_on_split,
    mask_coverage,
    mask_shift,
    missing_eos,
    non_finite,
    skipped_steps,
    truncation,
)

Rule = Callable[[Reading], Sign | None]

MANY = 0.1
"""Share of the samples, drawn and not trained on, above which it is a warning."""


def reward_dropped(reading: Reading) -> Sign | None:
    dropped, samples = reading.get("reward/dropped"), reading.get("doctor/samples")
    if not dropped:
        return None
    share = dropped / samples if samples else None
    text = f"{dropped:.0f} samples" + (f" ({share:.0%})" if share is not None else "")
    return Sign(
        Severity.WARNING if (share or 0) > MANY else Severity.INFO,
        dropped,
        f"{text} have no reward and are left out",
        "reward.on_error",
        badness=share if share is not None else dropped,
    )


def reply_failed(reading: Reading) -> Sign | None:
    share = reading.get("turns/errors")
    if not share:
        return None
    return Sign(
        Severity.WARNING if share > MANY else Severity.INFO,
        share,
        f"replies (`turns.reply`, `turns.tools`) failed on {share:.0%} of the samples: they end there and are left out",
        "turns.on_error",
    )


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        rollout_mismatch,
        stale_policy_version,
        off_policy,
        wrong_reference,
        stale_reference,
        frozen_role_changed,
        weights_do_not_move,
        broken_policy,
        mask_shift,
        mask_coverage,
        missing_eos,
        truncation,
        dead_groups,
        reward_dropped,
        reply_failed,
        loss_depends_on_split,
        clip_share,
        entropy_collapse,
        kl_too_large,
        explained_variance,
        non_finite,
        skipped_steps,
    )
}

SILENT_BESIDE = {"dead_groups": "broken_policy"}
"""Rule → an earlier one of which it is what comes of it: where that sees its sign, it is not asked."""
