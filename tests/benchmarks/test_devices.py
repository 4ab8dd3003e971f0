"""The benchmarks of workers and devices: what they call a ceiling, by hand; and that they run."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from plait.schedule.timeline import Span
from tests.benchmarks.scripts import output_of


@pytest.fixture
def ceiling(imported: Callable[[str], ModuleType]) -> ModuleType:
    return imported("placed.ceiling")


def test_the_ceiling_of_data_parallel_training(ceiling: ModuleType) -> None:
    whole = ceiling.Phases(step=20.0, generate=6.0, score=2.0, train=8.0, optimizer=3.0)
    half = ceiling.Phases(step=11.0, generate=4.0, score=1.0, train=4.0, optimizer=1.5)
    assert whole.other == 1.0
    # 4 as measured, (2 + 8 + 3) / 2, 1 that is not shared, 200 bytes at 100 a second
    assert ceiling.data_parallel(whole, half, 200, 100) == 4 + 6.5 + 1 + 2


def test_the_ceiling_of_a_pipeline(ceiling: ModuleType) -> None:
    whole = ceiling.Phases(step=20.0, generate=6.0, score=2.0, train=8.0, optimizer=3.0)
    half = ceiling.Phases(step=11.0, generate=4.0, score=1.0, train=4.0, optimizer=1.5)
    assert ceiling.filled(1, 2) == 1.0  # one micro-batch passes the stages one after the other
    assert ceiling.filled(4, 2) == 5 / 8
    assert ceiling.pipelined(whole, half, 1, 4, 50, 100) == 4 + 2 + 5 + 1.5 + 1 + 0.5


def test_a_span_belongs_to_the_phase_of_its_call(imported: Callable[[str], ModuleType]) -> None:
    runs = imported("placed.runs")
    spans = [
        Span("actor.generate/decode", "DECODE", 0, 0.0, 2.0),
        Span("actor.generate/decode", "DECODE", 1, 0.0, 3.0),
        Span("ref.logprobs/mb0", "SCORE", 0, 3.0, 4.0),
        Span("advantages", "COMPUTE", 0, 4.0, 4.5),
        Span("actor.train/b0/0F0", "F", 0, 5.0, 5.5),
        Span("actor.train/b0/0F1", "F", 0, 5.5, 6.0),
        Span("actor.train/b0/0B0", "B", 0, 6.0, 7.0),
        Span("actor.train/b0/step", "STEP", 0, 7.0, 7.25),
    ]
    found = runs.phases_of(spans, 8.0)
    assert (found.generate, found.score, found.train, found.optimizer) == (3.0, 1.0, 2.0, 0.25)
    assert (found.score_micro_batches, found.train_micro_batches) == (1, 2)
    assert found.other == 1.75


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["workers.py", "--tiny", "--steps", "1", "--repeats", "1", "--idle", "1,2", "--led", "2", "--rounds", "5"],
        ["devices.py", "--tiny", "--steps", "1", "--repeats", "1", "--prompts", "2", "--micro-batch-tokens", "64"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_they_run(arguments: list[str]) -> None:
    printed = output_of(*arguments)
    assert "ceiling" in printed or "one worker" in printed
