"""Under which names the numbers of a call's samples stand, and the numbers of what functions read from texts. Names:
docs/metrics.md."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from plait.data.computing import are_equal
from plait.dataflow import CallKind, Dataflow, Node
from plait.runtime.steps.step import StepState


def prefix_of(drawn: Node, flow: Dataflow) -> str:
    """What stands before the metrics of a call's samples, so that those of a rollout that is there to compare with are
    not taken for those of the samples that train."""
    if drawn is flow.main_rows:
        return ""
    return "greedy/" if is_baseline(drawn, flow) else f"{drawn.call}/"


def is_baseline(drawn: Node, flow: Dataflow) -> bool:
    """Whether a rollout answers the step's prompts greedily and trains nobody, as that of ReMax."""
    is_greedy = drawn.kind is CallKind.GENERATE and drawn.generation.greedy
    return is_greedy and drawn.prompts is None and drawn not in flow.trained_on


def exact_mean(values: Collection[float]) -> float:
    """Exactly rounded, so the same in any order: groups come as their rewards are done. 0 of none."""
    return math.fsum(values) / len(values) if values else 0.0


def grade_metrics(flow: Dataflow, state: StepState) -> dict[str, float]:
    """The mean of what functions read from texts, absent where they read nothing at all; the share of samples of which
    they read nothing, and of groups of which they read no two numbers that differ."""
    metrics: dict[str, float] = {}
    for node in flow.of_kind(CallKind.GRADE):
        rows = state.tables[node.rows]
        values = rows.columns[node.outputs[0]]
        before = prefix_of(flow.nodes[node.rows], flow)
        name = f"{before}{node.call}"
        read = values[np.isfinite(values)].tolist()
        metrics |= {f"{name}/mean": exact_mean(read)} if read else {}
        metrics[f"{name}/unread"] = (len(values) - len(read)) / len(values)
        equal = [are_equal(values[list(members)]) for members in rows.groups.values()]
        metrics[f"{before}frac_{node.call}_zero_std"] = float(np.mean(equal))
    return metrics
