"""Recipes that nobody thought of, and ways to run them that must change nothing: of all options that go together."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tests.runs.placed_runs import NO_ROLLOUT, Flow
from tests.runs.test_random_plans import random_plan

REPLIES = """
def reply(messages, **columns):
    said = messages[-1]["content"]
    if len(said) % 3 == 0:
        return None
    several = [{"role": "tool", "content": f"{len(said)} characters"}, {"role": "user", "content": "go on"}]
    return several if len(said) % 2 else several[0]

def by_ids(completion_ids, **columns):
    return [sum(ids) % 101 / 100 for ids in completion_ids]

def sevens_of_some(completions, **columns):
    return [None if len(text) % 5 == 4 else float(text.count("7")) for text in completions]
"""
"""A file `replies.py` that recipes name. Scores differ: where those of a batch are all alike, its advantages are
rounding, by whose signs clips are counted."""
TWO_MODELS: dict[str, Any] = {
    "reward.model": ["PLACE/scorer", "PLACE/other_scorer"],
    "reward.model_weight": [0.7, -0.4],
    "critic.model": "PLACE/scorer",
}
WITH_CRITIC = ("ppo", "safe_rlhf")
REWARDED = ("grpo", "rloo", "reinforce_pp", "remax", *WITH_CRITIC)
ROLLOUTS = (*REWARDED, "distill")
ON_PAIRS = ("dpo", "kto", "reward_model")
ALGORITHMS = (*ROLLOUTS, "grpo", "ppo", *ON_PAIRS, "sft")


@dataclass(frozen=True)
class Draw:
    """Keys that are set together, in some of the recipes of some algorithms; `options.KEY` is one of the options."""

    chance: float
    among: tuple[dict[str, Any], ...]
    of: Collection[str] = ALGORITHMS

    def drawn(self, chance: random.Random, algorithm: str) -> dict[str, Any]:
        take, keys = chance.random() < self.chance, chance.choice(self.among)
        return keys if take and algorithm in self.of else {}


def _one(key: str, *values: Any) -> tuple[dict[str, Any], ...]:
    return tuple({key: value} for value in values)


TURNS = {
    "turns.reply": "PLACE/replies.py:reply",
    "sampling.max_response_tokens": 100,
    "sampling.stop_token_ids": [2, *range(3, 300, 6)],
}
WHAT = (
    Draw(1, _one("steps", 2, 3, 4)),
    Draw(1, _one("prompts_per_step", 2, 3, 5, 6)),
    Draw(1, _one("seed", 0, 1, 7)),
    Draw(1, _one("samples_per_prompt", 2, 3, 4), ROLLOUTS),
    Draw(1, _one("sampling.max_response_tokens", 5, 12, 30), ROLLOUTS),
    Draw(0.6, _one("sampling.stop_token_ids", [*range(3, 300, 7)], [*range(3, 300, 30)]), ROLLOUTS),
    Draw(0.3, _one("sampling.temperature", 0.8), ROLLOUTS),
    Draw(0.3, ({**TURNS, "turns.most": 2}, {**TURNS, "turns.most": 3}), ROLLOUTS),
    Draw(0.3, _one("max_staleness", 1, 2), ROLLOUTS),
    Draw(1, _one("reward.functions", ["PLACE/replies.py:by_ids"]), REWARDED),
    Draw(0.2, _one("reward.functions", ["PLACE/replies.py:sevens_of_some", "PLACE/replies.py:by_ids"]), REWARDED),
    Draw(0.3, ({"reward.model": "PLACE/scorer"}, TWO_MODELS), WITH_CRITIC),
    Draw(0.6, _one("options.mini_batches", 2, 3), ROLLOUTS),
    Draw(0.4, _one("options.epochs", 2), ROLLOUTS),
    Draw(0.6, _one("options.kl_coef", 0.05), REWARDED),
    Draw(0.3, _one("options.aggregation", "token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"), ROLLOUTS),
    Draw(0.3, _one("options.entropy_coef", 0.02), REWARDED),
    Draw(0.2, _one("options.dual_clip", 3.0), REWARDED),
    Draw(0.4, (*_one("options.correction", "icepop", "seq_mask"), {"options.old_logprobs": "engine"}), REWARDED),
    Draw(0.3, _one("options.ratio", "sequence-mean", "sequence-product"), ("grpo",)),
    Draw(0.3, _one("options.mask_truncated", True), ("grpo",)),
    Draw(0.3, ({"options.dynamic_sampling": True, "options.max_sampling_rounds": 3},), ("grpo",)),
    Draw(0.3, _one("options.overlong_buffer_tokens", 4), ("grpo",)),
    Draw(0.5, _one("options.group_baseline", True), ("reinforce_pp",)),
    Draw(1, ({"options.ptx_coef": 0.5, "options.cost_window": 8},), ("safe_rlhf",)),
    Draw(1, ({"reference.model": "PLACE/teacher", "reward.functions": None},), ("distill",)),
    Draw(0.7, _one("options.top_k", 3, 8, 300), ("distill",)),
    Draw(0.7, _one("options.beta", 0, 0.3), ("distill",)),
    Draw(0.5, _one("options.loss_type", "ipo", "hinge"), ("dpo",)),
    Draw(0.5, _one("options.mini_batches", 2), (*ON_PAIRS, "sft")),
    Draw(0.25, _one("lora.rank", 1, 4)),
    Draw(0.2, _one("reference.sync_every", 2), ("dpo", "kto")),
    Draw(0.4, ({"evaluation.items": 3, "evaluation.every": 1}, {"evaluation.items": 3})),
    Draw(0.3, ({"optimizer.schedule": "cosine", "optimizer.warmup_steps": 1},)),
    Draw(0.3, _one("optimizer.weight_decay", 0.1)),
    Draw(0.3, _one("optimizer.max_grad_norm", 0.05)),
)
"""What is trained."""
HOW = (
    Draw(1, _one("micro_batch_tokens", 150, 400, 4096)),
    Draw(0.3, _one("checkpoint_activations", True, False)),
    Draw(0.2, _one("sequence_parallel", True)),
    Draw(0.3, _one("optimizer.shard_gradients", True)),
    Draw(0.7, _one("sampling.speculation", "auto", "adaptive", 2, 5), ROLLOUTS),
    Draw(0.2, ({"sampling.speculation": "adaptive", "sampling.draft_model": "PLACE/draft"},), ROLLOUTS),
    Draw(0.7, _one("sampling.max_running", 2, 5), ROLLOUTS),
    Draw(0.4, _one("sampling.max_prefill_tokens", 5, 17, 60), ROLLOUTS),
    Draw(0.3, _one("sampling.kv_tokens", 320, 512), ROLLOUTS),
    Draw(0.3, _one("sampling.prefix_cache_tokens", 64, 300), ROLLOUTS),
    Draw(0.5, _one("fusion", "off", 0.4), ROLLOUTS),
    Draw(0.5, _one("rebalance", "auto"), ROLLOUTS),
)
"""How it is run: none of these changes a result."""


@dataclass(frozen=True)
class Drawn:
    flow: Flow
    ways: dict[str, Any]
    plan: str | dict[str, str]


def random_recipe(seed: int) -> Drawn:
    """A recipe, and a way to run it. PLACE in a value stands for the folder of runs that are compared."""
    chance = random.Random(f"recipe {seed}")
    algorithm = chance.choice(ALGORITHMS)
    what, how = ({k: v for draw in draws for k, v in draw.drawn(chance, algorithm).items()} for draws in (WHAT, HOW))
    if "turns.reply" in what:
        what |= TURNS
        how = {key: value for key, value in how.items() if key not in ("fusion", "rebalance")}
    if "lora.rank" in what:
        what.pop("reference.sync_every", None)
    if algorithm not in ROLLOUTS:
        what |= NO_ROLLOUT | {"data.source": f"PLACE/{'examples' if algorithm == 'sft' else 'pairs'}.jsonl"}
    plan = _plan(chance, _calls(algorithm, what))
    if not isinstance(plan, str) and any(" pp2" in text for call, text in plan.items() if call.endswith(".train")):
        how.pop("optimizer.shard_gradients", None)
    options = {key.removeprefix("options."): value for key, value in what.items() if key.startswith("options.")}
    keys = {key: value for key, value in what.items() if not key.startswith("options.")}
    return Drawn((algorithm, keys | {"options": options}), how, plan)


def _calls(algorithm: str, what: dict[str, Any]) -> Sequence[str]:
    calls = ["reward.train" if algorithm == "reward_model" else "actor.train"]
    if algorithm in ROLLOUTS:
        calls.append("actor.generate")
    if algorithm in WITH_CRITIC:
        calls += ["critic.train", "critic.values"]
    if algorithm == "safe_rlhf":
        calls += ["cost_critic.train", "cost_critic.values"]
    if algorithm in ("dpo", "kto", "safe_rlhf") or "options.kl_coef" in what:
        calls.append("ref.logprobs")
    if algorithm == "distill":
        calls.append("ref.top_logprobs")
    if "reward.model" in what:
        calls += ["reward.score", "reward_2.score"][: 2 if what["reward.model"] == TWO_MODELS["reward.model"] else 1]
    return calls


def _plan(chance: random.Random, calls: Sequence[str]) -> str | dict[str, str]:
    if chance.random() < 0.35:
        return chance.choice(("colocated 2", "split 2", "standalone 3") if len(calls) > 1 else ("colocated 2",))
    return random_plan(tuple(calls), chance.choice((1, 2, 2, 3)), str(chance.random()))
