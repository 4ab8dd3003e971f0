"""On how many nodes of a cluster a run is, and what is said where there is no room. By hand."""

from __future__ import annotations

from typing import Any

import pytest

from plait.errors import ConfigError
from plait.launch.nodes.room import Need, Room, Rooms, node_counts, passed, table


def rooms(*free_of_total: tuple[float, float], elsewhere: float = 0.0) -> Rooms:
    there = [Room(f"gpu{i}", {"GPU": total}, {"GPU": free}) for i, (free, total) in enumerate(free_of_total)]
    return Rooms(there, {"GPU": elsewhere} if elsewhere else {})


EIGHT = Need(8, {"GPU": 1.0})


def test_ranks_are_on_the_fewest_nodes_that_have_room_now() -> None:
    assert node_counts(EIGHT, rooms((8, 8), (8, 8))) == ([1, 2], [1, 2])
    assert node_counts(EIGHT, rooms((4, 8), (4, 8))) == ([2], [1, 2]), "one node has 8, but not free"
    assert node_counts(EIGHT, rooms((4, 4), (3, 4), (2, 4), (2, 4)))[0] == [4]
    six = Need(6, {"GPU": 1.0})
    assert node_counts(six, rooms((4, 4), (4, 4), (4, 4)))[0] == [2, 3], "shares are equal: 3 and 3"


def test_where_none_has_room_now_they_wait_for_the_fewest_that_could() -> None:
    assert node_counts(EIGHT, rooms((0, 8), (1, 8))) == ([], [1, 2])
    assert node_counts(EIGHT, rooms((0, 4), (1, 4))) == ([], [2])


def test_the_number_of_nodes_may_be_said() -> None:
    assert node_counts(Need(8, {"GPU": 1.0}, 2), rooms((8, 8), (8, 8))) == ([2], [2])
    with pytest.raises(ConfigError, match=r"8 ranks .* cannot be divided among --nodes 3"):
        node_counts(Need(8, {"GPU": 1.0}, 3), rooms((8, 8), (8, 8)))
    with pytest.raises(ConfigError, match="could not hold the ranks if they were empty"):
        node_counts(Need(8, {"GPU": 1.0}, 4), rooms((8, 8), (8, 8)))


def test_every_resource_counts() -> None:
    both = Need(2, {"GPU": 1.0, "CPU": 4.0})
    few_cores = [Room(name, {"GPU": 2.0, "CPU": 4.0}, {"GPU": 2.0, "CPU": 4.0}) for name in "ab"]
    assert node_counts(both, Rooms(few_cores, {})) == ([2], [2])
    with pytest.raises(ConfigError):
        node_counts(both, Rooms(few_cores[:1], {}))


def node(name: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name * 8, "NodeManagerHostname": name, "Alive": alive, "Resources": resources}


def group(state: str, *bundles: tuple[str, dict[str, float]]) -> dict[str, Any]:
    return {
        "state": state,
        "bundles": dict(enumerate(amounts for _, amounts in bundles)),
        "bundles_to_node_id": {index: name * 8 for index, (name, _) in enumerate(bundles)},
    }


def test_what_placement_groups_have_is_known_by_node_and_what_others_have_in_sum() -> None:
    """Two nodes of 8 cores: a group has 3 of a and 1 of b, a task 2 somewhere; one group waits, one is gone."""
    nodes = [node("a", CPU=8.0), node("b", CPU=8.0, GPU=2.0), node("c", alive=False, CPU=8.0)]
    groups = {
        "1": group("CREATED", ("a", {"CPU": 3.0}), ("b", {"CPU": 1.0})),
        "2": group("PENDING", ("", {"CPU": 9.0})),
        "3": group("REMOVED", ("a", {"CPU": 5.0})),
    }
    found = Rooms.of(nodes, groups, {"CPU": 16.0, "GPU": 2.0}, {"CPU": 10.0, "GPU": 2.0})
    assert [(room.name, room.free) for room in found.nodes] == [
        ("a (aaaaaaaa)", {"CPU": 5.0}),
        ("b (bbbbbbbb)", {"CPU": 7.0, "GPU": 2.0}),
    ]
    assert found.elsewhere == {"CPU": 2.0}
    assert table(Need(16, {"CPU": 1.0}), 2, found).splitlines()[-1] == (
        "less 2 CPU of tasks and actors without a placement group: Ray does not say on which"
    )


def test_of_one_node_all_that_is_used_is_known() -> None:
    groups = {"1": group("CREATED", ("a", {"CPU": 3.0}))}
    found = Rooms.of([node("a", CPU=8.0)], groups, {"CPU": 8.0}, {"CPU": 1.5})  # a task has 3.5
    assert [room.free for room in found.nodes] == [{"CPU": 1.5}]
    assert found.elsewhere == {}
    assert Rooms.of([node("a", CPU=8.0)], {}, {"CPU": 8.0}, {}).nodes[0].free == {"CPU": 0.0}, "Ray leaves zeros out"


def test_the_table_says_what_is_needed_and_free_on_which_node() -> None:
    there = Rooms([*rooms((3, 8)).nodes, Room("head", {"CPU": 4.0}, {"CPU": 4.0})], {})
    assert table(EIGHT, 2, there).splitlines() == [
        "needed: 8 ranks, each with 1 GPU; 4 GPU on each of 2 nodes",
        "node    GPU free      of",
        "gpu0           3       8",
        "head           0       0",
    ]
    assert table(EIGHT, 0, Rooms([], {})).splitlines()[0] == "needed: 8 ranks, each with 1 GPU"


def test_only_listed_variables_are_passed_and_never_the_key() -> None:
    environ = {
        "PLAIT_RUN_KEY": "secret",
        "PLAIT_CACHE": "a",
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "/src",
        "HF_HOME": "/hf",
        "HF_TOKEN": "secret",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    assert sorted(passed(environ)) == ["HF_HOME", "NCCL_DEBUG", "PLAIT_CACHE", "PYTHONPATH"]
