"""The golden runs: their recipes and plans. Changing one makes its record worthless; new ones go at the end of a table.

Nothing here imports plait, as the same runs are made by sources of different age.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Keys = dict[str, Any]
STEPS = 3

COMMON: Keys = {
    "model": "inputs/llama",
    "prompts_per_step": 3,
    "micro_batch_tokens": 64,
    "optimizer.learning_rate": 1e-3,
    "evaluation.every": 2,
    "threads": 1,
}
ROLLOUT: Keys = COMMON | {
    "samples_per_prompt": 4,
    "data.source": "inputs/prompts.jsonl",
    "reward.functions": ["inputs/rewards.py:sevens"],
    "sampling.max_response_tokens": 6,
    "evaluation.items": 2,
}
EXAMPLES: Keys = COMMON | {"data.source": "inputs/examples.jsonl", "evaluation.items": 3}
PAIRS: Keys = COMMON | {"data.source": "inputs/pairs.jsonl", "evaluation.items": 3}
CRITIC: Keys = {"critic.optimizer.learning_rate": 1e-3}
COST: Keys = {
    "cost.functions": ["inputs/rewards.py:cost"],
    "pretraining.source": "inputs/examples.jsonl",
    "cost_critic.optimizer.learning_rate": 1e-3,
}
SCORER: Keys = {"reward.model": "inputs/scorer", "reward.functions": []}
SCORERS: Keys = {"reward.model": "inputs/scorer", "cost.model": "inputs/other_scorer"}


def _flow(base: Keys, algorithm: str, **options: Any) -> Keys:
    return base | {"algorithm": algorithm, "options": options}


FLOWS: dict[str, Keys] = {
    "sft": _flow(EXAMPLES, "sft", mini_batches=2),
    "reward_model": _flow(PAIRS, "reward_model", mini_batches=2),
    "dpo": _flow(PAIRS, "dpo", mini_batches=2, epochs=2),
    "grpo": _flow(ROLLOUT, "grpo", kl_coef=0.05, mini_batches=2),
    "dapo": _flow(ROLLOUT, "grpo", clip_high=0.28, aggregation="token-mean", overlong_buffer_tokens=2, epochs=2),
    "dapo-draws": _flow(ROLLOUT, "grpo", dynamic_sampling=True, max_sampling_rounds=2, mask_truncated=True)
    | {"evaluation.items": 0, "sampling.max_response_tokens": 12},
    "gspo": _flow(ROLLOUT, "grpo", ratio="sequence-mean", clip_low=3e-4, clip_high=4e-4, mini_batches=2),
    "dr_grpo": _flow(ROLLOUT, "grpo", scale_rewards=False, aggregation="seq-mean-token-sum-norm", dual_clip=3.0),
    "rloo": _flow(ROLLOUT, "rloo", kl_coef=0.05, kl_estimator="k1"),
    "rloo-loss": _flow(ROLLOUT, "rloo", kl_coef=0.05, kl_in="loss", kl_estimator="k2", normalize_advantages=True),
    "reinforce_pp": _flow(ROLLOUT, "reinforce_pp", kl_coef=0.05, mini_batches=2),
    "reinforce_pp-baseline": _flow(
        ROLLOUT, "reinforce_pp", group_baseline=True, kl_coef=0.05, kl_in="loss", kl_estimator="k2"
    ),
    "remax": _flow(ROLLOUT, "remax", kl_coef=0.05) | {"samples_per_prompt": 1, "prompts_per_step": 6},
    "ppo": _flow(ROLLOUT | CRITIC, "ppo", kl_coef=0.05, mini_batches=2, target_kl=0.1, reward_norm="mean-std"),
    "ppo-scored": _flow(ROLLOUT | CRITIC | SCORER, "ppo", kl_coef=0.05, mini_batches=2),
    "safe_rlhf": _flow(ROLLOUT | CRITIC | COST, "safe_rlhf", ptx_coef=0.5, kl_coef=0.02, cost_window=8),
    "safe_rlhf-scored": _flow(ROLLOUT | CRITIC | COST | SCORERS, "safe_rlhf", ptx_coef=0.5, kl_coef=0.02),
    "own": _flow(ROLLOUT | CRITIC, "inputs/flow.py:baseline_flow"),
    "kto": _flow(PAIRS | {"data.seed": 1, "prompts_per_step": 6}, "kto", beta=1.0, mini_batches=2, epochs=2),
    "distill": _flow(
        ROLLOUT | {"reward.functions": [], "reference.model": "inputs/qwen2"}, "distill", top_k=8, beta=0.5
    ),
}
GRPO, PPO, SAFE, OWN = FLOWS["grpo"], FLOWS["ppo"], FLOWS["safe_rlhf"], FLOWS["own"]


@dataclass(frozen=True)
class Case:
    """A run.

    plan: call → where, `"0,1 tp2 | 2 after=drop"` (see `tests.runs.plan_files`); or `"split 4"`; None: one process.
    stops: it is stopped after so many steps each, and resumed; under `plans[i]` from the i-th stop on, where these are.
    kills: SIGKILL ends it as soon as so many steps are in its log, then it is resumed.
    begun: a folder of `checkpoints/`, in which the run was begun; it is copied and resumed.
    stages: it is a recipe of several stages, each a run.
    """

    keys: Keys
    plan: str | dict[str, str] | None = None
    stops: tuple[int, ...] = ()
    plans: tuple[str | dict[str, str] | None, ...] = ()
    kills: tuple[int, ...] = ()
    begun: str | None = None
    stages: Mapping[str, Keys] = field(default_factory=dict)
    quick: bool = False


CASES: dict[str, Case] = {}
for _name, _keys in FLOWS.items():
    for _dtype in ("float64", "float32", "bfloat16"):
        CASES[f"{_name}.{_dtype}"] = Case(_keys | {"dtype": _dtype}, quick=True)

_F32: Keys = {"dtype": "float32"}
_BF16: Keys = {"dtype": "bfloat16"}
_F64: Keys = {"dtype": "float64"}
_LORA: Keys = {"lora.rank": 2}
_SAVING: Keys = {"checkpoint.every": 1}
LINEAR: Keys = {"optimizer.schedule": "linear", "optimizer.warmup_steps": 1, "optimizer.weight_decay": 0.1}

ONE_PROCESS: dict[str, Case] = {
    "lora.grpo.float64": Case(GRPO | _LORA | _F64),
    "lora.grpo.float32": Case(GRPO | _LORA | _F32),
    "lora.grpo.bfloat16": Case(GRPO | _LORA | _BF16),
    "lora.dpo.float32": Case(FLOWS["dpo"] | _LORA | _F32),
    "lora.ppo.bfloat16": Case(PPO | _LORA | _BF16),
    "lora.sft.bfloat16": Case(FLOWS["sft"] | _LORA | _BF16),
    "family.gemma2": Case(GRPO | _F32 | {"model": "inputs/gemma2"}),
    "family.qwen3_moe": Case(GRPO | _F32 | {"model": "inputs/qwen3_moe"}),
    "family.qwen2.bfloat16": Case(GRPO | _BF16 | {"model": "inputs/qwen2"}),
    "option.recomputed": Case(GRPO | _F32 | {"checkpoint_activations": True}),
    "option.linear": Case(GRPO | _F32 | LINEAR),
    "option.exact": Case(GRPO | _F32 | {"sampling.exact": True}),
    "option.exact.bfloat16": Case(GRPO | _BF16 | {"sampling.exact": True}),
    "option.engine_logprobs": Case(_flow(ROLLOUT, "grpo", old_logprobs="engine", kl_coef=0.05, mini_batches=2) | _BF16),
    "option.cooler": Case(GRPO | _BF16 | {"sampling.temperature": 0.7}),
    "option.stop": Case(GRPO | _F32 | {"sampling.stop": ["1", "a"], "sampling.max_response_tokens": 20}),
    "option.preempted": Case(
        GRPO | _F32 | {"sampling.max_response_tokens": 24, "sampling.kv_tokens": 320, "sampling.max_prefill_tokens": 16}
    ),
    "option.prefixes": Case(GRPO | _F32 | {"sampling.prefix_cache_tokens": 256, "sampling.max_running": 3}),
    "option.evaluated_at_random": Case(
        GRPO
        | _F32
        | {"evaluation.temperature": 0.7, "evaluation.functions": ["inputs/rewards.py:cost"], "evaluation.every": 1}
    ),
    "stopped.grpo.float32": Case(GRPO | _F32 | _SAVING, stops=(1, 2)),
    "stopped.ppo.bfloat16": Case(PPO | _BF16 | _SAVING, stops=(2,)),
    "stopped.safe_rlhf.float64": Case(SAFE | _F64 | _SAVING, stops=(1,)),
    "stopped.dapo_draws.float32": Case(FLOWS["dapo-draws"] | _F32 | _SAVING, stops=(2,)),
    "stopped.lora.bfloat16": Case(GRPO | _LORA | _BF16 | _SAVING, stops=(2,)),
    "stopped.sft.bfloat16": Case(FLOWS["sft"] | _BF16 | _SAVING, stops=(2,)),
    "killed.grpo.bfloat16": Case(GRPO | _BF16 | _SAVING, kills=(1, 2)),
    "killed.ppo.float32": Case(PPO | _F32 | _SAVING, kills=(2,)),
    "stages.film.float32": Case(
        COMMON | _F32,
        stages={
            "sft": {"algorithm": "sft", "data": {"source": "inputs/examples.jsonl"}, "lora": {"rank": 2}},
            "reward_model": {
                "algorithm": "reward_model",
                "model": "@sft",
                "data": {"source": "inputs/pairs.jsonl"},
            },
            "policy": {
                "algorithm": "ppo",
                "model": "@sft",
                "data": {"source": "inputs/prompts.jsonl"},
                "reward": {"model": "@reward_model"},
                "samples_per_prompt": 2,
                "sampling": {"max_response_tokens": 6},
                "critic": {"optimizer": {"learning_rate": 1e-3}},
            },
        },
    ),
}
_SLOW_EVEN_ALONE = {"killed.grpo.bfloat16", "killed.ppo.float32", "stages.film.float32"}
CASES |= {name: Case(**{**vars(case), "quick": name not in _SLOW_EVEN_ALONE}) for name, case in ONE_PROCESS.items()}

MIXED: dict[str, str] = {
    "actor.generate": "0,1,2,3 dp4",
    "actor.train": "0,1,2,3 dp2 pp2",
    "actor.logprobs": "2,3 tp2",
    "ref.logprobs": "0",
    "critic.train": "2,3 dp2",
    "critic.values": "1",
}
LEAVING: dict[str, str] = {
    "actor.generate": "0,1,2,3 dp4 after=drop",
    "actor.train": "0,1,2,3 dp2 pp2 after=offload",
    "actor.logprobs": "2,3 tp2 after=drop",
    "ref.logprobs": "0 after=offload",
    "critic.train": "2,3 dp2 after=offload",
    "critic.values": "1 after=offload",
}
NOTHING_STAYS: dict[str, str] = {
    "actor.generate": "0,1 pp2 after=drop",
    "actor.train": "0,1 tp2 after=offload",
    "ref.logprobs": "0,1 dp2 after=offload",
}
TP2: dict[str, str] = {"actor.generate": "0,1 dp2", "actor.train": "0,1 tp2", "ref.logprobs": "0,1 pp2"}
TOGETHER: dict[str, str] = {"actor.generate": "0,1 tp2", "actor.train": "0,1 pp2", "ref.logprobs": "1"}
PP2: dict[str, str] = {"actor.generate": "1", "actor.train": "0,1 pp2 schedule=gpipe", "ref.logprobs": "1,0 dp2"}

_ONE_GROUP: Keys = {"sampling.decode_groups": 1}
"""Stages that decode all samples in one step, as those did that the record was made by: rows of other products round
otherwise."""

CASES |= {
    # One process, but led as a plan is.
    "plan.nothing_stays-1": Case(
        GRPO | _F32,
        dict.fromkeys(("actor.generate", "actor.train", "ref.logprobs"), "0 after=offload"),
        quick=True,
    ),
    "plan.grpo-colocated-2": Case(GRPO | _F32, "colocated 2"),
    "plan.grpo-split-2": Case(GRPO | _BF16, "split 2"),
    "plan.grpo-tp2": Case(GRPO | _F64, TP2, quick=True),
    "plan.grpo-tp2.bfloat16": Case(GRPO | _BF16, TP2),
    "plan.grpo-generates-tp2": Case(GRPO | _F32, TOGETHER),
    "plan.grpo-generates-pp2": Case(
        GRPO | _F64 | _ONE_GROUP, {"actor.generate": "0,1 pp2", "actor.train": "0", "ref.logprobs": "0,1 tp2"}
    ),
    "plan.grpo-pp2-gpipe": Case(GRPO | _F32, PP2),
    "plan.grpo-generates-dp2tp2": Case(
        GRPO | _F32,
        {"actor.generate": "0,1,2,3 dp2 tp2", "actor.train": "0,1,2,3 dp2 pp2", "ref.logprobs": "1"},
    ),
    "plan.grpo-generates-tp2pp2": Case(
        GRPO | _F64 | _ONE_GROUP,
        {"actor.generate": "0,1,2,3 tp2 pp2", "actor.train": "2,3 tp2", "ref.logprobs": "0,1 dp2"},
    ),
    "plan.grpo-dp2tp2": Case(
        GRPO | _BF16, {"actor.generate": "0,1,2,3 dp4", "actor.train": "0,1,2,3 dp2 tp2", "ref.logprobs": "3"}
    ),
    "plan.grpo-dp3-of-4": Case(
        GRPO | _F64, {"actor.generate": "0,1,2,3 dp4", "actor.train": "1,2,3 dp3", "ref.logprobs": "0"}
    ),
    "plan.grpo-instances": Case(
        GRPO | _F32, {"actor.generate": "2 | 0,1 tp2", "actor.train": "0,1,2 dp3", "ref.logprobs": "2"}
    ),
    "plan.grpo-nothing_stays-2": Case(GRPO | _BF16 | _ONE_GROUP, NOTHING_STAYS),
    "plan.lora-dp2": Case(
        GRPO | _F32 | _LORA, {"actor.generate": "0,1 dp2", "actor.train": "1,0 dp2", "ref.logprobs": "0,1 dp2"}
    ),
    "plan.dapo_draws-tp2": Case(FLOWS["dapo-draws"] | _F64, {"actor.generate": "0,1 tp2", "actor.train": "0,1 pp2"}),
    "plan.remax-tp2": Case(FLOWS["remax"] | _F64, TP2),
    "plan.ppo-split-2": Case(PPO | _F32, "split 2"),
    "plan.ppo-standalone-4": Case(PPO | _BF16, "standalone 4"),
    "plan.ppo-mixed-4": Case(PPO | _F32, MIXED),
    "plan.ppo-leaving-4": Case(PPO | _F64, LEAVING),
    "plan.ppo-instances-4": Case(
        PPO | _F32 | _ONE_GROUP,
        {
            "actor.generate": "0 | 2,1 pp2 | 3",
            "actor.train": "0,1 tp2",
            "ref.logprobs": "3",
            "critic.train": "2,3 dp2",
            "critic.values": "2,3 dp2",
        },
    ),
    "plan.ppo-scored-while-generating-3": Case(
        PPO | _F64,
        {
            "actor.generate": "2 after=offload",
            "actor.train": "2 after=offload",
            "ref.logprobs": "0,1 tp2 after=offload",
            "critic.train": "0,1 tp2 after=offload",
            "critic.values": "1 after=drop",
        },
    ),
    "plan.ppo-judged-3": Case(
        FLOWS["ppo-scored"] | _F32,
        {
            "actor.generate": "1,2 dp2",
            "actor.train": "1,2 tp2",
            "ref.logprobs": "1",
            "critic.train": "0",
            "critic.values": "0",
            "reward.score": "2",
        },
    ),
    "plan.safe-mixed-4": Case(
        SAFE | _F32,
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
    "plan.safe-scored-split-4": Case(FLOWS["safe_rlhf-scored"] | _BF16, "split 4"),
    "plan.own-nothing_stays-2": Case(
        OWN | _F64,
        {
            "actor.generate": "0,1 dp2 after=drop",
            "actor.train": "0,1 pp2 after=offload",
            "actor.logprobs": "1 after=offload",
            "ref.logprobs": "0,1 tp2 after=offload",
            "critic.train": "0 after=offload",
            "critic.values": "0,1 dp2 after=drop",
        },
    ),
    "plan.dpo-tp2": Case(FLOWS["dpo"] | _F32, {"actor.train": "1,0 tp2", "ref.logprobs": "0,1 dp2"}),
    "plan.reward_model-tp2pp2": Case(FLOWS["reward_model"] | _F32, {"reward.train": "2,3,1,0 tp2 pp2"}),
    "plan.sft-dp2": Case(FLOWS["sft"] | _BF16, {"actor.train": "0,1 dp2"}, quick=True),
    "plan.sft-dp2tp2": Case(FLOWS["sft"] | _F64, {"actor.train": "1,0,2,3 dp2 tp2"}),
    "plan.stopped-tp2": Case(GRPO | _F32 | _SAVING, TP2, stops=(2,)),
    "plan.stopped-leaving-4": Case(PPO | _BF16 | _SAVING, LEAVING, stops=(1,)),
    "plan.stopped-under-others": Case(PPO | _F64 | _SAVING, "split 2", stops=(1, 2), plans=("colocated 2", None)),
}

# Runs whose first two steps were made by the sources of the record: checkpoints of their form go on being read.
BEGUN_KEYS: dict[str, tuple[Keys, str | dict[str, str] | None]] = {
    "ppo-1": (PPO | _F32 | _SAVING | {"model": "inputs/small"}, None),
    "lora-1": (GRPO | _BF16 | _LORA | _SAVING | {"model": "inputs/small"}, None),
    "grpo-tp2": (GRPO | _BF16 | _SAVING | {"model": "inputs/small"}, TP2 | {"ref.logprobs": "0,1 dp2"}),
}
"""Name in `checkpoints/` → keys, plan."""
BEGUN_STEPS = 2
CASES |= {
    "begun.ppo": Case(BEGUN_KEYS["ppo-1"][0], begun="ppo-1", quick=True),
    "begun.lora": Case(BEGUN_KEYS["lora-1"][0], begun="lora-1", quick=True),
    "begun.grpo-tp2": Case(*BEGUN_KEYS["grpo-tp2"], begun="grpo-tp2", quick=True),
    "begun.ppo-on-2": Case(BEGUN_KEYS["ppo-1"][0], "split 2", begun="ppo-1"),
    "begun.grpo-tp2-on-1": Case(BEGUN_KEYS["grpo-tp2"][0], None, begun="grpo-tp2", quick=True),
}
