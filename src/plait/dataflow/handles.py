"""What a flow works with while it is traced: handles of prompts, samples, columns and roles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plait.dataflow.graph import VALUE, CallKind, Column, Grain, Level
from plait.dataflow.options import BecomesOptions
from plait.dataflow.tracer import Tracer
from plait.dataflow.unfit import nearest
from plait.errors import FlowError, NoAttribute
from plait.metric_names import OF_DATA

LABELLED, MISMATCHED = "labelled", "mismatched"
"""Given samples that a flow names, and those that are made of them: names of calls."""


@dataclass(frozen=True)
class Prompts:
    """Handle of prompts: those of the step, or one that a function has written for each of some samples
    (`build_prompts`)."""

    _tracer: Tracer
    node: int | None = None
    """Id of the call that writes them; None: they are those of the step."""

    @property
    def rows(self) -> int:
        """Id of the call that makes the samples that they were written for."""
        assert self.node is not None, "prompts of the step are written for no samples"
        return self._tracer.nodes[self.node].rows


@dataclass(frozen=True, eq=False)
class ColumnHandle:
    """Handle of one column; pass it to a call, a loss, or a function over columns."""

    _tracer: Tracer
    column: Column

    def __bool__(self) -> bool:
        raise FlowError(
            f"the flow asks whether {self.column} is true, but a flow runs once on symbolic handles and has no "
            "values; compare with `is None`, or put the decision into a function given to per_sample or per_group"
        )

    def _refuse(self, *_: Any) -> Any:
        raise FlowError(self._without_values())

    def _without_values(self) -> str:
        return (
            f"the flow computes with {self.column}, which has no values while the flow is traced; put the computation "
            "into a function and apply it with per_sample, per_group or per_batch"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __pow__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    __getitem__ = __iter__ = __len__ = __float__ = _refuse
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        """What numbers have, such as `.mean()`."""
        if name.startswith("_"):
            raise AttributeError(name)  # a protocol of Python's
        raise NoAttribute(self._without_values())


class Carried(ColumnHandle):
    """Handle of a value that is kept from step to step, as it is in this step."""

    def becomes(self, value: ColumnHandle) -> None:
        """Set what it is in the next step: a value for the whole batch, of the same shape.

        Raises:
            FlowError: `value` is for samples or tokens, or this was said before.
        """
        name = self.column.name
        column = column_of(value, None, f"carried({name!r}).becomes")
        if column.level is not Level.BATCH:
            raise FlowError(f"carried({name!r}).becomes takes one value for the whole batch, not {column}")
        call = f"{name}.becomes"
        if any(node.call == call for node in self._tracer.nodes):
            raise FlowError(f"carried({name!r}) becomes two things in one step")
        self._tracer.add(
            call,
            CallKind.BECOMES,
            Grain.BATCH,
            inputs={VALUE: column},
            options=BecomesOptions(self.column.producer),
        )


class Scores(ColumnHandle):
    """Handle of the scores that a role gives samples: of a reward the weighted sum of what its functions say, and its
    models."""

    def of(self, name: str) -> ColumnHandle:
        """What one reward function gives each sample, before its weight, by its name in `rewards/NAME/mean` (`model`: a
        reward model; `model_2`: the second of several); NaN where it does not apply.

        Raises:
            FlowError: `name` is no name. (A run checks that the reward has a function of this name.)
        """
        if not isinstance(name, str) or not name:
            raise FlowError(f"{self.column}.of takes the name of a reward function, not {name!r:.80}")
        return self._further(f"{self.column.name}/{name}", Level.SAMPLE)

    @property
    def by_turn(self) -> ColumnHandle:
        """Per response token what was given for a turn of the sample, at the last drawn token of the turn; 0 elsewhere.
        What functions gave for the whole response, and reward models, counts at its last token. The sum is the score.
        """
        return self._further(f"{self.column.name}_by_turn", Level.TOKEN)

    @property
    def decoupled(self) -> ColumnHandle:
        """Per sample the weighted sum of what its functions and its models give it, each of them first standardised by
        itself among the samples of a prompt (GDPO: `plait.algorithms.advantages.decoupled`)."""
        return self._further(f"{self.column.name}_decoupled", Level.SAMPLE)

    def _further(self, name: str, level: Level) -> ColumnHandle:
        return ColumnHandle(self._tracer, self._tracer.add_output(self.column.producer, name, level))


@dataclass(frozen=True, eq=False)
class TopLogprobs:
    """Handles of the k likeliest tokens in the place of each response token, as a role has them."""

    ids: ColumnHandle
    """Their token ids, k for each token: the likeliest first, and of equally likely ones the lowest id."""
    logprobs: ColumnHandle
    """Their log-probs and last that of all other tokens together, k + 1 for each token: a distribution."""


class Samples:
    """Handle of samples: generated, or given by the data set."""

    def __init__(self, tracer: Tracer, rows: int | None = None) -> None:
        self._tracer = tracer
        self._rows = rows

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # a protocol of Python's
        names = [name for cls in type(self).__mro__[:-1] for name in vars(cls) if not name.startswith("_")]
        columns = [name for name in dict.fromkeys(names) if name not in ("rows", "data", MISMATCHED)]
        raise NoAttribute(
            f"samples have no column `{name}`{nearest(name, columns)}; theirs: {', '.join(columns)}; others are what "
            f'calls return, such as `reward.score(samples)`; a number of the data is `samples.data("{name}")`'
        )

    @property
    def rows(self) -> int:
        """Id of the node that makes them."""
        assert self._rows is not None, "only given samples are read late"
        return self._rows

    def data(self, name: str) -> ColumnHandle:
        """Per sample the number in the column `name` of its row of the data; true is 1, false 0. Both samples of a pair
        have that of their row.

        Raises:
            FlowError: `name` is no name. (A run checks that every row has a number there.)
        """
        if not isinstance(name, str) or not name:
            raise FlowError(f"samples.data takes the name of a column of the data, not {name!r:.80}")
        return ColumnHandle(self._tracer, self._tracer.add_output(self.rows, f"{OF_DATA}{name}", Level.SAMPLE))

    def _column(self, place: int) -> ColumnHandle:
        return ColumnHandle(self._tracer, self._tracer.nodes[self.rows].outputs[place])


class Given(Samples):
    """Handle of samples that the data set gives: `examples`, or `pairs` of a chosen and a rejected response.

    The two of a pair are a group: samples 0 (chosen) and 1 (rejected) of one prompt. They are read when the flow first
    uses them, and not at all where an option makes it do without.
    """

    def __init__(self, tracer: Tracer, name: str) -> None:
        super().__init__(tracer)
        self._name = name

    @property
    def rows(self) -> int:
        if self._rows is None:
            outputs = (("trained", Level.TOKEN), ("margin", Level.SAMPLE))
            self._rows = self._tracer.add(self._name, CallKind.READ, Grain.SAMPLE, outputs=outputs).id
        return self._rows

    @property
    def trained(self) -> ColumnHandle:
        """Per response token 1.0 where it is to be learnt, else 0.0 (what others said in a conversation)."""
        return self._column(0)

    @property
    def margin(self) -> ColumnHandle:
        """Per sample the number in the column `margin` of its row; 0 where the row has none."""
        return self._column(1)


class Labelled(Given):
    """Handle of responses that are given with a label each."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__(tracer, LABELLED)
        self._others = Given(tracer, MISMATCHED)

    @property
    def label(self) -> ColumnHandle:
        """Per sample 1.0 where the response is desirable, else 0.0."""
        return ColumnHandle(self._tracer, self._tracer.add_output(self.rows, "label", Level.SAMPLE))

    @property
    def mismatched(self) -> Given:
        """The same prompts, each with the completion of another one of the batch: samples to score, from which the KL
        to a reference is estimated. Nothing of them is to be learnt."""
        return self._others


