"""A worker that is killed, stopped or raises while prompts that it computed go to another instance, or come to it: as
in any phase, it is named, and --resume continues to the undisturbed result."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path

import pytest

from tests.cases import slow_but
from tests.runs.faulty_runs import FAULTS, FLOW, broken_off, filled, patience, plait_train, recipe_of, whole

MOVES = """
    import sys
    import threading

    from plait.workers import sample_mover
    from plait.workers.prompt_moves import PromptMoverOfRank

    STAGES = ("here", "give", "take", "enter")
    does, moves = PromptMoverOfRank.do, sample_mover.moving

    def do(self, number, gathering):
        if self._peers.ranks[self._peers.index] == int(lines[0]) and gathering.stage.value == lines[1]:
            fault()
        return does(self, number, gathering)

    def moving(plan, rank, *buffers, **name):
        # In a thread: of what goes ahead.
        if rank == int(lines[0]) and threading.current_thread() is not threading.main_thread():
            fault()
        return (yield from moves(plan, rank, *buffers, **name))

    if "pytest" not in sys.modules and lines:
        StatusFile.doing = doing
        if lines[1] in STAGES:
            PromptMoverOfRank.do = do
        else:
            sample_mover.moving = moving
"""
PLACES = {"actor.generate prefill": "1", "actor.generate": "0", "actor.train": "0,1 dp2", "ref.logprobs": "0,1 dp2"}
KEYS = {"sampling.max_prefill_tokens": 25}
SIDES = {"here": (0,), "give": (1,), "take": (0,), "enter": (0, 1), "ahead": (0, 1)}
"""Stage → ranks that have a part in it; `ahead` is in the threads that send and receive."""
CASES = [
    (fault, stage, rank)
    for fault, (stage, ranks) in itertools.product(("kill", "stop", "raise"), SIDES.items())
    for rank in ranks
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flow = textwrap.dedent(FLOW) + textwrap.dedent(MOVES)
    return filled(tmp_path_factory.mktemp("faults"), flow, {"plan": PLACES})


@pytest.fixture(scope="module")
def undisturbed(place: Path, tiny_folder: Path) -> Path:
    return whole(recipe_of(place, tiny_folder, "undisturbed", **KEYS, **patience("no")))


@pytest.mark.parametrize(("fault", "stage", "rank"), slow_but([("kill", "give", 1)], CASES))
def test_a_fault_while_prompts_move_is_named_and_the_run_goes_on(
    fault: str, stage: str, rank: int, place: Path, tiny_folder: Path, undisturbed: Path
) -> None:
    """Nobody meets there, so the other rank may be at anything."""
    broken = recipe_of(place, tiny_folder, f"{fault}-{stage}-{rank}", **KEYS, **patience(fault))
    broken_off(broken, fault, stage, rank, undisturbed, named="actor.generate", waits=False)


@pytest.mark.slow
def test_keys_and_values_that_never_come_end_the_run(place: Path, tiny_folder: Path) -> None:
    """Both ranks go on with their steps meanwhile, so that neither looks as if it had stalled."""
    recipe = recipe_of(place, tiny_folder, "never", **KEYS, **patience("no"), stalled_after_s=4)
    plant = place / "fault"
    plant.write_text(f"1\nahead\n{FAULTS['stall'][0]}\n{recipe.run_dir}/checkpoints/step-1\n")
    try:
        broken = plait_train(recipe)
    finally:
        plant.unlink()
    assert broken.returncode == 1, broken.stderr
    assert "expected keys and values of rank 1 within 4 s (`stalled_after_s`)" in broken.stderr
    assert "the checkpoint of step 1 is good" in broken.stderr
