"""Samples of several turns, from the recipe to the records of a run, wherever they are drawn."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.data.records import FinishReason, Prompt, Reply, Sample
from plait.errors import ConfigError, DataError, RunError
from plait.recipes.recipe import Recipe
from plait.recipes.turn_checks import rounds_by_prompt
from plait.runtime.api import evaluate_model, run
from plait.runtime.prediction.lengths import recorded
from plait.runtime.prepare import outline
from plait.runtime.session import Session
from plait.runtime.steps.scorer import Translator
from tests.cases import slow_but
from tests.models.tiny import tiny_tokenizer
from tests.runs.placed_runs import PPO, PPO_MODEL, where
from tests.runs.plans import assert_equal_columns, assert_equal_runs
from tests.runs.test_resume import kill_in_step, result_of
from tests.runs.written import logged, samples_of

MakeRecipe = Callable[..., Recipe]

TOOLS = """
import time

def reply(messages, answer=None, **columns):
    said = messages[-1]["content"]
    assert messages[0]["role"] == "user" and messages[-1]["role"] == "assistant"
    if len(said) % 3 == 0:
        return None
    several = [{"role": "tool", "content": f"{len(said)} characters"}, {"role": "user", "content": "go on"}]
    return several if len(said) % 2 else several[0]

def slow_reply(messages, **columns):
    time.sleep(len(messages[-1]["content"]) % 5 / 200)
    return reply(messages, **columns)

def one_turn(messages, **columns):
    return None

def broken(messages, **columns):
    raise KeyError(len(messages))

def number(messages, **columns):
    return 7

def hangs(messages, **columns):
    time.sleep(60)

def needs(messages, colour):
    return None

def no_messages(text):
    return None
