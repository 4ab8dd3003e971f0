"""Responses scored behind other prompts than their own: what is said of them, on any plan and after a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from plait.algorithms.distill import divergence
from plait.errors import DataError, RunError
from plait.models.compute.float64 import kept_float64
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.training.trainer import Trainer
from tests.cases import slow_but
from tests.models.tiny import save_tiny
from tests.runs.plans import assert_equal_columns, assert_equal_runs, metrics_of, runs_of_flows
from tests.runs.test_resume import kill_in_step, result_of
from tests.runs.written import samples_of

MakeRecipe = Callable[..., Recipe]

FLOWS = """
from plait.algorithms.distill import divergence
from plait.dataflow import Level, per_batch, per_sample, build_prompts


def taught(prompts, actor, ref, reward):
    samples = actor.generate(prompts)
    scores = reward.score(samples)
    told = build_prompts(samples, with_best, name="told", scores=scores)
    shown = build_prompts(samples, with_solution)
    top = ref.top_logprobs(samples, 4, prompts=told)
    actor.train(
        samples,
        loss=learnt,
        mini_batches=2,
        ids=top.ids,
        logprobs=top.logprobs,
        of_ref=ref.logprobs(samples, prompts=told),
        of_actor=actor.logprobs(samples, prompts=told),
        of_shown=actor.logprobs(samples, prompts=shown),
        entropies=actor.entropies(samples, prompts=told),
        own=actor.logprobs(samples),
    )
    for place in range(5):  # records of samples have columns of one number
        per_sample(nth, top.logprobs, name=f"logprob_{place}", level=Level.TOKEN, place=place)
    for place in range(4):
        per_sample(nth, top.ids, name=f"id_{place}", level=Level.TOKEN, place=place)


def with_best(prompts, completions, scores):
    best = completions[scores.argmax()]
    return [
        prompt if completion == best else f"{prompt} question: {best}"
        for prompt, completion in zip(prompts, completions)
    ]


def with_solution(prompts, solution):
    return [f"{prompt} the answer is {what}." for prompt, what in zip(prompts, solution)]


def nth(top, place):
    return top[:, place]


def learnt(batch, ids, logprobs, of_ref=None, of_actor=None, of_shown=None, entropies=None, own=None):
    assert not logprobs.requires_grad  # the gradient is the policy's alone
    return batch.aggregate(divergence(batch.logprobs_at(ids), logprobs, 0.5), "token-mean")


def same(prompts, actor, ref, critic, reward):
    samples = actor.generate(prompts)
    scores = reward.score(samples)
    told = build_prompts(samples, unchanged)
    top, again = actor.top_logprobs(samples, 4), actor.top_logprobs(samples, 4, prompts=told)
    for name, plain, behind in (
        ("ids", top.ids, again.ids),
        ("top", top.logprobs, again.logprobs),
        ("logprobs", actor.logprobs(samples), actor.logprobs(samples, prompts=told)),
        ("of_ref", ref.logprobs(samples), ref.logprobs(samples, prompts=told)),
        ("entropies", actor.entropies(samples), actor.entropies(samples, prompts=told)),
        ("values", critic.values(samples), critic.values(samples, prompts=told)),
    ):
        per_batch(largest_gap, plain, behind, name=f"gap/{name}", level=Level.BATCH)
    critic.train(samples, loss=squared, scores=scores)
    actor.train(samples, loss=pushed, advantages=scores)


def unchanged(prompts):
    return prompts


def largest_gap(plain, behind):
    return max(abs(one - other).max() for one, other in zip(plain, behind, strict=True))


def squared(batch, scores):
    return batch.aggregate((batch.values - scores) ** 2, "token-mean")


def pushed(batch, advantages):
    return batch.aggregate(-advantages * batch.logprobs, "token-mean")


def given(examples, actor):
    top = actor.top_logprobs(examples, 4, prompts=build_prompts(examples, with_solution))
    actor.train(examples, loss=learnt, mask=examples.trained, ids=top.ids, logprobs=top.logprobs)


def broken(prompts, actor, reward):
    samples = actor.generate(prompts)
    told = build_prompts(samples, FUNCTIONS[open(__file__.replace("flows.py", "which")).read()])
    behind = actor.logprobs(samples, prompts=told)
    actor.train(samples, loss=pushed, advantages=reward.score(samples), keep=per_sample(len, behind, name="length"))


