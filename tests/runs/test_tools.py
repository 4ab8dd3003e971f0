"""Tools that the model calls (`turns.tools`), from the recipe to the records of a run.

A tiny model calls nothing, so prompts end with a call that the assistant has begun its turn with.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.data import movie_reviews
from plait.data.formats import Row
from plait.errors import ConfigError, DataError, RunError, UserError
from plait.recipes.recipe import Recipe
from plait.recipes.trust import code_of
from plait.runtime.api import run
from plait.runtime.prepare import prepare
from tests.data.test_examples import with_template_of
from tests.models.tiny import save_tiny
from tests.runs.plans import assert_equal_columns
from tests.runs.test_resume import kill_in_step, result_of
from tests.runs.test_turns import STOPS
from tests.runs.written import logged, samples_of

MakeRecipe = Callable[..., Recipe]

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}: {{ tool.function.description }}\n{% endfor %}"
    "{% for message in messages %}{% if not loop.first %}\n{% endif %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}\n<|im_start|>assistant\n{% endif %}"
)
TOOLS = '''
import os
import time

def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: Other.
    """
    return a + b

async def where(sample_uid: str) -> str:
    """Says which sample asks."""
    return sample_uid

def hangs():
    """Hangs."""
    time.sleep(60)

def ends():
    """Ends its process."""
    os._exit(3)

def told(turns, tools, log_extra, **columns):
    log_extra("told", [[tool["function"]["name"] for tool in each] for each in tools])
    return [float(len(said)) for said in turns]
