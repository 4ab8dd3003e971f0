"""What is said of the data of a run before it begins."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from plait.cli import main
from plait.errors import DataError, UserError
from plait.recipes.flow_checks import checked_flow
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.folder.stored_recipe import recipe_text
from plait.runtime.inputs.opened_rows import check_rows
from plait.runtime.inputs.reading import check_files
from plait.runtime.prepare import prepare
from tests.data.json_rows import written
from tests.runs.written import logged

ASKED = {"role": "user", "content": "what is 3 plus 4?"}
BEGUN = {"role": "assistant", "content": "the answer is"}


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([[ASKED], [ASKED, BEGUN, ASKED]], []),
        ([[ASKED], [ASKED, BEGUN]], ["1 of 2 prompts end with words of the assistant: responses go on from these"]),
        ([[ASKED], [{**ASKED, "content": "4 " * 200}]], ["1 of 2 rows are left out (`data.overlong_prompts: drop`)"]),
    ],
)
def test_what_a_run_makes_of_its_prompts_is_said(
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    prompts: list[object],
    said: list[str],
) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    limits = {"data.max_prompt_tokens": 80, "data.overlong_prompts": "drop"}
    prepare(make_recipe(**{"data.source": str(file), "prompts_per_step": 1, **limits}))
    assert capsys.readouterr().err.splitlines() == [f"{file}: {line}" for line in said]


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_held_out_items_that_are_left_out_are_said(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str
) -> None:
    train, held = tmp_path / "train.jsonl", tmp_path / "held.jsonl"
    for file, prompts in ((train, ["what is 3 plus 4?"]), (held, ["the sum", "4 " * 200, "a fox"])):
        file.write_text("".join(json.dumps({"prompt": asked, "completion": "7"}) + "\n" for asked in prompts))
    limits = {"data.max_prompt_tokens": 80, "data.overlong_prompts": "drop", "algorithm": algorithm}
    if algorithm == "sft":
        limits |= {"reward.functions": [], "options": {}, "sampling": {}, "samples_per_prompt": 8}
    sources = {"data.source": str(train), "evaluation.sets": [str(held)], "evaluation.items": 3}
    prepared = prepare(make_recipe(**sources, **limits, prompts_per_step=1))
    assert capsys.readouterr().err.splitlines() == [
        f"{held}: 1 of 3 held-out items are left out (`data.overlong_prompts: drop`)"
    ]
    assert prepared.num_held_out == 2


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_a_batch_that_holds_rows_several_times_is_said(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str
) -> None:
    """`epochs: 1` cannot be had then: one batch is two and a half."""
    file = written(tmp_path / "few.jsonl", [{"prompt": f"{n} plus 1?", "completion": "7"} for n in (1, 2)])
    keys = {"data.source": file, "algorithm": algorithm}
    if algorithm == "sft":
        keys |= {"reward.functions": [], "options": {}, "sampling": {}, "samples_per_prompt": 8}
    prepare(make_recipe(**keys, prompts_per_step=2))
    assert capsys.readouterr().err == ""
    prepare(make_recipe(**keys, prompts_per_step=5))
    fewer = "2 rows are fewer than `prompts_per_step` (5), so a batch is 2.5 passes over them"
    assert capsys.readouterr().err.splitlines() == [f"{file}: {fewer}"]
    prepare(make_recipe(**keys, prompts_per_step=5), trains=False)
    assert capsys.readouterr().err == "", "nothing is trained"


def test_a_warm_up_that_is_longer_than_the_run_is_said(
    make_recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two batches of two mini-batches make four optimizer steps."""
    keys = {"steps": 2, "options": {"mini_batches": 2}, "prompts_per_step": 3}
    prepare(make_recipe(**keys, **{"optimizer.warmup_steps": 4}))
    assert capsys.readouterr().err == ""
    prepare(make_recipe(**keys, **{"optimizer.warmup_steps": 5}))
    said = (
        "`optimizer.warmup_steps` is 5, and the run has 4 optimizer steps: it ends before `optimizer.learning_rate` is"
    )
    assert capsys.readouterr().err.splitlines() == [f"{said} reached"]
    prepare(make_recipe(**keys, **{"optimizer.warmup_steps": 5}), trains=False)
    assert capsys.readouterr().err == ""