"""
SAMPLES = "samples/step-000002.jsonl"
STOPS = [2, *range(3, 300, 6)]


def keys_of(tmp_path: Path, function: str = "reply", **keys: Any) -> dict[str, Any]:
    (tmp_path / "tools.py").write_text(TOOLS)
    return {
        "turns.reply": f"{tmp_path}/tools.py:{function}",
        "turns.max_turns": 3,
        "sampling.max_response_tokens": 120,
        "sampling.stop_token_ids": STOPS,
        "steps": 2,
    } | keys


def test_what_is_recorded(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """By hand, of each sample: its messages, its tokens, and what the metrics count."""
    (tmp_path / "seen.py").write_text(
        "def seen(completions, completion_ids, turns, log_extra, **columns):\n"
        "    log_extra('seen', [[c, i, t] for c, i, t in zip(completions, completion_ids, turns)])\n"
        "    return [float(len(t)) for t in turns]\n"
    )
    limit = 80
    keys = {"reward.functions": [f"{tmp_path}/seen.py:seen"], "evaluation.items": 2}
    keys |= {"sampling.max_response_tokens": limit}
    recipe = make_recipe(**keys_of(tmp_path, **keys))
    run(recipe)
    tokenizer = tiny_tokenizer()
    rows = samples_of(recipe, 1)
    assert {len(row.get("replies", ())) for row in rows} == {0, 1, 2}
    for row in rows:
        replies, turns = row.get("replies", []), row.get("turns", [{"role": "assistant", "content": row["response"]}])
        begins, ends = [0, *(at for at, _ in replies)], [*(at for at, _ in replies), len(row["token_ids"])]
        drawn = [row["token_ids"][a:b] for a, b in zip(begins, ends, strict=True)]
        own = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        assert own == [tokenizer.decode(ids, skip_special_tokens=True) for ids in drawn]
        assert all(ids[-1] in STOPS for ids in drawn[:-1])
        given, said = [], iter(turns)
        for turn in said:
            if turn["role"] == "assistant":
                given.append("")
            else:
                given[-1] += f"\n<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>"
        written = [tokenizer.decode(ids, skip_special_tokens=False) for _, ids in replies]
        closings = ["" if ids[-1] == 2 else "<|im_end|>" for ids in drawn]  # the other stop tokens are text
        expected = [f"{end}{text}\n<|im_start|>assistant\n" for end, text in zip(closings, given, strict=True)]
        assert written == expected[: len(replies)]
        whole = [i for at, ids in zip([*drawn], [*(ids for _, ids in replies), []], strict=True) for i in (*at, *ids)]
        assert row["response"] == tokenizer.decode(whole, skip_special_tokens=True)
        assert row["seen"] == [row["response"], whole, turns]
        assert len(row["sampling_logprobs"]) == len(row["ref_logprobs"]) == len(row["token_ids"])
        assert row["finish_reason"] == ("length" if len(whole) == limit else row["finish_reason"])
    metrics = logged(recipe)[0]
    count = len(rows)
    assert metrics["turns/mean"] == pytest.approx(1 + sum(len(row.get("replies", ())) for row in rows) / count)
    assert metrics["turns/max_turns_share"] == pytest.approx(
        sum(len(row.get("replies", ())) == 2 for row in rows) / count
    )
    replied = [sum(len(ids) for _, ids in row.get("replies", ())) for row in rows]
    assert metrics["turns/reply_tokens"] == pytest.approx(sum(replied) / count)
    lengths = [len(row["token_ids"]) + tokens for row, tokens in zip(rows, replied, strict=True)]
    cut = [row["finish_reason"] == "length" and length < limit for row, length in zip(rows, lengths, strict=True)]
    assert 0 < metrics["turns/no_room"] == pytest.approx(sum(cut) / count)
    assert metrics["response_length/mean"] == pytest.approx(sum(len(row["token_ids"]) for row in rows) / count)
    assert metrics["training/rollout_logprobs_diff_max"] < 1e-5, "the trainer reads what the engine read"
    assert metrics["timing_s/turns.reply"] > 0
    assert "missing_eos" not in (recipe.run_dir / "doctor.jsonl").read_text()
    before = evaluate_model(recipe)
    answered = json.loads((recipe.run_dir / "evaluations.jsonl").read_text().splitlines()[0])
    assert answered["eval/reward"] == before.metrics()["eval/reward"] > 1
    assert [row["turns"] for row in before.rows() if "turns" in row]


PLACES: dict[str, tuple[tuple[str, dict[str, Any]], str | dict[str, str]]] = {
    "turns-mixed-2": (
        PPO,
        {
            "actor.generate": "0,1 dp2",
            "actor.train": "0,1 tp2",
            "ref.logprobs": "0,1 dp2",
            "critic.train": "1,0 pp2",
            "critic.values": "1,0 dp2",
        },
    ),
    "turns-ring-2": (PPO, {"actor.generate": "0,1 pp2", "actor.train": "0,1 dp2", "ref.logprobs": "1"}),
    "turns-split-2": (("remax", {"options": {"kl_coef": 0.05}}), "split 2"),
    "turns-standalone-4": (PPO, "standalone 4"),
    "turns-model-split-2": (PPO_MODEL, "split 2"),
    "turns-tp2pp2": (
        ("grpo", {"options": {"kl_coef": 0.05, "mini_batches": 2, "mask_truncated": True}}),
        {"actor.generate": "0,1,2,3 dp2 tp2", "actor.train": "0,1,2,3 tp2 pp2", "ref.logprobs": "0,1 dp2"},
    ),
}


@pytest.mark.parametrize("name", slow_but(("turns-mixed-2",), PLACES))
def test_a_plan_changes_nothing(
    name: str, place: Path, placed: Callable[..., Recipe], reference: Callable[..., Path]
) -> None:
    (flow, keys), plan = PLACES[name]
    keys = keys_of(place, **keys) | {"sampling.max_response_tokens": 60}
    slow = {"turns.reply": f"{place}/tools.py:slow_reply", "turns.workers": 2}
    recipe = placed(flow, name, **(keys | slow), **where(place, name, plan))
    run(recipe)
    assert logged(recipe)[0]["turns/mean"] > 1.5
    one = reference(flow, **keys)
    assert_equal_runs(recipe.run_dir, one)
    assert_equal_columns(recipe.run_dir, one)


DUEL = """
from plait.dataflow import per_group

