"""Samples of prompts that are made of other samples: a judge, a second attempt after a critique, on any plan, with
batches generated ahead, and after a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.data.records import MADE_UID, Prompt
from plait.errors import ConfigError, DataError, FlowError, RunError
from plait.generation.engine import Engine
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.models.language_loading import load_model
from plait.recipes.algorithm import load_flow
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.prepare import prepare
from tests.cases import slow_but
from tests.runs.plans import assert_equal_columns, assert_equal_runs, runs_of_flows
from tests.runs.test_resume import kill_in_step, result_of
from tests.runs.written import logged, samples_of

Make = Callable[..., Recipe]
EXAMPLE = Path(__file__).parents[2] / "examples/judged.py"

FLOWS = """
import math

import numpy as np

from plait.dataflow import Level, Resample, parse_grades, per_batch, per_group, per_sample, build_prompts


def judged(prompts, actor, judge, ref):
    samples = actor.generate(prompts)
    verdicts = judge.generate(build_prompts(samples, asks), samples_per_prompt=1, greedy=True, max_tokens=4)
    trained(actor, samples, parse_grades(samples, counts, name="grade", verdicts=verdicts), ref)


def by_itself(prompts, actor, ref):
    samples = actor.generate(prompts)
    verdicts = actor.generate(build_prompts(samples, asks), samples_per_prompt=2)
    sure = per_sample(total, ref.logprobs(verdicts), name="sure")
    grades = parse_grades(samples, weighed, name="grade", verdicts=verdicts, sure=sure)
    trained(actor, samples, grades, ref)


def again(prompts, actor, ref, reward):
    samples = actor.generate(prompts)
    critiques = ref.generate(build_prompts(samples, asks), samples_per_prompt=1)
    attempts = actor.generate(build_prompts(critiques, asks_again), samples_per_prompt=2)
    first, second = reward.score(samples), reward.score(attempts)
    gained = per_group(gain, second, first, name="gained")
    actor.train(samples, loss=of_first, advantages=per_group(centred, first, name="first"))
    actor.train(attempts, loss=of_first, advantages=gained)


def drawn_again(prompts, actor, judge, ref, reward):
    samples = actor.generate(prompts, resample=Resample(keep=differ, reward=reward, max_rounds=4))
    reward.score(samples)
    verdicts = judge.generate(build_prompts(samples, asks), samples_per_prompt=2)
    trained(actor, samples, parse_grades(samples, counts, name="grade", verdicts=verdicts), ref)


def unread(prompts, actor, judge, ref):
    samples = actor.generate(prompts)
    verdicts = judge.generate(build_prompts(samples, asks), samples_per_prompt=1)
    trained(actor, samples, parse_grades(samples, every_other, name="grade", verdicts=verdicts), ref)


def too_long(prompts, actor, judge, ref):
    samples = actor.generate(prompts)
    verdicts = judge.generate(build_prompts(samples, asks_much))
    trained(actor, samples, parse_grades(samples, counts, name="grade", verdicts=verdicts), ref)


def graded_in_words(prompts, actor, ref):
    samples = actor.generate(prompts)
    trained(actor, samples, parse_grades(samples, in_words), ref)


def graded_once(prompts, actor, ref):
    samples = actor.generate(prompts)
    trained(actor, samples, parse_grades(samples, once), ref)


def of_given(pairs, actor, judge):
    verdicts = judge.generate(build_prompts(pairs, asks))
    actor.train(pairs, loss=of_first, advantages=verdicts.finished)


def asks_for_more(prompts, actor, judge, ref):
    samples = actor.generate(prompts)
    trained(actor, samples, judge.generate(build_prompts(samples, asks_difficulty), samples_per_prompt=1).finished, ref)


def grades_by_more(prompts, actor, ref):
    samples = actor.generate(prompts)
    trained(actor, samples, parse_grades(samples, by_difficulty), ref)


def made_of_given(prompts, examples, actor, judge):
    samples = actor.generate(prompts)
    about = judge.generate(build_prompts(examples, asks), samples_per_prompt=1)
    more = judge.generate(build_prompts(about, asks), samples_per_prompt=1)
    for name, drawn in (("given", about), ("made", more)):
        told = judge.logprobs(drawn, prompts=build_prompts(drawn, unchanged))
        per_batch(largest_gap, judge.logprobs(drawn), told, name=f"gap/{name}", level=Level.BATCH)
    actor.train(samples, loss=of_first, advantages=samples.finished)


