"""The dataflow of an algorithm: a graph of calls, traced once from a plain Python function.

Enters: a flow (a function over role handles). Leaves: a `Dataflow`, nodes with a grain and typed columns.
Imports `metric_names`, `user_code` and `errors`; no torch.
"""

from plait.dataflow.call_name import CallName
from plait.dataflow.from_samples import grades_from, prompts_from
from plait.dataflow.graph import CallKind, Column, Dataflow, Grain, Level, Node
from plait.dataflow.handles import LABELLED, MISMATCHED, Generated, Given, Labelled, Prompts, Samples
from plait.dataflow.options import Asked, GenerateOptions, Resample, Score, Top, TrainOptions
from plait.dataflow.role import Role
from plait.dataflow.trace import carried, per_batch, per_group, per_sample, trace

__all__ = [
    "LABELLED",
    "MISMATCHED",
    "Asked",
    "CallKind",
    "CallName",
    "Column",
    "Dataflow",
    "GenerateOptions",
    "Generated",
    "Given",
    "Grain",
    "Labelled",
    "Level",
    "Node",
    "Prompts",
    "Resample",
    "Role",
    "Samples",
    "Score",
    "Top",
    "TrainOptions",
    "carried",
    "grades_from",
    "per_batch",
    "per_group",
    "per_sample",
    "prompts_from",
    "trace",
]