def marked(prompts, solution, turns):
    for prompt, said in zip(prompts, turns):
        prompt[-1]["content"] += "!"
        said[-1]["content"] = ""
    solution.clear()
    return prompts


def one_too_few(prompts):
    return prompts[1:]


def one_text(prompts):
    return prompts[0]


def nothing(prompts):
    return [*prompts[:2], None, None]


def too_long(prompts, solution):
    return [*prompts[:3], prompts[3] + " 1" * 300]


def raising(prompts):
    raise KeyError(prompts[0])


def of_columns(prompts, solutions):
    return prompts


FUNCTIONS = {f.__name__: f for f in (marked, one_too_few, one_text, nothing, too_long, raising, of_columns)}
"""


CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
ROWS = [{"prompt": f"what is {i} plus 4?", "solution": str(i + 4), "completion": f" {i + 4}"} for i in range(9)]
REWARDS = """
def length(completions, **columns):
    return [*map(len, completions)]


def of_some(completions, completion_ids, **columns):
    return [len(text) if sum(ids) % 3 else None for text, ids in zip(completions, completion_ids)]
"""


@pytest.fixture
def make(tiny_folder: Path, tmp_path: Path) -> MakeRecipe:
    """`make("taught", "name of the run", plan)`."""
    (tmp_path / "reward.py").write_text(REWARDS)
    usual = {"reward.functions": [f"{tmp_path}/reward.py:length"], "micro_batch_tokens": 64}
    return runs_of_flows(FLOWS, ROWS, tiny_folder, tmp_path, **usual)


def by_transformers(folder: Path, text: str, token_ids: list[int]) -> torch.Tensor:
    """[tokens, vocabulary] log-probs of a response behind a text, by the module of Transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa").eval()
    with torch.no_grad(), kept_float64(torch.float64):
        logits = module(torch.tensor([[*prompt_ids, *token_ids]])).logits[0]
    return logits[len(prompt_ids) - 1 : -1].log_softmax(-1)


def test_what_is_said_is_that_of_the_new_prompt_and_the_response(make: MakeRecipe, tiny_folder: Path) -> None:
    """Against Transformers, of each token: log-probs, entropy, and the four likeliest with the mass of the rest. Before
    the first update policy and reference are the same model."""
    recipe = make("taught", "one", steps=1)
    run(recipe)
    rows = samples_of(recipe, 1)
    groups = [[row for row in rows if row["uid"].startswith(f"{uid}.")] for uid in range(3)]
    assert [len(group) for group in groups] == [4, 4, 4]
    others = 0
    for group in groups:
        best = max(group, key=lambda row: row["reward_score"])["response"]  # the first of equal ones
        for row in group:
            question = row["prompt"].removeprefix("<|im_start|>user\n").partition("<|im_end|>")[0]
            hinted = question if row["response"] == best else f"{question} question: {best}"
            others += hinted != question
            ids = torch.tensor(row["token_ids"])
            asked = hinted, f"{question} the answer is {row['data/solution']}.", question
            assert [row["prompts/told"], row["prompts/with_solution"]] == [CHAT.format(text) for text in asked[:2]]
            told, shown, own = (by_transformers(tiny_folder, CHAT.format(text), row["token_ids"]) for text in asked)
            for name, logprobs in {
                "ref_logprobs": told,
                "actor_logprobs": told,
                "actor_logprobs#2": shown,
                "actor_logprobs#3": own,
            }.items():
                assert row[name] == pytest.approx(logprobs[range(len(ids)), ids].tolist(), abs=1e-9), name
            assert row["actor_entropies"] == pytest.approx((-(told.exp() * told).sum(-1)).tolist(), abs=1e-9)
            top = told.topk(4)
            rest = (1 - top.values.exp().sum(-1)).log()
            for place in range(4):
                assert row[f"id_{place}"] == top.indices[:, place].tolist()
                assert row[f"logprob_{place}"] == pytest.approx(top.values[:, place].tolist(), abs=1e-9)
            assert row["logprob_4"] == pytest.approx(rest.tolist(), abs=1e-9)
    assert others > 4
    assert "wrong_reference" not in (recipe.run_dir / "doctor.jsonl").read_text()  # what it says is of other prompts