def judged_twice(prompts, actor):
    samples = actor.generate(prompts)
    before = actor.generate(build_prompts(samples, asks_long), samples_per_prompt=2)
    actor.train(samples, loss=of_first, advantages=samples.tokens_left)
    after = actor.generate(build_prompts(samples, asks_long), samples_per_prompt=2)
    per_batch(largest_gap, after.logprobs, actor.logprobs(after), name="gap", level=Level.BATCH)


def left_out(prompts, actor, judge):
    samples = actor.generate(prompts)
    again = actor.generate(build_prompts(samples, asks), samples_per_prompt=1)
    none, some = parse_grades(samples, nothing, name="response_length"), parse_grades(again, every_other, name="read")
    actor.train(samples, loss=of_first, advantages=none, keep=none, with_next=True)
    actor.train(again, loss=of_first, advantages=again.finished, keep=per_sample(is_read, some, name="keep"))


def graded_beyond_floats(prompts, actor, ref):
    samples = actor.generate(prompts)
    trained(actor, samples, parse_grades(samples, beyond_floats), ref)


def trained(actor, samples, grades, ref):
    advantages = per_group(centred, grades, name="advantages")
    keep = per_sample(is_read, grades, name="keep")
    actor.train(samples, loss=loss, advantages=advantages, keep=keep, ref_logprobs=ref.logprobs(samples))


def asks(prompts, completions):
    return [f"{said(prompt)} {said(completion)} how many?" for prompt, completion in zip(prompts, completions)]


def said(words):
    return words if isinstance(words, str) else words[-1]["content"]


def asks_again(prompts, completions, solution):
    return [[{"role": "user", "content": f"{p} {c} {s}?"}] for p, c, s in zip(prompts, completions, solution)]


def asks_much(prompts):
    return [prompt * 100 for prompt in prompts]


def asks_difficulty(prompts, difficulty):
    return prompts


def counts(completions, verdicts):
    assert len(completions) == len(verdicts)
    return [None if not of_one[0] else float(np.mean([len(text) for text in of_one])) for of_one in verdicts]


def weighed(verdicts, sure):
    assert len(sure) == 2 * len(verdicts)
    return [sum(len(text) * s for text, s in zip(of_one, own)) for of_one, own in zip(verdicts, sure.reshape(-1, 2))]


def every_other(completions, verdicts=None):
    return [None if place % 4 == 1 else math.nan if place % 2 else 2 for place in range(len(completions))]


def asks_long(prompts):
    return [f"{prompt} one two three four five six seven eight nine ten" for prompt in prompts]


def unchanged(prompts):
    return prompts


def largest_gap(plain, behind):
    return max(abs(one - other).max() for one, other in zip(plain, behind, strict=True))


def nothing(completions):
    return [None] * len(completions)


def beyond_floats(completions):
    return [int("9" * 400)] * len(completions)


def in_words(completions):
    return ["good"] * len(completions)


def once(completions):
    return [1.0]


def by_difficulty(completions, difficulty):
    return difficulty


def differ(rewards):
    return bool(rewards[0] != rewards[-1])


def total(logprobs):
    return float(logprobs.sum())


def gain(second, first):
    [before] = first
    return second - before


def centred(grades):
    return np.nan_to_num(grades - np.nanmean(grades)) if np.isfinite(grades).any() else np.zeros(len(grades))


def is_read(grade):
    return float(math.isfinite(grade))


def of_first(batch, advantages):
    return batch.aggregate(-advantages * batch.logprobs, "token-mean")


def loss(batch, advantages, ref_logprobs):
    values = -advantages * batch.logprobs + 0.01 * (batch.logprobs - ref_logprobs) ** 2
    return batch.aggregate(values, "token-mean")
"""

REWARD = """
def length(completions, **columns):
    return [float(len(said if isinstance(said, str) else said[0]["content"])) for said in completions]