def duel(prompts, actor, ref, reward):
    samples, others = actor.generate(prompts), ref.generate(prompts, samples_per_prompt=2)
    advantages = per_group(above, reward.score(samples), reward.score(others), name="advantages")
    actor.train(samples, loss=pushed, advantages=advantages)

def above(scores, others):
    return scores - others.mean()

def pushed(batch, advantages):
    return batch.aggregate(-advantages * batch.logprobs, "token-mean")
"""
"""The actor and the reference draw samples of the same prompts."""


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["rloo", "reinforce_pp", "remax", "ppo", "duel.py:duel"])
def test_every_algorithm_that_samples(make_recipe: MakeRecipe, tmp_path: Path, algorithm: str) -> None:
    (tmp_path / "duel.py").write_text(DUEL)
    path = f"{tmp_path}/{algorithm}" if ":" in algorithm else algorithm
    recipe = make_recipe(**keys_of(tmp_path, algorithm=path, options={}))
    run(recipe)
    assert all(row["turns/mean"] > 1.5 and row["training/rollout_logprobs_diff_max"] < 1e-5 for row in logged(recipe))


def test_slow_replies_and_those_that_end_at_once_change_no_bit(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Who goes on together depends on what was said, not on the clock. A reply of None: the response has one turn."""
    folders = {}
    for name in ("reply", "slow_reply", "one_turn", ""):
        keys = keys_of(tmp_path, name or "reply", run_dir=str(tmp_path / f"run-{name}"))
        keys |= {"turns.workers": 3} if name == "slow_reply" else {}
        if not name:
            keys = {key: value for key, value in keys.items() if not key.startswith("turns.")}
        run(recipe := make_recipe(**keys))
        folders[name] = recipe.run_dir
    for one, other in (("slow_reply", "reply"), ("one_turn", "")):
        assert (folders[one] / SAMPLES).read_text() == (folders[other] / SAMPLES).read_text()
        final = [(folder / "final/model.safetensors").read_bytes() for folder in (folders[one], folders[other])]
        assert final[0] == final[1]
    assert (folders["one_turn"] / SAMPLES).read_text() != (folders["reply"] / SAMPLES).read_text()


def test_a_killed_run_asks_again(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    keys = keys_of(tmp_path, steps=3, **{"checkpoint.every": 1, "evaluation.items": 2, "sampling.speculation": 2})
    whole, killed = (make_recipe(**keys, run_dir=str(tmp_path / name)) for name in ("whole", "killed"))
    run(whole)
    kill_in_step(killed, 1)
    more = make_recipe(**keys, run_dir=str(killed.run_dir), **{"turns.workers": 2, "reward.workers": 3})
    run(more, resume=True)
    assert result_of(killed.run_dir) == result_of(whole.run_dir)


NAMED = """
def reply(messages, sample_uid):
    return {"role": "tool", "content": sample_uid}

def in_lists(completions, sample_uid, log_extra):
    log_extra("in_lists", sample_uid)
    return [1.0] * len(sample_uid)

def of_verl(solution_str, sample_uid):
    return {"score": 1.0, "of_verl": sample_uid}

def of_openrlhf(queries, prompts, labels, sample_uid):
    return {"rewards": [1.0] * len(queries), "extra_logs": {"of_openrlhf": sample_uid}}
"""


@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("remax", marks=pytest.mark.slow)])
def test_functions_know_which_sample_it_is(make_recipe: MakeRecipe, tmp_path: Path, algorithm: str) -> None:
    """As records call it, with the rollout where the flow has several; and the same after a resume."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": text, "labels": "7"}) + "\n" for text in ("a?", "b?", "c?", "d?")))
    keys = keys_of(tmp_path, algorithm=algorithm, options={}, **{"checkpoint.every": 1, "data.source": str(data)})
    keys |= {"reward.functions": [f"{tmp_path}/tools.py:{name}" for name in ("in_lists", "of_verl", "of_openrlhf")]}
    (tmp_path / "tools.py").write_text(NAMED)
    whole, killed = (make_recipe(**keys, run_dir=str(tmp_path / name)) for name in ("whole", "killed"))
    run(whole)
    for row in (row for step in (1, 2) for row in samples_of(whole, step)):
        uid = f"{row['rollout']}-{row['uid']}" if "rollout" in row else row["uid"]
        assert row["in_lists"] == row["of_verl"] == row["of_openrlhf"] == uid
        assert {said["content"] for said in row.get("turns", ()) if said["role"] == "tool"} <= {uid}
    assert logged(whole)[0]["turns/mean"] > 1
    assert ("rollout" in samples_of(whole, 1)[0]) == (algorithm == "remax")
    kill_in_step(killed, 1)
    run(killed, resume=True)
    assert result_of(killed.run_dir) == result_of(whole.run_dir)


WATCHED = """
def watched(prompts, examples, actor, reward):
    reward.score(actor.generate(prompts))
    actor.train(examples, loss=pushed)

