"""How the chat templates of families write tools, calls and what comes of them: TRL's."""

from __future__ import annotations

import re

import pytest

from plait.data.formats import Row
from plait.data.records import FinishReason, Prompt, Sample
from plait.data.replies import ReplyEncoder
from plait.data.settings import DataSettings
from plait.data.sources import Source, Splits
from plait.errors import ConfigError, DataError
from plait.recipes.evaluation_sets import Answering, EvaluationSet
from plait.rewards.tool_calls import CallForm
from plait.runtime.inputs.opened_rows import HeldOutRows, Opened
from plait.runtime.inputs.tools import call_form, with_tools
from tests.data.test_examples import with_template_of

DATA = DataSettings(source="x")
EVALUATED = EvaluationSet("", "evaluation", None, None, Answering())
RESPONSE = "<tool_response>\n42\n</tool_response>"
OF_QWEN = f"\n<|im_start|>user\n{RESPONSE}<|im_end|>\n<|im_start|>assistant\n"
OF_LLAMA = '<|start_header_id|>ipython<|end_header_id|>\n\n"42"<|eot_id|>'


@pytest.mark.parametrize(
    ("family", "form", "ends_with", "result"),
    [
        (
            "qwen2_5",
            CallForm.BLOCKS,
            "<|im_end|>",
            f"\n<|im_start|>user\n{RESPONSE}<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("qwen3", CallForm.BLOCKS, "<|im_end|>", OF_QWEN),
        ("qwen3_5_think", CallForm.BLOCKS, "<|im_end|>", f"\n<|im_start|>user\n{RESPONSE}<|im_end|>\n"),
        ("nemotron_3_nano", CallForm.BLOCKS, "<|im_end|>", f"\n<|im_start|>user\n{RESPONSE}\n<|im_end|>\n"),
        ("glm4moe", CallForm.BLOCKS, "<|user|>", f"<|observation|>\n{RESPONSE}<|assistant|>"),
        (
            "llama3_1",
            CallForm.WHOLE_TURN,
            "<|eot_id|>",
            '<|start_header_id|>ipython<|end_header_id|>\n\n"42"<|eot_id|>',
        ),
    ],
)
def test_families(family: str, form: CallForm, ends_with: str, result: str) -> None:
    tokenizer = with_template_of(family)
    assert call_form(tokenizer) is form
    prompt = Prompt(3, "", (1,), {"prompt": "x", "tools": []}, is_chat=True)
    sample = Sample(prompt, 0, (80, tokenizer.convert_tokens_to_ids(ends_with)), (), "", FinishReason.STOP)
    told = [{"role": "tool", "name": "add", "content": "42"}]
    written = tokenizer.decode(ReplyEncoder(tokenizer, 10**6, "turns.tools").token_ids(sample, told))
    assert written.startswith(result)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("gemma3", "does not write tools; change `model`"),
        ("lfm2_v2", "writes calls in a form that is not read: \"<|tool_call_start|>[look_up(what='seven seas'"),
        ("deepseekv3", "the chat template of the model refuses the prompt"),
    ],
)
def test_templates_that_tell_of_no_tools_are_refused(family: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"`turns.tools`.*{re.escape(message)}"):
        call_form(with_template_of(family))


def test_markers_that_are_lost_as_special_tokens_are_refused() -> None:
    """They would not be in the text of a turn."""
    tokenizer = with_template_of("qwen3")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>"]}, replace_extra_special_tokens=False)
    with pytest.raises(ConfigError, match="in a form that is not read"):
        call_form(tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="the tokenizer of `model` has no chat template"):
        call_form(tokenizer)


def test_rows_with_tools_of_their_own_are_refused() -> None:
    def opened(*tools: object) -> Opened:
        rows = tuple(Row({"prompt": "a", "tools": one}, f"x:{n}") for n, one in enumerate(tools, 1))
        source = Source("x", rows)
        held_out = HeldOutRows(EVALUATED, ((DATA, source),))
        return Opened((Splits(source, None, 0),), {}, (held_out,))

    schema = {"type": "function", "function": {"name": "add"}}
    told = with_tools(opened(None, []), [schema])
    for source in (told.prompts[0].train, told.held_out[0].parts[0][1]):
        assert [row.columns["tools"] for row in source.rows] == [[schema], [schema]]
    with pytest.raises(DataError, match=r"x:2: the row has a column `tools`, but `turns\.tools` says"):
        with_tools(opened(None, [schema]), [schema])
