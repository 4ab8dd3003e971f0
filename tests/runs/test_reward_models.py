"""Reward models as rewards: their scores, their own tokens, and what cannot be one."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.cli import main
from plait.data.examples import example_set
from plait.data.formats import Row, RowKind
from plait.data.packed import pack
from plait.data.prompts import prompt_set
from plait.data.records import FinishReason, Prompt, Sample
from plait.data.rows import Rows
from plait.data.settings import DataSettings
from plait.data.sources import Source
from plait.errors import ModelError, RunError, UserError
from plait.models.files.saving import save_pretrained
from plait.models.scalar_loading import load_scalar
from plait.observe.run_log import read_rows
from plait.runtime.api import run
from plait.runtime.folder.export import export_checkpoint
from plait.runtime.inputs.tokenizers import load_tokenizer
from plait.runtime.prepare import prepare
from plait.runtime.steps.scorer import ModelScorer, translator_for
from plait.workers.loading import build_models
from tests.cases import slow_but
from tests.models.tiny import tiny_tokenizer
from tests.runs.test_flows import MakeRecipe, data, recipe_of
from tests.runs.test_resume import kill_in_step, result_of
from tests.runs.written import logged, samples_of

__all__ = ["data"]


def test_a_reward_model_fills_the_reward(make_recipe: MakeRecipe, data: dict[str, str], tmp_path: Path) -> None:
    """Trained here, then the reward of PPO, beside a function; the critic begins as it."""
    trained = recipe_of("reward_model", make_recipe, data, steps=6, run_dir=str(tmp_path / "rm"))
    run(trained)
    folder = str(trained.run_dir / "final")
    keys = {"reward.model": folder, "reward.model_weight": 0.5, "evaluation.items": 2, "reward.weights": [2.0]}
    recipe = recipe_of("ppo", make_recipe, data, steps=2, **keys)
    outcome = run(recipe)
    row = logged(recipe)[0]
    assert row["reward"] == pytest.approx(0.5 * row["rewards/model/mean"] + 2 * row["rewards/count_sevens/mean"])
    assert row["rewards/model/mean"] != 0
    assert outcome.after is not None
    assert math.isfinite(outcome.after.metrics()["eval/reward"])
    scorer = load_scalar(folder, dtype="float32", device="cpu", seed=0)
    for sample in read_rows(recipe.run_dir / "samples" / "step-000001.jsonl")[:4]:
        batch = pack([(sample["prompt_ids"], [sample["token_ids"]])])
        score = float(scorer.values_and_scores(batch)[1][0].detach())
        assert sample["reward_score"] == pytest.approx(0.5 * score + 2 * sample["response"].count("7"), abs=1e-4)
        assert sample["rewards/model"] == pytest.approx(score, abs=1e-4)
        assert sample["rewards/count_sevens"] == sample["response"].count("7")


def evaluated(path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    assert main(["eval", str(path), "--model", str(model), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_reward_model_with_an_adapter_is_measured_and_trained_on(
    make_recipe: MakeRecipe, data: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its adapter and its export have the scores that the run had, in recipes with and without `lora`; and it keeps its
    head where training goes on from it."""
    keys = {"evaluation.items": 2, "optimizer.learning_rate": 0.01}
    recipe = recipe_of("reward_model", make_recipe, data, steps=3, lora={"rank": 2}, **keys)
    outcome = run(recipe)
    assert outcome.after is not None
    expected = outcome.after.metrics()
    assert abs(expected["eval/reward/mean_reward"]) > 1e-3
    export_checkpoint(recipe.run_dir, tmp_path / "whole", dtype="float32")
    for rank in (0, 2):
        again = recipe_of("reward_model", make_recipe, data, lora={"rank": rank}, **keys)
        path = tmp_path / f"{rank}.json"
        path.write_text(json.dumps(again.model_dump(mode="json", exclude={"epochs"})))
        for model in (recipe.run_dir / "final", tmp_path / "whole"):
            found = evaluated(path, model, capsys)
            assert found == pytest.approx(expected | {"items": 2}, rel=1e-4)
    on = recipe_of("reward_model", make_recipe, data, lora={"rank": 2}, model=str(tmp_path / "whole"), **keys)
    (model,) = build_models(prepare(on).models, on).values()
    head = load_scalar(str(tmp_path / "whole"), dtype="float32").module.score.weight
    assert torch.equal(next(iter(model.parameters_of_views().values())), head)


