"""The dataflow of an algorithm: a graph of calls, traced once from a plain Python function.

Enters: a flow (a function over role handles). Leaves: a `Dataflow`, nodes with a grain and typed columns.
Imports nothing of plait but `errors`; no torch.
"""

from plait.dataflow.graph import CallKind, Column, Dataflow, Grain, Level, Node
from plait.dataflow.trace import Prompts, Role, Samples, per_batch, per_group, per_sample, trace

__all__ = [
    "CallKind",
    "Column",
    "Dataflow",
    "Grain",
    "Level",
    "Node",
    "Prompts",
    "Role",
    "Samples",
    "per_batch",
    "per_group",
    "per_sample",
    "trace",
]