PLANS: dict[str, dict[str, str]] = {
    "dp": {"actor.generate": "0,1 dp2", "actor.train": "0,1 dp2", "ref.logprobs": "0,1 dp2"},
    "tp": {"actor.generate": "0,1 dp2", "actor.train": "0,1 tp2", "ref.logprobs": "1"},
    "pp": {"actor.generate": "0", "actor.train": "0,1 pp2", "ref.logprobs": "0,1 pp2"},
    "elsewhere": {"actor.generate": "0", "actor.train": "0", "ref.logprobs": "1"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_changes_nothing(make: MakeRecipe, name: str) -> None:
    one = make("taught", "one", steps=1)
    run(one)
    two = make("taught", "two", PLANS[name], steps=1, micro_batch_tokens=150)
    run(two)
    assert_equal_runs(two.run_dir, one.run_dir)
    assert_equal_columns(two.run_dir, one.run_dir)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"sampling.top_p": 0.9, "sampling.min_p": 0.05, "sampling.temperature": 1.3},
    "raw": {"data.chat_template": False, "data.prompt_template": "say what it is: {question}"},
    "adapters": {"lora.rank": 2},
    "ahead": {"max_staleness": 1},
    "keep": {"max_staleness": 1, "partial_rollout": "keep"},
    "replies": {"turns.reply": "PLACE/reply.py:reply", "turns.max_turns": 3, "sampling.max_response_tokens": 60}
    | {"sampling.stop_token_ids": [2, *range(3, 300, 6)]},
    "some without a reward": {"reward.functions": ["PLACE/reward.py:of_some"]},
    "replayed": {"sampling.router_replay": True},
}


@pytest.mark.parametrize("name", slow_but(("kept",), WAYS))
def test_behind_their_own_prompts_samples_are_as_without(make: MakeRecipe, name: str, tmp_path: Path) -> None:
    """Whatever they are drawn by. Of a mixture of experts that replays where tokens went, routers choose behind another
    prompt; before an update they choose the same."""
    (tmp_path / "reply.py").write_text(REPLY)
    placed = lambda value: value.replace("PLACE", str(tmp_path)) if isinstance(value, str) else value
    keys = {key: [*map(placed, v)] if isinstance(v, list) else placed(v) for key, v in WAYS[name].items()}
    if name == "replayed":
        keys["model"] = str(save_tiny(tmp_path / "experts", family="qwen3_moe"))
    recipe = make("same", "one", **{"critic.optimizer.learning_rate": 1e-3}, **keys)
    assert run(recipe).finished
    for row in metrics_of(recipe.run_dir):
        gaps = {key: value for key, value in row.items() if key.startswith("gap/")}
        assert len(gaps) == 6
        assert max(gaps.values()) < 1e-9, gaps
        if name == "some without a reward":
            assert row["reward/dropped"] > 0


REPLY = """
def reply(messages, **columns):
    said = messages[-1]["content"]
    return None if len(said) % 3 == 0 else {"role": "tool", "content": f"{len(said)} characters"}
"""


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, {"max_staleness": 1}, {"max_staleness": 1, "partial_rollout": "keep"}], ids=str)
def test_a_run_that_is_killed_and_resumed_ends_with_the_same_bits(
    make: MakeRecipe, tmp_path: Path, keys: dict[str, Any]
) -> None:
    """Killed when the prompts of its third step were written and scored."""
    keys = {"steps": 3, "checkpoint.every": 1, "reference.sync_every": 1, "reference.mixup": 0.5, **keys}
    whole, parts = make("taught", "whole", **keys), make("taught", "parts", **keys)
    run(whole)
    kill_in_step(parts, 2)
    assert run(parts, resume=True).finished
    assert result_of(parts.run_dir) == result_of(whole.run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"max_staleness": 1}, {"fusion": "off"}], ids=str)
def test_of_batches_drawn_ahead_too(make: MakeRecipe, keys: dict[str, Any]) -> None:
    one = make("taught", "one", steps=3, **keys)
    run(one)
    two = make("taught", "two", PLANS["elsewhere"], steps=3, **keys)
    run(two)
    assert_equal_runs(two.run_dir, one.run_dir)


