"""The doctor's rules on what a step trains with and what comes of it: masks, ends, rewards, updates.

Each is a pure function of a `Reading`, and silent where the numbers that it reads are absent.
"""

from __future__ import annotations

import math

from plait.observe.doctor_reading import (
    DEAD_GROUPS,
    FIRST_DEAD_GROUPS,
    FIRST_ENTROPY,
    FIRST_REWARD,
    REWARD,
    Reading,
    Severity,
    Sign,
)

ENTROPY_GROWN = 1.5
"""How many times the first step's entropy a policy has that says anything: training makes it smaller."""
NO_ADVANTAGES = 2.0
"""How bad a step without advantages is, beside shares of groups."""

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
    if (all_left := reading.is_set("all_left_out")) or reading.is_set("left_out_beside"):
        is_lasting = all_left and reading.streaks["mask_coverage"] >= 3
        severity = Severity.ERROR if is_lasting else Severity.WARNING
        learned = "nothing is learned" if all_left else "only the other losses of its optimizer steps are learned"
        what = "the flow" if all_left else "a training call"
        all_cut = reading.get("response_length/clip_ratio") == 1.0
        why = ": all of them are truncated at the limit" if all_cut else ""
        sentence = f"{what} leaves every sample of the step out of training (`keep`): {learned}{why}"
        return Sign(severity, 0.0, sentence, "sampling.max_response_tokens" if all_cut else "algorithm", badness=1.0)
    share = reading.get("training/mask_coverage")
    if share is None or share >= 0.05 or (share > 0 and reading.is_set("mask_chooses")):
        return None
    return Sign(
        Severity.ERROR if share == 0 else Severity.WARNING,
        share,
        f"the loss reaches {share:.1%} of the response tokens of what is trained on: the rest is masked",
        "data",
        badness=1 - share,
    )


