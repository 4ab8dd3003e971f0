"""The PPO benchmark: plait's side does the work it is given, and a side that did other work is noticed."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest

from tests.benchmarks.scripts import output_of


@pytest.fixture
def ppo_step(imported: Callable[[str], ModuleType]) -> ModuleType:
    return imported("ppo_step")


@pytest.fixture
def workload(ppo_step: ModuleType):
    """Two prompts of 3 tokens, 4 response tokens: 14 positions a model."""
    return ppo_step.Workload(
        "fake",
        "p",
        "v",
        "r",
        ("a b c", "d e f"),
        ((2, 3, 4), (5, 6, 7)),
        4,
        "float32",
        "float32",
        1,
        "cpu",
        num_steps=3,
    )


def done(ppo_step: ModuleType, workload, wall: float = 1.0):
    measure = importlib.import_module("grpo.measure")
    return ppo_step.PPOStep(
        {phase: measure.Seconds(wall=wall, cpu=wall / 2) for phase in ppo_step.PHASES},
        prompt_lengths=[3, 3],
        response_lengths=[4, 4],
        scored_tokens=42,
        trained_tokens=28,
        max_rss_bytes=30_000_000,
        optimizer_steps=2,
        prompt_digest=workload.prompt_digest,
    )


def test_work_as_asked_passes(ppo_step: ModuleType, workload) -> None:
    assert ppo_step.differing("plait", 1, done(ppo_step, workload), workload) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt_lengths": [3, 2]}, "expected prompt lengths [3, 3], found [3, 2]"),
        ({"response_lengths": [4, 3]}, "expected response lengths [4, 4], found [4, 3]"),
        ({"prompt_digest": "other"}, "found other"),
        ({"optimizer_steps": 8}, "expected optimizer steps 2, found 8"),
        ({"trained_tokens": 14}, "expected positions trained 28, found 14"),
        ({"scored_tokens": 28}, "expected 42 positions scored or more, found 28"),
    ],
)
def test_other_work_is_named(ppo_step: ModuleType, workload, change: dict, said: str) -> None:
    found = ppo_step.differing("trl", 2, replace(done(ppo_step, workload), **change), workload)
    assert len(found) == 1
    assert found[0].startswith("trl, step 2: ")
    assert said in found[0]


def test_scoring_with_the_policy_as_well_passes(ppo_step: ModuleType, workload) -> None:
    more = replace(done(ppo_step, workload), scored_tokens=56)
    assert ppo_step.differing("plait", 1, more, workload) == []


def test_digest_knows_the_prompts_but_not_their_order(ppo_step: ModuleType) -> None:
    digest = importlib.import_module("ppo.workload").digest
    assert digest([(1, 2), (3, 4)]) == digest([[3, 4], [1, 2]])
    assert digest([(1, 2), (3, 4)]) != digest([(1, 2), (3, 5)])
    assert digest([(1, 2), (3, 4)]) != digest([(1, 2), (1, 2)])


class FakeSide:
    """A side that answers at once, `trl` three times as slowly; it steps too often in step 1."""

    def __init__(self, ppo_step: ModuleType, name: str, workload) -> None:
        self.name = name
        self.steps: list = []
        self.ready = importlib.import_module("grpo.measure").Ready(imported_bytes=10_000_000, loaded_bytes=20_000_000)
        answer = done(ppo_step, workload, wall=3.0 if name == "trl" else 1.0)
        wrong = replace(answer, optimizer_steps=4) if name == "trl" else answer
        self._answers = [answer, wrong, answer]

    def step(self):
        self.steps.append(self._answers[len(self.steps)])
        return self.steps[-1]


def test_ratio_is_second_side_to_first(ppo_step: ModuleType, workload) -> None:
    sides = [FakeSide(ppo_step, name, workload) for name in ("plait", "trl")]
    in_turns = importlib.import_module("sides").in_turns
    assert in_turns(sides, workload, ppo_step.differing) == ["trl, step 1: expected optimizer steps 2, found 4"]
    rows = {line[:26].strip(): line[26:].split() for line in ppo_step.report(sides, workload).splitlines()}
    assert rows["whole step"] == ["4.00", "(2.00)", "12.00", "(6.00)", "3.00", "(3.00)"]
    assert rows["samples per second"] == ["0.5", "0.2"]
    assert rows["response tokens"] == ["8", "8"]


def test_unknown_side_is_refused(ppo_step: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert ppo_step.main(["--sides", "verl"]) == 2
    assert "--sides: expected some of plait,trl, found verl" in capsys.readouterr().err


def test_missing_peer_says_how_to_get_it(ppo_step: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert ppo_step.main(["--peer-python", "no/such/python"]) == 2
    said = capsys.readouterr().err
    assert "no/such/python does not exist" in said
    assert "setup_peer.sh" in said


def run(*options: str) -> tuple[dict[str, list[str]], str]:
    """Rows of the table by their titles, and all that was printed."""
    printed = output_of("ppo_step.py", "--tiny", "--repeats", "1", *options)
    return {line[:26].strip(): line[26:].split() for line in printed.splitlines()}, printed


@pytest.mark.slow
def test_plait_side_does_the_work_it_is_given() -> None:
    rows, printed = run("--sides", "plait", "--prompts", "4", "--dtype", "bfloat16")
    assert rows["prompt tokens"] == ["64"]
    assert rows["response tokens"] == ["48"]
    assert rows["positions trained"] == [str(2 * 4 * (16 + 12))]
    assert rows["optimizer steps"] == ["2"]
    for phase in ("generation", "scoring", "training"):
        assert rows[phase] != ["0.00", "(0.00)"], printed


@pytest.mark.slow  # the peer's imports take long
def test_tiny_run_of_both_sides(ppo_step: ModuleType) -> None:
    if not ppo_step.peer_python().is_file():
        pytest.skip("TRL 1.10 is not set up; see benchmarks/ppo/setup_peer.sh")
    rows, printed = run()
    assert rows["response tokens"] == ["384", "384"]
    assert rows["positions trained"] == ["1792", "1792"]
    assert re.search(r"plait: float32; TRL: float32", printed)
