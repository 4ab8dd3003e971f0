"""Seeded random scheduling problems, small enough to be solved to the proven optimum."""

from __future__ import annotations

import random
from math import inf

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


def capped_workload(seed: int) -> Workload:
    """N in {2, 3, 4}, 3 to 7 micro-batches, unequal stages; each rank may hold 0 to 4 more than the largest activation
    of its two stages, which is 1 to 5."""
    rng = random.Random(f"capped {seed}")
    num_ranks = rng.choice([2, 3, 4, 4])
    copies = rng.choice([k for k in range(1, num_ranks + 1) if num_ranks % k == 0])
    stages = (num_ranks // copies, num_ranks)
    microbatches = (rng.randint(3, 7), rng.randint(3, 7))
    forward = [[rng.randint(1, 9) for _ in range(count)] for count in stages]
    backward = [[rng.randint(1, 18) for _ in range(count)] for count in stages]
    memory = [[rng.randint(1, 5) for _ in range(count)] for count in stages]
    most = [max(memory[0][rank % stages[0]], memory[1][num_ranks - 1 - rank]) for rank in range(num_ranks)]
    return fused_workload(stages, microbatches, forward, backward, memory, [held + rng.randint(0, 4) for held in most])