"""


@pytest.fixture
def make(tiny_folder: Path, tmp_path: Path) -> Make:
    """`make("judged", "name of the run", plan)`."""
    rows = [{"prompt": f"what is {i} plus 4?", "solution": str(i + 4)} for i in range(9)]
    return runs_of_flows(FLOWS, rows, tiny_folder, tmp_path, micro_batch_tokens=100)


def drawn_by(rows: list[dict[str, Any]], call: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["rollout"] == call]


def asked_in(row: dict[str, Any]) -> str:
    """What the user said, as the template of the tiny model has it."""
    text, rest = row["prompt"].removeprefix("<|im_start|>user\n").split("<|im_end|>")
    assert rest == "\n<|im_start|>assistant\n"
    return text


def test_what_is_said_is_what_an_engine_says_to_the_same_prompts(make: Make, tiny_folder: Path) -> None:
    """Two verdicts of each sample, at the sampling temperature: token by token those of an engine that is asked for
    them alone, with the noise of the second rollout of the first step, and prompts that are numbered by their
    samples."""
    recipe = make("by_itself", "one", steps=1)
    run(recipe)
    rows = drawn_by(samples_of(recipe, 1), "actor.generate#2")
    assert [row["uid"] for row in rows] == [f"{p}.{s}.{v}" for p in range(3) for s in range(4) for v in range(2)]
    model = load_model(str(tiny_folder), dtype="float64")
    engine = Engine(model, SamplingSettings(max_response_tokens=6))
    for place, row in enumerate(rows[::2]):
        prompt = Prompt(MADE_UID + place, "", tuple(row["prompt_ids"]))
        engine.add(Request(prompt, 2, Sampling(max_tokens=6), NoiseKey(recipe.seed, rollout=1)))
    told = {}
    while engine.has_work:
        told |= {(sample.prompt.uid - MADE_UID, sample.index): sample for sample in engine.step()}
    assert len(told) == len(rows) == 24
    for place, row in enumerate(rows):
        sample = told[divmod(place, 2)]
        assert list(sample.token_ids) == row["token_ids"]
        assert list(sample.logprobs) == pytest.approx(row["sampling_logprobs"], abs=1e-9)


def test_what_is_recorded(make: Make) -> None:
    """Of each verdict the prompt that the function wrote, with nothing of `data` around it; of each sample what was
    read from its verdict. Metrics of verdicts stand under the call's name."""
    around = {"data.system_prompt": "be brief", "data.prompt_template": "Q: {question}"}
    recipe = make("judged", "one", steps=1, **around)
    run(recipe)
    samples, verdicts = (drawn_by(samples_of(recipe, 1), call) for call in ("actor.generate", "judge.generate"))
    assert len(samples) == len(verdicts) == 12
    for row, verdict in zip(samples, verdicts, strict=True):
        question = row["prompt"].split("Q: ")[1].split("<|im_end|>")[0]
        assert verdict["uid"] == f"{row['uid']}.0"
        assert asked_in(verdict) == f"{question} {row['response']} how many?"
        assert row["grade"] == len(verdict["response"])
        assert len(verdict["token_ids"]) <= 4
        assert verdict["data/solution"] == row["data/solution"]
    [metrics] = logged(recipe)
    lengths = [len(row["token_ids"]) for row in verdicts]
    assert metrics["grade/mean"] == pytest.approx(sum(row["grade"] for row in samples) / 12)
    assert metrics["grade/unread"] == 0
    assert metrics["judge.generate/response_length/mean"] == pytest.approx(sum(lengths) / 12)
    assert metrics["judge.generate/response_length/max"] == max(lengths)
    assert metrics["response_length/mean"] == pytest.approx(sum(len(row["token_ids"]) for row in samples) / 12)
    for start in range(0, 12, 4):
        group = samples[start : start + 4]
        mean = sum(row["grade"] for row in group) / 4
        assert [row["advantages"] for row in group] == pytest.approx([row["grade"] - mean for row in group])


def test_what_cannot_be_read_trains_nobody(make: Make) -> None:
    recipe = make("unread", "one", steps=1)
    run(recipe)
    [metrics] = logged(recipe)
    unread = [row for row in drawn_by(samples_of(recipe, 1), "actor.generate") if row["grade"] == "NaN"]
    assert [row["uid"] for row in unread] == ["0.1", "0.3", "1.1", "1.3", "2.1", "2.3"]
    assert [row["keep"] for row in unread] == [0] * 6
    assert metrics["actor/samples_left_out"] == 6
    assert metrics["grade/unread"] == 0.5
    assert metrics["grade/mean"] == 2


