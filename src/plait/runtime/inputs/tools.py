"""The tools of a run (`turns.tools`): what the model is told of them, and how it calls them.

How calls are written is asked of the chat template: it writes one, which must be found again in the text of the turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from plait.data.chat import EndingTokenizer, render, shared_prefix
from plait.data.formats import Row
from plait.data.sources import Source
from plait.errors import ConfigError, DataError
from plait.rewards.tool_calls import CallForm, Schema, ToolCall, Tools, calls_in
from plait.rewards.tools import KEY
from plait.runtime.inputs.opened_rows import Opened
from plait.runtime.inputs.tool_schemas import described

_NAME, _ARGUMENTS = "look_up", {"what": "seven seas", "count": 7}
_PROBE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Looks it up.",
        "parameters": {
            "type": "object",
            "properties": {
                "what": {"type": "string", "description": "What to look up."},
                "count": {"type": "integer", "description": "How many to find."},
            },
            "required": ["what", "count"],
        },
    },
}
"""A tool that a template is tried with."""
_FORMS = (
    "<tool_call> blocks, as those of Qwen, Hermes, Nemotron and GLM, or a whole turn of JSON, as those of Llama 3.1"
)
_REMEDY = "`model` to one whose template writes tools, or `turns.tools` to a function `turns.reply` that finds calls"


def tools_of(paths: tuple[str, ...], tokenizer: EndingTokenizer) -> Tools | None:
    """Those at these paths; None: there are none.

    Raises:
        ConfigError: one cannot be loaded, has no schema, or the chat template does not write tools and calls in a form
            that is read.
    """
    return Tools(described(paths), call_form(tokenizer)) if paths else None


def with_tools(opened: Opened, tools: Sequence[Schema]) -> Opened:
    """The same rows, of which those that are asked have these tools for their chat template.

    Raises:
        DataError: a row has tools already.
    """

    def told(source: Source) -> Source:
        if own := next((row for row in source.rows if row.columns.get("tools")), None):
            raise DataError(
                f"{own.place}: the row has a column `tools`, but `turns.tools` says what the tools are; rename the "
                "column, or reply by a function (`turns.reply`)"
            )
        rows = tuple(replace(row, columns={**row.columns, "tools": list(tools)}) for row in source.rows)
        return replace(source, rows=rows)

    return opened._replace(
        prompts=tuple(replace(splits, train=told(splits.train)) for splits in opened.prompts),
        held_out=tuple(
            held_out._replace(parts=tuple((settings, told(source)) for settings, source in held_out.parts))
            for held_out in opened.held_out
        ),
    )


def call_form(tokenizer: EndingTokenizer) -> CallForm:
    """How the chat template writes calls. Raises ConfigError as above."""
    if tokenizer.chat_template is None:
        raise ConfigError(f"`{KEY}` is set, but the tokenizer of `model` has no chat template; change {_REMEDY}")
    asked = {"role": "user", "content": "Do you see?"}
    function = {"name": _NAME, "arguments": _ARGUMENTS}
    calls = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    row = Row({"tools": [_PROBE]}, f"`{KEY}`")
    try:
        opened = render(tokenizer, [asked], row, remedy=_REMEDY, begin_answer=True)
        whole = render(tokenizer, [asked, calls], row, remedy=_REMEDY, begin_answer=False)
    except DataError as error:
        raise ConfigError(str(error)) from None
    if _PROBE["function"]["description"] not in opened:
        raise ConfigError(f"`{KEY}` is set, but the chat template of the model does not write tools; change {_REMEDY}")
    turn = whole[shared_prefix([*map(ord, opened)], [*map(ord, whole)]) :]
    ids = tokenizer(turn, add_special_tokens=False)["input_ids"]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    for form in CallForm:
        if calls_in(text, form, {_NAME: _PROBE}) == [ToolCall(_NAME, _ARGUMENTS)]:
            return form
    raise ConfigError(
        f"`{KEY}` is set, but the chat template of the model writes calls in a form that is not read: {turn!r:.200}; "
        f"read are {_FORMS}; change {_REMEDY}"
    )
