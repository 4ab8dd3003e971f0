"""A worker that is killed, stopped or raises while two roles train together: as in any phase, it is named, and --resume
continues to the undisturbed result."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path

import pytest

from plait.recipes.recipe import Recipe
from tests.runs.faulty_runs import FLOW, broken_off, filled, patience, recipe_of, whole
from tests.runs.plan_files import write_plan
from tests.runs.test_fused_training import ACTOR_CRITIC, schedule_of

TOGETHER = "critic.train + actor.train"
SENDS = """
    if lines and lines[1] == "send":
        from plait.models.parallel.team import Peers

        posted, StatusFile.doing = Peers.isend, doing

        def isend(self, *message):
            if self.ranks[self.index] == int(lines[0]) and "SEND_B" in message[-1]:
                fault()
            return posted(self, *message)

        Peers.isend = isend
"""
"""In the middle of the pipeline: the other rank waits for the message."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flow = textwrap.dedent(FLOW + SENDS).replace("from plait.algorithms.grpo import grpo as grpo", "")
    folder = filled(tmp_path_factory.mktemp("faults"), "from plait.algorithms.ppo import ppo as ppo\n" + flow, {})
    write_plan(folder, "plan", ACTOR_CRITIC, [schedule_of((2, 2), (2, 2))])
    return folder


def broken_ppo(place: Path, tiny_folder: Path, fault: str, name: str) -> Recipe:
    keys = {"algorithm": f"{place}/flow.py:ppo", "critic.optimizer.learning_rate": 1e-3}
    return recipe_of(place, tiny_folder, f"{fault}-{name}", **keys, **patience(fault))


@pytest.fixture(scope="module")
def undisturbed(place: Path, tiny_folder: Path) -> Path:
    return whole(broken_ppo(place, tiny_folder, "no", "fault"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "action", "rank"),
    list(itertools.product(("kill", "stop", "raise"), (TOGETHER, "send"), (0, 1))),
)
def test_a_fault_while_two_roles_train_together_is_named_and_the_run_goes_on(
    fault: str, action: str, rank: int, place: Path, tiny_folder: Path, undisturbed: Path
) -> None:
    """At the beginning, and when the rank is about to send to the other one."""
    broken = broken_ppo(place, tiny_folder, fault, f"{'send' if action == 'send' else 'begin'}-{rank}")
    broken_off(broken, fault, action, rank, undisturbed, named=TOGETHER)
