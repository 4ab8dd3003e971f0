"""The doctor's rules on samples that a step has drawn and does not train on.

Each is a pure function of a `Reading`, and silent where the numbers that it reads are absent.
"""

from __future__ import annotations

from plait.observe.doctor_reading import Reading, Severity, Sign

MANY = 0.1
"""Share of the samples above which it is a warning."""


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
        f"the function of `turns.reply` failed on {share:.0%} of the samples: they end there and are left out",
        "turns.on_error",
    )
