"""What was learned of drafts outlasts the engine: it comes back from its file, and who takes it up goes on as the one
who learned it would have."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from plait.json_text import parse
from plait.kernels.draft_lookup import CELLS
from plait.speculation.costly import FIRST
from plait.speculation.drafter import Asked, PoolDrafter
from plait.speculation.knowledge import Knowledge, knowledge_of, take_up
from plait.speculation.ledger import LATEST
from plait.speculation.pool import least_bytes
from plait.speculation.speculation import Speculation
from plait.speculation.step_cost import MANY
from tests.cases import examples, slow_but
from tests.speculation.test_best_length import Paired
from tests.speculation.test_costly import model_of, with_model
from tests.speculation.test_windows import CONTEXT

SECONDS = st.floats(1e-5, 10.0)
STEPS = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 1 << 20), SECONDS, st.booleans()), max_size=40)
TRIALS = st.lists(st.tuples(st.integers(0, int(np.prod(CELLS)) - 1), st.integers(0, 1)), max_size=20)


def ignorant() -> Speculation:
    return Speculation("adaptive", PoolDrafter(least_bytes()), clock=lambda: 0.0)


def through_a_file(knowledge: Knowledge) -> Knowledge:
    return Knowledge.model_validate(parse(json.dumps(knowledge.model_dump(mode="json"))))


@settings(max_examples=examples(15, 300))
@given(STEPS, TRIALS, st.lists(SECONDS, max_size=20), st.integers(1, 64))
def test_it_comes_back_from_its_file_and_from_whoever_took_it_up(
    steps: list[tuple[int, int, float, bool]], trials: list[tuple[int, int]], looks: list[float], num_samples: int
) -> None:
    learned, knows = ignorant(), ignorant()
    for cell, hit in trials:
        learned.acceptance.learn(np.array([cell]), np.array([hit]))
    learned.acceptance.forget()
    for num_rows, num_context, seconds, is_mixed in steps:
        learned.ledger.quiet(0 if is_mixed else num_rows, num_context, seconds)
    for seconds in looks:
        learned.due.looking.took(seconds)
    learned.probes.more(num_samples, np.ones(3 * num_samples, bool))
    knowledge = knowledge_of(learned)
    assert through_a_file(knowledge) == knowledge
    take_up(knows, knowledge)
    assert knowledge_of(knows) == knowledge
    rows = np.arange(1, 400)
    np.testing.assert_array_equal(knows.cost.most(rows, 100), learned.cost.most(rows, 100))
    np.testing.assert_array_equal(knows.acceptance.table_C, learned.acceptance.table_C)


def stays(num_samples: int, chance: float, curve: str, steps: int) -> tuple[Paired, Paired, Paired]:
    """A second rollout of a run that goes on, of one that takes up what that has learned, and of a cold one."""
    unbroken = Paired(num_samples, chance, curve).run(100)
    unbroken.new_rollout()
    knowledge = through_a_file(knowledge_of(unbroken.speculation))
    resumed, cold = Paired(num_samples, chance, curve), Paired(num_samples, chance, curve)
    take_up(resumed.speculation, knowledge)
    for engine in (resumed, cold):
        engine.said = list(unbroken.said)
    return tuple(engine.run(steps) for engine in (unbroken, resumed, cold))  # type: ignore[return-value]


CASES = [("CPU", 8, 0.7), ("CPU with a matrix unit", 1, 0.5), ("GPU", 1, 0.7), ("stairs", 8, 0.7)]


@pytest.mark.parametrize(("curve", "num_samples", "chance"), slow_but(CASES[:2], CASES))
def test_a_resumed_run_drafts_from_its_first_step_as_the_unbroken_one(
    curve: str, num_samples: int, chance: float
) -> None:
    """As many rows in each step, told by its seconds."""
    unbroken, resumed, cold = stays(num_samples, chance, curve, 32)
    np.testing.assert_allclose(resumed.steps, unbroken.steps[-32:])
    first = [sum(tokens for tokens, _ in engine.own[:8]) for engine in (resumed, cold)]
    assert first[0] > 1.05 * first[1]


def test_elsewhere_acceptance_is_known_and_seconds_are_not() -> None:
    learned, knows = Paired(4, 0.7, "CPU").run(60).speculation, ignorant()
    take_up(knows, knowledge_of(learned).elsewhere)
    np.testing.assert_array_equal(knows.acceptance.table_C, learned.acceptance.table_C)
    assert knows.cost.num_steps == 0
    assert knows.margin.room_s(1.0) == ignorant().margin.room_s(1.0)


def test_what_is_known_of_a_draft_model_goes_along() -> None:
    learned, knows = (with_model("adaptive", 4, 0.9, 0.0005) for _ in range(2))
    learned.run(60)
    knowledge = knowledge_of(learned.speculation)
    take_up(knows.speculation, through_a_file(knowledge))
    assert knowledge_of(knows.speculation) == knowledge
    assert knowledge.num_drafted == min(model_of(learned).num_drafted, FIRST) > 0
    take_up(ignorant(), knowledge)  # the run has no draft model any longer


def drafts_under_way(engine: Paired) -> int:
    """How many a step computes that has asked and is not done."""
    slots = np.arange(len(engine.said))
    asked = Asked(slots, slots.astype(np.uint64), np.array(engine.said), slots < 0, np.full(len(slots), 15), ())
    assert engine.speculation.is_due(len(slots), CONTEXT)
    return sum(map(len, engine.speculation.propose(asked, CONTEXT)))


@pytest.mark.parametrize("under_way", [1, 2])
def test_more_steps_with_drafts_in_a_row_than_there_may_be_count_as_so_many(under_way: int) -> None:
    """Behind LATEST a step that measures, or one that had been asked for before the last of them was done."""
    engine = Paired(4, 0.8, "CPU").run(100)
    speculation = engine.speculation
    speculation.ledger.since_plain = LATEST + 1 - under_way
    if under_way == 1:
        speculation.probes.trials.clear()
    for num_drafted in [drafts_under_way(engine) for _ in range(under_way)]:
        assert num_drafted
        speculation.done(4, num_drafted, CONTEXT, 4, engine.forward_s(4 + num_drafted))
    assert speculation.ledger.since_plain == LATEST + 1
    knowledge, knows = through_a_file(knowledge_of(speculation)), ignorant()
    take_up(knows, knowledge)
    assert knows.ledger.since_plain == LATEST
    assert not knows.ledger.may_draft


def test_a_long_run_is_known_as_a_long_one() -> None:
    learned = with_model("adaptive", 4, 0.9, 0.0005).speculation
    assert learned.costly is not None
    learned.costly.num_drafted = learned.cost.num_steps = 1 << 40
    knowledge = knowledge_of(learned)
    assert knowledge.pace is not None
    assert (knowledge.num_drafted, knowledge.pace.num_steps) == (FIRST, MANY)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hits": (2.0, 9.0)}, "expected hits from 0 to as many as there were trials"),
        ({"hits": (2.0,)}, "found 2 cells, 2 trials and 1 hits"),
        ({"cells": (5, 5)}, "expected cells that rise"),
        ({"cells": (5, int(np.prod(CELLS)))}, "less than"),
        ({"model_confidences": (((0.1,) * 10,) * 15,)}, "for 2 kinds and 15 places"),
        ({"model_confidences": (((0.1,) * 9,) * 15,) * 2}, "expected 10 confidences"),
        ({"pace": {"buckets": (((0, 10, 1.0),),)}}, "expected steps of at least one row"),
        ({"pace": {"buckets": ((),)}}, "expected 1 to 15 steps in a bucket, found 0"),
        ({"pace": {"margin": ((1.0, 0.0),)}}, "at least 31 items"),
        ({"pace": {"probes": ((1, 3, 2),)}}, "a place below 3"),
        ({"pace": {"gain": float("nan")}}, "finite number"),
    ],
)
def test_what_is_damaged_is_refused(changes: dict[str, Any], said: str) -> None:
    whole = knowledge_of(ignorant()).model_dump() | {"cells": (5, 9), "trials": (3.0, 4.5), "hits": (2.0, 4.5)}
    Knowledge.model_validate(whole)
    pace = {"pace": whole["pace"] | changes["pace"]} if "pace" in changes else {}
    with pytest.raises(ValidationError, match=said):
        Knowledge.model_validate(whole | changes | pace)
