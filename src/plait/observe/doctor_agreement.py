"""The doctor's rules on weights and log-probs: engine, trainer, reference and frozen models hold what they should.

Each is a pure function of a `Reading`, and silent where the numbers that it reads are absent.
"""

from __future__ import annotations

import math
from dataclasses import replace

from plait.observe.doctor_reading import DIFF, FIRST_DIFF, ROLLOUT_KL, Diagnosis, Reading, Severity, Sign

LEAST_ESS = 0.5
"""Effective sample size of the tokens of older weights, over their number."""
MOST_STALE_KL = 0.1
"""Nats per token between the weights that drew samples and those that train on them."""

# -- engine and trainer


def rollout_mismatch(reading: Reading) -> Sign | None:
    """The alarm: engine log-probs against the first training forward. The cause is another's to name."""
    diff, kl = reading.get(DIFF), reading.get(ROLLOUT_KL)
    if diff is None or reading.is_set("off_policy") or reading.is_set("drawn_by_another"):
        return None  # of older weights other probabilities are to be expected: `off_policy` looks at how far
    limits = reading.limits
    excess = max(diff / limits.probs_diff, (kl or 0.0) / limits.kl)
    if excess <= 1:
        return None
    sentence = f"the trainer's probabilities are {diff:.2g} off the engine's on average (alarm: {limits.probs_diff:g})"
    if kl is not None:
        sentence += f", KL {kl:.2g}"
    severity = Severity.ERROR if excess > 5 else Severity.WARNING
    return Sign(severity, diff, f"{sentence}; no cause stands out", "dtype", badness=excess)


def metrics_diagnosis(reading: Reading) -> Diagnosis | None:
    """What the metrics alone say of a mismatch between engine and trainer."""
    logs, shifted = reading.get("training/rollout_logprobs_diff_mean"), reading.get("training/rollout_shift_match")
    if logs is not None and shifted is not None and shifted < 0.3 * logs:
        return Diagnosis(
            "mask_shift",
            f"moved by one token the two sides agree ({shifted:.2g} instead of {logs:.2g} nats): log-probs or mask are "
            "read one place off",
            "algorithm",
        )
    fit, ratio = reading.get("training/rollout_temperature_fit"), reading.get("training/rollout_temperature_ratio")
    if fit is not None and ratio is not None and fit > 0.8 and abs(math.log(ratio)) > 0.01:
        return Diagnosis(
            "temperature",
            f"another temperature explains {fit:.0%} of it: the engine samples at {ratio:.3g} times the trainer's",
            "sampling.temperature",
        )
    first = reading.first(FIRST_DIFF)
    if first is not None and reading.has_come_apart:
        return Diagnosis(
            "stale_sampler_weights",
            f"before the first update they agreed ({first:.2g}): the engine most likely samples with older weights "
            "than those that train",
            "doctor.max_version_lag",
        )
    return None


def explained(sign: Sign, diagnosis: Diagnosis | None) -> Sign:
    """The alarm with its cause."""
    if diagnosis is None:
        return sign
    sentence = sign.sentence.removesuffix("; no cause stands out")
    return replace(sign, sentence=f"{sentence}: {diagnosis.sentence}", key=diagnosis.key, name=diagnosis.cause)


def stale_policy_version(reading: Reading) -> Sign | None:
    lag = reading.get("doctor/version_lag")
    if lag is None or lag <= reading.settings.max_version_lag:
        return None
    return Sign(
        Severity.ERROR,
        lag,
        f"samples were drawn {lag:.0f} policy versions before the one that trains on them (allowed: "
        f"{reading.settings.max_version_lag})",
        "doctor.max_version_lag",
    )


def off_policy(reading: Reading) -> Sign | None:
    """How much samples of older weights are still worth: they are weighed by what the weights say of them now."""
    ess, kl = reading.get("training/rollout_ess"), reading.get(ROLLOUT_KL)
    if not reading.is_set("off_policy") or ess is None or kl is None:
        return None
    excess = max(LEAST_ESS / max(ess, 1e-9), kl / MOST_STALE_KL)
    if excess <= 1:
        return None
    return Sign(
        Severity.WARNING,
        1 - ess,
        f"samples are of older weights, and those that train on them have moved away: the effective sample size is "
        f"{ess:.0%} (alarm: {LEAST_ESS:.0%}), KL {kl:.2g} (alarm: {MOST_STALE_KL:g})",
        "max_staleness",
        badness=excess,
    )


