from __future__ import annotations

from dataclasses import replace

import pytest

from plait.errors import ConfigError
from plait.schedule.fusion_times import FusionTimes

TIMES = FusionTimes(0.02, 0.001, 0.0003, 0.5, 128.0, 1.5)


def test_settings_are_numbers_by_their_names() -> None:
    assert dict(TIMES.settings()) == {
        "step_s": 0.02, "more_s": 0.001, "token_s": 0.0003, "parts_s": 0.5, "prompt_tokens": 128.0, "step_tokens": 1.5
    }  # fmt: skip
    assert FusionTimes.of(TIMES.settings(), "plan") == TIMES


def test_plans_of_older_versions_do_not_say_what_a_step_brings() -> None:
    assert FusionTimes.of(TIMES.settings()[:-1], "plan") == replace(TIMES, step_tokens=1.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step_s": None}, "all of step_s, more_s"),
        ({"threshold": 3}, "found step_s, more_s, token_s, parts_s, prompt_tokens, step_tokens, threshold"),
        ({"step_s": -1.0}, "`step_s`: expected a number from 0 on, found -1.0"),
        ({"more_s": True}, "`more_s`: expected a number from 0 on, found True"),
        ({"token_s": "fast"}, "`token_s`: expected a number from 0 on, found 'fast'"),
        ({"parts_s": float("inf")}, "found inf"),
    ],
)
def test_what_is_no_setting_is_named(change: dict[str, object], said: str) -> None:
    settings = {**dict(TIMES.settings()), **change}
    settings = {name: value for name, value in settings.items() if value is not None}
    with pytest.raises(ConfigError, match="plan p: ") as error:
        FusionTimes.of(tuple(settings.items()), "plan p")
    assert said in str(error.value)
