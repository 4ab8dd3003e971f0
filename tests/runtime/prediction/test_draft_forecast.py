"""What drafts come to: as stated, as measured, as the recipe fixes it. By hand."""

from __future__ import annotations

import pytest

from plait.cost.drafts import Drafts
from plait.cost.profile import DraftRecord, RunRecord
from plait.errors import ConfigError
from plait.generation.settings import SamplingSettings
from plait.runtime.prediction.draft_forecast import UNKNOWN, Acceptance, draft_forecast, known_draft_forecast
from tests.cost.test_profile import PROFILE


def sampling(speculation: int | str, draft_model: str | None = None) -> SamplingSettings:
    return SamplingSettings.model_validate({"speculation": speculation, "draft_model": draft_model})


MEASURED = Drafts(1.5, 2.0)
RAN = PROFILE.with_run(RunRecord(devices=1, predicted_s=1.0, measured_s=1.0, drafts=DraftRecord(tokens=1.25, rows=3.0)))


@pytest.mark.parametrize(
    ("speculation", "rate", "length", "tokens", "rows"),
    [
        (4, 0.5, None, 3.0, 5.0),  # half of four are accepted, and a token of its own
        (4, None, 3.0, 3.0, 5.0),
        (4, 0.0, None, 1.0, 5.0),  # useless drafts are computed, too
        (4, None, 5.0, 5.0, 5.0),
        ("auto", 0.5, 3.0, 3.0, 5.0),  # two are accepted: four were drafted
        ("auto", 0.8, 2.0, 2.0, 2.25),
        ("auto", 0.0, 1.0, 1.0, 1.0),
        ("off", 0.5, 3.0, 3.0, 5.0),  # what auto would come to
    ],
)
def test_what_is_stated_by_hand(
    speculation: int | str, rate: float | None, length: float | None, tokens: float, rows: float
) -> None:
    found = Acceptance(rate, length).drafts(sampling(speculation))
    assert found == Drafts(pytest.approx(tokens), pytest.approx(rows), 0.0)


def test_a_draft_model_has_a_forward_for_each_draft() -> None:
    assert Acceptance(0.5).drafts(sampling(4, "small")) == Drafts(3.0, 5.0, 4.0)
    assert Acceptance(0.5, 3.0).drafts(sampling("auto", "small")) == Drafts(3.0, 5.0, 4.0)


@pytest.mark.parametrize(
    ("speculation", "rate", "length", "message"),
    [
        (4, 1.5, None, "--acceptance-rate: expected a share .* 0 to 1, found 1.5"),
        (4, -0.1, None, "--acceptance-rate: .*found -0.1"),
        (4, float("nan"), None, "--acceptance-rate: .*found nan"),
        (4, None, 0.5, "--acceptance-length: expected the tokens .* 1 to 16, found 0.5"),
        (4, None, 5.5, "--acceptance-length: expected at most 5, as `sampling.speculation` is 4, found 5.5"),
        (4, 0.5, 3.0, "expected one of them, as `sampling.speculation` 4 says the other"),
        ("auto", 0.5, None, "expected both .* but `auto`; --acceptance-length is missing"),
        ("auto", None, 3.0, "expected both .* but `auto`; --acceptance-rate is missing"),
        ("off", None, 3.0, "expected both .* but `off`; --acceptance-rate is missing"),
        ("auto", 0.1, 3.0, "expected a length of at most 1 \\+ 15 \\* rate = 2.5"),
    ],
)
def test_what_cannot_be_is_refused(
    speculation: int | str, rate: float | None, length: float | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Acceptance(rate, length).drafts(sampling(speculation))


def test_what_is_stated_comes_before_what_was_measured_and_that_before_what_is_assumed() -> None:
    auto = sampling("auto")
    stated = draft_forecast(auto, RAN, MEASURED, Acceptance(0.5, 3.0))
    of_lengths, newest = (draft_forecast(auto, RAN, recorded) for recorded in (MEASURED, None))
    assert stated is not None
    assert of_lengths is not None
    assert newest is not None
    assert [one.drafts for one in (stated, of_lengths, newest)] == [Drafts(3.0, 5.0), MEASURED, Drafts(1.25, 3.0)]
    assert [one.source for one in (stated, of_lengths, newest)] == [
        "as stated",
        "as measured by the run of --lengths",
        "as measured by the newest run on this machine that drafted",
    ]
    assert draft_forecast(auto, PROFILE, None) is UNKNOWN
    assert draft_forecast(sampling("off"), RAN, MEASURED, Acceptance(0.5, 3.0)) is None
    assumed = known_draft_forecast(sampling(2, "small"), RAN, MEASURED)
    assert assumed is not None
    assert assumed.drafts == Drafts(pytest.approx(1 + 0.8 + 0.64), 3.0, 2.0), "those runs had no draft model"
    assert assumed.source == "if each is accepted in 80% of the places"
