"""A worker that is killed, stopped or raises while samples go on in another instance, or when a rank that they have
left begins to score: as in any phase, it is named, and --resume continues to the undisturbed result."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path
from typing import Any

import pytest

from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from tests.runs.faulty_runs import FLOW, broken_off, filled, patience, recipe_of, whole

MOVES = """
    import sys
    import threading

    from plait.policy.migration import HowToMove
    from plait.runtime.steps.rebalancing import Balance
    from plait.workers import sample_mover
    from plait.workers.migrations import SampleMoverOfRank

    STAGES = ("here", "give", "take", "rest")
    does, moves = SampleMoverOfRank.do, sample_mover.moving

    def do(self, gathering):
        if self._rank == int(lines[0]) and gathering.stage.value == lines[1]:
            fault()
        return does(self, gathering)

    def moving(plan, rank, *buffers, **name):
        # In a thread: of what goes ahead.
        if rank == int(lines[0]) and threading.current_thread() is not threading.main_thread():
            fault()
        return (yield from moves(plan, rank, *buffers, **name))

    def look(self, *, frees):
        # In the second step and later half of the samples of one instance go over, their keys and values ahead.
        if self.num_moved or self._moves.is_moving or sum(self._engine.running) > 10 or not all(self._engine.running):
            return
        rank, stage = (int(lines[0]), lines[1]) if lines else (0, "rest")
        source = rank if stage in ("give", "rest") else 1 - rank
        keys = self._moves.unfinished[source][::2]
        self._move({(source, 1 - source): keys}, {}, HowToMove(frozenset(keys[:1]), ahead=True))

    @contextlib.contextmanager
    def scoring(self, action):
        with doing(self, action):
            if lines and self.rank == int(lines[0]) and action.split("/")[0] == lines[1]:
                fault()
            yield

    if "pytest" not in sys.modules:
        Balance.look = look
        if lines and lines[1] in STAGES:
            SampleMoverOfRank.do = do
        elif lines and lines[1] == "ahead":
            sample_mover.moving = moving
        elif lines:
            StatusFile.doing = scoring
"""
PLACES = {"actor.generate": "0,1 dp2", "actor.train": "0,1 dp2", "ref.logprobs": "0,1 dp2"}
KEYS = {"sampling.max_response_tokens": 24, "sampling.stop_token_ids": [*range(3, 300, 12)], "micro_batch_tokens": 128}
CASES = list(itertools.product(("kill", "stop", "raise"), ("here", "give", "take", "rest"), (0, 1)))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flow = textwrap.dedent(FLOW) + textwrap.dedent(MOVES)
    return filled(tmp_path_factory.mktemp("faults"), flow, {"plan": PLACES})


@pytest.fixture(scope="module")
def undisturbed(place: Path, tiny_folder: Path) -> Path:
    return whole(recipe_of(place, tiny_folder, "undisturbed", **KEYS, **patience("no")))


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "stage", "rank"), CASES)
def test_a_fault_while_samples_move_is_named_and_the_run_goes_on(
    fault: str, stage: str, rank: int, place: Path, tiny_folder: Path, undisturbed: Path
) -> None:
    """When a rank is about to do its part of any stage; for the last one the other side waits."""
    keys = KEYS | {"rebalance": "auto", "fusion": "off"} | patience(fault)
    broken = recipe_of(place, tiny_folder, f"{fault}-{stage}-{rank}", **keys)
    broken_off(broken, fault, stage, rank, undisturbed, named="actor.generate", waits=stage == "rest")
    assert samples_moved(broken)[0] > 0, "in the step before, by the same hand"


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "rank"), list(itertools.product(("kill", "stop", "raise"), (0, 1))))
def test_a_fault_while_keys_and_values_go_ahead_is_named_and_the_run_goes_on(
    fault: str, rank: int, place: Path, tiny_folder: Path, undisturbed: Path
) -> None:
    """In the thread that takes them (rank 0) or sends them, while both instances generate."""
    keys = KEYS | {"rebalance": "auto", "fusion": "off"} | patience(fault)
    broken = recipe_of(place, tiny_folder, f"{fault}-ahead-{rank}", **keys)
    broken_off(broken, fault, "ahead", rank, undisturbed, named="actor.generate", waits=False)
    assert samples_moved(broken)[0] > 0, "in the step before, by the same hand"


@pytest.fixture(scope="module")
def drafts(tiny_folder: Path) -> dict[str, Any]:
    """Three tokens are drafted in every step: samples that move leave in the middle of drafts, and what those have
    come to goes along."""
    return KEYS | {"sampling.speculation": 3, "sampling.draft_model": str(tiny_folder)}


@pytest.fixture(scope="module")
def drafted(place: Path, tiny_folder: Path, drafts: dict[str, Any]) -> Path:
    return whole(recipe_of(place, tiny_folder, "drafted", **drafts, **patience("no")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "stage", "rank"),
    [*CASES, *itertools.product(("kill", "stop", "raise"), ("ahead",), (0, 1))],
)
def test_a_fault_while_samples_with_drafts_move_is_named_and_the_run_goes_on(
    fault: str, stage: str, rank: int, place: Path, tiny_folder: Path, drafts: dict[str, Any], drafted: Path
) -> None:
    """In each stage, and in the thread of what goes ahead, on either side, while both draft."""
    keys = drafts | {"rebalance": "auto", "fusion": "off"} | patience(fault)
    broken = recipe_of(place, tiny_folder, f"drafting-{fault}-{stage}-{rank}", **keys)
    broken_off(broken, fault, stage, rank, drafted, named="actor.generate", waits=stage == "rest")
    rows = read_rows(broken.run_dir / "metrics.jsonl")
    assert samples_moved(broken)[0] > 0, "in the step before, by the same hand"
    assert all(row["perf/spec/draft_tokens"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "rank"), [("kill", 1), ("stop", 1), ("raise", 0)])
def test_a_fault_of_a_rank_that_begins_to_score_is_named_and_the_run_goes_on(
    fault: str, rank: int, place: Path, tiny_folder: Path, undisturbed: Path
) -> None:
    """Samples were gathered when half of them were left, and the rank that they left scores."""
    broken = recipe_of(place, tiny_folder, f"{fault}-score-{rank}", **KEYS, fusion=0.5, **patience(fault))
    broken_off(broken, fault, "ref.logprobs", rank, undisturbed, waits=False)
    assert all(samples_moved(broken))


def samples_moved(recipe: Recipe) -> list[float]:
    """Of each step."""
    return [row["perf/samples_moved"] for row in read_rows(recipe.run_dir / "metrics.jsonl")]
