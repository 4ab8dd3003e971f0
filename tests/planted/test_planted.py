"""The suite catches every planted bug, and the doctor names those that show in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from plait.algorithms.losses import kl_estimate
from tests.cases import slow_but
from tests.planted.bugs import BUGS
from tests.planted.switch import Bug, function_at, planted
from tests.runs.conftest import make_recipe as make_recipe
from tests.runs.conftest import tiny_folder as tiny_folder
from tests.runs.test_flows import data as data
from tests.runs.test_flows import recipe_of as flow_recipe
from tests.runtime.health.test_doctor import ending_folder as ending_folder
from tests.runtime.health.test_doctor import recipe_of as recipe_of
from tests.runtime.health.test_doctor import said

TESTS = Path(__file__).parents[1]
SHOWN = [bug for bug in BUGS if bug.doctor]


class Outcomes:
    """Which checks failed while they ran, and which did not come to run."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.broken: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            (self.failed if report.when == "call" else self.broken).append(report.nodeid)


def outcomes_of(checks: tuple[str, ...]) -> Outcomes:
    """Run checks of the suite in this process, where the bug is, until each has failed once or ended."""
    outcomes = Outcomes()
    for check in checks:
        # What collects garbage between the checks takes longer than most of them.
        without = ("cacheprovider", "hypothesispytest", "unraisableexception")
        arguments = ["-x", "-q", *(f"-pno:{name}" for name in without), "--rootdir", str(TESTS.parent)]
        ended = pytest.main([*arguments, f"{TESTS}/{check}"], plugins=[outcomes])
        assert ended in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), f"{check}: {ended!r}"
    return outcomes


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_every_bug_can_be_planted(bug: Bug) -> None:
    with planted(bug):
        pass


@pytest.mark.parametrize("bug", slow_but(BUGS[::12], BUGS), ids=str)
def test_the_suite_catches(bug: Bug) -> None:
    with planted(bug):
        outcomes = outcomes_of(bug.caught_by)
    assert outcomes.broken == []
    for check in bug.caught_by:
        name = check.partition("[")[0]
        assert any(name in node for node in outcomes.failed), f"{check} does not notice: {bug.name}"


@pytest.mark.parametrize("bug", slow_but(SHOWN[::8], SHOWN), ids=str)
def test_the_doctor_names(bug: Bug, recipe_of: Any, ending_folder: Path, data: dict[str, str]) -> None:
    keys = {"model": str(ending_folder)}
    recipe = recipe_of(**keys) if bug.flow == "grpo" else flow_recipe(bug.flow, recipe_of, data, **keys)
    with planted(bug):
        findings = said(recipe, steps=3)
    assert bug.doctor in {finding.rule for finding in findings}


def test_the_named_checks_pass_without_a_bug() -> None:
    checks = ("algorithms/test_losses.py::test_kl_estimators_by_hand", "data/test_packed.py::test_by_hand")
    assert outcomes_of(checks).failed == []


def test_a_bug_lasts_as_long_as_its_context() -> None:
    bug = next(bug for bug in BUGS if bug.name == "KL sign")
    one, two = torch.tensor([1.0]), torch.tensor([0.0])
    with planted(bug):
        assert kl_estimate(one, two, "k1").item() == -1
    assert kl_estimate(one, two, "k1").item() == 1


def test_a_bug_whose_place_has_changed_is_an_error() -> None:
    bug = Bug("gone", "plait.algorithms.losses:kl_estimate", "no such text", "", ())
    with pytest.raises(AssertionError, match="stands 0 times"), planted(bug):
        pass
    assert function_at("plait.data.rows:Rows.groups").__name__ == "groups"
    assert function_at("plait.training.token_means:MiniBatchTotals.of").__name__ == "of"


def test_the_list_is_as_long_as_promised_and_has_no_two_alike() -> None:
    assert len(BUGS) >= 30
    assert len({bug.name for bug in BUGS}) == len({(bug.place, bug.right, bug.wrong) for bug in BUGS}) == len(BUGS)
    named = {bug.doctor for bug in BUGS}
    assert named >= {
        "mask_shift",
        "temperature",
        "stale_sampler_weights",
        "stale_reference",
        "missing_eos",
        "dead_groups",
    }
