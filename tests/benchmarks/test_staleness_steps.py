"""The simulated steps of batches that are generated ahead: by hand, and what no choice of groups can change."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.benchmarks.scripts import output_of

Imported = Callable[[str], ModuleType]


@pytest.mark.slow
def test_it_runs() -> None:
    printed = output_of("staleness_steps.py", "--tiny", "--repeats", "1")
    kinds = [line.split("  ")[0].strip() for line in printed.splitlines()[1:]]
    assert (kinds[0], len(kinds)) == ("wait 1", 16)


def test_a_step_by_hand(imported: Imported, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two places and groups of one: of lengths 3, 1 and 2 the third begins when the second has ended. A step of one
    sample takes 1.5 s, of two 2 s."""
    steps = imported("staleness_steps")
    for name, value in (("SAMPLES", 1), ("PLACES", 2), ("PER_SAMPLE", 0.5)):
        monkeypatch.setattr(steps, name, value)
    engine = steps.Engine()
    groups = [steps.Group(number, [length], drawn=[0]) for number, length in enumerate((3, 1, 2))]
    for group in groups:
        engine.ask(group, 5)
    while engine.has_work:
        engine.run()
    assert [group.done_s for group in groups] == [6, 2, 6]
    longer = steps.Group(3, [9], drawn=[0])
    engine.version = 1
    engine.ask(longer, 4)
    engine.run(until_s=9)
    assert engine.clock == 5  # of 3 s two steps
    engine.halt()
    assert (longer.drawn, longer.versions) == ([2], {1: 2})


@pytest.mark.parametrize("most", [1, 2])
def test_with_all_that_a_bound_allows_ahead_no_choice_is_left(
    imported: Imported, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If n batches are open beside the step's own, and a group may be n versions old, then each step after the first
    n + 1 trains on the batch that was opened n steps before: what is done first is the order of prompts."""
    steps = imported("staleness_steps")
    monkeypatch.setattr(steps, "GROUPS", 8)
    chosen, trained = steps.chosen, dict[int, list[int]]()

    def seen(kind: object, waiting: list[Any], step: int) -> list[Any] | None:
        found = chosen(kind, waiting, step)
        if found is not None:
            trained[step] = sorted(group.number // 8 for group in found)
        return found

    monkeypatch.setattr(steps, "chosen", seen)
    sizes = steps.Sizes(1.0, 3200, 0.5, False, 8)
    steps.played(steps.Kind("", most, most, choice="done first"), sizes, 0)
    assert {step: of for step, of in trained.items() if step > most} == {s: [s] * 8 for s in range(most + 1, 8)}
