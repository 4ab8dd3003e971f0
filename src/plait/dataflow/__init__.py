"""The dataflow of an algorithm: a graph of calls, traced once from a plain Python function.

* While a flow runs: `trace` runs it with a `tracer`; it works with `handles` and `role`s, and with functions of texts
  (`from_samples`, `prompt_call`). `option_reads` sees which options it reads, `unfit` says what does not fit.
* The result: `graph` has its nodes with their `options`, `call_name` their names, `made_rows` where samples come from.

Enters: a flow (a function over role handles). Leaves: a `Dataflow`, nodes with a grain and typed columns.
Imports `metric_names`, `user_code` and `errors`; no torch.
"""

from typing import TYPE_CHECKING

from plait.dataflow.call_name import CallName
from plait.dataflow.from_samples import build_prompts, parse_grades
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
    "build_prompts",
    "carried",
    "parse_grades",
    "per_batch",
    "per_group",
    "per_sample",
    "trace",
]

_RENAMED = {"prompts_from": "build_prompts", "grades_from": "parse_grades"}

if not TYPE_CHECKING:

    def __getattr__(name):
        """Raises ImportError where a flow asks for a name of an earlier version, AttributeError of any other."""
        if name in _RENAMED:
            raise ImportError(f"`{name}` of plait.dataflow is `{_RENAMED[name]}` now")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
