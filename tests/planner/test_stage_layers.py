"""Cuts of layers into stages: by hand, and against all cuts."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.layout.shards import balanced_stages
from plait.planner.stage_layers import StageDevices, cut_layers


def all_cuts(layers: int, stages: int):
    for ends in combinations(range(1, layers), stages - 1):
        bounds = (0, *ends, layers)
        yield tuple(b - a for a, b in pairwise(bounds))


def slowest(cut, seconds, first, last, speeds=()) -> float:
    found, at = [], 0
    for number, layers in enumerate(cut):
        work = sum(seconds[at : at + layers]) + first * (number == 0) + last * (number == len(cut) - 1)
        found.append(work / (speeds[number] if speeds else 1))
        at += layers
    return max(found)


def held(cut, sizes) -> list[float]:
    ends = [0]
    for layers in cut:
        ends.append(ends[-1] + layers)
    return [sum(sizes[a:b]) for a, b in pairwise(ends)]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(0, 9),
    st.integers(0, 9),
    st.data(),
)
def test_none_is_faster_of_those_that_fit(seconds, stages, first, last, data) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=len(seconds), max_size=len(seconds)))
    rooms = data.draw(st.lists(st.integers(3, 30), min_size=stages, max_size=stages))
    speeds = data.draw(st.lists(st.integers(1, 5), min_size=stages, max_size=stages))
    devices = [StageDevices(room, speed) for room, speed in zip(rooms, speeds, strict=True)]
    fitting = [
        cut
        for cut in all_cuts(len(seconds), stages)
        if all(one <= room for one, room in zip(held(cut, sizes), rooms, strict=True))
    ]
    found = cut_layers(seconds, stages, first_s=first, last_s=last, layer_bytes=sizes, devices=devices)
    if found is None:
        assert not fitting
    else:
        assert found in fitting
        least = min(slowest(cut, seconds, first, last, speeds) for cut in fitting)
        assert slowest(found, seconds, first, last, speeds) == least


@given(st.integers(1, 40), st.integers(1, 8), st.floats(0, 12))
def test_equal_layers_are_cut_as_well_as_by_the_rule_of_a_run(layers, stages, head) -> None:
    if stages > layers:
        assert cut_layers([1.0] * layers, stages) is None
        return
    found = cut_layers([1.0] * layers, stages, last_s=head)
    rule = balanced_stages(layers, stages, head)
    assert found is not None
    assert sum(found) == layers
    seconds = [1.0] * layers
    assert abs(slowest(found, seconds, 0, head) - slowest(rule, seconds, 0, head)) < 1e-9


def test_by_hand() -> None:
    assert cut_layers([1, 1, 1, 1, 8], 2) == (4, 1)
    assert cut_layers([1.0] * 30, 2, last_s=8.0) == (19, 11)
    assert cut_layers([1, 1, 1, 1], 2, layer_bytes=[4, 4, 4, 4], devices=[StageDevices(), StageDevices(4)]) == (3, 1)
    assert cut_layers([1, 1], 2, layer_bytes=[5, 5], devices=[StageDevices(4), StageDevices(9)]) is None


def test_by_hand_on_devices_of_several_kinds() -> None:
    """Eight layers on a stage that is three times as fast: 6 and 2, as 6 / 3 = 2; with a head of four layers on the
    fast one, 3 and 5 + 4; where the fast device has room for five, the slow one takes the rest."""
    assert cut_layers([1.0] * 8, 2, devices=[StageDevices(speed=3), StageDevices(speed=1)]) == (6, 2)
    assert cut_layers([1.0] * 8, 2, devices=[StageDevices(speed=1), StageDevices(speed=3)]) == (2, 6)
    assert cut_layers([1.0] * 8, 2, last_s=4.0, devices=[StageDevices(speed=1), StageDevices(speed=3)]) == (3, 5)
    assert cut_layers([1.0] * 8, 2, layer_bytes=[1.0] * 8, devices=[StageDevices(5, 3), StageDevices(9, 1)]) == (5, 3)