def test_attempts_after_a_critique(make: Make, tmp_path: Path) -> None:
    """Both attempts are trained on: what a later one gained is by the sample that it follows."""
    (tmp_path / "reward.py").write_text(REWARD)
    recipe = make("again", "one", steps=1, **{"reward.functions": [f"{tmp_path}/reward.py:length"]})
    run(recipe)
    rows = samples_of(recipe, 1)
    first = {row["uid"]: row for row in drawn_by(rows, "actor.generate")}
    critiques = {row["uid"]: row for row in drawn_by(rows, "ref.generate")}
    second = drawn_by(rows, "actor.generate#2")
    assert (len(first), len(critiques), len(second)) == (12, 12, 24)
    for row in second:
        prompt, sample, critique, _ = row["uid"].split(".")
        assert row["gained"] == row["reward_score"] - first[f"{prompt}.{sample}"]["reward_score"]
        said = critiques[f"{prompt}.{sample}.{critique}"]
        assert asked_in(row) == f"{asked_in(said)} {said['response']} {row['data/solution']}?"
    [metrics] = logged(recipe)
    assert metrics["training/optimizer_steps"] == 2
    assert metrics["reward"] == pytest.approx(sum(row["reward_score"] for row in first.values()) / 12)
    assert metrics["actor.generate#2/reward"] == pytest.approx(sum(row["reward_score"] for row in second) / 24)


@pytest.mark.parametrize("messages", [False, True])
def test_what_is_made_of_given_responses_leads_further(make: Make, tmp_path: Path, messages: bool) -> None:
    """A function of what a judge said of given responses reads the prompt that the judge was asked, whatever the row
    holds; and behind this prompt, unchanged, the judge says the same as behind the sample's own, without anything of
    the data around it."""
    row: dict[str, Any] = {"prompt": "what is 3 plus 4?", "completion": " 7"}
    if messages:
        said = zip(("user", "assistant"), row.values(), strict=True)
        row = {"messages": [{"role": role, "content": text} for role, text in said]}
    (tmp_path / "given.jsonl").write_text(json.dumps(row) + "\n")
    around = {"data.system_prompt": "be brief", "pretraining.source": str(tmp_path / "given.jsonl")}
    recipe = make("made_of_given", "one", steps=1, micro_batch_tokens=200, **around)
    run(recipe)
    rows = samples_of(recipe, 1)
    about, more = drawn_by(rows, "judge.generate"), drawn_by(rows, "judge.generate#2")
    assert {asked_in(row) for row in about} == {"what is 3 plus 4?  7 how many?"}
    for row, before in zip(more, about, strict=True):
        assert asked_in(row) == f"{asked_in(before)} {before['response']} how many?"
    [metrics] = logged(recipe)
    assert metrics["gap/given"] == pytest.approx(0, abs=1e-12)
    assert metrics["gap/made"] == pytest.approx(0, abs=1e-12)


def test_what_is_said_after_an_update_is_of_the_new_weights(make: Make) -> None:
    """Also where the engine keeps prompts, which it has computed with the weights before."""
    keys = {"sampling.prefix_cache_tokens": 1024, "optimizer.learning_rate": 0.05}
    recipe = make("judged_twice", "one", steps=1, **keys)
    run(recipe)
    assert logged(recipe)[0]["gap"] == pytest.approx(0, abs=1e-12)


def test_names_do_not_move_where_the_first_of_two_losses_has_no_sample(make: Make) -> None:
    """All 12 first samples are left out, and 6 of the second ones (the groups have one sample each: none; see
    `every_other`); the loss of the second call stays under its own name, and lengths are no grades."""
    recipe = make("left_out", "one", steps=1)
    run(recipe)
    [metrics] = logged(recipe)
    assert metrics["actor/samples_left_out"] == 12
    assert "actor/loss" not in metrics
    assert "actor.train#2/loss" in metrics
    assert metrics["training/optimizer_steps"] == 1
    assert metrics["response_length/mean"] > 1
    assert metrics["response_length/unread"] == 1
    assert "logged/response_length/mean" not in metrics, "none was read"


