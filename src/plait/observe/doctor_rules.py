"""The doctor's rules: each reads the numbers of a step and says what is off, or nothing.

A rule is a pure function of a `Reading`. The numbers are the step's metrics (docs/metrics.md) and facts that only the
runtime can establish, under `doctor/`; a rule whose numbers are absent is silent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from plait.observe.doctor_reading import (
    DIFF,
    FIRST_DIFF,
    FIRST_ENTROPY,
    ROLLOUT_KL,
    Diagnosis,
    Reading,
    Severity,
    Sign,
)

Rule = Callable[[Reading], Sign | None]


def _either(flag: bool, yes: Severity, no: Severity | None) -> Severity | None:
    return yes if flag else no


# -- engine and trainer


def rollout_mismatch(reading: Reading) -> Sign | None:
    """The alarm: engine log-probs against the first training forward. The cause is another's to name."""
    diff, kl = reading.get(DIFF), reading.get(ROLLOUT_KL)
    if diff is None:
        return None
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
    what = sign.sentence.removesuffix("; no cause stands out")
    return replace(sign, sentence=f"{what}: {diagnosis.sentence}", key=diagnosis.key, name=diagnosis.cause)


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


# -- reference


def wrong_reference(reading: Reading) -> Sign | None:
    """Before the first update policy and reference are one model, so their KL is the floor of the numerics."""
    if reading.step != 1:
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
            "the reference's weights are not those that it had at the beginning of the run",
            "model",
        )
    trained = (reading.get("actor/grad_norm") or 0) > 0 and (reading.get("actor/lr") or 0) > 0
    moved = reading.values.get("doctor/weights_moved", 1.0) > 0
    if reading.step > 1 and reading.get("kl") == 0 and trained and moved:
        severity = _either(reading.streaks["stale_reference"] >= 3, Severity.WARNING, None)
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
        _either(reading.streaks["weights_do_not_move"] >= 3, Severity.WARNING, None),
        0.0,
        "optimizer steps have left the working weights as they were, three steps in a row: updates are lost in the "
        "rounding of the dtype, or gradients are 0",
        "optimizer.learning_rate",
    )


# -- masks and ends


def mask_shift(reading: Reading) -> Sign | None:
    for fact, where in (("mask_early", "one token before"), ("mask_late", "one token after")):
        share = reading.get(f"doctor/{fact}")
        if share is not None and share >= 0.5:
            return Sign(
                Severity.ERROR,
                share,
                f"the mask ends {where} the end token in {share:.0%} of the trained turns: it is shifted by one",
                "data",
            )
    return None


def mask_coverage(reading: Reading) -> Sign | None:
    share = reading.get("training/mask_coverage")
    if share is None or share >= 0.05:
        return None
    return Sign(
        _either(share == 0, Severity.ERROR, Severity.WARNING),
        share,
        f"the loss reaches {share:.1%} of the response tokens: the rest is masked",
        "data",
        badness=1 - share,
    )


def missing_eos(reading: Reading) -> Sign | None:
    if reading.is_set("stop_strings"):
        return None  # a response may end with any token that completes one
    passed = reading.get("doctor/passed_end") or 0.0
    if passed > 0.05:
        return Sign(
            _either(passed >= 0.3, Severity.ERROR, Severity.WARNING),
            passed,
            f"{passed:.0%} of the responses go on after an end token: the engine does not know it as one",
            "sampling.stop_token_ids",
            badness=1 + passed,
        )
    shares = [reading.get("training/eos_coverage"), reading.get("doctor/eos_share")]
    known = [share for share in shares if share is not None]
    if not known or min(known) >= 0.5:
        return None
    share = min(known)
    return Sign(
        _either(share == 0, Severity.ERROR, Severity.WARNING),
        share,
        f"of the responses that ended by themselves {share:.0%} have their end token trained: the model is not "
        "taught to stop",
        "sampling.stop_token_ids",
        badness=1 - share,
    )


def truncation(reading: Reading) -> Sign | None:
    share = reading.get("response_length/clip_ratio")
    if share is None or share <= reading.settings.truncated:
        return None
    cause = "no response ended by itself" if share == 1 else f"{share:.0%} of the responses are cut at the limit"
    sentence = f"{cause}: the limit is too low for the task, or the model does not stop"
    return Sign(Severity.WARNING, share, sentence, "sampling.max_response_tokens")


# -- rewards


