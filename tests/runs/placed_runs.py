"""Flows and plans that are compared: by placement, at random, in float32; and the folder and recipes of such runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plait.models.files.saving import save_pretrained
from plait.models.scalar_loading import load_scalar
from plait.recipes.recipe import Recipe
from plait.recipes.recipe_file import load_recipe
from tests.models.tiny import save_tiny
from tests.runs.plan_files import write_plan

STEPS = 10

Flow = tuple[str, dict[str, Any]]
"""Its name, and the keys of its recipe."""

OWN_FLOW = """
import numpy as np

from plait.algorithms.policy import policy_loss
from plait.dataflow import Level, per_group, per_sample


def baseline_flow(prompts, actor, ref, reward, critic):
    samples = actor.generate(prompts)
    greedy = actor.generate(prompts, samples_per_prompt=1, greedy=True)
    scores, baseline = reward.score(samples), reward.score(greedy)
    values = critic.values(samples)
    logprobs = ref.logprobs(samples)
    advantages = per_group(above, scores, baseline, name="advantages")
    returns = per_sample(spread, scores, values, name="returns", level=Level.TOKEN)
    critic.train(samples, loss=squared, returns=returns)
    actor.train(samples, loss=pushed, advantages=advantages, ref_logprobs=logprobs)
    after = actor.logprobs(samples)
    actor.train(samples, loss=pushed, advantages=advantages, ref_logprobs=after)


def above(scores, baseline):
    return scores - baseline.mean()


def spread(score, values):
    return np.full_like(values, score)


def squared(batch, returns):
    return batch.aggregate((batch.values - returns) ** 2, "token-mean")


def pushed(batch, advantages, ref_logprobs):
    return batch.aggregate(-advantages * batch.logprobs + 0.1 * (batch.logprobs - ref_logprobs) ** 2, "token-mean")
