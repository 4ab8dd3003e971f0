"""HybridFlow's mapping: its golden numbers, and that each set has room on the devices that it is dealt."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.planner.hybridflow import MOST_UNITS, compositions, hybridflow, set_partitions
from plait.planner.plan_baselines import one_mesh
from plait.planner.plan_objective import Objective
from plait.planner.plan_space import PlanSpace
from tests.cases import examples
from tests.planner.test_plan_search import SMALL, problem
from tests.schedule.test_placements import PPO


def test_golden_numbers() -> None:
    """Set partitions of 3 to 6 models, and allocations summed over those of 4 and 5."""
    assert [sum(1 for _ in set_partitions("abcdef"[:k])) for k in (3, 4, 5, 6)] == [5, 15, 52, 203]

    def counted(k, n):
        return sum(1 for sets in set_partitions("abcdef"[:k]) for _ in compositions(n, [1] * len(sets)))

    assert (counted(4, 8), counted(4, 16), counted(5, 8)) == (211, 1191, 1016)
    assert list(compositions(4, [1, 2])) == [(1, 3), (2, 2)]
    assert list(compositions(2, [1, 2])) == []


@settings(deadline=None, max_examples=examples(10, 50))
@given(
    st.sampled_from([2, 3, 4, 6, 8]), st.integers(40, 400), st.sampled_from([PPO, SMALL]), st.sampled_from([1, 2, 8])
)
def test_every_device_has_room_and_something_to_do(devices: int, memory: int, flow, tp: int) -> None:
    of = problem(devices, memory, flow, tp=tp)
    places = hybridflow(PlanSpace(of))
    assert places is None or Objective(of)(places).usable


def test_models_are_cut_or_apart_where_the_fastest_have_no_room_together() -> None:
    """Four copies of everything take 20 * (1 + 2 + 6 / 4) + 10 * 4.5 + 20 + 10 = 165 bytes, and more while a call runs.
    Of 120 all models have a place yet, without anything going to host memory."""
    of = problem(4, memory=120)
    space = PlanSpace(of)
    together = one_mesh(space)
    assert together is not None
    assert not Objective(of)(together).usable
    places = hybridflow(space)
    assert places is not None
    assert Objective(of)(places).usable
    assert {p.after for place in places for p in place.placements} == {"keep"}


def test_where_kept_models_have_no_room_what_idles_is_in_host_memory() -> None:
    of = problem(2, memory=120)
    places = hybridflow(PlanSpace(of))
    assert places is not None
    assert Objective(of)(places).usable
    assert "offload" in {p.after for place in places for p in place.placements}


def test_where_no_set_has_room_there_is_no_mapping() -> None:
    assert hybridflow(PlanSpace(problem(2, memory=20))) is None


@pytest.mark.parametrize("devices", [34, 40])
def test_devices_that_are_no_whole_unit_go_to_the_last_set(devices: int) -> None:
    of = problem(devices, memory=400, flow=SMALL)
    places = hybridflow(PlanSpace(replace(of)))
    assert places is not None
    assert {rank for place in places for p in place.placements for rank in p.ranks} == set(range(devices))


@pytest.mark.parametrize("devices", [16, 24, 31])
def test_no_more_than_sixteen_units_are_dealt_out(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 24 devices two at a time: as 24 units they would be dealt to six models in 33,649 ways."""
    space, begins = PlanSpace(problem(devices, memory=400, flow=SMALL)), set[int]()
    forms_of = space.forms.of
    monkeypatch.setattr(space.forms, "of", lambda slot, ranks: begins.add(ranks[0]) or forms_of(slot, ranks))
    assert hybridflow(space) is not None
    assert len(begins) <= MOST_UNITS