def test_a_reward_model_reads_its_own_tokens(tiny_folder: Path) -> None:
    actor, other = tiny_tokenizer(), tiny_tokenizer()
    assert translator_for(actor, other) is None, "one vocabulary, one template"
    other(["a", "a b"], padding=True, truncation=True, max_length=8)
    assert translator_for(actor, other) is None, "it was used for padded batches before it was saved"
    other.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    translator = translator_for(actor, other)
    assert translator is not None
    prompt = Prompt(0, "rendered", (1, 2), {"prompt": "what is 7?"})
    sample = Sample(prompt, 0, (5, 6), (-1.0, -1.0), "it is 7", FinishReason.STOP)
    (read,) = translator.translate_all([sample])
    assert other.decode(read.prompt.token_ids + read.token_ids) == "<user>what is 7?<assistant>it is 7"
    other.chat_template = None
    (raw,) = translator.translate_all([sample])
    ids = raw.prompt.token_ids + raw.token_ids
    assert ids[-1] == other.eos_token_id
    assert other.decode(ids, skip_special_tokens=True) == "renderedit is 7"
    (truncated,) = translator.translate_all([dataclasses.replace(sample, finish_reason=FinishReason.LENGTH)])
    assert truncated.token_ids[-1] != other.eos_token_id, "the end was not said"


@pytest.mark.parametrize(
    ("keys", "prompt", "asked"),
    [
        ({"prompt_template": "In French: {question}"}, "dog", "<user>In French: dog"),
        ({"prompt_template": "In French: {question}", "chat_template": False}, "dog", "<user>In French: dog"),
        (
            {"system_prompt": "Translate.", "examples": [["cat", "chat"]]},
            "dog",
            "<system>Translate.<user>cat<assistant>chat<user>dog",
        ),
        ({"system_prompt": "Translate."}, [{"role": "user", "content": "dog"}], "<system>Translate.<user>dog"),
    ],
)
def test_a_reward_model_with_a_template_of_its_own_reads_what_the_policy_is_asked(
    keys: dict[str, Any], prompt: Any, asked: str
) -> None:
    """With the policy's template it reads what that has written, so with any other it reads the same messages."""
    actor, other = typing.cast(Any, tiny_tokenizer()), typing.cast(Any, tiny_tokenizer())
    other.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    translator = translator_for(actor, other)
    assert translator is not None
    rows = prompt_set(Source("d", (Row({"prompt": prompt}, "d:1"),)), actor, DataSettings(source="d", **keys), 99)
    sample = Sample(rows.prompt(0, 0), 0, (5, 6), (-1.0, -1.0), "chien", FinishReason.STOP)
    (read,) = translator.translate_all([sample])
    assert other.decode(read.prompt.token_ids + read.token_ids) == f"{asked}<assistant>chien"


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
WRITES_NO_REPLIES = (
    "{% for m in messages %}{% if m['role'] != 'tool' %}<{{ m['role'] }}>{{ m['content'] }}{% endif %}{% endfor %}"
)
WRITES_TOOLS = (
    "{% if tools %}[{% for t in tools %}{{ t.function.name }}{% endfor %}]{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
)


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_a_reward_model_with_a_template_of_its_own_reads_the_tools(tools: Any) -> None:
    """As its own template writes them, and where the policy was told of them: not where prompts are sent raw."""
    actor, other = typing.cast(Any, tiny_tokenizer()), typing.cast(Any, tiny_tokenizer())
    actor.chat_template, other.chat_template = f"tools: {WRITES_TOOLS}", WRITES_TOOLS
    told: list[str] = []
    translator = translator_for(actor, other, tell=told.append)
    assert translator is not None
    row = Row({"prompt": "what is 3 + 4?", "tools": tools}, "d:1")
    for keys, shown in (({}, "[add]"), ({"chat_template": False}, "")):
        rows = prompt_set(Source("d", (row,)), actor, DataSettings(source="d", **keys), 99)
        sample = Sample(rows.prompt(0, 0), 0, (5, 6), (-1.0, -1.0), "7", FinishReason.STOP)
        (read,) = translator.translate_all([sample])
        assert other.decode(read.prompt.token_ids + read.token_ids) == f"{shown}<user>what is 3 + 4?<assistant>7"
    assert not told


