"""What recipes ask for beside a flow, on several ranks: evaluation, adapters, given samples, instances of unequal size;
and checkpoints of two models under changing plans. float64, as in `test_placements`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.schedule.plan import Plan
from plait.schedule.timeline import load_any
from tests.cases import slow_but
from tests.models.tiny import save_tiny
from tests.runs.placed_runs import DPO, GRPO, KTO, NO_ROLLOUT, PPO, PPO_MODEL, Flow, where
from tests.runs.plan_files import write_plan
from tests.runs.plans import assert_equal_runs

STEPS = 4

EVALUATED = {"evaluation.items": 3, "evaluation.every": 2}
DRAWN = {"evaluation.temperature": 0.7, "evaluation.functions": ["PLACE/rewards.py:sevens", "PLACE/rewards.py:cost"]}
REMAX = ("remax", {"options": {"kl_coef": 0.05}, "samples_per_prompt": 1, "prompts_per_step": 6} | EVALUATED)
ON_PAIRS = {"options": {"mini_batches": 2}, "data.source": "PLACE/pairs.jsonl"} | NO_ROLLOUT
ON_EXAMPLES = {"options": {"mini_batches": 2}, "data.source": "PLACE/examples.jsonl"} | NO_ROLLOUT

CASES: dict[str, tuple[Flow, dict[str, str]]] = {
    "evaluation-lora-dp2": (
        ("grpo", GRPO[1] | EVALUATED | {"lora.rank": 2}),
        {"actor.generate": "0,1 dp2", "actor.train": "1,0 dp2", "ref.logprobs": "0,1 dp2"},
    ),
    "sft-lora-tp2": (("sft", ON_EXAMPLES | EVALUATED | {"lora.rank": 2}), {"actor.train": "1,0 tp2"}),
    "dpo-lora-dp2-tp2": (  # what is averaged over tokens, and then over pairs, wherever they are
        (
            "dpo",
            DPO[1]
            | {"options": {"mini_batches": 2, "loss_type": "sigmoid_norm", "margin": 0.5, "nll_coef": 0.3}}
            | EVALUATED
            | {"lora.rank": 2},
        ),
        {"actor.train": "1,0,2,3 dp2 tp2", "ref.logprobs": "1,0,2,3 dp2 tp2"},
    ),
    "grpo-lora-tp2": (
        ("grpo", GRPO[1] | EVALUATED | {"lora.rank": 2}),
        {"actor.generate": "0,1 tp2", "actor.train": "0,1 tp2", "ref.logprobs": "0,1 tp2"},
    ),
    "grpo-lora-elsewhere": (
        ("grpo", GRPO[1] | EVALUATED | {"lora.rank": 2}),
        {"actor.generate": "0,1 tp2", "actor.train": "1,0 pp2", "ref.logprobs": "0,1 dp2"},
    ),
    "ppo-lora-tp2": (  # a critic with an adapter and a head of its own on the actor's weights
        ("ppo", PPO_MODEL[1] | EVALUATED | DRAWN | {"lora.rank": 2}),
        dict.fromkeys(
            ("actor.generate", "actor.train", "ref.logprobs", "critic.train", "critic.values", "reward.score"),
            "0,1 tp2",
        ),
    ),
    "reward-model-lora-tp2-pp2": (
        ("reward_model", ON_PAIRS | EVALUATED | {"lora.rank": 2}),
        {"reward.train": "2,3,1,0 tp2 pp2"},
    ),
    "evaluation-tp2": (
        ("grpo", GRPO[1] | EVALUATED),
        {"actor.generate": "0,1 tp2", "actor.train": "0,1 pp2", "ref.logprobs": "1"},
    ),
    "dpo-evaluation-tp2": (
        ("dpo", DPO[1] | {"options": {"mini_batches": 2}} | EVALUATED),
        {"actor.train": "1,0 tp2", "ref.logprobs": "0,1 dp2"},
    ),
    "kto-evaluation-tp2": (
        ("kto", KTO[1] | {"options": {"beta": 1.0, "mini_batches": 2, "epochs": 2}} | EVALUATED),
        {"actor.train": "1,0 tp2", "ref.logprobs": "0,1 dp2"},
    ),
    "kto-tp2-pp2": (KTO, {"actor.train": "2,3,1,0 tp2 pp2", "actor.logprobs": "0,1 dp2", "ref.logprobs": "1"}),
    "distill-evaluation-tp2": (  # on given examples
        (
            "distill",
            ON_EXAMPLES
            | {"options": {"on_policy": False, "beta": 0.5}, "reference.model": "PLACE/teacher"}
            | EVALUATED,
        ),
        {"actor.train": "1,0 tp2", "ref.top_logprobs": "0,1 dp2"},
    ),
    "reward-model-dp2": (("reward_model", ON_PAIRS | EVALUATED), {"reward.train": "0,1 dp2"}),
    "reward-model-tp2-pp2": (("reward_model", ON_PAIRS), {"reward.train": "2,3,1,0 tp2 pp2"}),
    "sft-pp2": (("sft", ON_EXAMPLES | EVALUATED), {"actor.train": "1,0 pp2"}),
    "sft-dp2-tp2": (("sft", ON_EXAMPLES), {"actor.train": "1,0,2,3 dp2 tp2"}),
    "rloo-tp2": (
        ("rloo", {"options": {"kl_coef": 0.05, "mini_batches": 2}}),
        {"actor.generate": "1,0 tp2", "actor.train": "0,1 dp2", "ref.logprobs": "0,1 pp2"},
    ),
    "remax-tp2": (  # a second, greedy rollout of one sample a prompt
        REMAX,
        {"actor.generate": "0,1 tp2", "actor.train": "1,0 pp2", "ref.logprobs": "0,1 dp2"},
    ),
    "remax-instances-of-1-and-2": (
        REMAX,
        {"actor.generate": "1,2 pp2 | 0", "actor.train": "0,1,2 dp3", "ref.logprobs": "2"},
    ),
    "judged-tp2": (  # a frozen reward model in parts, held-out items drawn at a temperature, functions that only judge
        ("ppo", PPO_MODEL[1] | EVALUATED | DRAWN),
        {
            "actor.generate": "0,1 tp2",
            "actor.train": "0,1 dp2",
            "ref.logprobs": "0",
            "critic.train": "0,1 pp2",
            "critic.values": "0,1 pp2",
            "reward.score": "1,0 tp2",
        },
    ),
    "judged-elsewhere": (
        ("ppo", PPO_MODEL[1] | EVALUATED | DRAWN),
        {
            "actor.generate": "1,2 dp2",
            "actor.train": "1,2 tp2",
            "ref.logprobs": "1",
            "critic.train": "0",
            "critic.values": "0",
            "reward.score": "2",
        },
    ),
    "instances-of-1-and-2": (
        GRPO,
        {"actor.generate": "2 | 0,1 tp2", "actor.train": "0,1,2 dp3", "ref.logprobs": "2"},
    ),
    "instances-of-1-1-and-2": (
        PPO,
        {
            "actor.generate": "0 | 2,1 pp2 | 3",
            "actor.train": "0,1 tp2",
            "ref.logprobs": "3",
            "critic.train": "2,3 dp2",
            "critic.values": "2,3 dp2",
        },
    ),
}


@pytest.mark.parametrize("name", slow_but(["grpo-lora-tp2"], CASES))
def test_a_recipe_on_several_ranks_is_that_of_one(name: str, place: Path, placed: Callable[..., Recipe]) -> None:
    (flow, keys), plan = CASES[name]
    one = placed(flow, f"one-{name}", steps=STEPS, **keys)
    several = placed(flow, name, steps=STEPS, **keys, **where(place, name, plan))
    run(one)
    run(several)
    assert_equal_runs(several.run_dir, one.run_dir)
    if "lora.rank" in keys:
        configs = [json.loads((of.run_dir / "final" / "adapter_config.json").read_text()) for of in (several, one)]
        for config in configs:
            config["target_modules"].sort()  # of a set
        assert configs[0] == configs[1]
    evaluated = [
        [
            {key: value for key, value in row.items() if not key.startswith(("timing_", "perf/"))}
            for row in read_rows(recipe.run_dir / "evaluations.jsonl")
        ]
        for recipe in (several, one)
    ]
    assert len(evaluated[1]) == (3 if "evaluation.items" in keys else 0), "before, between and after"
    for mine, theirs in zip(*evaluated, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-9)
    if "actor.generate" in plan and evaluated[0]:
        check_names(several.run_dir / "trace.json", plan["actor.generate"])


def check_names(trace: Path, generates: str) -> None:
    """Every rank that draws says alike of what: of an evaluation, which is of no step, or of the rollout of a step."""
    ranks = {int(rank) for instance in generates.split("|") for rank in instance.split()[0].split(",")}
    drawn = [span for span in load_any(trace).spans if span.kind in ("PREFILL", "DECODE")]
    assert {(span.rank, span.step is None, re.split("[#/]", span.action)[0]) for span in drawn} == {
        *((rank, True, "evaluate") for rank in ranks),
        *((rank, False, "actor.generate") for rank in ranks),
    }


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_checkpoint_of_ppo_is_resumed_under_other_plans(
    place: Path, placed: Callable[..., Recipe], rank: int
) -> None:
    """Two optimizers, and a critic whose head is new: two steps under tp 2, one under pp 2, one on one process."""
    critic = ("critic.train", "critic.values")
    plans = {
        "tp2": dict.fromkeys(("actor.generate", "actor.train", *critic), "0,1 tp2") | {"ref.logprobs": "0"},
        "pp2": dict.fromkeys(("actor.generate", "actor.train"), "0,1 pp2")
        | dict.fromkeys(critic, "1,0 pp2")
        | {"ref.logprobs": "1"},
    }
    keys = PPO[1] | {"checkpoint.every": 1, "lora.rank": rank}
    undisturbed = placed("ppo", f"undisturbed-{rank}", steps=STEPS, **keys)
    run(undisturbed)
    for step, name in ((2, "tp2"), (3, "pp2"), (STEPS, None)):
        plan = {} if name is None else where(place, f"ppo-{name}", plans[name])
        changed = placed("ppo", f"changed-{rank}", steps=step, **keys, **plan)
        run(changed, resume=step > 2)
    assert_equal_runs(changed.run_dir, undisturbed.run_dir)


@pytest.mark.slow
def test_stages_of_equal_work_are_resumed_under_other_stages(place: Path, placed: Callable[..., Recipe]) -> None:
    """Four layers: three and one by the rule (the head is worth 1.3 of them), then one and three, then one process."""
    model = save_tiny(place / "four", num_hidden_layers=4)
    keys = GRPO[1] | {"model": str(model), "checkpoint.every": 1}
    undisturbed = placed("grpo", "four-undisturbed", steps=3, **keys)
    run(undisturbed)
    calls = dict.fromkeys(("actor.generate", "actor.train", "ref.logprobs"), "0,1 pp2")
    path = write_plan(place, "four", calls)
    ruled = placed("grpo", "four-layers", steps=1, plan=str(path), **keys)
    run(ruled)
    assert {p.stages for p in Plan.load(ruled.run_dir / "plan.json").placements} == {(3, 1)}
    stated = Plan.load(path)
    replace(stated, placements=tuple(replace(p, stages=(1, 3)) for p in stated.placements)).save(path)
    run(placed("grpo", "four-layers", steps=2, plan=str(path), **keys), resume=True)
    run(placed("grpo", "four-layers", steps=3, **keys), resume=True)
    assert_equal_runs(ruled.run_dir, undisturbed.run_dir)
