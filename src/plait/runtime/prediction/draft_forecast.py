"""What draft tokens come to in a run that is predicted: as a user states it, as runs have measured it, or as the
recipe fixes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from plait.cost.drafts import NO_DRAFTS, TRUST, Drafts
from plait.cost.profile import DraftRecord, Profile
from plait.dataflow import CallKind, Dataflow
from plait.errors import ConfigError
from plait.generation.settings import MAX_DRAFT_TOKENS, SamplingSettings

RATE, LENGTH = "--acceptance-rate", "--acceptance-length"


@dataclass(frozen=True)
class Acceptance:
    """What a user states of the steps that compute drafts, by the names of metrics (`perf/spec/...`); None: nothing.

    rate:   `draft_acceptance_rate`, the share of draft tokens that are accepted
    length: `mean_acceptance_length`, tokens that a sample gets in a step: one more than are accepted
    """

    rate: float | None = None
    length: float | None = None

    @property
    def is_stated(self) -> bool:
        return self.rate is not None or self.length is not None

    def drafts(self, sampling: SamplingSettings) -> Drafts:
        """What drafts come to where each step computes them. G are drafted for a sample and step: length = 1 + rate G.
        A number of the recipe is G, so that one of the two says the other; `auto` takes both; `off` is seen as `auto`.

        Raises:
            ConfigError: one of them cannot be, one is missing, or one is too many.
        """
        rate, length, fixed = self.rate, self.length, sampling.speculation
        if rate is not None and not 0 <= rate <= 1:
            raise ConfigError(f"{RATE}: expected a share of the draft tokens, 0 to 1, found {rate:g}")
        if length is not None and not 1 <= length <= 1 + MAX_DRAFT_TOKENS:
            raise ConfigError(
                f"{LENGTH}: expected the tokens that a sample gets in a step with drafts, "
                f"1 to {1 + MAX_DRAFT_TOKENS}, found {length:g}"
            )
        if isinstance(fixed, int):
            drafted = float(fixed)
            if rate is not None and length is not None:
                raise ConfigError(
                    f"{RATE}, {LENGTH}: expected one of them, as `sampling.speculation` {fixed} says the other: length "
                    f"= 1 + {fixed} * rate"
                )
            length = 1 + (rate or 0.0) * drafted if length is None else length
            if length > 1 + drafted:
                raise ConfigError(
                    f"{LENGTH}: expected at most {1 + fixed}, as `sampling.speculation` is {fixed}, found {length:g}"
                )
        elif rate is None or length is None:
            raise ConfigError(
                f"{RATE}, {LENGTH}: expected both where `sampling.speculation` is no number but `{fixed}`; "
                f"{LENGTH if length is None else RATE} is missing"
            )
        elif length > 1 + rate * MAX_DRAFT_TOKENS:
            raise ConfigError(
                f"{RATE}, {LENGTH}: expected a length of at most 1 + {MAX_DRAFT_TOKENS} * rate = "
                f"{1 + rate * MAX_DRAFT_TOKENS:g}, as {MAX_DRAFT_TOKENS} tokens are drafted at most, found {length:g}"
            )
        else:
            drafted = (length - 1) / rate if rate else 0.0
        return Drafts(length, 1 + drafted, drafted if sampling.draft_model is not None else 0.0)

    def check(self, sampling: SamplingSettings, flow: Dataflow) -> None:
        """Raises ConfigError where the flow draws nothing, or as of `drafts`."""
        if not flow.of_kind(CallKind.GENERATE):
            raise ConfigError(f"{RATE}, {LENGTH}: this recipe generates nothing, so nothing is drafted; leave them out")
        self.drafts(sampling)


NOTHING_STATED = Acceptance()


@dataclass(frozen=True)
class DraftForecast:
    """What drafts come to, and who says so, in words."""

    drafts: Drafts
    source: str


UNKNOWN = DraftForecast(
    NO_DRAFTS, f"plain steps, as nothing is known of what drafts come to; {RATE} and {LENGTH} state it"
)


def draft_forecast(
    sampling: SamplingSettings, profile: Profile | None, recorded: Drafts | None, stated: Acceptance = NOTHING_STATED
) -> DraftForecast | None:
    """What drafting brings to a run; None: it does not draft. `UNKNOWN`, where nothing is known of how many drafts are
    accepted, predicts no gain: drafting then costs a few percent at most.

    Raises:
        ConfigError: as of `Acceptance.drafts`.
    """
    if sampling.speculation == "off":
        return None
    return known_draft_forecast(sampling, profile, recorded, stated) or UNKNOWN


def known_draft_forecast(
    sampling: SamplingSettings, profile: Profile | None, recorded: Drafts | None, stated: Acceptance = NOTHING_STATED
) -> DraftForecast | None:
    """What drafts come to, by a draft model or by texts as the recipe has it, whether or not it drafts: as it is
    stated; else as runs have measured it; else as the recipe fixes it, where a draft model proposes in every step.
    None: nothing is known.

    Args:
        profile: of the machine, with what runs there measured.
        recorded: of the run whose lengths are taken, which comes before others.

    Raises:
        ConfigError: as of `Acceptance.drafts`.
    """
    if stated.is_stated:
        return DraftForecast(stated.drafts(sampling), "as stated")
    by_model = sampling.draft_model is not None
    if recorded is not None and (recorded.passes > 0) == by_model:
        return DraftForecast(recorded, "as measured by the run of --lengths")
    if profile is not None and (measured := profile.drafts(by_model=by_model)) is not None:
        return DraftForecast(measured, "as measured by the newest run on this machine that drafted")
    if by_model and isinstance(sampling.speculation, int):
        return DraftForecast(Drafts.fixed(sampling.speculation), f"if each is accepted in {TRUST:.0%} of the places")
    return None


def drafts_of(rows: Sequence[Mapping[str, float]]) -> DraftRecord | None:
    """What drafts came to, in the mean over all steps of decoding; None where none were made.

    In a step that computes drafts a sample has one row more for each, and gets `perf/spec/mean_acceptance_length`
    tokens; all other steps have a row and a token a sample.
    """
    length, share, drafted, accepted = (
        [row[f"perf/spec/{name}"] for row in rows if f"perf/spec/{name}" in row]
        for name in ("mean_acceptance_length", "drafted_steps", "draft_tokens", "accepted_tokens")
    )
    if not length or not share or not sum(accepted):
        return None
    gained, typical_share = median(length) - 1.0, median(share)
    proposed = gained * sum(drafted) / sum(accepted)
    passes = [row["perf/spec/draft_model_passes"] for row in rows if "perf/spec/draft_model_passes" in row]
    return DraftRecord(
        tokens=1 + typical_share * gained, rows=1 + typical_share * proposed, passes=median(passes) if passes else 0.0
    )