class Generated(Samples):
    """Handle of generated samples. `logprobs` are those of the sampling engine, at its temperature."""

    @property
    def logprobs(self) -> ColumnHandle:
        return self._column(0)

    @property
    def finished(self) -> ColumnHandle:
        """Per sample 1.0 where the response ended by itself, 0.0 where the limit truncated it."""
        return self._column(1)

    @property
    def tokens_left(self) -> ColumnHandle:
        """Per sample the tokens by which the response is shorter than the recipe's limit."""
        return self._column(2)

    @property
    def turn(self) -> ColumnHandle:
        """Per response token the number of the turn that it was drawn in, from 0."""
        return ColumnHandle(self._tracer, self._tracer.add_output(self.rows, "turn", Level.TOKEN))


def rows_of(samples: Any, call: str) -> int:
    """The id of the node that these samples come from.

    Raises:
        FlowError: they are no samples.
    """
    if not isinstance(samples, Samples):
        raise FlowError(f"{call} takes samples (what `generate` returns), not {describe(samples)}")
    return samples.rows


def written_for(prompts: Any, rows: int, call: str) -> int | None:
    """The id of the node that writes prompts for the samples of node `rows`; None: the samples have their own.

    Raises:
        FlowError: they are no such prompts.
    """
    if prompts is None:
        return None
    if not isinstance(prompts, Prompts) or prompts.node is None:
        found = "those of the step" if isinstance(prompts, Prompts) else describe(prompts)
        raise FlowError(f"{call}(prompts=…) takes what `build_prompts` returns for these samples, not {found}")
    if prompts.rows != rows:
        raise FlowError(f"{call}(prompts=…): the prompts were written for other samples than those of the call")
    return prompts.node


def column_of(handle: Any, rows: int | None, call: str) -> Column:
    """The column of a handle that is read by a call on `rows` (None: on no rows).

    Raises:
        FlowError: it is no column, or one of tokens of other samples.
    """
    if not isinstance(handle, ColumnHandle):
        raise FlowError(f"{call} takes a column (what a call returns), not {describe(handle)}")
    if rows is not None and handle.column.rows != rows and handle.column.level is Level.TOKEN:
        raise FlowError(
            f"{call}: {handle.column} belongs to other samples than the rest of the call, with other tokens; "
            "turn it into one number per sample (`per_sample`), or read it in `per_group`"
        )
    return handle.column


def describe(value: Any) -> str:
    of_top = "what `top_logprobs` returns (give its `ids` and its `logprobs`)"
    names = ((Prompts, "prompts"), (Samples, "samples"), (ColumnHandle, "a column"), (TopLogprobs, of_top))
    return next((name for cls, name in names if isinstance(value, cls)), f"a {type(value).__name__}")
