"""Workloads for property tests; the published and the random ones are the benchmark's."""

from __future__ import annotations

import sys
from math import inf
from pathlib import Path
from typing import NoReturn

from hypothesis import strategies as st

from plait.schedule.pipeline import Pipeline, Workload, fused_workload

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from schedule.published import PROBLEMS, Problem
from schedule.random_workloads import capped_workload, random_workload

__all__ = ["PROBLEMS", "Problem", "capped_workload", "never", "random_workload", "workload", "workloads"]


def never(batch: object, **columns: object) -> NoReturn:
    """A loss of flows that are only planned."""
    raise AssertionError("a plan runs nothing")


def workload(num_stages: int, count: int, model: str = "actor", copy: int = 0) -> Workload:
    """One model on so many stages, each of whose forwards, backwards and memory counts 1."""
    table = ((1.0,) * count,) * num_stages
    return Workload((Pipeline(model, copy, tuple(range(num_stages)), table, table, table),), num_stages)


@st.composite
def workloads(draw) -> Workload:
    """Small workloads of one or two models, with or without a cap."""
    stages = draw(st.sampled_from([(1,), (2,), (3,), (1, 1), (2, 2), (2, 1), (3, 3), (3, 1), (1, 2), (4, 2)]))
    duration = st.sampled_from([0.5, 1.0, 1.25, 2.0, 3.0, 7.0])
    table = lambda: [draw(st.lists(duration, min_size=s, max_size=s)) for s in stages]
    forward, backward, memory = table(), table(), table()
    microbatches = [draw(st.integers(1, 4)) for _ in stages]
    some = st.sampled_from([inf, 7.0, 9.5, 20.0])
    ranks = max(stages)
    cap = draw(some | st.lists(some, min_size=ranks, max_size=ranks))  # devices of several kinds have caps of their own
    return fused_workload(stages, microbatches, forward, backward, memory, cap)
