"""The benchmark of the parts of the search runs."""

from __future__ import annotations

import re

import pytest

from tests.benchmarks.scripts import ended, output_of


@pytest.mark.slow
def test_each_part_is_left_out_once() -> None:
    """The whole search is what others are held against; where every plan is played the same plan is found."""
    printed = output_of("plan_ablation.py", "--tiny", "--repeats", "1")
    rows = dict(re.findall(r"^  (\S.*?)  +([\d.e+-]+) s ", printed, re.MULTILINE))
    assert [*rows] == [
        "the whole search",
        "one mesh: every call on all devices",
        "one layout for all calls of a role",
        "prompts where samples are drawn",
        "roles train one after the other",
        "nothing leaves a device between calls",
        "one call changed at a time",
        "plans drawn at random",
        "every plan is played",
    ]
    assert rows["every plan is played"] == rows["the whole search"]


def test_an_unknown_setting_is_named() -> None:
    done = ended("plan_ablation.py", "--settings", "ideal")
    assert done.returncode == 2
    assert "expected some of real, rlhfuse, prompts, found ideal" in done.stderr
