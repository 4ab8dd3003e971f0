"""Trace a flow: run it once on symbolic handles and keep the calls that it makes.

A flow is a plain function. Its parameters name what it uses: `prompts` are the prompts of the step, `examples`,
`pairs` or `labelled` what the data set gives, `options` the algorithm's settings, every other parameter is a role. It
has no data-dependent Python: a loop that depends on data lives inside a call.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

from plait.dataflow.graph import CallKind, Dataflow, Grain, Level, Node
from plait.dataflow.handles import (
    LABELLED,
    Carried,
    ColumnHandle,
    Given,
    Labelled,
    Prompts,
    column_of,
    describe,
)
from plait.dataflow.option_reads import OptionReads
from plait.dataflow.options import CarriedOptions, ComputeOptions
from plait.dataflow.role import Role
from plait.dataflow.tracer import Tracer, current, tracing
from plait.dataflow.unfit import nearest, unfit_partial
from plait.errors import FlowError
from plait.metric_names import problem_of
from plait.user_code import TRACE_LIMIT_S, UserCode, is_users, title_of

GIVEN = ("examples", "pairs")
"""Parameters of a flow that are samples of the data set; labelled ones have more to say."""


def per_sample(
    fn: Callable[..., Any], *columns: ColumnHandle, name: str, level: Level = Level.SAMPLE, **constants: Any
) -> ColumnHandle:
    """Apply `fn` to each sample: a float per SAMPLE column, a float64 array [tokens] per TOKEN column.

    Raises:
        FlowError: `name` is no name, `fn` cannot be called with what is given, or the columns are none that it could
            read together.
    """
    return _compute(fn, columns, name, level, Grain.SAMPLE, ComputeOptions(constants))


def per_group(
    fn: Callable[..., Any],
    *columns: ColumnHandle,
    name: str,
    level: Level = Level.SAMPLE,
    least_samples: int = 1,
    **constants: Any,
) -> ColumnHandle:
    """Apply `fn` to all samples of one prompt: an array [samples] per SAMPLE column, a list of arrays per TOKEN column.

    Samples are in sample-index order; samples without a reward have been dropped.

    Args:
        least_samples: that a group needs for `fn` to say anything, 2 where it compares them: a recipe that draws fewer
            is refused. Groups of which samples were dropped may still have fewer.

    Raises:
        FlowError: as `per_sample`.
    """
    return _compute(fn, columns, name, level, Grain.GROUP, ComputeOptions(constants, least_samples))


def per_batch(
    fn: Callable[..., Any],
    *columns: ColumnHandle,
    name: str,
    level: Level = Level.SAMPLE,
    least_samples: int = 1,
    **constants: Any,
) -> ColumnHandle:
    """Apply `fn` to the whole batch, arguments as in `per_group`. A barrier: everything before it must be done.

    With `level=Level.BATCH` it returns one number, or an array of a fixed shape, for the whole batch; a number is
    recorded as the metric `name`. Functions over columns get such a value as a float or an array.

    Raises:
        FlowError: as `per_sample`.
    """
    return _compute(fn, columns, name, level, Grain.BATCH, ComputeOptions(constants, least_samples))


def carried(name: str, start: float | Sequence[float]) -> Carried:
    """A value for the whole batch that is kept from step to step, and in checkpoints: `start` in the first step, then
    what `becomes` said in the step before. A number is recorded as the metric `name`.

    Raises:
        FlowError: not called inside a flow, the name is taken, or `start` is not finite numbers.
    """
    tracer = current(f"carried({name!r:.60})")
    if (problem := problem_of(name)) is not None:
        raise FlowError(f"carried: {problem}")
    if any(node.call == name for node in tracer.nodes):
        raise FlowError(f"carried({name!r}): another call of the flow has this name")
    values = [start] if isinstance(start, int | float) else list(start)
    if not values or not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        raise FlowError(f"carried({name!r}) starts with finite numbers, found {start!r}")
    value = float(start) if isinstance(start, int | float) else tuple(float(value) for value in values)
    node = tracer.add(
        name, CallKind.CARRIED, Grain.BATCH, outputs=((name, Level.BATCH),), options=CarriedOptions(value)
    )
    return Carried(tracer, node.outputs[0])


def trace(
    flow: Callable[..., Any],
    *,
    roles: Collection[str] | Mapping[str, Mapping[str, str]],
    options: Any = None,
) -> Dataflow:
    """Run `flow` once on handles and return its graph.

    Args:
        roles: names of the roles that are filled (have a model or a function); each perhaps → of the models after its
            first that score with it, what their scores are called → the role of each.
        options: passed on as `options` when the flow has that parameter.

    Raises:
        FlowError: a parameter is neither `prompts`, `examples`, `pairs`, `labelled`, `options` nor a filled role; a
            call is given what it cannot take; the flow trains nothing, does not ask for rewards by which groups stay,
            makes more than `tracer.MAX_NODES` calls, or does not come back; or it raises, whatever that is.
    """
    tracer = Tracer()
    title = title_of(flow)
    running = partial(UserCode, f"the flow `{title}`", FlowError, users=is_users(flow))
    with running():
        parameters = inspect.signature(flow).parameters.values()
    if inspect.iscoroutinefunction(flow) or inspect.isgeneratorfunction(flow):
        raise FlowError(f"flow `{title}`: expected a plain function, found one with `async` or `yield`")
    arguments: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.name == "prompts":
            arguments["prompts"] = Prompts(tracer)
        elif parameter.name == LABELLED:
            arguments[LABELLED] = Labelled(tracer)
        elif parameter.name in GIVEN:
            arguments[parameter.name] = Given(tracer, parameter.name)
        elif parameter.name == "options":
            arguments["options"] = options
        elif parameter.name in roles:
            further = roles[parameter.name] if isinstance(roles, Mapping) else {}
            arguments[parameter.name] = Role(parameter.name, tracer, further)
        elif parameter.default is inspect.Parameter.empty:
            data = ("prompts", *GIVEN, LABELLED)
            raise FlowError(
                f"flow `{title}` uses the role `{parameter.name}`, which nothing fills"
                f"{nearest(parameter.name, (*roles, *data, 'options'))}; filled roles: "
                f"{', '.join(sorted(roles)) or 'none'}; data: {', '.join(data)}"
            )
    reads = OptionReads(arguments.get("options") if is_users(flow) else None)
    with tracing(tracer), running(limit_s=TRACE_LIMIT_S), reads.watching():
        flow(**arguments)
    if not any(node.kind is CallKind.TRAIN for node in tracer.nodes):
        raise FlowError(f"flow `{title}` trains nothing: it makes no `train` call")
    for node in tracer.nodes:
        _check_decided(node, tracer.nodes, title)
    _check_updates(tracer.nodes, title)
    return Dataflow(title, tuple(tracer.nodes), reads.unread, arguments.get("options"), frozenset(tracer.teachers))


def _compute(
    fn: Callable[..., Any],
    columns: tuple[ColumnHandle, ...],
    name: str,
    level: Level,
    grain: Grain,
    options: ComputeOptions,
) -> ColumnHandle:
    call = f"per_{grain}({title_of(fn) if callable(fn) else describe(fn)})"
    if not callable(fn):
        raise FlowError(f"{call} takes a function first, not {describe(fn)}")
    if (problem := problem_of(name, is_metric=level is Level.BATCH)) is not None:
        raise FlowError(f"{call}: {problem}")
    if not columns:
        raise FlowError(f"{call} needs at least one column")
    if not isinstance(columns[0], ColumnHandle):
        raise FlowError(f"{call} takes columns, not {describe(columns[0])}")
    tracer = columns[0]._tracer
    # A value of the whole batch belongs to no rows: those of the first column that has some are worked on.
    rows = next(
        (c.column.rows for c in columns if isinstance(c, ColumnHandle) and c.column.level is not Level.BATCH), None
    )
    if rows is None and level is not Level.BATCH:
        raise FlowError(f"{call} makes one number per {level}, but reads no column of samples")
    if level is Level.BATCH and grain is not Grain.BATCH:
        raise FlowError(f"{call} cannot make one value for the whole batch; use per_batch")
    inputs = {str(i): column_of(handle, rows, call) for i, handle in enumerate(columns)}
    if (problem := _unfit(fn, len(inputs), options.constants)) is not None:
        given = f"{len(inputs)} columns and {sorted(options.constants)}"
        raise FlowError(f"{call} cannot be called with {given}: {problem}")
    node = tracer.add(
        name,
        CallKind.COMPUTE,
        grain,
        rows=rows,
        inputs=inputs,
        outputs=((name, level),),
        fn=fn,
        options=options,
    )
    return ColumnHandle(tracer, node.outputs[0])


def _check_decided(node: Node, nodes: Collection[Node], title: str) -> None:
    """Raises FlowError where the rewards that decide which groups stay are not asked for."""
    resample = node.generation.resample if node.kind is CallKind.GENERATE else None
    scored_by = [other.role for other in nodes if other.rows == node.id and other.asks == "score"]
    if resample is not None and resample.reward not in scored_by:
        raise FlowError(
            f"flow `{title}`: {node.call}(resample=…) asks `{resample.reward}` which groups stay, but the flow does "
            f"not score these samples by it; call `{resample.reward}.score(samples)`"
        )


def _check_updates(nodes: Collection[Node], title: str) -> None:
    """Raises FlowError where a call leaves its gradients to one that cannot make an optimizer step of them."""
    asking = [node for node in nodes if node.kind in (CallKind.GENERATE, CallKind.SCORE, CallKind.TRAIN)]
    for node, following in zip_longest(asking, asking[1:]):
        if node.kind is not CallKind.TRAIN or not node.training.with_next:
            continue
        if following is None or following.kind is not CallKind.TRAIN or following.role != node.role:
            found = "none" if following is None else following.call
            raise FlowError(
                f"flow `{title}`: {node.call}(with_next=True) leaves its gradients to the next call, expected another "
                f"{node.role}.train, found {found}; make all other calls of roles before it"
            )
        mine, other = node.training, following.training
        for what, of_both in (
            ("mini_batches x epochs", (mine.passes, other.passes)),
            ("after", (mine.after, other.after)),
        ):
            if of_both[0] != of_both[1]:
                raise FlowError(
                    f"flow `{title}`: {node.call}(with_next=True) makes its optimizer steps with {following.call}, "
                    f"expected equal `{what}` of both, found {of_both[0]} and {of_both[1]}"
                )


def _unfit(fn: Callable[..., Any], count: int, constants: Mapping[str, Any]) -> TypeError | None:
    """Why a function cannot be called with so many columns and these constants. None: it can; or it does not say what
    it takes, as `max`, and is seen when it is called."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return TypeError(why) if (why := unfit_partial(fn)) else None
    try:
        signature.bind(*range(count), **constants)
    except TypeError as error:
        return error
    return None