def test_what_the_template_of_a_reward_model_does_not_write_is_said_once() -> None:
    """Many write no tools, and only the roles that they know: such a model scores, and one reads what it has not."""
    actor, other = typing.cast(Any, tiny_tokenizer()), typing.cast(Any, tiny_tokenizer())
    other.chat_template = WRITES_NO_REPLIES
    told: list[str] = []
    translator = translator_for(actor, other, tell=told.append)
    assert translator is not None
    prompt = Prompt(0, "3 + 4?", (1, 2), {"prompt": "3 + 4?", "tools": [TOOL]}, is_chat=True)
    contents = [("assistant", "add"), ("tool", "7"), ("assistant", "it is seven")]
    turns = tuple({"role": role, "content": content} for role, content in contents)
    plain = Sample(prompt, 0, (5, 6), (-1.0, -1.0), "yes", FinishReason.STOP)
    called = dataclasses.replace(plain, index=1, turns=turns)
    reads = "`reward.model`: its chat template does not write"
    without = "so it scores conversations without them"
    translator.translate_all([plain, plain])
    assert told == [f"{reads} the column `tools`, {without}"]
    (_, read) = translator.translate_all([plain, called])
    assert told[1:] == [f"{reads} messages of the role `tool`, {without}"]
    assert other.decode(read.prompt.token_ids + read.token_ids) == "<user>3 + 4?<assistant>add<assistant>it is seven"


@pytest.mark.parametrize("first", ["", "7"])
def test_a_reply_that_stands_elsewhere_too_does_not_hide_that_replies_are_not_written(first: str) -> None:
    """The answer often repeats what a tool has said: whether that was written shows in another conversation."""
    actor, other = typing.cast(Any, tiny_tokenizer()), typing.cast(Any, tiny_tokenizer())
    other.chat_template = WRITES_NO_REPLIES
    told: list[str] = []
    translator = translator_for(actor, other, tell=told.append)
    assert translator is not None
    prompt = Prompt(0, "3 + 4?", (1, 2), {"prompt": "3 + 4?"}, is_chat=True)

    def with_reply(index: int, reply: str) -> Sample:
        contents = [("assistant", "add"), ("tool", reply), ("assistant", "it is 7")]
        turns = tuple({"role": role, "content": content} for role, content in contents)
        return Sample(prompt, index, (5, 6), (-1.0, -1.0), "it is 7", FinishReason.STOP, turns=turns)

    translator.translate_all([with_reply(0, first)])
    assert not told
    translator.translate_all([with_reply(1, "no such tool"), with_reply(2, "no tool")])
    (said,) = told
    assert "messages of the role `tool`" in said


def test_a_reward_model_reads_what_others_said_up_to_where_it_was_trained(tiny_folder: Path, tmp_path: Path) -> None:
    """The template writes a line break behind the marker that closes an answer. One that plait has trained was never
    asked there; one from elsewhere was, as TRL trains on all that the template writes."""
    save_pretrained(load_scalar(str(tiny_folder), dtype="float32"), tmp_path / "trained")
    trained, actor = load_tokenizer(str(tmp_path / "trained")), tiny_tokenizer()
    actor.chat_template = "{{ messages[-1]['content'] }}"
    asked, answer = {"role": "user", "content": "what is 7?"}, {"role": "assistant", "content": "it is 7"}
    columns = {"prompt": [asked], "chosen": [answer], "rejected": [{**answer, "content": "no"}]}
    pairs = Source("x", (Row(columns, "x:1"),), RowKind.PAIRS)
    given = example_set(pairs, trained, DataSettings(source="x"), 1000).given(0, 0)[0].sample
    sample = Sample(Prompt(0, "what is 7?", (1, 2), columns), 0, (5, 6), (-1.0, -1.0), "it is 7", FinishReason.STOP)
    for scorer, behind in ((trained, ""), (tiny_tokenizer(), "\n")):
        translator = translator_for(actor, scorer)
        assert translator is not None
        (read,) = translator.translate_all([sample])
        whole = (*given.prompt.token_ids, *given.token_ids, *trained(behind, add_special_tokens=False)["input_ids"])
        assert (*read.prompt.token_ids, *read.token_ids) == whole


