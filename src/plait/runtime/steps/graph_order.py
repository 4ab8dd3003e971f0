"""What the calls of a step said, in the order of the graph, whichever call ended first.

So a run has the same metrics and the same order of columns on one rank, where calls run one after another, and on many.
"""

from __future__ import annotations

from plait.data.rows import Rows
from plait.dataflow import CallKind, Dataflow, Node
from plait.runtime.steps.step import StepState
from plait.schedule.work import Work
from plait.training.results import COUNTS, OF_EACH_CALL

_OF_TRAINING = "training/"
"""Metrics of every training call, in some steps only where a sample ended by itself."""


class GraphOrder:
    """Which call said which metric of a step."""

    def __init__(self, flow: Dataflow, state: StepState) -> None:
        self._flow = flow
        self._state = state
        state.said_by |= {name: -1 for name in state.metrics if name not in state.said_by}
        self._trained: dict[int, dict[str, float] | None] = {}
        """Training call → its metrics, until those before it have ended."""
        self._roles: set[str | None] = set()
        """Those of calls whose metrics the step has."""

    def ascribing(self, node: Node, work: Work[None]) -> Work[None]:
        """A call's work: the metrics that an action of it adds to the step are this call's."""
        for done in work:
            self.ascribe(node)
            yield done
        self.ascribe(node)

    def ascribe(self, node: Node) -> None:
        """The metrics that are new in the step are this call's."""
        state = self._state
        state.said_by |= {name: node.id for name in state.metrics if name not in state.said_by}

    def training_ended(self, node: Node, metrics: dict[str, float] | None) -> None:
        """Add what a training call returned, after what the training calls before it in the graph return."""
        self._trained[node.id] = metrics
        for call in self._flow.of_kind(CallKind.TRAIN):
            if call.id not in self._trained:
                return
            if (returned := self._trained[call.id]) is not None:
                self._merge(returned, call)
                self._trained[call.id] = None

    def _merge(self, metrics: dict[str, float], node: Node) -> None:
        """A role trained twice in a step: counts add up, the second's other numbers stand under its call's name, in
        place of the role's or of `training`, also where the first had no sample to say them of. What its loss alone
        logs keeps its name."""
        merged, again = self._state.metrics, node.role in self._roles
        for name, value in metrics.items():
            if name in merged and name.rpartition("/")[2] in COUNTS:
                merged[name] += value
                continue
            own = name.removeprefix(f"{node.role}/").removeprefix(_OF_TRAINING)
            of_each = name.startswith(_OF_TRAINING) or (own != name and own in OF_EACH_CALL)
            is_taken = name in merged or (again and of_each)
            merged[f"{node.call}/{own}" if is_taken else name] = value
        self._roles.add(node.role)

    def restore(self) -> None:
        """Sort the columns of the step's tables, and its metrics."""
        state = self._state
        for table, rows in state.tables.items():
            columns = sorted(rows.columns.items(), key=lambda item: item[0].producer)
            state.tables[table] = Rows(rows.samples, dict(columns))
        state.metrics = dict(sorted(state.metrics.items(), key=lambda item: state.said_by[item[0]]))