WHOLE = "0,1 dp2"
PLANS: dict[str, tuple[str, dict[str, str]]] = {
    "dp": (
        "judged",
        {"actor.generate": WHOLE, "actor.train": WHOLE, "judge.generate": WHOLE, "ref.logprobs": WHOLE},
    ),
    "elsewhere": (
        "judged",
        {"actor.generate": "0", "actor.train": WHOLE, "judge.generate": "1", "ref.logprobs": "1"},
    ),
    "tp": (
        "judged",
        {"actor.generate": WHOLE, "actor.train": "0,1 tp2", "judge.generate": "0,1 tp2", "ref.logprobs": "0"},
    ),
    "pp": (
        "judged",
        {"actor.generate": "0,1 pp2", "actor.train": "0,1 pp2", "judge.generate": "0,1 pp2", "ref.logprobs": "1"},
    ),
    "by-itself": ("by_itself", {"actor.generate": WHOLE, "actor.train": "1", "ref.logprobs": WHOLE}),
}


@pytest.mark.parametrize("name", slow_but(("elsewhere",), PLANS))
def test_a_plan_changes_nothing(make: Make, name: str) -> None:
    flow, plan = PLANS[name]
    one, two = make(flow, "one", steps=1), make(flow, "two", plan, steps=1, micro_batch_tokens=150)
    run(one)
    run(two)
    assert_equal_runs(two.run_dir, one.run_dir)
    assert_equal_columns(two.run_dir, one.run_dir)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flow", "keys"),
    [
        ("by_itself", {"lora": {"rank": 2}}),
        ("judged", {"lora": {"rank": 2}}),
        ("by_itself", {"sampling.top_p": 0.9}),
        ("by_itself", {"sampling.speculation": "adaptive", "sampling.prefix_cache_tokens": 64}),
        ("drawn_again", {}),
    ],
)
def test_what_goes_with_it_on_a_plan(make: Make, tmp_path: Path, flow: str, keys: dict[str, Any]) -> None:
    """Adapters, filters, drafts with a cache of prompts, dynamic sampling."""
    (tmp_path / "reward.py").write_text(REWARD)
    if flow == "drawn_again":
        keys = {"reward.functions": [f"{tmp_path}/reward.py:length"]}
    plan = dict(PLANS["by-itself"][1]) | ({} if flow == "by_itself" else {"judge.generate": "1"})
    if flow != "by_itself":
        plan["ref.logprobs"] = "0"
    one, two = make(flow, "one", **keys), make(flow, "two", plan, **keys)
    run(one)
    run(two)
    assert_equal_runs(two.run_dir, one.run_dir)


@pytest.mark.slow
def test_samples_that_move_and_are_scored_in_parts(make: Make) -> None:
    """The last samples and the last verdicts are gathered, and a reference scores both meanwhile."""
    plan = {"actor.generate": WHOLE, "actor.train": "0", "ref.logprobs": WHOLE}
    one, two = make("by_itself", "one"), make("by_itself", "two", plan, fusion=0.5, rebalance="auto")
    run(one)
    run(two)
    assert_equal_runs(two.run_dir, one.run_dir)


@pytest.mark.parametrize("flow", slow_but(("by_itself",), ("judged", "by_itself")))
def test_batches_drawn_ahead_are_judged_in_their_step(make: Make, flow: str) -> None:
    """Samples are one version old, and what the policy says of them is of the version that is trained; a run that was
    killed in a step ends alike."""
    recipe = make(flow, "ahead", steps=3, max_staleness=1, **{"checkpoint.every": 1})
    run(recipe)
    for step in (1, 2, 3):
        rows = samples_of(recipe, step)
        assert {row["policy_version"] for row in drawn_by(rows, "actor.generate")} == {max(0, step - 2)}
        if flow == "by_itself":
            assert {row["policy_version"] for row in drawn_by(rows, "actor.generate#2")} == {step - 1}
    again = make(flow, "killed", steps=3, max_staleness=1, **{"checkpoint.every": 1})
    kill_in_step(again, 1)
    run(again, resume=True)
    assert result_of(again.run_dir) == result_of(recipe.run_dir)