def pushed(batch):
    return batch.aggregate(-batch.logprobs, "token-mean")
"""


def test_a_rollout_that_trains_nothing_has_turns_under_its_name(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "watched.py").write_text(WATCHED)
    (tmp_path / "examples.jsonl").write_text('{"prompt": "a", "completion": "quick"}\n' * 8)
    keys = {"algorithm": f"{tmp_path}/watched.py:watched", "options": {}, "steps": 1}
    run(recipe := make_recipe(**keys_of(tmp_path, **keys, **{"pretraining.source": f"{tmp_path}/examples.jsonl"})))
    [metrics] = logged(recipe)
    assert metrics["actor.generate/turns/mean"] > 1
    assert "turns/mean" not in metrics


def test_a_reward_may_log_replies_where_samples_have_one_turn(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """They have another name in records. Folders of earlier versions, where they had not, are read where a run goes on,
    to draft from, and where lengths are told."""
    code = "def logs(completions, log_extra, **columns):\n    n = len(completions)\n"
    (tmp_path / "logs.py").write_text(
        code + "    log_extra('replies', [3] * n)\n    return [float(i) for i in range(n)]\n"
    )
    keys = {"reward.functions": [f"{tmp_path}/logs.py:logs"], "sampling.speculation": 2, "checkpoint.every": 1}
    recipe = make_recipe(**keys, steps=1)
    run(recipe)
    assert all(row["logged/replies"] == 3 for row in samples_of(recipe, 1))
    file = recipe.run_dir / "samples/step-000001.jsonl"
    file.write_text(file.read_text().replace('"logged/replies"', '"replies"'))
    run(make_recipe(**keys, steps=2), resume=True)
    lengths = [len(row["token_ids"]) for row in samples_of(recipe, 1)]
    there = recorded([file], outline(recipe))
    assert there is not None
    assert sorted(there.responses.values) == sorted(lengths)


def test_groups_are_drawn_again_until_enough_are_worth_it(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    options = {"dynamic_sampling": True, "max_sampling_rounds": 3}
    recipe = make_recipe(**keys_of(tmp_path, options=options))
    run(recipe)
    assert logged(recipe)[0]["dynamic/groups_drawn"] >= 3


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("broken", r"reply `broken` failed on sample \d\.\d, turn 1: raised KeyError: 2.*tools\.py"),
        ("number", r"reply `number` failed on sample \d\.\d, turn 1: returned int 7; expected None"),
        ("hangs", r"reply `hangs` failed on sample .*, turn 1: passed the time limit of 0\.3 s \(`turns\.timeout_s`\)"),
    ],
)
def test_a_reply_that_fails_is_named(make_recipe: MakeRecipe, tmp_path: Path, function: str, message: str) -> None:
    with pytest.raises(RunError, match=f"(?s){message}"):
        run(make_recipe(**keys_of(tmp_path, function, **{"turns.timeout_s": 0.3})))


@pytest.mark.slow
def test_when_a_reply_fails_the_last_whole_step_is_saved_and_nothing_is_held_for_turns_meanwhile(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To save brings back what had left the device, for which there is room only where keys and values are not."""
    recipe, held = make_recipe(**keys_of(tmp_path, "away", steps=3)), list[int]()
    (tmp_path / "tools.py").write_text(
        f"{TOOLS}\nfrom pathlib import Path\n\ndef away(messages, **columns):\n"
        "    if len(messages) > 2 and (Path(__file__).parent / 'away').exists():\n"
        "        raise ValueError('service away')\n"
        "    return reply(messages, **columns)\n"
    )
    save, end_step = Session.save, Session.end_step

    def ending(session: Session, state: Any) -> None:
        end_step(session, state)
        (tmp_path / "away").touch()

    def saving(session: Any) -> None:
        held.extend(role.engine.occupancy.kv_bytes for role in session.workers.rank_state.roles.values() if role.engine)
        save(session)

    monkeypatch.setattr(Session, "end_step", ending)
    monkeypatch.setattr(Session, "save", saving)
    with pytest.raises(RunError, match=r"service away[\s\S]*checkpoint of step 1 is good"):
        run(recipe)
    assert held == [0]