# -- reference


def wrong_reference(reading: Reading) -> Sign | None:
    """Before the first update policy and reference are one model, so their KL is the floor of the numerics: unless the
    recipe gives the reference a model of its own."""
    if reading.step != 1 or reading.is_set("reference_is_another"):
        return None
    kl = reading.get("doctor/ref_kl")
    if kl is None and reading.get("training/optimizer_steps") == 1:
        kl = reading.get("kl")
    if kl is None:
        return _wrong_reference_of_pairs(reading)
    # A mismatch between engine and trainer is another rule's, and part of this difference too.
    floor = max(reading.limits.kl, 3 * (reading.get(ROLLOUT_KL) or 0.0))
    if kl <= floor:
        return None
    return Sign(
        Severity.ERROR,
        kl,
        f"before the first update the policy's KL to the reference is {kl:.2g}, where their numerics allow "
        f"{floor:.1g}: the reference has other weights, another temperature or other tokens",
        "model",
    )


def _wrong_reference_of_pairs(reading: Reading) -> Sign | None:
    """DPO's implicit rewards are β times the log-ratio to the reference: 0 before the first update."""
    rewards = [abs(reading.get(f"rewards/{side}") or 0.0) for side in ("chosen", "rejected")]
    limit = 5 * reading.limits.probs_diff
    if not reading.is_set("has_reference") or reading.get("training/optimizer_steps") != 1 or max(rewards) <= limit:
        return None
    return Sign(
        Severity.ERROR,
        max(rewards),
        f"before the first update the implicit rewards are {max(rewards):.2g}, where policy and reference being one "
        "model makes them 0: the reference has other weights, or reads other tokens",
        "model",
    )


def stale_reference(reading: Reading) -> Sign | None:
    if reading.is_set("ref_is_policy"):
        return Sign(
            Severity.ERROR,
            1.0,
            "the reference has the policy's weights though the policy has been updated: it follows the policy, so the "
            "KL is 0 and holds nothing",
            "model",
        )
    if reading.is_set("ref_changed"):
        return Sign(
            Severity.ERROR,
            1.0,
            "the reference's weights are not those that it had at the beginning of the run, or after its last sync",
            "model",
        )
    trained = (reading.get("actor/grad_norm") or 0) > 0 and (reading.get("actor/lr") or 0) > 0
    moved = reading.values.get("doctor/weights_moved", 1.0) > 0
    if reading.step > 1 and reading.get("kl") == 0 and trained and moved:
        severity = Severity.WARNING if reading.streaks["stale_reference"] >= 3 else None
        return Sign(
            severity,
            0.0,
            "the KL to the reference is exactly 0 after updates: the reference follows the policy, or updates do not "
            "reach the log-probs",
            "optimizer.learning_rate",
        )
    return None


def frozen_role_changed(reading: Reading) -> Sign | None:
    roles = [name.rsplit("/", 1)[1] for name, value in reading.values.items() if value and _is_changed_fact(name)]
    if not roles:
        return None
    return Sign(
        Severity.ERROR,
        float(len(roles)),
        f"weights of {', '.join(f'`{role}`' for role in roles)}, which the flow does not train, have changed",
        "algorithm",
    )


def _is_changed_fact(name: str) -> bool:
    return name.startswith("doctor/changed/")


def weights_do_not_move(reading: Reading) -> Sign | None:
    moved, applied = reading.get("doctor/weights_moved"), reading.get("training/optimizer_steps")
    skipped = reading.get("training/skipped_steps") or 0
    if moved is None or moved > 0 or not applied or skipped >= applied or not reading.get("actor/lr"):
        return None
    if reading.get("doctor/zero_advantages") == 1:
        return None  # there is nothing to move them, as another rule says
    return Sign(
        Severity.WARNING if reading.streaks["weights_do_not_move"] >= 3 else None,
        0.0,
        "optimizer steps have left the working weights as they were, three steps in a row: updates are lost in the "
        "rounding of the dtype, or gradients are 0",
        "optimizer.learning_rate",
    )