def test_a_column_that_the_prompt_template_names_is_said_to_stay(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other braces are those of texts, such as of an answer that is to be JSON."""
    file = tmp_path / "asked.jsonl"
    file.write_text(json.dumps({"prompt": "what is 3 plus 4?", "unit": "litres"}) + "\n")
    template = '{question} In {unit}, as {"answer": 1} or {answer}.'
    keys = {"data.source": str(file), "prompts_per_step": 1, "data.prompt_template": template}
    prepare(make_recipe(**keys))
    assert capsys.readouterr().err.splitlines() == [
        f"{file}: `data.prompt_template` keeps {{unit}} as it stands: only {{question}} is replaced, by the prompt"
    ]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, None),
        (
            {"data.source": "nowhere.jsonl"},
            "`data.source`: `nowhere.jsonl` does not exist; give a JSONL, JSON, CSV or Parquet",
        ),
        ({"data.source": "hf:nobody/knows"}, None),
        ({"data.source": "movie_reviews:prompts"}, None),
        (
            {"evaluation.items": 1, "evaluation.sets": ["movie_reviews:prompts", "held.jsonl"]},
            "evaluation set `held`: `evaluation.sets.1.source`: `held.jsonl` does not exist",
        ),
        (
            {"data": [{"source": "movie_reviews:prompts"}, {"source": "b.jsonl", "name": "other"}]},
            "source `other`: `data.source`: `b.jsonl` does not exist",
        ),
        ({"pretraining.source": "x.parquet"}, "`pretraining.source`: `x.parquet` does not exist"),
        ({"reward.functions": ["task", "mine.py:f"]}, "`reward.functions`: the file `mine.py` does not exist in "),
        ({"cost.functions": ["mine.py"]}, "`cost.functions`: expected FILE.py:FUNCTION"),
        ({"algorithm": "mine.py:flow"}, "`algorithm`: the file `mine.py` does not exist in "),
        ({"turns.reply": "mine.py:f"}, "`turns.reply`: the file `mine.py` does not exist in "),
        ({"model": "nowhere"}, "model: 'nowhere' is neither a known name"),
        ({"reference.model": "./nowhere"}, "model: './nowhere' is neither a known name"),
        ({"model": "nobody/knows"}, None),
    ],
)
def test_files_that_are_not_there_are_missed_before_anything_is_loaded(
    make_recipe: Callable[..., Recipe], keys: dict[str, object], said: str | None
) -> None:
    with nullcontext() if said is None else pytest.raises(UserError, match=re.escape(said)):
        check_files(make_recipe(**keys))


@pytest.mark.parametrize("command", ["train", "eval"])
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "holds no row"),
        ('{"prompt": ', "rows.jsonl:1: malformed JSON"),
        ('{"x": 1}', "rows.jsonl:1: no column `prompt`"),
    ],
)
def test_what_is_wrong_with_rows_is_said_before_anything_is_loaded(
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    line: str,
    said: str,
) -> None:
    (tmp_path / "rows.jsonl").write_text(line)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_text(make_recipe(**{"data.source": str(tmp_path / "rows.jsonl"), "evaluation.items": 1})))
    assert main([command, str(path)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "loading" not in err


def test_large_files_are_read_once(make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(**{"data.source": "no/such.jsonl"})
    check_rows(checked_flow(recipe), recipe)  # that it is not there is another check's
    recipe = make_recipe()
    monkeypatch.setattr("plait.runtime.inputs.opened_rows.open_sources", None)
    with pytest.raises(TypeError):
        check_rows(checked_flow(recipe), recipe)
    monkeypatch.setattr("plait.runtime.inputs.opened_rows.EARLY_BYTES", 10)
    check_rows(checked_flow(recipe), recipe)


def test_a_node_that_serves_looks_for_no_file(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """Node 0 reads data and functions, and leads whoever joins it."""
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_text(make_recipe(**{"data.source": "nowhere.jsonl"})))
    nodes = ["--nodes", "2", "--leader", "localhost:29500", "--dry-run"]
    assert [main(["train", str(path), *nodes, "--node", node]) for node in ("0", "1")] == [2, 0]


def test_rows_beside_prompts_have_no_question_that_is_held_out(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """A policy was measured by prompts to which it had learnt the answers."""
    rows = [{"prompt": f"what is {i} plus 4?", "completion": f" {i + 4}"} for i in range(12)]
    source, two = written(tmp_path / "rows.jsonl", rows), written(tmp_path / "two.jsonl", rows[:2])
    keys = {"algorithm": "safe_rlhf", "options": {"ptx_coef": 0.5}, "cost.functions": ["json:dumps"]}
    keys |= {"data.source": source, "pretraining.source": source, "evaluation.items": 3}
    prepared = prepare(make_recipe(**keys))
    (examples,) = prepared.given["examples"].sets
    held_out = {prompt.columns["prompt"] for prompt in prepared.held_out[0].prompts}
    assert len(held_out) == 3
    learnt = {examples.source[row].columns["prompt"] for row in examples.kept}
    assert learnt == {row["prompt"] for row in rows} - held_out
    keys |= {"pretraining.source": two, "evaluation.sets": [two], "evaluation.items": 2}
    with pytest.raises(DataError, match="no row is left to train on after 2 held-out questions"):
        prepare(make_recipe(**keys))


def test_conversations_that_are_several_examples_are_said(
    make_recipe: Callable[..., Recipe], tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of a model whose template drops the reasoning of earlier turns; they train."""
    shutil.copytree(tiny_folder, model := tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last else m.content.split('#')[-1] }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    answers = [{"role": "assistant", "content": f"so#{n}"} for n in (7, 8)]
    rows = [{"messages": [ASKED, answers[0], ASKED, answers[1]]}, {"messages": [ASKED, answers[1]]}]
    file = written(tmp_path / "spoken.jsonl", rows)
    keys = {"model": str(model), "data.source": file, "algorithm": "sft", "reward.functions": [], "options": {}}
    recipe = make_recipe(**keys, sampling={}, samples_per_prompt=8, prompts_per_step=3, steps=1)
    run(recipe)
    said = (
        "1 conversations are several examples each (3 in all), as the chat template writes earlier turns in another way"
    )
    assert f"{file}: {said} once others follow" in capsys.readouterr().err
    assert logged(recipe)[0]["training/epoch"] == 1
