"""On how many nodes of a cluster a run is, and what is said where there is no room. By hand."""

from __future__ import annotations

import pytest

from plait.errors import ConfigError
from plait.launch.nodes.room import Need, Room, num_nodes, passed, table


def rooms(*free_of_total: tuple[float, float]) -> list[Room]:
    return [Room(f"gpu{i}", {"GPU": total}, {"GPU": free}) for i, (free, total) in enumerate(free_of_total)]


EIGHT = Need(8, {"GPU": 1.0})


def test_ranks_are_on_the_fewest_nodes_that_have_room_now() -> None:
    assert num_nodes(EIGHT, rooms((8, 8), (8, 8))) == 1
    assert num_nodes(EIGHT, rooms((4, 8), (4, 8))) == 2, "one node has 8, but not free"
    assert num_nodes(EIGHT, rooms((4, 4), (3, 4), (2, 4), (2, 4))) == 4
    assert num_nodes(Need(6, {"GPU": 1.0}), rooms((4, 4), (4, 4), (4, 4))) == 2, "shares are equal: 3 and 3"


def test_where_none_has_room_now_they_wait_for_the_fewest_that_could() -> None:
    assert num_nodes(EIGHT, rooms((0, 8), (1, 8))) == 1
    assert num_nodes(EIGHT, rooms((0, 4), (1, 4))) == 2
    unknown = [Room("a", {"GPU": 4.0}, None), Room("b", {"GPU": 4.0}, None)]
    assert num_nodes(EIGHT, unknown) == 2


def test_the_number_of_nodes_may_be_said() -> None:
    assert num_nodes(Need(8, {"GPU": 1.0}, 2), rooms((8, 8), (8, 8))) == 2
    with pytest.raises(ConfigError, match=r"8 ranks .* cannot be divided among --nodes 3"):
        num_nodes(Need(8, {"GPU": 1.0}, 3), rooms((8, 8), (8, 8)))
    with pytest.raises(ConfigError, match="could not hold the ranks if they were empty"):
        num_nodes(Need(8, {"GPU": 1.0}, 4), rooms((8, 8), (8, 8)))


def test_every_resource_counts() -> None:
    both = Need(2, {"GPU": 1.0, "CPU": 4.0})
    few_cores = [Room("a", {"GPU": 2.0, "CPU": 4.0}, None), Room("b", {"GPU": 2.0, "CPU": 4.0}, None)]
    assert num_nodes(both, few_cores) == 2
    with pytest.raises(ConfigError):
        num_nodes(both, few_cores[:1])


def test_the_table_says_what_is_needed_and_free_on_which_node() -> None:
    there = [*rooms((3, 8)), Room("head", {"CPU": 4.0}, None)]
    assert table(EIGHT, 2, there).splitlines() == [
        "needed: 8 ranks, each with 1 GPU; 4 GPU on each of 2 nodes",
        "node    GPU free      of",
        "gpu0           3       8",
        "head           ?       0",
    ]
    assert table(EIGHT, 0, []).splitlines()[0] == "needed: 8 ranks, each with 1 GPU"


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
