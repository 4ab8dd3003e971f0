"""On-policy distillation: a teacher of another size and shape as the reference, in one process and on two devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from plait.errors import ConfigError
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.prepare import prepare
from tests.cases import slow_but
from tests.data.json_rows import written
from tests.models.tiny import save_tiny
from tests.runs.plans import metrics_of
from tests.runs.test_resume import kill_in_step, result_of
from tests.runs.written import logged, samples_of

MakeRecipe = Callable[..., Recipe]
EXAMPLE = Path(__file__).parents[2] / "examples" / "distill.py"
BOTH = EXAMPLE.with_name("distill_both.py")


def recipe_of(make_recipe: MakeRecipe, teacher: Path, **keys: Any) -> Recipe:
    given = {"algorithm": f"{EXAMPLE}:distill", "reward.functions": [], "options": {}, "reference.model": str(teacher)}
    return make_recipe(**(given | {"dtype": "float64"} | keys))


@pytest.mark.slow
def test_a_teacher_says_what_is_learnt(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    teacher = save_tiny(tmp_path / "teacher", seed=7, hidden_size=48, num_hidden_layers=3)
    alone = recipe_of(make_recipe, teacher)
    run(alone)
    module = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64, attn_implementation="eager")
    gaps = []
    for sample in samples_of(alone, 1):
        before, ids = sample["prompt_ids"], torch.tensor(sample["token_ids"])
        with torch.no_grad():
            logits = module(torch.tensor([[*before, *ids.tolist()]])).logits[0, len(before) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0].tolist()
        assert sample["ref_logprobs"] == pytest.approx(expected, abs=1e-4)
        gaps += [own - its for own, its in zip(sample["sampling_logprobs"], expected, strict=True)]
    assert logged(alone)[0]["actor/reverse_kl"] == pytest.approx(sum(gaps) / len(gaps), abs=1e-4)
    assert "wrong_reference" not in (alone.run_dir / "doctor.jsonl").read_text()

    placements = [
        {"call": "actor.train", "mode": "train", "ranks": [0, 1], "tp": 2},
        {"call": "ref.logprobs", "mode": "score", "ranks": [1, 0], "pp": 2},
    ]
    plan = {"format": "plait-plan", "version": 1, "name": "both", "num_ranks": 2, "placements": placements}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    both = recipe_of(make_recipe, teacher, plan=str(tmp_path / "plan.json"), run_dir=str(tmp_path / "both"))
    run(both)
    for row, other in zip(metrics_of(alone.run_dir), metrics_of(both.run_dir), strict=True):
        assert other["actor/reverse_kl"] == pytest.approx(row["actor/reverse_kl"], abs=1e-9)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gpt2", {"n_positions": 16, "max_position_embeddings": 16}, r"whose positions end at 16, but .* 30 tokens"),
        ("llama", {"vocab_size": 256}, r"whose vocabulary has 256 tokens, but .*draws from 3\d\d, .*; give another"),
    ],
)
def test_a_teacher_that_cannot_read_the_samples_is_refused(
    make_recipe: MakeRecipe, tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    teacher = save_tiny(tmp_path / "teacher", family=family, **changes)
    with pytest.raises(ConfigError, match=rf"`reference.model` is `.*`, {message}"):
        prepare(recipe_of(make_recipe, teacher))


def test_a_reference_reads_held_out_pairs_too(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    short = save_tiny(tmp_path / "short", family="gpt2", n_positions=24, max_position_embeddings=24)
    for name, words in (("pairs", 1), ("held", 60)):
        rows = [{"prompt": f"{i}", "chosen": " 7" * (words + i), "rejected": " 8"} for i in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"algorithm": "dpo", "reward.functions": [], "options": {}, "samples_per_prompt": 8}
    given |= {"sampling.max_response_tokens": 256, "reference.model": str(short)}
    given |= {"data.source": str(tmp_path / "pairs.jsonl")}
    prepare(make_recipe(**given))
    held_out = {"evaluation.sets": [str(tmp_path / "held.jsonl")], "evaluation.items": 2}
    with pytest.raises(ConfigError, match=r"positions end at 24, but .* prompts; lower `data.max_example_tokens`, or"):
        prepare(make_recipe(**given, **held_out))


WRITES = """
def flow(prompts, actor, ref):
    actor.train(ref.generate(prompts), loss=loss)


def loss(batch):
    return batch.aggregate(-batch.logprobs, "token-mean")
