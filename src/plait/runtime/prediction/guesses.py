"""What guessed tokens come to in a run that is foretold: as runs have measured it, or as the recipe fixes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from plait.cost.drafts import NO_DRAFTS, Drafts
from plait.cost.profile import DraftRecord, Profile
from plait.generation.settings import SamplingSettings


def drafts_of_run(sampling: SamplingSettings, profile: Profile | None, recorded: Drafts | None) -> Drafts:
    """What the guesses of a run come to. Of what nothing is known of nothing is foretold: it takes at most some percent
    longer than without."""
    if sampling.speculation == "off":
        return NO_DRAFTS
    return known_drafts(sampling, profile, recorded) or NO_DRAFTS


def known_drafts(sampling: SamplingSettings, profile: Profile | None, recorded: Drafts | None) -> Drafts | None:
    """What guesses come to, by a draft model or by texts as the recipe has it, whether or not it guesses: as runs have
    measured it; else as the recipe fixes it, where a draft model guesses in every step. None: nothing is known.

    Args:
        profile: of the machine, with what runs there measured.
        recorded: of the run whose lengths are taken, which comes before others.
    """
    by_model = sampling.draft_model is not None
    if recorded is not None and (recorded.passes > 0) == by_model:
        return recorded
    if profile is not None and (measured := profile.drafts(by_model=by_model)) is not None:
        return measured
    if by_model and isinstance(sampling.speculation, int):
        return Drafts.fixed(sampling.speculation)
    return None


def drafts_of(rows: Sequence[Mapping[str, float]]) -> DraftRecord | None:
    """What guesses came to, in the mean over all steps of decoding; None where none were made.

    In a step that computes guesses a sample has one row more for each, and gets `perf/spec/mean_acceptance_length`
    tokens; all other steps have a row and a token a sample.
    """
    length, share, drafted, accepted = (
        [row[f"perf/spec/{name}"] for row in rows if f"perf/spec/{name}" in row]
        for name in ("mean_acceptance_length", "drafted_steps", "draft_tokens", "accepted_tokens")
    )
    if not length or not share or not sum(accepted):
        return None
    gained, part = median(length) - 1.0, median(share)
    guessed = gained * sum(drafted) / sum(accepted)
    passes = [row["perf/spec/draft_model_passes"] for row in rows if "perf/spec/draft_model_passes" in row]
    return DraftRecord(tokens=1 + part * gained, rows=1 + part * guessed, passes=median(passes) if passes else 0.0)