def dead_groups(reading: Reading) -> Sign | None:
    if reading.is_set("groups_broken"):
        return Sign(
            Severity.ERROR,
            1.0,
            "groups have fewer samples than were drawn for a prompt: they are keyed by something else than the prompt "
            "instance, and compare nothing",
            "samples_per_prompt",
            badness=2.0,
        )
    zero = reading.get("doctor/zero_advantages")
    if zero == 1:
        return Sign(
            Severity.ERROR,
            1.0,
            "every advantage of the step is 0: it teaches nothing, all rewards that are compared are equal",
            "reward.functions",
            badness=2.0,
        )
    share = reading.get("frac_reward_zero_std")
    if share is None or share < reading.settings.dead_groups or reading.values.get("doctor/uses_groups") == 0:
        return None
    return Sign(
        Severity.WARNING,
        share,
        f"{share:.0%} of the groups have equal rewards and teach nothing: prompts too hard or too easy, or a reward "
        "that does not tell responses apart",
        "reward.functions",
    )


def reward_dropped(reading: Reading) -> Sign | None:
    dropped, samples = reading.get("reward/dropped"), reading.get("doctor/samples")
    if not dropped:
        return None
    share = dropped / samples if samples else None
    text = f"{dropped:.0f} samples" + (f" ({share:.0%})" if share is not None else "")
    return Sign(
        _either((share or 0) > 0.1, Severity.WARNING, Severity.INFO),
        dropped,
        f"{text} have no reward and are left out",
        "reward.on_error",
        badness=share if share is not None else dropped,
    )


# -- optimisation


def clip_share(reading: Reading) -> Sign | None:
    share = reading.get("actor/pg_clipfrac")
    if share is None or share <= reading.settings.clipped:
        return None
    return Sign(
        Severity.WARNING,
        share,
        f"the clip stops {share:.0%} of the tokens: updates of one batch go too far",
        "optimizer.learning_rate",
    )


def entropy_collapse(reading: Reading) -> Sign | None:
    entropy, first = reading.get("actor/entropy"), reading.first(FIRST_ENTROPY)
    if entropy is None or first is None or first < 0.05 or entropy >= reading.settings.entropy_left * first:
        return None
    return Sign(
        Severity.WARNING,
        entropy,
        f"the policy's entropy has fallen to {entropy:.2g} nats from {first:.2g} at the first step: it repeats itself "
        "and explores no more",
        "optimizer.learning_rate",
        badness=first / max(entropy, 1e-6),
    )


def kl_too_large(reading: Reading) -> Sign | None:
    kl = reading.get("kl")
    if kl is None or kl <= reading.settings.kl:
        return None
    sentence = f"the policy is {kl:.2g} nats per token from the reference: it leaves the language that it had"
    return Sign(Severity.WARNING, kl, sentence, "options.kl_coef")


def explained_variance(reading: Reading) -> Sign | None:
    for role in ("critic", "cost_critic"):
        value = reading.get(f"{role}/vf_explained_var")
        if value is not None and value < 0 and reading.step >= 10:
            return Sign(
                _either(reading.streaks["explained_variance"] >= 5, Severity.WARNING, None),
                value,
                f"the explained variance of `{role}` is {value:.2f}: its values are worse than a constant",
                f"{role}.optimizer.learning_rate",
                badness=-value,
            )
    return None


def non_finite(reading: Reading) -> Sign | None:
    counts = {name: value for name, value in reading.values.items() if "/nonfinite_" in name and value > 0}
    names = [name for name, value in reading.values.items() if not math.isfinite(value)] + list(counts)
    if not names:
        return None
    shown = ", ".join(f"`{name}`" for name in names[:3]) + (" …" if len(names) > 3 else "")
    sentence = f"numbers that are not finite: {shown}"
    return Sign(Severity.WARNING, float(len(names)), sentence, "optimizer.learning_rate")


def skipped_steps(reading: Reading) -> Sign | None:
    for name, skipped in reading.values.items():
        if name.endswith("/skipped_steps") and skipped > 0:
            group = name.rsplit("/", 1)[0]
            total = reading.get(f"{group}/optimizer_steps") or skipped
            return Sign(
                _either(skipped >= total, Severity.ERROR, Severity.WARNING),
                skipped,
                f"{skipped:.0f} of {total:.0f} optimizer steps were skipped, their loss or gradient was not finite",
                "optimizer.learning_rate",
            )
    return None


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        rollout_mismatch,
        stale_policy_version,
        wrong_reference,
        stale_reference,
        frozen_role_changed,
        weights_do_not_move,
        mask_shift,
        mask_coverage,
        missing_eos,
        truncation,
        dead_groups,
        reward_dropped,
        clip_share,
        entropy_collapse,
        kl_too_large,
        explained_variance,
        non_finite,
        skipped_steps,
    )
}
