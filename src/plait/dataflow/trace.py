"""Trace a flow: run it once on symbolic handles and keep the calls that it makes.

A flow is a plain function. Its parameters name what it uses: `prompts` are the prompts of the step, `options` the
algorithm's settings, every other parameter is a role. It has no data-dependent Python: a loop that depends on data
lives inside a call.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from plait.dataflow.graph import CallKind, Column, Dataflow, Grain, Level, Node
from plait.errors import FlowError


class _Tracer:
    """Collects the nodes of one trace and keeps call names unique."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def add(
        self,
        call: str,
        kind: CallKind,
        grain: Grain,
        *,
        role: str | None = None,
        rows: int | None = None,
        inputs: dict[str, Column] | None = None,
        outputs: tuple[tuple[str, Level], ...] = (),
        fn: Callable[..., Any] | None = None,
        options: dict[str, Any] | None = None,
    ) -> Node:
        used = {node.call for node in self.nodes}
        unique = next(name for name in (call, *(f"{call}#{i}" for i in range(2, len(used) + 3))) if name not in used)
        node_id = len(self.nodes)
        rows = node_id if rows is None else rows
        columns = tuple(Column(name, level, node_id, rows) for name, level in outputs)
        node = Node(node_id, unique, kind, grain, role, rows, inputs or {}, columns, fn, options or {})
        self.nodes.append(node)
        return node


@dataclass(frozen=True)
class Prompts:
    """Handle of the prompts of the step."""

    _tracer: _Tracer


@dataclass(frozen=True, eq=False)
class ColumnHandle:
    """Handle of one column; pass it to a call, a loss, or a function over columns."""

    _tracer: _Tracer
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


@dataclass(frozen=True)
class Samples:
    """Handle of generated samples. `logprobs` are those of the sampling engine, at its temperature."""

    _tracer: _Tracer
    rows: int

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

    def __init__(self, name: str, tracer: _Tracer) -> None:
        self.name = name
        self._tracer = tracer

    def __getattr__(self, call: str) -> Any:
        raise FlowError(
            f"role `{self.name}` has no call `{call}`{_nearest(call, _CALLS)}; its calls: {', '.join(_CALLS)}"
        )

    def generate(self, prompts: Prompts, *, greedy: bool = False, samples_per_prompt: int | None = None) -> Samples:
        """Sample responses. `samples_per_prompt=None` takes the recipe's number; `greedy` decodes at temperature 0."""
        if not isinstance(prompts, Prompts):
            raise FlowError(f"{self.name}.generate takes the flow's `prompts`, not {_describe(prompts)}")
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
            options={"greedy": greedy, "samples_per_prompt": samples_per_prompt},
        )
        return Samples(self._tracer, node.id)

    def logprobs(self, samples: Samples) -> ColumnHandle:
        """Log-probs of the response tokens under this role's current weights, at the sampling temperature."""
        return self._score(samples, "logprobs", Level.TOKEN)

    def score(self, samples: Samples) -> ColumnHandle:
        """One number per sample, from a reward function or a reward model."""
        return self._score(samples, "score", Level.SAMPLE)

    def _score(self, samples: Samples, call: str, level: Level) -> ColumnHandle:
        rows = _rows_of(samples, f"{self.name}.{call}")
        node = self._tracer.add(
            f"{self.name}.{call}",
            CallKind.SCORE,
            Grain.SAMPLE,
            role=self.name,
            rows=rows,
            outputs=((f"{self.name}_{call}", level),),
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
        **columns: ColumnHandle | None,
    ) -> None:
        """Update this role: `epochs` passes over `mini_batches` mini-batches, one optimizer step each.

        `loss(batch, **columns)` gets, by name, the columns that it asks for. A column given as None is left out, and
        the loss then needs a default for it.

        Samples for which the SAMPLE column `keep` is 0 take no part: neither in the loss nor in any of its
        denominators. It is an input of the node under the name `keep`, and does not reach the loss.

        Raises:
            FlowError: a column that the loss needs is missing, or one is given that it does not take.
        """
        call = f"{self.name}.train"
        rows = _rows_of(samples, call)
        given = {
            name: _column_of(handle, rows, f"{call}({name}=…)")
            for name, handle in columns.items()
            if handle is not None
        }
        _check_loss(loss, given, call)
        for name, count in (("mini_batches", mini_batches), ("epochs", epochs)):
            if count < 1:
                raise FlowError(f"{call}: {name} must be at least 1, found {count}")
        if keep is not None:
            given["keep"] = _column_of(keep, rows, f"{call}(keep=…)")
            if given["keep"].level is not Level.SAMPLE:
                raise FlowError(f"{call}(keep=…) takes one number per sample, not {given['keep']}")
        self._tracer.add(
            call,
            CallKind.TRAIN,
            Grain.BATCH,
            role=self.name,
            rows=rows,
            inputs=given,
            fn=loss,
            options={"mini_batches": mini_batches, "epochs": epochs},
        )


_CALLS = ("generate", "logprobs", "score", "train")


def per_sample(
    fn: Callable[..., Any], *columns: ColumnHandle, name: str, level: Level = Level.SAMPLE, **constants: Any
) -> ColumnHandle:
    """Apply `fn` to each sample: a float per SAMPLE column, a float64 array [tokens] per TOKEN column."""
    return _compute(fn, columns, name, level, Grain.SAMPLE, constants)


