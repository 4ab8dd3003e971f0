"""Recipes of any options on four ranks, of keys and flows that `wide_recipes` leaves out: several sources and what is
put around a prompt, functions that fail, further losses, teachers, adapters of experts, pools that are small."""

from __future__ import annotations

import random
from typing import Any

from plait.algorithms.dpo import SMOOTHED, WITH_MARGIN
from tests.runs import random_flows as flows
from tests.runs import wide_recipes
from tests.runs.random_recipes import (
    AHEAD,
    ALGORITHMS,
    ON_PAIRS,
    REWARDED,
    ROLLOUTS,
    SCORED,
    WITH_CRITIC,
    Draw,
    Drawn,
    calls_of,
    drawn_by,
    one_of,
    sharing,
    without,
)
from tests.runs.wide_recipes import WIDE_HOW, WIDE_WHAT, ended, plan_on_four

MORE = {
    "data.more": [{"source": "PLACE/more_rows.jsonl", "prompt_template": "{question} Say."}],
}
WEIGHED = {
    "data.weight": 2,
    "data.more": [{"source": "PLACE/more_rows.jsonl", "weight": 1, "name": "others", "shuffle": False}],
}
MORE_PAIRS = {"data.more": [{"source": "PLACE/more_pairs.jsonl"}]}
MORE_ROWS = {"data.more": [{"source": "PLACE/more_rows.jsonl"}]}
MORE_EXAMPLES = {"pretraining.more": [{"source": "PLACE/more_rows.jsonl"}]}
FAILING = {"reward.functions": ["PLACE/replies.py:fails_of_some", "PLACE/replies.py:by_ids"], "reward.on_error": "drop"}
FAILS_TO_REPLY = "PLACE/replies.py:reply_or_fail"
FOLLOWED = ("constant_with_warmup", "linear", "polynomial", "inverse_sqrt")
OF_PAIRS = ("sigmoid_norm", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "orpo")
TUNED: dict[str, Any] = {"optimizer.betas": [0.8, 0.95], "optimizer.epsilon": 1e-3, "optimizer.weight_decay": 0.05}
OF_CRITIC = {f"critic.{key}": value for key, value in TUNED.items()}
ALL_SCORED = (*SCORED, *flows.OF_MORE_FILES)
ALL_ROLLOUTS = (*ROLLOUTS, *flows.OF_MORE_FILES)
KL_IN_LOSS = {"options.kl_coef": 0.05, "options.kl_in": "loss", "options.kl_estimator": "k3"}
BROAD_WHAT = (
    *WIDE_WHAT,
    Draw(1, one_of("samples_per_prompt", 2, 3), flows.OF_MORE_FILES),
    Draw(1, one_of("sampling.max_response_tokens", 5, 20), flows.OF_MORE_FILES),
    Draw(0.7, one_of("sampling.stop_token_ids", [*range(3, 300, 7)]), flows.OF_MORE_FILES),
    Draw(1, one_of("reward.functions", ["PLACE/replies.py:by_ids"]), flows.OF_MORE_FILES),
    Draw(0.5, one_of("options.mini_batches", 2), (flows.STUDIED, flows.PAIRED, flows.NEWER)),
    Draw(0.4, one_of("options.epochs", 2), (flows.STUDIED, flows.PAIRED, flows.NEWER)),
    Draw(0.6, one_of("options.with_next", True), (flows.STUDIED,)),
    Draw(0.5, one_of("judge.model", "PLACE/teacher"), (flows.STUDIED,)),
    Draw(1, one_of("options.loss", "topr", "gpg"), (flows.NEWER,)),
    Draw(0.5, one_of("options.uncertain", 0.4), (flows.NEWER,)),
    Draw(0.3, (MORE, WEIGHED), ALL_ROLLOUTS),
    Draw(0.3, (MORE_ROWS,), ("sft",)),
    Draw(0.4, AHEAD, flows.OF_MORE_FILES),
    Draw(0.3, (MORE_PAIRS,), ("dpo", "reward_model")),
    Draw(0.5, (MORE_EXAMPLES,), ALL_ROLLOUTS),
    Draw(0.2, one_of("data.system_prompt", "add"), ALL_ROLLOUTS),
    Draw(0.2, one_of("data.prompt_template", "so {question} tell"), ALL_ROLLOUTS),
    Draw(0.2, one_of("data.examples", [["1 plus 1?", "2"]]), ALL_ROLLOUTS),
    Draw(0.2, one_of("data.shuffle", False)),
    Draw(0.15, ({"prompts_per_step": 13},)),
    Draw(0.2, (FAILING,), ALL_SCORED),
    Draw(0.5, one_of("reward.weights", [0.5, 2.0]), ALL_SCORED),
    Draw(0.3, ({"turns.reply": FAILS_TO_REPLY, "turns.on_error": "drop"},), ALL_ROLLOUTS),
    Draw(0.3, one_of("reference.model", "PLACE/teacher"), (*REWARDED, flows.STUDIED, flows.PAIRED, "dpo", "kto")),
    Draw(0.5, one_of("lora.alpha", 1.0)),
    Draw(0.4, one_of("lora.target_modules", ["all-linear", "experts.down_proj"], ["o_proj", "experts.gate_up_proj"])),
    Draw(0.2, (TUNED,)),
    Draw(0.2, (OF_CRITIC,), WITH_CRITIC),
    Draw(0.3, one_of("critic.optimizer.schedule", "linear", "cosine"), WITH_CRITIC),
    Draw(0.3, tuple({"optimizer.schedule": one, "optimizer.warmup_steps": 2} for one in FOLLOWED)),
    Draw(0.3, ({"options.clip_low": 0.01, "options.clip_high": 0.02},), REWARDED),
    Draw(0.2, (KL_IN_LOSS, KL_IN_LOSS | {"options.weigh_kl_by_ratio": True}), ("grpo", "rloo", "reinforce_pp", "ppo")),
    Draw(
        0.3,
        (
            {"options.correction": "tis", "options.correction_high": 1.2},
            {"options.correction": "seq_tis"},
            {"options.correction": "seq_icepop", "options.correction_low": 0.7, "options.correction_high": 1.4},
            {"options.correction": "geo_mask"},
        ),
        REWARDED,
    ),
    Draw(0.4, one_of("options.scale_rewards", False, "batch"), ("grpo",)),
    Draw(0.5, one_of("options.overlong_penalty", 0.5), ("grpo",)),
    Draw(0.5, one_of("options.normalize_advantages", True), ("rloo",)),
    Draw(0.5, ({"options.gamma": 0.9, "options.lam": 0.7}, {"options.gamma": 0.97, "options.lam": 0.0}), WITH_CRITIC),
    Draw(0.5, one_of("options.value_clip", 0.05, None), WITH_CRITIC),
    Draw(0.4, one_of("options.bootstrap_truncated", True), WITH_CRITIC),
    Draw(0.3, one_of("options.reward_clip", 0.4), WITH_CRITIC),
    Draw(0.3, one_of("options.whiten_advantages", True, False), WITH_CRITIC),
    Draw(0.5, ({"options.cost_threshold": 0.5, "options.lambda_lr": 0.7, "options.lambda_max": None},), ("safe_rlhf",)),
    Draw(0.3, one_of("cost.functions", ["PLACE/replies.py:by_ids", "PLACE/rewards.py:cost"]), ("safe_rlhf",)),
    Draw(0.5, one_of("options.margin", 0.3), ("reward_model", "dpo")),
    Draw(0.5, one_of("options.center_rewards_coefficient", 0.02), ("reward_model",)),
    Draw(0.3, one_of("data.source", "PLACE/margins.jsonl"), ("reward_model",)),
    Draw(0.5, one_of("data.source", "PLACE/labelled.jsonl"), ("kto",)),
    Draw(0.5, ({"options.desirable_weight": 3.0}, {"options.loss_type": "apo_zero_unpaired"}), ("kto",)),
    Draw(0.6, one_of("options.loss_type", *OF_PAIRS[:6]), ("dpo",)),
    Draw(0.4, one_of("options.loss_type", *OF_PAIRS[6:]), ("dpo",)),
    Draw(0.4, one_of("options.label_smoothing", 0.1), ("dpo",)),
    Draw(0.3, one_of("options.reference_free", True), ("dpo",)),
    Draw(0.4, one_of("options.nll_coef", 0.2), ("dpo",)),
    Draw(0.3, ({"options.beta": 0.5},), (*ON_PAIRS[:2], "distill")),
    Draw(0.3, one_of("evaluation.functions", ["PLACE/replies.py:sevens_of_some"]), ALL_ROLLOUTS),
    Draw(0.5, one_of("evaluation.pass_at", [1, 2]), ALL_SCORED),
)
BROAD_HOW = (
    *WIDE_HOW,
    Draw(0.7, one_of("sampling.max_running", 2, 5), flows.OF_MORE_FILES),
    Draw(0.5, one_of("sampling.speculation", "adaptive", 3), flows.OF_MORE_FILES),
    Draw(0.5, one_of("sampling.kv_tokens", 320), flows.OF_MORE_FILES),
    Draw(0.5, one_of("fusion", 0.4), flows.OF_MORE_FILES),
    Draw(0.5, one_of("rebalance", "auto"), flows.OF_MORE_FILES),
    Draw(0.15, one_of("sampling.kv_memory", 1 << 20), ALL_ROLLOUTS),
    Draw(0.2, one_of("sampling.draft_pool_bytes", 1 << 16), ALL_ROLLOUTS),
    Draw(0.2, one_of("sampling.max_prefill_tokens", 1, 3), ALL_ROLLOUTS),
    Draw(0.3, one_of("reward.workers", 2), ALL_SCORED),
    Draw(0.2, one_of("micro_batch_tokens", 1)),
    Draw(0.2, one_of("restarts", 1)),
)
BROAD = (*ALGORITHMS, *flows.OF_MORE_FILES, *flows.OF_MORE_FILES)


