"""A Ray cluster of three nodes, which are processes of this machine; skips where ray is not installed."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
from collections.abc import Iterator

import pytest

from plait.launch.nodes.gathered import Gathered
from plait.launch.nodes.room import Need
from tests.launch.nodes.agents import KEY

NODES = 3
CORES = 16
"""That Ray counts on each of the nodes: suites hold several groups at a time."""


@functools.cache
def cluster_address() -> str:
    """Address of a cluster that runs to the end of this process, which is connected to it."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CORES, "include_dashboard": False})
    atexit.register(cluster.shutdown)
    for _ in range(NODES - 1):
        cluster.add_node(num_cpus=CORES)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    atexit.register(ray.shutdown)
    return cluster.address


@contextlib.contextmanager
def addressed() -> Iterator[str]:
    """The cluster is the one that runs, for this process and those that it starts."""
    before, address = os.environ.get("RAY_ADDRESS"), cluster_address()
    os.environ["RAY_ADDRESS"] = address
    try:
        yield address
    finally:
        if before is None:
            del os.environ["RAY_ADDRESS"]
        else:
            os.environ["RAY_ADDRESS"] = before


@contextlib.contextmanager
def placed_by_ray(*, nodes: int, num_ranks: int = 2, placed_s: float = 60.0) -> Iterator[Gathered]:
    """Nodes that Ray has started, with a core for each rank."""
    with addressed():
        from plait.launch.nodes.on_ray import started_by_ray

        need = Need(num_ranks, {"CPU": 1.0}, nodes)
        said: list[str] = []
        with started_by_ray(need, KEY, silent_after_s=15.0, say=said.append, placed_s=placed_s) as gathered:
            yield gathered
            gathered.end(0)