def per_group(
    fn: Callable[..., Any], *columns: ColumnHandle, name: str, level: Level = Level.SAMPLE, **constants: Any
) -> ColumnHandle:
    """Apply `fn` to all samples of one prompt: an array [samples] per SAMPLE column, a list of arrays per TOKEN column.

    Samples are in sample-index order; samples without a reward have been dropped.
    """
    return _compute(fn, columns, name, level, Grain.GROUP, constants)


def per_batch(
    fn: Callable[..., Any], *columns: ColumnHandle, name: str, level: Level = Level.SAMPLE, **constants: Any
) -> ColumnHandle:
    """Apply `fn` to the whole batch, arguments as in `per_group`. A barrier: everything before it must be done."""
    return _compute(fn, columns, name, level, Grain.BATCH, constants)


def trace(
    flow: Callable[..., Any], *, roles: Collection[str], options: Any = None, name: str | None = None
) -> Dataflow:
    """Run `flow` once on handles and return its graph.

    Args:
        roles: names of the roles that are filled (have a model or a function).
        options: passed on as `options` when the flow has that parameter.

    Raises:
        FlowError: a parameter is neither `prompts`, `options` nor a filled role; a call is given what it cannot take;
            the flow trains nothing.
    """
    tracer = _Tracer()
    title = name or getattr(flow, "__name__", "flow")
    arguments: dict[str, Any] = {}
    for parameter in inspect.signature(flow).parameters.values():
        if parameter.name == "prompts":
            arguments["prompts"] = Prompts(tracer)
        elif parameter.name == "options":
            arguments["options"] = options
        elif parameter.name in roles:
            arguments[parameter.name] = Role(parameter.name, tracer)
        elif parameter.default is inspect.Parameter.empty:
            raise FlowError(
                f"flow `{title}` uses the role `{parameter.name}`, which nothing fills"
                f"{_nearest(parameter.name, roles)}; filled roles: {', '.join(sorted(roles)) or 'none'}"
            )
    flow(**arguments)
    if not any(node.kind is CallKind.TRAIN for node in tracer.nodes):
        raise FlowError(f"flow `{title}` trains nothing: it makes no `train` call")
    return Dataflow(title, tuple(tracer.nodes))


def _compute(
    fn: Callable[..., Any],
    columns: tuple[ColumnHandle, ...],
    name: str,
    level: Level,
    grain: Grain,
    constants: dict[str, Any],
) -> ColumnHandle:
    call = f"per_{grain}({getattr(fn, '__name__', repr(fn))})"
    if not columns:
        raise FlowError(f"{call} needs at least one column")
    if not isinstance(columns[0], ColumnHandle):
        raise FlowError(f"{call} takes columns, not {_describe(columns[0])}")
    tracer, rows = columns[0]._tracer, columns[0].column.rows
    inputs = {str(i): _column_of(handle, rows, call) for i, handle in enumerate(columns)}
    try:
        inspect.signature(fn).bind(*inputs.values(), **constants)
    except TypeError as error:
        raise FlowError(
            f"{call} cannot be called with {len(inputs)} columns and {sorted(constants)}: {error}"
        ) from None
    node = tracer.add(
        name,
        CallKind.COMPUTE,
        grain,
        rows=rows,
        inputs=inputs,
        outputs=((name, level),),
        fn=fn,
        options=constants,
    )
    return ColumnHandle(tracer, node.outputs[0])


def _check_loss(loss: Callable[..., Any], given: dict[str, Column], call: str) -> None:
    parameters = list(inspect.signature(loss).parameters.values())
    title = getattr(loss, "__name__", None) or getattr(getattr(loss, "func", None), "__name__", "loss")
    if not parameters or parameters[0].name != "batch":
        raise FlowError(f"{call}: the first parameter of the loss `{title}` must be `batch`")
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    names = [p.name for p in parameters[1:] if p.kind not in variadic]
    for name in given:
        if name not in names and not takes_any:
            raise FlowError(
                f"{call}: the loss `{title}` takes no column `{name}`{_nearest(name, names)}; "
                f"it takes: {', '.join(names)}"
            )
    for parameter in parameters[1:]:
        needed = parameter.default is inspect.Parameter.empty and parameter.kind not in variadic
        if needed and parameter.name not in given:
            raise FlowError(f"{call}: the loss `{title}` needs the column `{parameter.name}`, which is not given")


def _rows_of(samples: Any, call: str) -> int:
    if not isinstance(samples, Samples):
        raise FlowError(f"{call} takes samples (what `generate` returns), not {_describe(samples)}")
    return samples.rows


def _column_of(handle: Any, rows: int, call: str) -> Column:
    if not isinstance(handle, ColumnHandle):
        raise FlowError(f"{call} takes a column (what a call returns), not {_describe(handle)}")
    if handle.column.rows != rows and handle.column.level is Level.TOKEN:
        raise FlowError(f"{call}: {handle.column} belongs to other samples than the rest of the call")
    return handle.column


def _describe(value: Any) -> str:
    return {Prompts: "prompts", Samples: "samples", ColumnHandle: "a column"}.get(
        type(value), f"a {type(value).__name__}"
    )


def _nearest(name: str, names: Collection[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean `{close[0]}`?)" if close else ""