def test_a_reply_that_fails_in_an_evaluation_is_said_to_be_of_it(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"failed on sample [12]\.0 of the evaluation, turn 1: raised"):
        evaluate_model(make_recipe(**keys_of(tmp_path, "broken", **{"evaluation.items": 2})))


@pytest.mark.parametrize(
    ("function", "keys", "message"),
    [
        ("needs", {}, r"`turns\.reply`: `needs` needs `colour`"),
        ("no_messages", {}, r"expected a function reply\(messages, \*\*columns\), found no_messages\(text\)"),
        ("missing", {}, r"`turns\.reply`: .* has no `missing`"),
        ("reply", {"rebalance": "auto"}, "`turns.reply` is set, and `rebalance` is auto"),
        ("reply", {"fusion": 0.5}, "`turns.reply` is set, and `fusion` is 0.5"),
        ("reply", {"turns.reply": None}, "max_turns is set, but has no effect without reply"),
        (
            "reply",
            {"turns.wait_for": "step", "partial_rollout": "keep", "max_staleness": 1},
            "`turns.wait_for` is step, but with",
        ),
        (
            "reply",
            {"turns.wait_for": "prompt", "sampling.engine": "vllm"},
            "`turns.wait_for` is prompt, but vLLM is asked",
        ),
    ],
)
def test_what_is_refused_before_the_run(
    make_recipe: MakeRecipe, tmp_path: Path, function: str, keys: dict[str, Any], message: str
) -> None:
    given = {key: value for key, value in keys_of(tmp_path, function, **keys).items() if value is not None}
    recipe = make_recipe(**given)
    with pytest.raises(ConfigError, match=message):
        run(recipe)
    assert not recipe.run_dir.exists()


@pytest.mark.parametrize(
    ("keys", "by_prompt"),
    [
        ({}, False),
        ({"max_staleness": 1}, False),
        ({"max_staleness": 1, "partial_rollout": "keep"}, True),
        ({"turns.wait_for": "prompt"}, True),
        ({"turns.wait_for": "step"}, False),
    ],
)
def test_whose_turns_a_next_turn_waits_for(
    make_recipe: MakeRecipe, tmp_path: Path, keys: dict[str, Any], by_prompt: bool
) -> None:
    assert rounds_by_prompt(make_recipe(**keys_of(tmp_path, **keys))) is by_prompt


WAITING = {"one": None, "turns-wait-2": {"actor.generate": "0,1 dp2", "actor.train": "0", "ref.logprobs": "1"}}


