"""The inner loop of the static simulator, compiled by numba where it is installed; `longest_paths.py_func` is plain."""

# numpy's annotations do not say that an array indexed by numbers gives a number.
# pyright: reportArgumentType=false

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from plait.compiled import njit

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@njit()
def longest_paths(
    first_edge: Ints, edge_to: Ints, edge_s: Floats, waits_left: Ints, seconds: Floats, start: Floats, queue: Ints
) -> int:
    """Start every node as soon as all edges into it allow; return how many could start.

    first_edge: [n + 1], edge_to: [m], edge_s: [m] the edges out of node k are first_edge[k] … first_edge[k + 1] − 1;
                the head of an edge starts at the earliest `edge_s` after the end of its tail
    waits_left: [n] edges into each node; counted down
    start:      [n] earliest starts, raised in place; queue: [n] the order in which nodes were started
    """
    last = 0
    for node in range(seconds.shape[0]):
        if waits_left[node] == 0:
            queue[last] = node
            last += 1
    done = 0
    while done < last:
        node = queue[done]
        done += 1
        end = start[node] + seconds[node]
        for k in range(first_edge[node], first_edge[node + 1]):
            other = edge_to[k]
            start[other] = max(start[other], end + edge_s[k])
            waits_left[other] -= 1
            if waits_left[other] == 0:
                queue[last] = other
                last += 1
    return done
