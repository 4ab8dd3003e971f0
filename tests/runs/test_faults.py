"""A worker that is killed, stopped or raises in any phase: an error that says who, in what and who waited; nothing is
left; and --resume continues to the undisturbed result."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path

import pytest

from plait.runtime.api import run
from tests.cases import slow_but
from tests.runs.faulty_runs import FLOW, SUM, broken_off, filled, plait_train, recipe_of, whole
from tests.runs.nodes import left_of
from tests.runs.plans import assert_equal_runs

PLANS = {
    "plan": {"actor.generate": "0,1 dp2", "actor.train": "0,1 tp2", "ref.logprobs": "0,1 dp2"},
    "together": {"actor.generate": "0,1 tp2", "actor.train": "0,1 dp2", "ref.logprobs": "0,1 tp2"},
    "ring": {"actor.generate": "0,1 pp2", "actor.train": "0,1 tp2", "ref.logprobs": "0,1 dp2"},
}
PHASES = {
    "generate": "actor.generate",
    "score": "ref.logprobs",
    "train": "actor.train",
    "move": "actor (move)",
    "save": "save",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled(tmp_path_factory.mktemp("faults"), textwrap.dedent(FLOW), PLANS)


@pytest.fixture(scope="module")
def undisturbed(place: Path, tiny_folder: Path) -> Path:
    return whole(recipe_of(place, tiny_folder, "undisturbed"))


QUICK = (("kill", "train", 1),)


@pytest.mark.parametrize(
    ("fault", "phase", "rank"),
    slow_but(QUICK, itertools.product(("kill", "stop", "raise"), PHASES, (0, 1))),
)
def test_a_fault_is_named_and_the_run_goes_on_from_its_checkpoint(
    fault: str, phase: str, rank: int, place: Path, tiny_folder: Path, undisturbed: Path
) -> None:
    """At the beginning of the action. Rank 0 leads, the other serves; where the leader raises, it knows by itself
    whether it can still save."""
    broken_off(recipe_of(place, tiny_folder, f"{fault}-{phase}-{rank}"), fault, PHASES[phase], rank, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["kill", "stop", "raise"])
def test_a_fault_within_a_collective_is_found(
    fault: str, rank: int, place: Path, tiny_folder: Path, undisturbed: Path
) -> None:
    """Two ranks generate together, token by token: the other one is in the middle of a sum that never ends."""
    recipe = recipe_of(place, tiny_folder, f"{fault}-together-{rank}", plan=str(place / "together.json"))
    broken_off(recipe, fault, SUM, rank, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["kill", "stop", "raise"])
def test_a_stage_of_a_ring_is_named(fault: str, rank: int, place: Path, tiny_folder: Path, undisturbed: Path) -> None:
    """Two stages decode with steps in flight, and one of them does not go on."""
    recipe = recipe_of(place, tiny_folder, f"{fault}-ring-{rank}", plan=str(place / "ring.json"))
    broken_off(recipe, fault, "actor.generate", rank, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_lives_and_does_nothing_is_found(
    rank: int, place: Path, tiny_folder: Path, undisturbed: Path
) -> None:
    recipe = recipe_of(place, tiny_folder, f"stalled-{rank}", freeze_after_s=30, stalled_after_s=60)
    broken_off(recipe, "stall", "actor.train", rank, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_the_input_is_said_as_by_one_process(
    rank: int, place: Path, tiny_folder: Path, undisturbed: Path
) -> None:
    """Whichever rank finds it: the error alone and exit code 2, and the run can be resumed."""
    recipe = recipe_of(place, tiny_folder, f"input-{rank}")
    code = "from plait.errors import DataError; raise DataError('planted: look at the key')"
    (place / "fault").write_text(f"{rank}\nactor.train\n{code}\n{recipe.run_dir}/checkpoints/step-1\n")
    broken = plait_train(recipe)
    (place / "fault").unlink()
    assert broken.returncode == 2, broken.stderr
    assert "error: planted: look at the key" in broken.stderr
    assert "Traceback" not in broken.stderr
    assert left_of(recipe.run_dir) == []
    assert run(recipe, resume=True).finished
    assert_equal_runs(recipe.run_dir, undisturbed)