@pytest.mark.parametrize("staleness", slow_but([1], [0, 1]))
def test_a_reward_model_that_decides_which_groups_stay_scores_each_sample_once(
    make_recipe: MakeRecipe, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    """And a run that is resumed with such a batch open has the scores that its checkpoint keeps."""
    monkeypatch.setattr("plait.algorithms.groups.informative", lambda rewards: bool(rewards[0] > rewards[-1]))
    keys = {"steps": 5, "max_staleness": staleness, "checkpoint.every": 1, "options": {"dynamic_sampling": True}}
    keys |= {"reward.functions": [], "reward.model": str(tmp_path / "reward_model")}
    save_pretrained(load_scalar(str(tiny_folder), dtype="float32"), tmp_path / "reward_model")
    killed = make_recipe(**keys, run_dir=str(tmp_path / "killed"))
    kill_in_step(killed, 3)
    run(killed, resume=True)
    asked: list[str] = []
    read = ModelScorer.read

    def noting(self: ModelScorer, samples: Sequence[Sample]) -> Rows:
        asked.extend(sample.uid for sample in samples)
        return read(self, samples)

    monkeypatch.setattr(ModelScorer, "read", noting)
    recipe = make_recipe(**keys, run_dir=str(tmp_path / "whole"))
    run(recipe)
    samples = [sample for step in range(1, 6) for sample in samples_of(recipe, step)]
    assert sorted(asked) == sorted(sample["uid"] for sample in samples)
    assert sum(row["dynamic/groups_refused"] for row in logged(recipe)) > 0
    assert all(sample["reward_score"] == sample["rewards/model"] for sample in samples if "advantages" in sample)
    assert result_of(killed.run_dir) == result_of(recipe.run_dir)


@pytest.mark.parametrize("texts", [("it is 7", "it is 8", "it is 7"), ("7", "it is not", "")])
def test_translated_samples_of_a_prompt_share_what_they_begin_with(texts: tuple[str, ...]) -> None:
    """One prompt for all, of which nothing is another sample's: else its scores would be too."""
    other = tiny_tokenizer()
    other.chat_template = None
    translator = translator_for(tiny_tokenizer(), other)
    assert translator is not None
    prompt = Prompt(0, "what is 7?", (1, 2), {"prompt": "what is 7?"})
    samples = [Sample(prompt, i, (5, 6), (-1.0, -1.0), text, FinishReason.LENGTH) for i, text in enumerate(texts)]
    read = translator.translate_all(samples)
    assert len({one.prompt.token_ids for one in read}) == 1
    assert len(read[0].prompt.token_ids) >= 3
    for one, text in zip(read, texts, strict=True):
        assert one.token_ids
        assert other.decode(one.prompt.token_ids + one.token_ids) == "what is 7?" + text


def test_a_reward_model_with_its_own_tokens_scores_groups(
    make_recipe: MakeRecipe, tiny_folder: Path, tmp_path: Path
) -> None:
    """Each sample's score is that of its own text alone, whatever its group says."""
    model = load_scalar(str(tiny_folder), dtype="float32")
    model.tokenizer.chat_template = None
    save_pretrained(model, tmp_path / "reward_model")
    recipe = make_recipe(steps=1, **{"reward.functions": [], "reward.model": str(tmp_path / "reward_model")})
    run(recipe)
    for sample in read_rows(recipe.run_dir / "samples" / "step-000001.jsonl"):
        ids = model.tokenizer(sample["prompt"] + sample["response"])["input_ids"]
        ids += [2] * (sample["finish_reason"] == "stop")
        score = float(model.values_and_scores(pack([(ids[:-1], [ids[-1:]])]))[1][0])
        assert sample["reward_score"] == pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('no') }}",
            r"`reward\.model`: sample 0\.0: the chat template of the model refuses .*: no ",
        ),
        (
            "{{ messages[0]['content'] }}<x39>",
            r"`reward\.model`: its tokenizer writes token 3\d\d for sample 0\.0, but",
        ),
    ],
)
def test_a_reward_model_that_cannot_read_the_prompts_is_refused_before_anything(
    make_recipe: MakeRecipe, tiny_folder: Path, tmp_path: Path, template: str, message: str
) -> None:
    model = load_scalar(str(tiny_folder), dtype="float32")
    model.tokenizer.chat_template = template
    model.tokenizer.add_tokens([f"<x{number}>" for number in range(40)])
    save_pretrained(model, tmp_path / "reward_model")
    recipe = make_recipe(**{"reward.functions": [], "reward.model": str(tmp_path / "reward_model")})
    with pytest.raises(UserError, match=message):
        run(recipe)
    assert not recipe.run_dir.exists()


