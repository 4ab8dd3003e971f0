"""Workloads for property tests and random proofs."""

from __future__ import annotations

import random
from math import inf

from hypothesis import strategies as st

from plait.schedule.pipeline import Workload, fused_workload


def random_workload(seed: int) -> Workload:
    """N in {2, 3, 4}, up to 8 micro-batches, unequal stages, and in two cases of three a memory cap."""
    rng = random.Random(seed)
    num_ranks = rng.choice([2, 3, 4])
    copies = rng.choice([k for k in range(1, num_ranks + 1) if num_ranks % k == 0])
    stages = (num_ranks, num_ranks // copies)
    microbatches = (rng.randint(1, 8), rng.randint(1, 8))
    forward = [[rng.randint(1, 9) for _ in range(count)] for count in stages]
    backward = [[rng.randint(1, 18) for _ in range(count)] for count in stages]
    memory = [[rng.randint(1, 5) for _ in range(count)] for count in stages]
    least = max(map(max, memory))
    cap = rng.choice([inf, least + rng.randint(0, 4), least + rng.randint(2, 15)])
    return fused_workload(stages, microbatches, forward, backward, memory, cap)


@st.composite
def workloads(draw) -> Workload:
    """Small workloads of one or two models, with or without a cap."""
    stages = draw(st.sampled_from([(1,), (2,), (3,), (1, 1), (2, 2), (2, 1), (3, 3), (3, 1), (1, 2), (4, 2)]))
    duration = st.sampled_from([0.5, 1.0, 1.25, 2.0, 3.0, 7.0])
    table = lambda: [draw(st.lists(duration, min_size=s, max_size=s)) for s in stages]  # noqa: E731
    forward, backward, memory = table(), table(), table()
    microbatches = [draw(st.integers(1, 4)) for _ in stages]
    cap = draw(st.sampled_from([inf, 7.0, 9.5, 20.0]))
    return fused_workload(stages, microbatches, forward, backward, memory, cap)