@pytest.mark.slow
def test_a_plan_changes_nothing_of_batches_drawn_ahead(make: Make) -> None:
    plan = {"actor.generate": "1", "actor.train": "0", "judge.generate": "1", "ref.logprobs": "0"}
    one = make("judged", "one", steps=3, max_staleness=1)
    two = make("judged", "two", plan, steps=3, max_staleness=1)
    run(one)
    run(two)
    assert_equal_runs(two.run_dir, one.run_dir)


@pytest.mark.slow
def test_a_run_that_was_killed_ends_alike(make: Make) -> None:
    recipe, again = (make("judged", name, steps=3, **{"checkpoint.every": 1}) for name in ("whole", "killed"))
    run(recipe)
    kill_in_step(again, 1)
    run(again, resume=True)
    assert result_of(again.run_dir) == result_of(recipe.run_dir)


def test_nobody_replies_to_a_judge(make: Make, tmp_path: Path) -> None:
    """Samples of the policy have two turns, its verdicts one."""
    (tmp_path / "tools.py").write_text(
        "def reply(messages, **columns):\n    return [{'role': 'user', 'content': 'go on'}]\n"
    )
    keys = {"turns.reply": f"{tmp_path}/tools.py:reply", "turns.max_turns": 2, "sampling.max_response_tokens": 60}
    recipe = make("by_itself", "one", steps=1, **keys | {"sampling.stop_token_ids": [2, *range(3, 300, 6)]})
    run(recipe)
    rows = samples_of(recipe, 1)
    assert any("replies" in row for row in drawn_by(rows, "actor.generate"))
    assert not any("replies" in row or "turns" in row for row in drawn_by(rows, "actor.generate#2"))


@pytest.mark.parametrize(
    ("flow", "keys", "error", "message"),
    [
        ("judged", {"max_staleness": 1, "partial_rollout": "keep"}, ConfigError, "generates more than once"),
        ("by_itself", {"judge.model": "there"}, ConfigError, "`judge` is set, but the flow `by_itself` has no role"),
        ("judged", {"sampling.max_response_tokens": 3}, ConfigError, r"may say 4 tokens \(`max_tokens`\)"),
        ("of_given", {}, FlowError, "answers prompts that are made of given samples, but the flow generates from no"),
        ("asks_for_more", {}, DataError, r"build_prompts\(asks_difficulty\) needs the column `difficulty`"),
        ("grades_by_more", {}, DataError, r"parse_grades\(by_difficulty\) needs the column `difficulty`"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(
    make: Make, flow: str, keys: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        prepare(make(flow, "refused", **keys))


@pytest.mark.parametrize(
    ("flow", "message"),
    [
        ("too_long", r"build_prompts\(asks_much\), sample 0.0: the prompt has \d+ tokens, \d+ with an answer of judge"),
        ("graded_in_words", r"parse_grades\(in_words\), sample 0.0: expected a finite number or None, found 'good'"),
        (
            "graded_beyond_floats",
            r"parse_grades\(beyond_floats\), sample 0.0: expected a finite number or None, found",
        ),
        ("graded_once", r"parse_grades\(once\), prompt 0: expected a list with one number or None .* \(4\), found 1"),
    ],
)
def test_what_a_function_does_wrong_is_named(make: Make, flow: str, message: str) -> None:
    with pytest.raises(RunError, match=message):
        run(make(flow, "wrong", steps=1))


def test_the_example_reads_numbers() -> None:
    """The mean of those in the verdicts of a sample; what has no number from 0 to 10 gets no advantage."""
    functions = load_flow(f"{EXAMPLE}:judged").__globals__
    verdicts = [["8", "10/10"], ["no"], ["It is 11."], ["3.5", "good"], ["9."]]
    assert functions["mean_number"](verdicts) == [9.0, None, None, 3.5, 9.0]
    advantages = functions["advantages_of_read"](np.array([9.0, np.nan, np.nan, 3.0, 9.0]))
    assert advantages == pytest.approx(np.array([2, 0, 0, -4, 2]) / (12**0.5 + 1e-4))
    assert functions["advantages_of_read"](np.full(2, np.nan)).tolist() == [0, 0]
    messages = [{"role": "user", "content": "why?"}]
    (asked,) = functions["asks_for_a_number"]([messages], [[{"role": "assistant", "content": "so"}]])
    assert asked.startswith("A user asked:\n\nwhy?\n\nAn assistant answered:\n\nso\n\n")
