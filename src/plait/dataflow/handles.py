"""What a flow works with while it is traced: handles of prompts, samples, columns and roles."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from plait.dataflow.graph import CallKind, Column, Grain, Level
from plait.dataflow.options import BecomesOptions, GenerateOptions, Resample, Score, ScoreOptions, TrainOptions
from plait.dataflow.tracer import Tracer
from plait.errors import FlowError
from plait.user_code import title_of


@dataclass(frozen=True)
class Prompts:
    """Handle of the prompts of the step."""

    _tracer: Tracer


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
        raise FlowError(
            f"the flow computes with {self.column}, which has no values while the flow is traced; put the computation "
            "into a function and apply it with per_sample, per_group or per_batch"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __pow__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    __getitem__ = __iter__ = __len__ = __float__ = _refuse
    __hash__ = object.__hash__


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
            inputs={"value": column},
            options=BecomesOptions(self.column.producer),
        )


class Samples:
    """Handle of samples: generated, or given by the data set."""

    def __init__(self, tracer: Tracer, rows: int | None = None) -> None:
        self._tracer = tracer
        self._rows = rows

    @property
    def rows(self) -> int:
        """Id of the node that makes them."""
        assert self._rows is not None, "only given samples are read late"
        return self._rows


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

    def _column(self, place: int) -> ColumnHandle:
        return ColumnHandle(self._tracer, self._tracer.nodes[self.rows].outputs[place])


class Generated(Samples):
    """Handle of generated samples. `logprobs` are those of the sampling engine, at its temperature."""

    @property
    def logprobs(self) -> ColumnHandle:
        return self._generated(0)

    @property
    def finished(self) -> ColumnHandle:
        """Per sample 1.0 where the response ended by itself, 0.0 where the limit truncated it."""
        return self._generated(1)

    @property
    def tokens_left(self) -> ColumnHandle:
        """Per sample the tokens by which the response is shorter than the recipe's limit."""
        return self._generated(2)

    def _generated(self, place: int) -> ColumnHandle:
        return ColumnHandle(self._tracer, self._tracer.nodes[self.rows].outputs[place])


class Role:
    """Handle of a role inside a flow: what it can be asked, whatever it is made of and wherever it runs."""

    def __init__(self, name: str, tracer: Tracer) -> None:
        self.name = name
        self._tracer = tracer

    def __getattr__(self, call: str) -> Any:
        raise FlowError(
            f"role `{self.name}` has no call `{call}`{nearest(call, _CALLS)}; its calls: {', '.join(_CALLS)}"
        )

    def generate(
        self,
        prompts: Prompts,
        *,
        greedy: bool = False,
        samples_per_prompt: int | None = None,
        resample: Resample | None = None,
    ) -> Generated:
        """Sample responses. `samples_per_prompt=None` takes the recipe's number; `greedy` decodes at temperature 0.

        `resample` draws further prompts until enough groups are kept; the step then holds other prompts than those of
        another `generate` call.

        Raises:
            FlowError: an option is wrong.
        """
        if not isinstance(prompts, Prompts):
            raise FlowError(f"{self.name}.generate takes the flow's `prompts`, not {describe(prompts)}")
        node = self._tracer.add(
            f"{self.name}.generate",
            CallKind.GENERATE,
            Grain.SAMPLE,
            role=self.name,
            outputs=(
                ("sampling_logprobs", Level.TOKEN),
                ("finished", Level.SAMPLE),
                ("tokens_left", Level.SAMPLE),
            ),
            options=GenerateOptions(
                samples_per_prompt,
                greedy,
                None if resample is None else _named(resample, f"{self.name}.generate"),
            ),
        )
        return Generated(self._tracer, node.id)

    def logprobs(self, samples: Samples) -> ColumnHandle:
        """Log-probs of the response tokens under this role's current weights, at the sampling temperature."""
        return self._score(samples, Score.LOGPROBS, Level.TOKEN)

    def values(self, samples: Samples) -> ColumnHandle:
        """A critic's value of the state before each response token."""
        return self._score(samples, Score.VALUES, Level.TOKEN)

    def score(self, samples: Samples) -> ColumnHandle:
        """One number per sample, from a reward function or a reward model."""
        return self._score(samples, Score.SCORE, Level.SAMPLE)

    def _score(self, samples: Samples, what: Score, level: Level) -> ColumnHandle:
        rows = rows_of(samples, f"{self.name}.{what}")
        node = self._tracer.add(
            f"{self.name}.{what}",
            CallKind.SCORE,
            Grain.SAMPLE,
            role=self.name,
            rows=rows,
            outputs=((f"{self.name}_{what}", level),),
            options=ScoreOptions(what),
        )
        return ColumnHandle(self._tracer, node.outputs[0])

    def train(
        self,
        samples: Samples,
        *,
        loss: Callable[..., Any],
        mini_batches: int = 1,
        epochs: int = 1,
        keep: ColumnHandle | None = None,
        mask: ColumnHandle | None = None,
        whole_groups: bool = False,
        after: int = 0,
        **columns: ColumnHandle | None,
    ) -> None:
        """Update this role: `epochs` passes over `mini_batches` mini-batches, one optimizer step each.

        `loss(batch, **columns)` gets, by name, the columns that it asks for. A column given as None is left out, and
        the loss then needs a default for it.

        Samples for which the SAMPLE column `keep` is 0 take no part: neither in the loss nor in any of its
        denominators. Response tokens for which the TOKEN column `mask` is 0 are in neither too. Both are inputs of the
        node under these names, and do not reach the loss.

        Args:
            whole_groups: never split the samples of one prompt over mini-batches or micro-batches (a loss over pairs).
            after: training steps at the beginning of a run in which this call does nothing.

        Raises:
            FlowError: a column that the loss needs is missing, one is given that it does not take, or an option is
                wrong.
        """
        call = f"{self.name}.train"
        rows = rows_of(samples, call)
        given = {
            name: column_of(handle, rows, f"{call}({name}=…)") for name, handle in columns.items() if handle is not None
        }
        _check_loss(loss, given, call)
        for name, handle, level in (("keep", keep, Level.SAMPLE), ("mask", mask, Level.TOKEN)):
            if handle is not None:
                given[name] = column_of(handle, rows, f"{call}({name}=…)")
                if given[name].level is not level:
                    raise FlowError(f"{call}({name}=…) takes one number per {level}, not {given[name]}")
        self._tracer.add(
            call,
            CallKind.TRAIN,
            Grain.BATCH,
            role=self.name,
            rows=rows,
            inputs=given,
            fn=loss,
            options=TrainOptions(mini_batches, epochs, whole_groups, after),
        )