'''


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


BEGUN = {
    "sum": (call("add", a=1, b=2), [{"role": "tool", "name": "add", "content": "3"}]),
    "two": (
        call("where") + call("add", a=1),
        [
            {"role": "tool", "name": "where", "content": "UID"},
            {
                "role": "tool",
                "name": "add",
                "content": "Error: add cannot be called so: missing a required argument: 'b'",
                "is_error": True,
            },
        ],
    ),
    "cut": ("<tool_call>", [{"role": "tool", "content": "Error: <tool_call> has no </tool_call>", "is_error": True}]),
    "none": ("So", []),
}
"""Question → what the assistant begins its turn with, and the replies to that turn, by hand."""


def keys_of(folder: Path, *names: str, begun: Any = BEGUN, **keys: Any) -> dict[str, Any]:
    if not (folder / "with_tools").exists():
        save_tiny(folder / "with_tools", weight_scale=0.05, max_position_embeddings=512)
        (folder / "with_tools/chat_template.jinja").write_text(TEMPLATE)
    (folder / "tools.py").write_text(TOOLS)
    rows = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        for asked, (said, _) in begun.items()
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    return {
        "model": str(folder / "with_tools"),
        "turns.tools": [f"{folder}/tools.py:{name}" for name in names or ("add", "where")],
        "turns.max_turns": 2,
        "data.source": str(folder / "rows.jsonl"),
        "reward.functions": [f"{folder}/tools.py:told"],
        "sampling.max_response_tokens": 120,
        "sampling.stop_token_ids": STOPS,
        "prompts_per_step": len(begun),
        "steps": 2,
    } | keys


def test_what_is_called_and_recorded(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """By hand; and the same after a resume, with several workers."""
    keys = keys_of(tmp_path, **{"checkpoint.every": 1})
    whole, killed = (make_recipe(**keys, run_dir=str(tmp_path / name)) for name in ("whole", "killed"))
    run(whole)
    rows = samples_of(whole, 1)
    answered, failed = 0, 0
    for row in rows:
        assert row["prompt"].startswith("add: Adds.\nwhere: Says which sample asks.\n<|im_start|>user\n")
        assert row["told"] == ["add", "where"]
        asked = next(each for each in BEGUN if f"user\n{each}<|im_end|>" in row["prompt"])
        replies = [reply | {"content": reply["content"].replace("UID", row["uid"])} for reply in BEGUN[asked][1]]
        said = row.get("turns", [])
        assert said[1:-1] == replies
        assert len(said) == (0 if asked == "none" else 2 + len(replies))
        answered += len(replies)
        failed += sum("is_error" in reply for reply in replies)
    metrics = logged(whole)[0]
    assert metrics["turns/tool_calls"] == answered / len(rows) == 1.0
    assert metrics["turns/tool_failures"] == failed / answered == 0.5
    assert metrics["turns/mean"] == 1.75
    assert metrics["training/rollout_logprobs_diff_max"] < 1e-5
    kill_in_step(killed, 1)
    run(make_recipe(**keys, run_dir=str(killed.run_dir), **{"turns.workers": 2}), resume=True)
    assert result_of(killed.run_dir) == result_of(whole.run_dir)


@pytest.mark.slow
def test_a_plan_changes_nothing(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    keys = keys_of(tmp_path, steps=1, dtype="float64")
    one, two = (make_recipe(**keys, run_dir=str(tmp_path / name)) for name in ("one", "two"))
    run(one)
    run(make_recipe(**keys, run_dir=str(two.run_dir), plan="split", devices=2))
    assert_equal_columns(two.run_dir, one.run_dir)


@pytest.mark.slow
def test_the_example_with_a_template_of_qwen(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """A template of some 1,000 tokens for the tiny tokenizer."""
    model = save_tiny(tmp_path / "qwen", weight_scale=0.05, max_position_embeddings=4096)
    (model / "chat_template.jinja").write_text(str(with_template_of("qwen3").chat_template))
    examples = Path(__file__).parents[2] / "examples"
    said = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "17 + 25"}}\n</tool_call>'
    prompt = [{"role": "user", "content": "What is 17 + 25?"}, {"role": "assistant", "content": said}]
    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "42"}) + "\n")
    keys = keys_of(tmp_path, begun={"": ("", [])}, steps=1, model=str(model))
    keys |= {
        "turns.tools": [f"{examples}/calculator_tool.py:calculate"],
        "reward.functions": [f"{examples}/calculator_tool.py:right"],
        "data.source": str(tmp_path / "asked.jsonl"),
    }
    run(recipe := make_recipe(**keys))
    for row in samples_of(recipe, 1):
        assert '"description": "What to calculate, with +, - and *, such as 17 + 25 * 3."' in row["prompt"]
        assert row["turns"][1] == {"role": "tool", "name": "calculate", "content": "42"}
        assert "<tool_response>\n42\n</tool_response>" in row["response"]
        assert row["rewards/right"] == pytest.approx(0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ("hangs", r"reply `tools` failed on sample .*, turn 1: passed the time limit of 0\.3 s \(`turns\.timeout_s`\)"),
        ("ends", r"reply `tools` failed on sample .*, turn 1: ended its worker process \(exit code 3\)"),
    ],
)
def test_a_tool_that_hangs_or_ends_its_process_has_failed(
    make_recipe: MakeRecipe, tmp_path: Path, tool: str, message: str
) -> None:
    keys = keys_of(tmp_path, tool, begun={"a": (call(tool), [])}, **{"turns.timeout_s": 0.3})
    with pytest.raises(RunError, match=message):
        run(make_recipe(**keys))


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"turns.reply": "x.py:reply"}, ConfigError, "`reply` and `tools` are both set; give one of them"),
        ({"turns.tools": []}, ConfigError, "max_turns is set, but has no effect without reply; set `turns.reply` or"),
        ({"rebalance": "auto"}, ConfigError, "`turns.tools` is set, and `rebalance` is auto"),
        ({"turns.tools": ["nowhere.py:add"]}, ConfigError, "`turns.tools`: the file `nowhere.py`"),
        pytest.param(
            {"data.chat_template": False, "data.source": "texts"},
            DataError,
            "texts that are sent raw",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_does_not_go_with_tools_is_refused(
    make_recipe: MakeRecipe, tmp_path: Path, keys: dict[str, Any], error: type[UserError], message: str
) -> None:
    (tmp_path / "texts.jsonl").write_text('{"prompt": "a"}\n' * 3)
    if "data.source" in keys:
        keys = keys | {"data.source": f"{tmp_path}/texts.jsonl"}
    with pytest.raises(error, match=message):
        prepare(make_recipe(**keys_of(tmp_path) | keys))


def test_held_out_prompts_tell_of_tools_or_are_refused(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(tmp_path) | {"evaluation.items": 1}
    (tmp_path / "texts.jsonl").write_text('{"prompt": "a"}\n')
    prepared = prepare(make_recipe(**keys, **{"evaluation.sets": [{}, f"{tmp_path}/texts.jsonl"]}))
    for held_out in prepared.held_out:
        (prompt,) = held_out.prompts
        assert prompt.text.startswith("add: Adds.\nwhere: Says which sample asks.\n<|im_start|>user\n")
    reviews = [Row({"prompt": "Review: the film"}, f"x:{n}") for n in range(3)]
    monkeypatch.setattr(movie_reviews, "review_rows", lambda kind, parameters: reviews)
    with pytest.raises(DataError, match=r"evaluation set `movie_reviews_prompts`: .*texts that are sent raw"):
        prepare(make_recipe(**keys, **{"evaluation.sets": [{}, "movie_reviews:prompts"]}))


def test_tools_are_code_of_the_user(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    keys = keys_of(tmp_path)
    assert code_of(make_recipe(**keys))["turns.tools"] == tuple(keys["turns.tools"])