@pytest.mark.parametrize("name", slow_but(("one",), WAITING))
def test_prompts_need_not_wait_for_each_other_where_company_changes_no_bit(
    name: str, place: Path, placed: Callable[..., Recipe]
) -> None:
    """Those of a step at once, and each prompt by itself while replies take their time: the same bits."""
    plan = WAITING[name]
    keys = keys_of(place) | {"sampling.exact": True, "sampling.max_response_tokens": 80, "turns.workers": 2}
    found = []
    for wait_for, function in (("step", "reply"), ("prompt", "slow_reply")):
        own = keys | {"turns.wait_for": wait_for, "turns.reply": f"{place}/tools.py:{function}"}
        at = {} if plan is None else where(place, f"{name}-{wait_for}", plan)
        recipe = placed("grpo", f"{name}-{wait_for}", options={"kl_coef": 0.05}, **own, **at)
        run(recipe)
        assert logged(recipe)[0]["turns/mean"] > 1.5
        found.append(result_of(recipe.run_dir))
    assert found[0] == found[1]


def test_advantages_go_over_the_drawn_tokens_of_all_turns(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """By hand: a reply is part of the state that the first token of the next turn is drawn in, and takes no step."""
    gamma, lam, kl_coef = 0.9, 0.8, 0.1
    options = {"kl_coef": kl_coef, "gamma": gamma, "lam": lam, "whiten_advantages": False}
    keys = {"algorithm": "ppo", "options": options, "critic.optimizer.learning_rate": 1e-2}
    run(recipe := make_recipe(**keys_of(tmp_path, **keys)))
    rows = samples_of(recipe, 2)
    assert max(len(row.get("replies", ())) for row in rows) == 2
    for row in rows:
        values, ahead, expected = [*row["critic_values"], 0.0], 0.0, []
        rewards = [kl_coef * (r - a) for r, a in zip(row["ref_logprobs"], row["actor_logprobs"], strict=True)]
        rewards[-1] += row["reward_score"]
        for t in reversed(range(len(row["token_ids"]))):
            ahead = rewards[t] + gamma * values[t + 1] - values[t] + gamma * lam * ahead
            expected.insert(0, ahead)
        assert any(values)
        assert row["critic_token_rewards"] == pytest.approx(rewards)
        assert row["critic_advantages"] == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("begun", [(), ({"role": "assistant", "content": "so "},)])
def test_a_reward_model_with_tokens_of_its_own_reads_the_conversation(begun: tuple[dict[str, str], ...]) -> None:
    """One turn is what the model said behind words of the assistant, if the prompt ends with such."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    contents = [("assistant", "a"), ("tool", "7"), ("assistant", "b")]
    turns = tuple({"role": role, "content": content} for role, content in contents)
    replies = (Reply(1, (9,)),)
    asked = Prompt(1, "", (1,), {"prompt": [{"role": "user", "content": "?"}, *begun] if begun else "?"})
    sample = Sample(asked, 0, (4, 5), (), "a7b", FinishReason.STOP, replies=replies, turns=turns)
    [read] = Translator(tokenizer, "reward.model").translate_all([sample])
    said = f"<user>?<assistant>{'so ' * len(begun)}a<tool>7<assistant>b"
    assert tokenizer.decode([*read.prompt.token_ids, *read.all_ids]) == said


def test_a_template_without_a_place_for_a_reply_is_refused_before_the_run(
    make_recipe: MakeRecipe, tiny_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_folder, tmp_path / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{{ messages[0]['content'] }}{% if messages[1:] %}{{ raise_exception('one turn') }}{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    recipe = make_recipe(**keys_of(tmp_path, model=str(tmp_path / "model")))
    with pytest.raises(DataError, match=r"`turns\.reply`, prompt 0: the chat template .* refuses the prompt: one turn"):
        run(recipe)
    assert not recipe.run_dir.exists()
