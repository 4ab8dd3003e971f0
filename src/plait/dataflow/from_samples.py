"""What a flow has made of the texts of samples by functions of a reward's form: prompts, and numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from plait.dataflow.graph import CallKind, Column, Grain, Level, Node
from plait.dataflow.handles import ColumnHandle, Prompts, Samples, column_of, describe, rows_of
from plait.dataflow.made_rows import made_from
from plait.dataflow.options import TextOptions
from plait.dataflow.prompt_call import unfit_prompts
from plait.errors import FlowError
from plait.metric_names import problem_of
from plait.user_code import title_of


def build_prompts(
    samples: Samples, fn: Callable[..., object], /, name: str | None = None, **columns: ColumnHandle | Samples
) -> Prompts:
    """Another prompt for each sample: `fn(prompts, completions, …)` returns one for each of the samples of a prompt, a
    text or messages. A model answers them (`judge.generate(prompts)`), or reads them before the same responses, as a
    teacher does (`ref.logprobs(samples, prompts=…)`).

    `fn` gets by name what it asks for, as a reward function of TRL's form does: `prompts` as they stand in the data,
    `completions`, `completion_ids`, `turns`, and columns of the data; and these `columns` of the flow, in the form in
    which `per_group` gives them. Given samples that were drawn from prompts made of these, it gets a list of their
    texts for each sample (what a judge said of it).

    Before the same responses, what it returns becomes tokens as the prompts of the run do, with the same templates. To
    be answered, a text is a user's message (raw, where the tokenizer has no chat template or `data.chat_template` is
    false), messages are as they stand, and nothing of `data` is put around them.

    Args:
        name: of the call; None: that of `fn`.

    Raises:
        FlowError: `fn` is no plain function, or cannot be called with what is given; `name` is no name.
    """
    node = _added(samples, fn, CallKind.PROMPT, name, columns)
    return Prompts(samples._tracer, node.id)


def parse_grades(
    samples: Samples, fn: Callable[..., object], /, name: str | None = None, **columns: ColumnHandle | Samples
) -> ColumnHandle:
    """A number for each sample, read from texts: `fn(prompts, completions, …)` returns one for each of the samples of a
    prompt, as a reward function of TRL's form does; None or NaN where it reads none.

    `fn` gets what that of `build_prompts` gets: with `verdicts=verdicts`, drawn from prompts made of these samples, a
    list of texts for each sample. It runs in the run's own process, and nothing is left out: who wants no sample
    without a number says so (`keep`).

    Args:
        name: of the column; its mean is the metric `NAME/mean`. None: that of `fn`.

    Raises:
        FlowError: as of `build_prompts`.
    """
    node = _added(samples, fn, CallKind.GRADE, name, columns)
    return ColumnHandle(samples._tracer, node.outputs[0])


_TITLES = {CallKind.PROMPT: "build_prompts", CallKind.GRADE: "parse_grades"}


def title_of_call(node: Node) -> str:
    """What messages call a PROMPT or GRADE node."""
    assert node.fn is not None, f"{node.call} has no function"
    return f"{_TITLES[node.kind]}({title_of(node.fn)})"


def _added(
    samples: Samples,
    fn: Callable[..., object],
    kind: CallKind,
    name: str | None,
    given: Mapping[str, ColumnHandle | Samples],
) -> Node:
    call = f"{_TITLES[kind]}({title_of(fn) if callable(fn) else describe(fn)})"
    rows = rows_of(samples, call)
    if not callable(fn):
        raise FlowError(f"{call} takes a function behind the samples, not {describe(fn)}")
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):
        raise FlowError(f"{call}: expected a plain function, found one with `async` or `yield`")
    name = title_of(fn) if name is None else name
    of_column = problem_of(name, is_metric=False) if kind is CallKind.GRADE else None
    if (problem := problem_of(name) or of_column) is not None:
        raise FlowError(f"{call}: {problem}")
    texts: dict[str, int] = {}
    inputs: dict[str, Column] = {}
    for key, handle in given.items():
        if isinstance(handle, Samples):
            texts[key] = handle.rows
            if rows not in made_from(samples._tracer.nodes, handle.rows):
                raise FlowError(
                    f"{call}({key}=…) takes samples that were drawn from prompts made of these (`build_prompts`); take "
                    "columns of others, in per_group"
                )
        else:
            inputs[key] = column_of(handle, rows, f"{call}({key}=…)")
    if (problem := unfit_prompts(fn, given)) is not None:
        raise FlowError(f"{call}: {problem}")
    outputs = ((name, Level.SAMPLE),) if kind is CallKind.GRADE else ()
    return samples._tracer.add(
        name, kind, Grain.GROUP, rows=rows, inputs=inputs, outputs=outputs, fn=fn, options=TextOptions(texts)
    )
