"""Roles that train together: whatever valid order states it, each gets the bits of training it by itself. Workers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.launch.group import Group
from plait.schedule.generators import one_f_one_b
from plait.schedule.pipeline import fused_workload
from plait.schedule.schedule import Schedule
from tests.cases import examples, slow_but
from tests.training.schedules import shuffled

DEADLINE_S = 120.0
PLACES = {
    (2, 2): {"actor": "0,1 pp2", "critic": "1,0 pp2"},
    (2, 1): {"actor": "0,1 pp2", "critic": "0,1 dp2"},
    (4, 4): {"actor": "0,1,2,3 pp4", "critic": "3,2,1,0 pp4"},
    (4, 2): {"actor": "0,1,2,3 pp4", "critic": "1,0,3,2 dp2 pp2"},
    (4, 1): {"actor": "3,2,1,0 pp4", "critic": "3,2,1,0 dp4"},
}
"""Stages of both → their ranks."""


def workload_of(stages: tuple[int, int], counts: tuple[int, int]):
    return fused_workload(stages, counts, (2.0, 3.0), models=("actor", "critic"))


def check(
    group: Group, schedule: Schedule, places: dict[str, str], slow: int = -1, prompts: int = 7, divides: bool = False
) -> list[list[str]]:
    """Returns what each rank did of the first mini-batches, by the ids of the schedule."""
    answers = group.submit(range(4), "together", schedule, places, slow, prompts, divides).result(DEADLINE_S)
    members = {int(rank) for rank in places["actor"].split()[0].split(",")}
    assert [rank for rank, answer in enumerate(answers) if answer is not None] == sorted(members)
    done = []
    for rank in sorted(members):
        first, found, expected, unlike = answers[rank]
        assert found == expected
        assert unlike == []
        done.append([name.split("/", 2)[2] for name in first])
    assert answers[0][1]["training/optimizer_steps"] == answers[0][1]["critic/optimizer_steps"] == 4
    return done


@pytest.mark.parametrize("count", slow_but([2], [1, 2, 4, 8]))
def test_two_ranks_do_what_the_schedule_says(four: Group, count: int) -> None:
    """Every forward and backward of it. Where a mini-batch has fewer micro-batches, theirs are left out: in the first
    pair of mini-batches, which has one sample of the actor, all but one. Orders of one to five are drawn below."""
    schedule = shuffled(workload_of((2, 2), (count, count)), count)
    for done, row in zip(check(four, schedule, PLACES[2, 2], prompts=2 * count), schedule.ids(), strict=True):
        assert done == [name for name in row if name in done]
        assert len(done) == 4 * count, "forward and backward of both"


@given(
    st.sampled_from(list(PLACES)),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.integers(0, 2**20),
    st.integers(-1, 3),
)
@settings(max_examples=examples(1, 16), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_order_gives_the_bits_of_one_after_the_other(four: Group, stages, counts, seed: int, slow: int) -> None:
    check(four, shuffled(workload_of(stages, counts), seed), PLACES[stages], slow)


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "slow"), list(itertools.product(PLACES, [-1, 0, 3])))
def test_a_slow_rank_changes_nothing(four: Group, stages: tuple[int, int], slow: int) -> None:
    for number, schedule in enumerate(
        [one_f_one_b(workload_of(stages, (4, 2))), *(shuffled(workload_of(stages, (3, 3)), seed) for seed in range(3))]
    ):
        check(four, schedule, PLACES[stages], slow if number % 2 else -1)


@pytest.mark.slow
@pytest.mark.parametrize("slow", [-1, 0, 3])
def test_copies_of_an_order_may_divide_gradients(four: Group, slow: int) -> None:
    """Each stage of a copy waits for that of the other in every backward; of some the other has no samples."""
    places = {"actor": "0,1,2,3 dp2 pp2", "critic": "1,0,3,2 dp2 pp2"}
    for seed in range(3):
        check(four, shuffled(workload_of((2, 2), (3, 2)), seed), places, slow, divides=True)