def broad_recipe(seed: int) -> Drawn:
    """As `wide_recipe`, of more."""
    chance = random.Random(f"broad recipe {seed}")
    drawn = drawn_by(chance, (BROAD_WHAT, BROAD_HOW), _plan, BROAD, fit=_leave_what_goes_together)
    return sharing(ended(drawn, chance), f"broad recipe {seed}")


def _plan(chance: random.Random, algorithm: str, what: dict[str, Any]) -> str | dict[str, str]:
    """As `plan_on_four`; what scores of one model has one placement, as a plan demands."""
    plan = plan_on_four(chance, algorithm, what)
    first: dict[str, str] = {}
    if isinstance(plan, dict):
        for call, text in plan.items():
            if "generate" not in call and not call.endswith(".train"):
                plan[call] = first.setdefault(call.partition(".")[0], text)
    return plan


def _leave_what_goes_together(algorithm: str, what: dict[str, Any], how: dict[str, Any]) -> None:
    """Takes away what is refused beside something else."""
    reply, targets = what.get("turns.reply"), what.pop("lora.target_modules", None)
    if targets is not None and not any("." in target for target in targets):
        what["lora.target_modules"] = targets
    wide_recipes.leave_what_goes_together(algorithm, what, how)
    if reply == FAILS_TO_REPLY:
        what["turns.reply"] = reply
    elif "turns.on_error" in what:
        without(what, "turns.on_error")
    _leave_what_models_can(algorithm, what, targets)
    _leave_what_data_can(algorithm, what)
    _leave_what_goes_with_options(algorithm, what)
    if "sampling.kv_memory" in how:
        without(how, "sampling.kv_tokens")
    if what.get("partial_rollout") == "keep":
        without(how, "sampling.kv_memory")
    if algorithm == flows.STUDIED:  # it generates twice
        without(what, "partial_rollout", "tokens_per_version")
    if "turns.reply" in what or "partial_rollout" in what:
        without(how, "fusion", "rebalance")


