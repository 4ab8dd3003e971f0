"""Responses scored behind other prompts than their own: what is said of them, on any plan and after a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from plait.models.compute.float64 import kept_float64
from plait.recipes.recipe import Recipe
from plait.recipes.recipe_file import load_recipe
from plait.runtime.api import run
from tests.cases import slow_but
from tests.runs.plans import assert_equal_columns, assert_equal_runs, planned
from tests.runs.written import samples_of

MakeRecipe = Callable[..., Recipe]

FLOWS = """
from plait.algorithms.distill import divergence
from plait.dataflow import Level, per_sample, prompts_from


def taught(prompts, actor, ref, reward):
    samples = actor.generate(prompts)
    scores = reward.score(samples)
    told = prompts_from(samples, with_best, name="told", scores=scores)
    shown = prompts_from(samples, with_solution)
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


def learnt(batch, ids, logprobs, of_ref, of_actor, of_shown, entropies, own):
    return batch.aggregate(divergence(batch.logprobs_at(ids), logprobs, 0.5), "token-mean")
"""


@pytest.fixture
def make(tiny_folder: Path, tmp_path: Path) -> MakeRecipe:
    """`make("taught", "name of the run", plan)`."""
    (tmp_path / "flows.py").write_text(FLOWS)
    (tmp_path / "reward.py").write_text("def length(completions, **columns):\n    return [*map(len, completions)]\n")
    rows = [{"prompt": f"what is {i} plus 4?", "solution": str(i + 4), "completion": f"{i + 4}"} for i in range(9)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def get(flow: str, name: str, plan: dict[str, str] | None = None, **keys: Any) -> Recipe:
        tree = {
            "model": str(tiny_folder),
            "algorithm": f"{tmp_path}/flows.py:{flow}",
            "steps": 2,
            "prompts_per_step": 3,
            "data.source": str(tmp_path / "sums.jsonl"),
            "optimizer.learning_rate": 1e-3,
            "micro_batch_tokens": 64,
            "threads": 1,
            "samples_per_prompt": 4,
            "reward.functions": [f"{tmp_path}/reward.py:length"],
            "sampling.max_response_tokens": 6,
        }
        return planned(
            lambda **all_keys: load_recipe(None, list((tree | all_keys).items())), tmp_path, name, plan, **keys
        )

    return get


def of_transformers(folder: Path, asked: str, token_ids: list[int]) -> torch.Tensor:
    """[tokens, vocabulary] log-probs of a response behind a question, by the module of Transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
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
            told = of_transformers(tiny_folder, hinted, row["token_ids"])
            shown = of_transformers(tiny_folder, f"{question} the answer is {row['data/solution']}.", row["token_ids"])
            own = of_transformers(tiny_folder, question, row["token_ids"])
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


PLANS: dict[str, dict[str, str]] = {
    "dp": {"actor.generate": "0,1 dp2", "actor.train": "0,1 dp2", "ref.logprobs": "0,1 dp2"},
    "tp": {"actor.generate": "0,1 dp2", "actor.train": "0,1 tp2", "ref.logprobs": "1"},
    "pp": {"actor.generate": "0", "actor.train": "0,1 pp2", "ref.logprobs": "0,1 pp2"},
    "elsewhere": {"actor.generate": "0", "actor.train": "0", "ref.logprobs": "1"},
}


@pytest.mark.parametrize("name", slow_but(("dp",), PLANS))
def test_a_plan_changes_nothing(make: MakeRecipe, name: str) -> None:
    one = make("taught", "one", steps=1)
    run(one)
    two = make("taught", "two", PLANS[name], steps=1, micro_batch_tokens=150)
    run(two)
    assert_equal_runs(two.run_dir, one.run_dir)
    assert_equal_columns(two.run_dir, one.run_dir)