"""

GRPO = ("grpo", {"options": {"kl_coef": 0.05, "mini_batches": 2}})
FOLLOWED = ("grpo", GRPO[1] | {"reference.sync_every": 2, "reference.mixup": 0.5})
"""The reference follows the policy."""
BONUS = ("grpo", {"options": {**GRPO[1]["options"], "weigh_kl_by_ratio": True, "entropy_coef": 0.05}})
"""A loss of which every part has a gradient: surrogate, KL with its weight, entropy."""
KEPT = ("grpo", {"options": {**GRPO[1]["options"], "entropy_coef": 0.05}, "sampling.top_p": 0.9, "sampling.min_p": 0.1})
"""Draws from a part of the vocabulary, which samples have with them."""
PPO = ("ppo", {"options": {"kl_coef": 0.05, "mini_batches": 2}})
EXAMPLES = {"pretraining.source": "PLACE/examples.jsonl"}
SUMMED = ("grpo", {"options": {**GRPO[1]["options"], "ptx_coef": 0.3}, **EXAMPLES})
"""Two losses in each optimizer step: of 12 drawn samples, and of 3 given ones."""
SUMMED_PPO = ("ppo", {"options": {**PPO[1]["options"], "ptx_coef": 0.3}, **EXAMPLES})
SAFE = ("safe_rlhf", {"options": {"ptx_coef": 0.5, "kl_coef": 0.02, "cost_window": 8}})
OWN = ("own", {"options": {}})
PPO_MODEL = ("ppo", PPO[1] | {"reward.model": "PLACE/scorer", "reward.functions": None})
"""Scores of a frozen model alone."""
SAFE_MODELS = ("safe_rlhf", SAFE[1] | {"reward.model": "PLACE/scorer", "cost.model": "PLACE/other_scorer"})
"""Each of a frozen model and a function."""

LONG: dict[str, Any] = {
    "steps": 3,
    "prompts_per_step": 6,
    "sampling.max_response_tokens": 40,
    "sampling.stop_token_ids": [*range(3, 300, 12)],
    "micro_batch_tokens": 128,
}
"""Responses of many lengths, so that samples are left when others have ended."""
FUSED_PPO = ("ppo", PPO_MODEL[1] | LONG | {"fusion": 0.5})
FUSED_SAFE = ("safe_rlhf", SAFE_MODELS[1] | LONG | {"fusion": 0.5})

NO_REWARD = {"reward.functions": None}
NO_ROLLOUT = NO_REWARD | {"sampling.max_response_tokens": None, "samples_per_prompt": None}
"""Keys of flows that read their samples."""
DPO = ("dpo", {"options": {}, "data.source": "PLACE/pairs.jsonl"} | NO_ROLLOUT)
DISTILL = ("distill", {"options": {"top_k": 8, "mini_batches": 2}, "reference.model": "PLACE/teacher"} | NO_REWARD)
"""A teacher of another shape."""
FUSED_DISTILL = ("distill", DISTILL[1] | LONG | {"fusion": 0.5})
KTO = ("kto", {"options": {"beta": 1.0}, "data.source": "PLACE/pairs.jsonl", "prompts_per_step": 5} | NO_ROLLOUT)

PLANS: dict[str, tuple[Flow, str | dict[str, str]]] = {
    "grpo-colocated-2": (GRPO, "colocated 2"),
    "grpo-split-2": (GRPO, "split 2"),
    "grpo-tp2": (GRPO, {"actor.generate": "0,1 dp2", "actor.train": "0,1 tp2", "ref.logprobs": "0,1 pp2"}),
    "grpo-generates-tp2": (GRPO, {"actor.generate": "1,0 tp2", "actor.train": "0,1 tp2", "ref.logprobs": "0"}),
    "grpo-generates-pp2": (GRPO, {"actor.generate": "0,1 pp2", "actor.train": "0", "ref.logprobs": "0,1 tp2"}),
    "grpo-generates-dp2tp2": (
        GRPO,
        {"actor.generate": "0,1,2,3 dp2 tp2", "actor.train": "0,1,2,3 dp2 pp2", "ref.logprobs": "1"},
    ),
    "grpo-generates-tp2pp2": (
        GRPO,
        {"actor.generate": "0,1,2,3 tp2 pp2", "actor.train": "2,3 tp2", "ref.logprobs": "0,1 dp2"},
    ),
    "grpo-pp2": (GRPO, {"actor.generate": "1", "actor.train": "0,1 pp2", "ref.logprobs": "1,0 dp2"}),
    "grpo-dp3-of-4": (GRPO, {"actor.generate": "0,1,2,3 dp4", "actor.train": "1,2,3 dp3", "ref.logprobs": "0"}),
    "grpo-dp2tp2": (GRPO, {"actor.generate": "0,1,2,3 dp4", "actor.train": "0,1,2,3 dp2 tp2", "ref.logprobs": "3"}),
    "grpo-tp2pp2": (GRPO, {"actor.generate": "2,3 dp2", "actor.train": "0,1,2,3 tp2 pp2", "ref.logprobs": "0,1 dp2"}),
    "grpo-gpipe": (GRPO, {"actor.generate": "0,1 dp2", "actor.train": "1,0 pp2 schedule=gpipe", "ref.logprobs": "0"}),
    "ppo-colocated-2": (PPO, "colocated 2"),
    "ppo-split-2": (PPO, "split 2"),
    "ppo-standalone-4": (PPO, "standalone 4"),
    "ppo-elsewhere": (
        PPO,
        {"actor.generate": "1", "actor.train": "1", "ref.logprobs": "1", "critic.train": "1", "critic.values": "0"},
    ),
    "ppo-mixed-2": (
        PPO,
        {
            "actor.generate": "0,1 dp2",
            "actor.train": "0,1 tp2",
            "ref.logprobs": "0,1 tp2",
            "critic.train": "1,0 pp2",
            "critic.values": "1,0 dp2",
        },
    ),
    "ppo-mixed-4": (
        PPO,
        {
            "actor.generate": "0,1,2,3 dp4",
            "actor.train": "0,1,2,3 dp2 pp2",
            "actor.logprobs": "2,3 tp2",
            "ref.logprobs": "0",
            "critic.train": "2,3 dp2",
            "critic.values": "1",
        },
    ),
    "ppo-tp4": (
        PPO,
        {
            "actor.generate": "0,1 dp2",
            "actor.train": "0,1,2,3 tp4",
            "ref.logprobs": "2,3 pp2",
            "critic.train": "0,1,2,3 tp4",
            "critic.values": "0,1,2,3 dp2 tp2",
        },
    ),
    "safe-colocated-2": (SAFE, "colocated 2"),
    "safe-split-2": (SAFE, "split 2"),
    "safe-split-4": (SAFE, "split 4"),
    "safe-standalone-4": (SAFE, "standalone 4"),
    "safe-mixed-4": (
        SAFE,
        {
            "actor.generate": "0,1 dp2",
            "actor.train": "0,1 tp2",
            "ref.logprobs": "0,1 dp2",
            "critic.train": "2,3 pp2",
            "critic.values": "2,3 pp2",
            "cost_critic.train": "3,2 dp2",
            "cost_critic.values": "2",
        },
    ),
    "own-colocated-2": (OWN, "colocated 2"),
    "own-split-2": (OWN, "split 2"),
    "own-mixed-2": (
        OWN,
        {
            "actor.generate": "0,1 dp2",
            "actor.train": "0,1 pp2",
            "actor.logprobs": "1",
            "ref.logprobs": "0,1 tp2",
            "critic.train": "0",
            "critic.values": "0,1 dp2",
        },
    ),
    "own-standalone-4": (OWN, "standalone 4"),
    "grpo-nothing-stays-1": (
        GRPO,
        {
            "actor.generate": "0 after=offload",
            "actor.train": "0 after=offload",
            "ref.logprobs": "0 after=offload",
        },
    ),
    "grpo-nothing-stays-2": (
        GRPO,
        {
            "actor.generate": "0,1 pp2 after=drop",
            "actor.train": "0,1 tp2 after=offload",
            "ref.logprobs": "0,1 dp2 after=offload",
        },
    ),
    "grpo-nothing-stays-4": (
        GRPO,
        {
            "actor.generate": "1,2,3 dp3 after=drop",
            "actor.train": "0,1,2,3 dp2 pp2 after=offload",
            "ref.logprobs": "0,1,2 dp3 after=offload",
        },
    ),
    "ppo-fused-2": (FUSED_PPO, "colocated 2"),
    "ppo-fused-split-4": (FUSED_PPO, "split 4"),
    "ppo-fused-stages-3": (
        FUSED_PPO,
        {
            "actor.generate": "0,1 pp2 | 2",
            "actor.train": "0,1,2 dp3",
            "ref.logprobs": "0,1,2 dp3",
            "critic.train": "0,1,2 dp3",
            "critic.values": "0,1,2 dp3",
            "reward.score": "0,1,2 dp3",
        },
    ),
    "ppo-fused-mixed-4": (
        FUSED_PPO,
        {
            "actor.generate": "0,1 tp2 | 2 | 3",
            "actor.train": "0,1,2,3 dp4",
            "ref.logprobs": "0,1,2,3 dp2 tp2",
            "critic.train": "0,1,2,3 dp2 pp2",
            "critic.values": "0,1,2,3 dp4",
            "reward.score": "0,1,2,3 dp2 pp2",
        },
    ),
    "safe-fused-4": (FUSED_SAFE, "colocated 4"),
    "safe-fused-split-4": (FUSED_SAFE, "split 4"),
    "grpo-followed-2": (
        FOLLOWED,
        {
            "actor.generate": "0,1 dp2",
            "actor.train": "0,1 tp2 after=offload",
            "ref.logprobs": "0,1 pp2 after=offload",
        },
    ),
    "grpo-followed-apart-2": (FOLLOWED, "split 2"),
    "grpo-followed-4": (
        FOLLOWED,
        {
            "actor.generate": "1,2,3 dp3 after=drop",
            "actor.train": "0,1,2,3 dp2 pp2",
            "ref.logprobs": "3",
        },
    ),
    "ppo-critic-leaves-2": (
        PPO,
        {
            "actor.generate": "1,0 pp2 after=offload",
            "actor.train": "0,1 tp2",
            "ref.logprobs": "1 after=offload",
            "critic.train": "1,0 pp2 after=offload",
            "critic.values": "1,0 dp2 after=drop",
        },
    ),
    "ppo-critic-leaves-4": (
        PPO,
        {
            "actor.generate": "0,1,2,3 dp4 after=drop",
            "actor.train": "0,1,2,3 dp2 pp2 after=offload",
            "actor.logprobs": "2,3 tp2 after=drop",
            "ref.logprobs": "0 after=offload",
            "critic.train": "2,3 dp2 after=offload",
            "critic.values": "1 after=offload",
        },
    ),
    "ppo-scored-while-generating-3": (
        PPO,
        {
            "actor.generate": "2 after=offload",
            "actor.train": "2 after=offload",
            "ref.logprobs": "0,1 tp2 after=offload",
            "critic.train": "0,1 tp2 after=offload",
            "critic.values": "1 after=drop",
        },
    ),
    "own-nothing-stays-2": (
        OWN,
        {
            "actor.generate": "0,1 dp2 after=drop",
            "actor.train": "0,1 pp2 after=offload",
            "actor.logprobs": "1 after=offload",
            "ref.logprobs": "0,1 tp2 after=offload",
            "critic.train": "0 after=offload",
            "critic.values": "0,1 dp2 after=drop",
        },
    ),
}
PLANS |= {
    "bonus-mixed-2": (BONUS, {"actor.generate": "0,1 dp2", "actor.train": "0,1 tp2", "ref.logprobs": "0,1 pp2"}),
    "bonus-dp2pp2": (BONUS, {"actor.generate": "0", "actor.train": "0,1,2,3 dp2 pp2", "ref.logprobs": "1"}),
    "bonus-tp2pp2": (BONUS, {"actor.generate": "0", "actor.train": "0,1,2,3 tp2 pp2", "ref.logprobs": "1"}),
    "kept-tp2": (KEPT, {"actor.generate": "0,1 tp2", "actor.train": "1,0 tp2", "ref.logprobs": "0,1 pp2"}),
    "kept-pp2": (KEPT, {"actor.generate": "1,0 pp2", "actor.train": "0,1 pp2", "ref.logprobs": "0,1 dp2"}),
    "kept-dp2tp2": (
        KEPT,
        {
            "actor.generate": "0,1,2,3 tp2 pp2",
            "actor.train": "0,1,2,3 dp2 tp2",
            "actor.logprobs": "2,3 dp2",
            "ref.logprobs": "2",
        },
    ),
    "summed-colocated-2": (SUMMED, "colocated 2"),
    "summed-split-2": (SUMMED, "split 2"),
    "summed-pp2": (SUMMED, {"actor.generate": "1", "actor.train": "0,1 pp2", "ref.logprobs": "1,0 dp2"}),
    "summed-dp2tp2": (SUMMED, {"actor.generate": "0", "actor.train": "0,1,2,3 dp2 tp2", "ref.logprobs": "3"}),
    "summed-dp4": (SUMMED, {"actor.generate": "0", "actor.train": "0,1,2,3 dp4", "ref.logprobs": "3"}),
    "summed-leaves-2": (
        SUMMED,
        {
            "actor.generate": "0,1 pp2 after=drop",
            "actor.train": "0,1 tp2 after=offload",
            "ref.logprobs": "0,1 dp2 after=offload",
        },
    ),
    "summed-ppo-standalone-4": (SUMMED_PPO, "standalone 4"),
    "dpo-tp2": (DPO, {"actor.train": "0,1 tp2", "ref.logprobs": "0"}),
    "kto-dp2": (KTO, {"actor.train": "0,1 dp2", "ref.logprobs": "0,1 tp2"}),
    "kto-split-2": (KTO, "split 2"),
    "distill-colocated-2": (DISTILL, "colocated 2"),
    "distill-split-2": (DISTILL, "split 2"),
    "distill-standalone-2": (DISTILL, "standalone 2"),
    "distill-tp2": (DISTILL, {"actor.generate": "0", "actor.train": "0,1 tp2", "ref.top_logprobs": "1,0 tp2"}),
    "distill-mixed-4": (
        DISTILL,
        {
            "actor.generate": "0,1 dp2",
            "actor.train": "0,1,2,3 tp2 pp2",
            "ref.top_logprobs": "2,3,0,1 dp2 pp2 after=offload",
        },
    ),
    "distill-fused-2": (FUSED_DISTILL, "colocated 2"),
    "ppo-model-split-2": (PPO_MODEL, "split 2"),
    "ppo-model-standalone-4": (PPO_MODEL, "standalone 4"),
    "ppo-model-beside-values-2": (
        PPO_MODEL,
        {
            "actor.generate": "0",
            "actor.train": "0",
            "ref.logprobs": "0",
            "critic.train": "1",
            "critic.values": "1",
            "reward.score": "0,1 tp2",
        },
    ),
    "safe-models-split-4": (SAFE_MODELS, "split 4"),
    "safe-models-standalone-6": (SAFE_MODELS, "standalone 6"),
}


def fill(folder: Path, tiny_folder: Path) -> None:
    """Write what the recipes name: models that score, a flow, reward functions and data."""
    for seed, name in enumerate(("scorer", "other_scorer")):
        save_pretrained(load_scalar(str(tiny_folder), dtype="float32", seed=seed), folder / name)
    save_tiny(folder / "teacher", seed=7, hidden_size=48)
    (folder / "flow.py").write_text(OWN_FLOW)
    (folder / "rewards.py").write_text(
        "def sevens(prompts, completions, **columns):\n"
        "    return [text.count('7') + 0.01 * len(text) + 0.1 * ('1 plus' in prompt)\n"
        "        for prompt, text in zip(prompts, completions)]\n"
        "def cost(completions, **columns):\n    return [0.1 * len(text) - 1.0 for text in completions]\n"
    )
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "what is {i} plus 4?"}}\n' for i in range(12)))
    (folder / "pairs.jsonl").write_text(
        "".join(f'{{"prompt": "what is {i} plus 4?", "chosen": "{i + 4}", "rejected": "{i}"}}\n' for i in range(12))
    )
    (folder / "examples.jsonl").write_text(
        "".join(f'{{"prompt": "what is {i} plus 4?", "completion": "{i + 4}"}}\n' for i in range(12))
    )


def recipe_in(place: Path, tiny_folder: Path, flow: str, run_dir: str, **keys: Any) -> Recipe:
    """A run of a flow in `place`; PLACE in a value stands for it, and None takes a key away."""
    tree: dict[str, Any] = {
        "model": str(tiny_folder),
        "algorithm": f"{place}/flow.py:baseline_flow" if flow == "own" else flow,
        "steps": STEPS,
        "prompts_per_step": 3,
        "samples_per_prompt": 4,
        "data.source": str(place / "prompts.jsonl"),
        "reward.functions": [f"{place}/rewards.py:sevens"],
        "sampling.max_response_tokens": 6,
        "micro_batch_tokens": 64,
        "optimizer.learning_rate": 1e-3,
        "dtype": "float64",
        "threads": 1,
        "run_dir": str(place / run_dir),
    }
    if flow in ("ppo", "safe_rlhf", "own"):
        tree["critic.optimizer.learning_rate"] = 1e-3
    if flow == "safe_rlhf":
        tree |= {
            "cost.functions": [f"{place}/rewards.py:cost"],
            "pretraining.source": str(place / "examples.jsonl"),
            "cost_critic.optimizer.learning_rate": 1e-3,
        }
    values = {key: placed_at(place, value) for key, value in (tree | keys).items() if value is not None}
    return load_recipe(None, list(values.items()))


def placed_at(place: Path, value: Any) -> Any:
    """A value of a recipe, with the folder for each PLACE in it."""
    if isinstance(value, list):
        return [placed_at(place, one) for one in value]
    if isinstance(value, dict):
        return {key: placed_at(place, one) for key, one in value.items()}
    return value.replace("PLACE", str(place)) if isinstance(value, str) else value


def where(place: Path, name: str, plan: str | dict[str, str], schedules: Sequence[str] = ()) -> dict[str, Any]:
    """The recipe keys of a plan of the table; `schedules` as of `write_plan`."""
    if isinstance(plan, str):
        named, devices = plan.split()
        return {"plan": named, "devices": int(devices)}
    return {"plan": str(write_plan(place, name, plan, schedules))}