_CALLS = ("generate", "logprobs", "values", "score", "train")


def _check_loss(loss: Callable[..., Any], given: dict[str, Column], call: str) -> None:
    if not callable(loss):
        raise FlowError(f"{call}: `loss` is a function `loss(batch, …)`, not {describe(loss)}")
    try:
        parameters = list(inspect.signature(loss).parameters.values())
    except (TypeError, ValueError) as error:
        raise FlowError(f"{call}: the parameters of the loss `{title_of(loss)}` cannot be read: {error}") from None
    title = title_of(loss)
    if not parameters or parameters[0].name != "batch":
        raise FlowError(f"{call}: the first parameter of the loss `{title}` must be `batch`")
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    names = [p.name for p in parameters[1:] if p.kind not in variadic]
    for name in given:
        if name not in names and not takes_any:
            raise FlowError(
                f"{call}: the loss `{title}` takes no column `{name}`{nearest(name, names)}; "
                f"it takes: {', '.join(names)}"
            )
    for parameter in parameters[1:]:
        needed = parameter.default is inspect.Parameter.empty and parameter.kind not in variadic
        if needed and parameter.name not in given:
            raise FlowError(f"{call}: the loss `{title}` needs the column `{parameter.name}`, which is not given")


def rows_of(samples: Any, call: str) -> int:
    if not isinstance(samples, Samples):
        raise FlowError(f"{call} takes samples (what `generate` returns), not {describe(samples)}")
    return samples.rows


def column_of(handle: Any, rows: int | None, call: str) -> Column:
    """The column of a handle that is read by a call on `rows` (None: on no rows)."""
    if not isinstance(handle, ColumnHandle):
        raise FlowError(f"{call} takes a column (what a call returns), not {describe(handle)}")
    if rows is not None and handle.column.rows != rows and handle.column.level is Level.TOKEN:
        raise FlowError(f"{call}: {handle.column} belongs to other samples than the rest of the call")
    return handle.column


def describe(value: Any) -> str:
    names = ((Prompts, "prompts"), (Samples, "samples"), (ColumnHandle, "a column"))
    return next((name for cls, name in names if isinstance(value, cls)), f"a {type(value).__name__}")


def nearest(name: str, names: Collection[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean `{close[0]}`?)" if close else ""


def _named(resample: Resample, call: str) -> Resample:
    if not isinstance(resample.reward, Role):
        raise FlowError(
            f"{call}(resample=…): `reward` is the role whose score decides, not {describe(resample.reward)}"
        )
    if resample.max_rounds < 1:
        raise FlowError(f"{call}(resample=…): max_rounds must be at least 1, found {resample.max_rounds}")
    return dataclasses.replace(resample, reward=resample.reward.name)