def missing_eos(reading: Reading) -> Sign | None:
    if reading.is_set("stop_strings"):
        return None  # a response may end with any token that completes one
    if reading.is_set("no_end_token"):
        sentence = "neither the model's configuration nor its tokenizer names an end token: no response ends by itself"
        return Sign(Severity.WARNING, 1.0, sentence, "sampling.stop_token_ids", badness=2.0)
    passed = reading.get("doctor/passed_end") or 0.0
    if passed > 0.05:
        return Sign(
            Severity.ERROR if passed >= 0.3 else Severity.WARNING,
            passed,
            f"{passed:.0%} of the responses go on after an end token: the engine does not know it as one",
            "sampling.stop_token_ids",
            badness=1 + passed,
        )
    names = ("doctor/eos_share", *(() if reading.is_set("mask_chooses") else ("training/eos_coverage",)))
    share = min((known for name in names if (known := reading.get(name)) is not None), default=1.0)
    if share >= 0.5:
        return None
    return Sign(
        Severity.ERROR if share == 0 else Severity.WARNING,
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
    cause = "no response ended by itself" if share == 1 else f"{share:.0%} of the responses are truncated at the limit"
    why = "replies are too long" if (reading.get("turns/no_room") or 0) > share / 2 else "the model does not stop"
    sentence = f"{cause}: the limit is too low for the task, or {why}"
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
    if reading.get("doctor/zero_advantages") == 1:
        return _no_advantages(reading)
    share = _dead_share(reading)
    if share is None:
        return None
    return Sign(
        Severity.WARNING,
        share,
        f"{share:.0%} of the groups have equal {reading.compared} and teach nothing: prompts too hard or too easy, or "
        f"{reading.compared} that do not tell responses apart",
        reading.key_of_compared,
    )


def _no_advantages(reading: Reading) -> Sign:
    """An error where rewards have never told anything apart, or do not any more: one step may be luck, and a task that
    is learned is what the run is for. Where another loss is in the same optimizer steps it may be what changes that."""
    beside, mean = reading.is_set("learns_beside"), reading.get(REWARD)
    what = "these teach nothing" if beside else "it teaches nothing"
    cause = f"all {reading.compared} that are compared are equal"
    if mean is None:
        cause = "the numbers that are compared are equal, are of one sample alone, or were not read"
    sentence = f"every advantage of the step is 0: {what}, {cause}"
    if _learned(reading):
        sentence += f", at a mean of {mean:.3g} ({reading.first(FIRST_REWARD):.3g} at the first step)"
        sentence += ": there is little left to learn here, or a way to please the reward was found (read the responses)"
        return Sign(Severity.WARNING, 1.0, sentence, "data.source")
    first = reading.first(FIRST_DEAD_GROUPS)
    is_luck = first is not None and first < 1 and not _third_in_a_row(reading)
    severity = Severity.WARNING if is_luck or beside else Severity.ERROR
    key = "algorithm" if mean is None else reading.key_of_compared
    return Sign(severity, 1.0, sentence, key, badness=NO_ADVANTAGES)


def _third_in_a_row(reading: Reading) -> bool:
    """Whether this step without advantages follows two others that one rule has seen, whichever of the two asks."""
    before = (reading.before.get(rule, (0.0, 0)) for rule in ("dead_groups", "broken_policy"))
    return any(badness == NO_ADVANTAGES and steps >= 2 for badness, steps in before)


def _learned(reading: Reading) -> bool:
    """Whether the mean reward is above the first step's: groups may have equal rewards as all answers are right."""
    reward, first = reading.get(REWARD), reading.first(FIRST_REWARD)
    return reward is not None and first is not None and reward > first


def _dead_share(reading: Reading) -> float | None:
    """Share of the groups that have equal rewards, where it is too large and groups are compared."""
    share = reading.get(DEAD_GROUPS)
    if share is None or share < reading.settings.dead_groups or reading.values.get("doctor/uses_groups") == 0:
        return None
    return share


# -- optimisation


def broken_policy(reading: Reading) -> Sign | None:
    """Rewards that told responses apart at first, and do not any more, though they are no higher: if the policy is far
    from what it was, that is why. As long as they do not, it is the same policy, whatever it says now. The entropy of
    few prompts varies by as much from step to step: an error is the third step in a row without advantages."""
    share, first = _dead_share(reading), reading.first(FIRST_DEAD_GROUPS)
    if share is None or first is None or first >= reading.settings.dead_groups:
        return None
    if _learned(reading):
        return None
    moved = _far_away(reading) or ("little is learned" if reading.streaks["broken_policy"] > 1 else None)
    if moved is None:
        return None
    is_empty = reading.get("doctor/zero_advantages") == 1
    return Sign(
        Severity.ERROR if is_empty and _third_in_a_row(reading) else Severity.WARNING,
        share,
        f"{share:.0%} of the groups have equal {reading.compared}, {first:.0%} at the first step, and {moved}: updates "
        "that are too large have most likely broken the policy",
        "optimizer.learning_rate",
        badness=NO_ADVANTAGES if is_empty else share,
    )


def _far_away(reading: Reading) -> str | None:
    """What shows that the policy is far from the one that the run began with; None: nothing does."""
    entropy, first, kl = reading.get("actor/entropy"), reading.first(FIRST_ENTROPY), reading.get("kl")
    if entropy is not None and first is not None and first >= 0.05:
        low, high = reading.settings.entropy_left * first, ENTROPY_GROWN * first
        if not low <= entropy <= high:
            return f"the policy's entropy is {entropy:.2g} nats, {first:.2g} then"
    if kl is not None and kl > reading.settings.kl and not reading.is_set("reference_is_another"):
        return f"the policy is {kl:.2g} nats per token from the reference"
    return None


def loss_depends_on_split(reading: Reading) -> Sign | None:
    prefix = "doctor/loss_split/"
    gaps = {name.removeprefix(prefix): gap for name, gap in reading.values.items() if name.startswith(prefix)}
    worst = max(gaps, key=gaps.__getitem__, default=None)
    if worst is None or gaps[worst] <= 0.01:
        return None
    call, _, loss = worst.partition(" ")
    return Sign(
        Severity.ERROR,
        gaps[worst],
        f"the loss `{loss}` of {call} does not add up: as two micro-batches its gradient is {gaps[worst]:.0%} off that "
        "of the same samples as one, so that `micro_batch_tokens` scales it; in place of `values.mean()` end it with "
        "`return batch.aggregate(values, 'token-mean')` (of values per sample: `batch.mean_over_sequences(values)`)",
        "algorithm",
    )


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
    """Who learns from given samples, or from a teacher, is to become as certain as these are."""
    entropy, first = reading.get("actor/entropy"), reading.first(FIRST_ENTROPY)
    if entropy is None or first is None or first < 0.05 or reading.is_set("is_taught"):
        return None
    if entropy >= reading.settings.entropy_left * first:
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
    if kl is None or kl <= reading.settings.kl or reading.is_set("reference_is_another"):
        return None
    sentence = f"the policy is {kl:.2g} nats per token from the reference: it leaves the language that it had"
    return Sign(Severity.WARNING, kl, sentence, "options.kl_coef")


def explained_variance(reading: Reading) -> Sign | None:
    for role in ("critic", "cost_critic"):
        value = reading.get(f"{role}/vf_explained_var")
        if value is not None and value < 0 and reading.step >= 10:
            return Sign(
                Severity.WARNING if reading.streaks["explained_variance"] >= 5 else None,
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
    return Sign(Severity.WARNING, float(len(names)), f"numbers that are not finite: {shown}", _blamed(reading))


def skipped_steps(reading: Reading) -> Sign | None:
    for name, skipped in reading.values.items():
        if name.endswith("/skipped_steps") and skipped > 0:
            total = reading.get(f"{name.rsplit('/', 1)[0]}/optimizer_steps") or skipped
            sentence = f"{skipped:.0f} of {total:.0f} optimizer steps were skipped, as loss or gradient was not finite"
            if (key := _blamed(reading)) == "algorithm":
                sentence += ": no update had been made, so it is the loss, or what it is given"
            return Sign(Severity.ERROR if skipped >= total else Severity.WARNING, skipped, sentence, key)
    return None


def _blamed(reading: Reading) -> str:
    """The key to look at where numbers are not finite; before the policy's first update it is not the learning rate."""
    steps, skipped = (reading.get(f"training/{name}_steps") for name in ("optimizer", "skipped"))
    return "algorithm" if reading.step == 1 and steps and steps == skipped else "optimizer.learning_rate"