def test_a_reward_model_without_a_tokenizer_is_refused_by_its_key(
    make_recipe: MakeRecipe, tiny_folder: Path, tmp_path: Path
) -> None:
    save_pretrained(load_scalar(str(tiny_folder), dtype="float32"), tmp_path / "reward_model")
    for file in (tmp_path / "reward_model").glob("tokenizer*"):
        file.unlink()
    keys = {"reward.functions": [], "reward.model": str(tmp_path / "reward_model")}
    with pytest.raises(ModelError, match=r"key `reward\.model`: `.*` has no tokenizer that can be read"):
        prepare(make_recipe(**keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, r"`reward.model` gives sample 0.0 the score (nan|-?inf) \(12 of 12 scores are not finite\)"),
        ({"reward.on_error": "drop"}, r"no sample of 12 has a score from `reward`; look at key `reward.model`"),
    ],
)
def test_a_reward_model_whose_scores_are_not_finite_is_named(
    make_recipe: MakeRecipe, tiny_folder: Path, tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    model = load_scalar(str(tiny_folder), dtype="float32")
    model.module.score.weight.data.fill_(3e38)  # finite, as a file must be; its products are not
    save_pretrained(model, tmp_path / "reward_model")
    given = {"reward.functions": [], "reward.model": str(tmp_path / "reward_model")}
    with pytest.raises(RunError, match=message):
        run(make_recipe(**(given | keys)))


@pytest.mark.parametrize(
    ("flow", "keys", "message"),
    [
        (
            "ppo",
            ("reward.model",),
            r"the critic begins as .* \(key `reward.model`\) .*; set `critic.model`, such as to",
        ),
        ("ppo", ("critic.model",), r"the critic begins as .* \(key `critic.model`\) .*; give another `critic.model`"),
        ("reward_model", ("reward.model",), r"the reward begins as .*; give another `reward.model`"),
        ("ppo", ("reward.model", "critic.model"), None),
    ],
)
def test_a_critic_reads_the_tokens_of_the_actor(
    make_recipe: MakeRecipe,
    data: dict[str, str],
    tiny_folder: Path,
    tmp_path: Path,
    flow: str,
    keys: tuple[str, ...],
    message: str | None,
) -> None:
    """Only a frozen reward model has samples rendered for it; to a critic the ids would mean other texts."""
    model = load_scalar(str(tiny_folder), dtype="float32")
    tokenizer = json.loads(model.tokenizer.backend_tokenizer.to_str())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    save_pretrained(model, tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    given = {key: str(tmp_path / "other") for key in keys} | {"steps": 1}
    if message is None:
        recipe = recipe_of(flow, make_recipe, data, **(given | {"critic.model": str(tiny_folder)}))
        assert run(recipe).finished
        return
    with pytest.raises(UserError, match=message):
        prepare(recipe_of(flow, make_recipe, data, **given))