"""


@pytest.mark.slow
def test_the_policy_need_not_say_what_a_teacher_has_written(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """The doctor took the teacher for an engine at another temperature."""
    (tmp_path / "flow.py").write_text(WRITES)
    recipe = recipe_of(make_recipe, save_tiny(tmp_path / "teacher", seed=7), algorithm=f"{tmp_path}/flow.py:flow")
    run(recipe)
    assert '"rollout_mismatch"' not in (recipe.run_dir / "doctor.jsonl").read_text()


def test_keys_and_values_of_a_teacher_that_writes_fit_the_memory_for_them(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    """Its tokens take four times as many bytes as those of the policy."""
    (tmp_path / "flow.py").write_text(WRITES)
    teacher = save_tiny(tmp_path / "teacher", num_key_value_heads=4, num_hidden_layers=4)
    keys = {"algorithm": f"{tmp_path}/flow.py:flow", "sampling.kv_memory": 2**20}
    own, its = (prepare(recipe_of(make_recipe, path, **keys)) for path in (save_tiny(tmp_path / "own"), teacher))
    assert (own.recipe.sampling.kv_tokens, its.recipe.sampling.kv_tokens) == (2048, 512)


def distilled(make_recipe: MakeRecipe, teacher: Path, **keys: Any) -> Recipe:
    return recipe_of(make_recipe, teacher, **({"algorithm": "distill", "options": {"top_k": 8}} | keys))


def test_the_likeliest_tokens_of_a_teacher_are_learnt(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """What is compared in the first step is what Transformers' models say of all tokens, of which the teacher has more
    than the policy; and then the policy is nearer to it. No sample holds eight numbers per token."""
    teacher = save_tiny(tmp_path / "teacher", seed=7, hidden_size=48, num_hidden_layers=3, vocab_size=352)
    recipe = distilled(make_recipe, teacher, steps=6, **{"optimizer.learning_rate": 3e-3})
    run(recipe)
    modules = [
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.float64, attn_implementation="eager")
        for name in (recipe.model, teacher)
    ]
    divergences, masses = [], []
    for sample in samples_of(recipe, 1):
        assert not any("top" in column for column in sample)
        before, ids = sample["prompt_ids"], sample["token_ids"]
        row, places = torch.tensor([[*before, *ids]]), slice(len(before) - 1, -1)
        with torch.no_grad():
            own, its = (module(row).logits[0, places].softmax(-1) for module in modules)
        top = its[:, : own.shape[1]].topk(8).indices
        p, q = (torch.cat([of.gather(1, top), 1 - of.gather(1, top).sum(-1, keepdim=True)], 1) for of in (own, its))
        divergences += (p * (p.log() - q.log())).sum(-1).tolist()
        masses += q[:, :-1].sum(-1).tolist()
    rows = logged(recipe)
    assert rows[0]["actor/divergence"] == pytest.approx(sum(divergences) / len(divergences), rel=1e-5)
    assert rows[0]["ref/top_mass"] == pytest.approx(sum(masses) / len(masses), rel=1e-5)
    assert rows[-1]["actor/divergence"] < 0.9 * rows[0]["actor/divergence"]


@pytest.mark.parametrize("on_policy", slow_but([True], [True, False]))
def test_either_half_of_a_step_on_both_kinds_is_what_distill_says_of_it(
    make_recipe: MakeRecipe, tmp_path: Path, on_policy: bool
) -> None:
    """With a learning rate of nearly 0, as the second update begins where the first has ended."""
    teacher = save_tiny(tmp_path / "teacher", seed=7, hidden_size=48)
    examples = written(tmp_path / "rows.jsonl", [{"prompt": f"what is {i}?", "completion": f" {i}"} for i in range(12)])
    keys = {"data.source": examples, "steps": 1, "optimizer.learning_rate": 1e-30}
    beside = {"algorithm": f"{BOTH}:both", "pretraining.source": examples, "run_dir": str(tmp_path / "both")}
    both = distilled(make_recipe, teacher, **keys | beside)
    if not on_policy:
        keys |= {"options": {"top_k": 8, "on_policy": False}, "sampling.max_response_tokens": 256}
        keys |= {"samples_per_prompt": 8}
    alone = distilled(make_recipe, teacher, **keys)
    run(both)
    run(alone)
    (row,), (of_half,) = logged(both), logged(alone)
    before = "actor" if on_policy else "actor.train#2"
    for name in ("divergence", "top_mass", "agreement"):
        assert row[f"{before}/{name}"] == pytest.approx(of_half[f"actor/{name}"], rel=1e-9)
    of_teacher = "ref/top_mass" if on_policy else f"{before}/ref/top_mass"
    assert row[of_teacher] == pytest.approx(of_half["ref/top_mass"], rel=1e-9)


@pytest.mark.slow
def test_a_killed_distillation_resumes_exactly(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """With a batch that was generated ahead: of it the teacher says again what it said."""
    teacher = save_tiny(tmp_path / "teacher", seed=7, hidden_size=48)
    keys = {"steps": 4, "checkpoint.every": 2, "max_staleness": 1, "dtype": "float32"}
    whole, killed = (
        distilled(make_recipe, teacher, run_dir=str(tmp_path / name), **keys) for name in ("whole", "killed")
    )
    run(whole)
    kill_in_step(killed, 3)
    assert run(killed, resume=True).finished
    assert result_of(killed.run_dir) == result_of(whole.run_dir)