def _leave_what_models_can(algorithm: str, what: dict[str, Any], targets: list[str] | None) -> None:
    has_critic = algorithm in (*WITH_CRITIC, flows.STUDIED)
    is_stacked = flows.family_of(what) in ("qwen3_moe", "gpt_oss", "mixtral")
    if targets and any("." in one for one in targets) and is_stacked and not has_critic and "lora.rank" in what:
        what["lora.target_modules"] = targets
    if "lora.rank" not in what:
        without(what, "lora.alpha")
    if not any(call.startswith("ref.") for call in calls_of(algorithm, what)):
        without(what, "reference.model")
    if "reference.model" in what:
        without(what, "reference.sync_every", "reference.mixup")


def _leave_what_data_can(algorithm: str, what: dict[str, Any]) -> None:
    if what.get("data.source") == "PLACE/calls.jsonl":  # messages
        without(what, "data.prompt_template", "data.examples")
    if algorithm in (flows.DEMONSTRATED, flows.TRACKED):  # they know a prompt by its row
        without(what, "data.more", "data.weight")
    if algorithm == flows.DEMONSTRATED or "options.ptx_coef" not in what:
        without(what, "pretraining.more")
    if what.get("data.source") == "PLACE/margins.jsonl":
        without(what, "data.more")
    if algorithm == flows.ATTEMPTED and "reward.on_error" in what:  # it compares with samples that may be dropped
        what["reward.functions"] = ["PLACE/replies.py:by_ids"]
        without(what, "reward.on_error")
    if len(what.get("reward.functions") or ()) != 2:
        without(what, "reward.weights")
    if "evaluation.items" not in what:
        without(what, "evaluation.functions")
    if "evaluation.samples_per_prompt" not in what or "evaluation.items" not in what:
        without(what, "evaluation.pass_at")


def _leave_what_goes_with_options(algorithm: str, what: dict[str, Any]) -> None:
    if "options.correction" in what:
        without(what, "options.old_logprobs")
    if "options.correction_high" in what and what["options.correction"] not in ("tis", "seq_icepop"):
        without(what, "options.correction_high", "options.correction_low")
    if "options.multi_objective_aggregation" in what:
        without(what, "options.scale_rewards")
    if "options.overlong_buffer_tokens" not in what:
        without(what, "options.overlong_penalty")
    if what.get("options.credit") == "turn":
        without(what, "options.bootstrap_truncated", "options.reward_clip")
    if "options.missing_eos_penalty" in what:
        without(what, "options.bootstrap_truncated")
    if algorithm == "dpo":
        _leave_what_goes_with_loss(what)


def _leave_what_goes_with_loss(what: dict[str, Any]) -> None:
    loss = what.get("options.loss_type", "sigmoid")
    if loss == "exo_pair":
        what["options.label_smoothing"] = 0.1
    if loss == "orpo":
        what["options.reference_free"] = True
    if loss not in SMOOTHED:
        without(what, "options.label_smoothing")
    if loss not in WITH_MARGIN:
        without(what, "options.margin")
    if "options.reference_free" in what:
        without(what, "reference.model", "reference.sync_every", "reference.mixup")