@pytest.mark.parametrize("plan", slow_but((None,), (None, {"actor.train": "0,1 dp2"})), ids=str)
def test_given_responses_are_learnt_as_behind_what_says_more(
    make: MakeRecipe, tiny_folder: Path, plan: dict[str, str] | None, tmp_path: Path
) -> None:
    """Context distillation. The loss of the first step, by Transformers; and that of held-out rows."""
    (tmp_path / "held_out.jsonl").write_text(json.dumps(ROWS[8]) + "\n")
    held_out = {"evaluation.sets": [str(tmp_path / "held_out.jsonl")], "evaluation.items": 1}
    none = {"reward.functions": None, "samples_per_prompt": None, "sampling.max_response_tokens": None}
    recipe = make("given", "one", plan, **held_out, **none, **{"data.shuffle": False}, steps=1)
    outcome = run(recipe)

    def loss_of(rows: list[dict[str, str]]) -> float:
        """Mean over tokens of the divergence, between the four likeliest of the teacher and the rest."""
        losses = []
        for row in rows:
            ids = AutoTokenizer.from_pretrained(tiny_folder)(row["completion"] + "<|im_end|>")["input_ids"]
            told = by_transformers(tiny_folder, f"{row['prompt']} the answer is {row['solution']}.", ids)
            own = by_transformers(tiny_folder, row["prompt"], ids)
            top = told.topk(4)
            logprobs = [
                torch.cat([x, (1 - x.exp().sum(-1, keepdim=True)).log()], -1)
                for x in (top.values, own.gather(-1, top.indices))
            ]
            losses.append(divergence(logprobs[1], logprobs[0], 0.5))
        return float(torch.cat(losses).mean())

    assert metrics_of(recipe.run_dir)[0]["actor/loss"] == pytest.approx(loss_of(ROWS[:3]), abs=1e-9)
    assert outcome.before is not None
    assert outcome.before.metrics()["eval/actor/loss"] == pytest.approx(loss_of(ROWS[8:]), abs=1e-9)


WRONG = {
    "one_too_few": r"build_prompts\(one_too_few\), prompt \d: expected .* one prompt per sample \(4\), found 3",
    "one_text": r"expected a list with one prompt per sample \(4\), found str 'what is \d plus 4\?'",
    "nothing": r"build_prompts\(nothing\), sample \d\.2: `prompt` must be a text or a list of messages, found null",
    "too_long": r"build_prompts\(too_long\), sample \d\.3: the prompt has \d+ tokens, \d+ with the response, but "
    r"actor.logprobs reads it by `.*` \(key `model`\), whose positions end at 256; return shorter prompts",
    "raising": r"build_prompts\(raising\), prompt \d: .*flows.py:\d+: KeyError: 'what is \d plus 4\?'",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_function_does_wrong_is_named(
    make: MakeRecipe, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a token is computed behind it."""
    monkeypatch.setattr(Trainer, "score", lambda *_, **__: pytest.fail("it is scored"))
    (tmp_path / "which").write_text(name)
    recipe = make("broken", "one")
    with pytest.raises(RunError, match=WRONG[name]) as raised:
        run(recipe)
    assert "flows.py" in raised.value.frames


def test_a_function_may_change_what_it_gets(make: MakeRecipe, tmp_path: Path) -> None:
    """Messages of the data stay as they are, for the other samples of a prompt and when it comes again."""
    (tmp_path / "which").write_text("marked")
    rows = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS[:3]]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = make("broken", "one", **{"data.source": str(tmp_path / "asked.jsonl")})
    assert run(recipe).finished
    for step in (1, 2):
        for row in samples_of(recipe, step):
            assert row["prompts/marked"] == row["prompt"].replace("4?", "4?!") != row["prompt"]


def test_a_column_that_the_data_lack_is_named_before_the_run(make: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "which").write_text("of_columns")
    recipe = make("broken", "one")
    with pytest.raises(
        DataError,
        match=r"build_prompts\(of_columns\) needs the column `solutions` \(did you mean `solution`\?\), found",
    ):
        run(recipe)
    assert not recipe.run_dir.exists()
