"""Recipes that nobody thought of, and ways to run them that must change nothing: of all options that go together."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.runs import random_flows as flows
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

def fails_of_some(completions, **columns):
    if sum(map(len, completions)) % 3 == 1:
        raise ValueError("not of these")
    return [0.1 * len(text) for text in completions]

def reply_or_fail(messages, **columns):
    if len(messages[-1]["content"]) % 7 == 1:
        raise ValueError("no reply")
    return reply(messages)

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
BUILT_IN = (*REWARDED, "distill")
"""Those that draw."""
ROLLOUTS = (*BUILT_IN, *flows.OF_FILES)
ON_PAIRS = ("dpo", "kto", "reward_model")
GIVEN = (*ON_PAIRS, "sft")
"""Those that read their samples."""
ALGORITHMS = (*ROLLOUTS, "grpo", "ppo", *GIVEN)
SCORED = (*REWARDED, flows.ATTEMPTED, flows.DEMONSTRATED, flows.TOLD, flows.TRACKED)


@dataclass(frozen=True)
class Draw:
    """Keys that are set together, in some of the recipes of some algorithms; `options.KEY` is one of the options."""

    chance: float
    among: tuple[dict[str, Any], ...]
    of: Collection[str] = ()
    """Empty: of all."""

    def drawn(self, chance: random.Random, algorithm: str) -> dict[str, Any]:
        take, keys = chance.random() < self.chance, chance.choice(self.among)
        return keys if take and (not self.of or algorithm in self.of) else {}


def one_of(key: str, *values: Any) -> tuple[dict[str, Any], ...]:
    return tuple({key: value} for value in values)


TURNS = {
    "turns.reply": "PLACE/replies.py:reply",
    "sampling.max_response_tokens": 100,
    "sampling.stop_token_ids": [2, *range(3, 300, 6)],
}
AHEAD = (
    {"max_staleness": 1},
    {"max_staleness": 2},
    {"max_staleness": 1, "partial_rollout": "recompute", "tokens_per_version": 3},
    {"max_staleness": 2, "partial_rollout": "keep", "tokens_per_version": 4},
    {"max_staleness": 2, "partial_rollout": "recompute", "tokens_per_version": 7},
)
CALLS = tuple(
    {"model": f"PLACE/{name}", "data.source": "PLACE/calls.jsonl", "data.chat_template_kwargs": {"mark": mark}}
    for name in flows.WITH_TOOLS
    for mark in ("!", "")
)
DREW = {"reward.functions": None}
WHAT = (
    Draw(1, one_of("steps", 2, 3, 4)),
    Draw(1, one_of("prompts_per_step", 2, 3, 5, 6)),
    Draw(1, one_of("seed", 0, 1, 7)),
    Draw(1, one_of("samples_per_prompt", 2, 3, 4), ROLLOUTS),
    Draw(1, one_of("sampling.max_response_tokens", 5, 12, 30), ROLLOUTS),
    Draw(0.6, one_of("sampling.stop_token_ids", [*range(3, 300, 7)], [*range(3, 300, 30)]), ROLLOUTS),
    Draw(0.3, one_of("sampling.temperature", 0.8), ROLLOUTS),
    Draw(0.3, ({"sampling.top_p": 0.9}, {"sampling.top_k": 20, "sampling.min_p": 0.1}), ROLLOUTS),
    Draw(0.3, ({**TURNS, "turns.max_turns": 2}, {**TURNS, "turns.max_turns": 3}), ROLLOUTS),
    Draw(0.4, AHEAD, ROLLOUTS),
    Draw(1, one_of("reward.functions", ["PLACE/replies.py:by_ids"]), SCORED),
    Draw(0.2, one_of("reward.functions", ["PLACE/replies.py:sevens_of_some", "PLACE/replies.py:by_ids"]), SCORED),
    Draw(0.3, ({"reward.model": "PLACE/scorer"}, TWO_MODELS), SCORED),
    Draw(0.6, one_of("options.mini_batches", 2, 3), BUILT_IN),
    Draw(0.4, one_of("options.epochs", 2), BUILT_IN),
    Draw(0.6, one_of("options.kl_coef", 0.05), REWARDED),
    Draw(0.2, ({"options.kl_coef": 0.05, "options.kl_in": "reward"},), ("grpo", "rloo", "reinforce_pp", "ppo")),
    Draw(0.3, one_of("options.critic_warmup_steps", 1), WITH_CRITIC),
    Draw(0.3, ({"options.kl_coef": 0.05, "options.target_kl": 0.1, "options.kl_horizon": 50},), ("ppo",)),
    Draw(0.3, one_of("options.reward_norm", "std", "mean-std"), ("ppo",)),
    Draw(0.3, (*one_of("options.missing_eos_penalty", 0.5), {"options.whiten_rewards": True}), ("ppo",)),
    Draw(0.3, one_of("options.credit", "turn"), WITH_CRITIC),
    Draw(0.3, one_of("options.multi_objective_aggregation", "normalize_then_sum"), ("grpo",)),
    Draw(0.3, one_of("options.aggregation", "token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"), BUILT_IN),
    Draw(0.3, one_of("options.entropy_coef", 0.02), REWARDED),
    Draw(0.4, ({"options.dual_clip": 3.0}, {"options.off_policy_mask_threshold": 1e-3}), REWARDED),
    Draw(0.4, (*one_of("options.correction", "icepop", "seq_mask"), {"options.old_logprobs": "engine"}), REWARDED),
    Draw(0.3, one_of("options.ratio", "sequence-mean", "sequence-product"), ("grpo",)),
    Draw(0.3, one_of("options.mask_truncated", True), ("grpo",)),
    Draw(0.3, ({"options.dynamic_sampling": True, "options.max_sampling_rounds": 3},), ("grpo",)),
    Draw(0.3, one_of("options.overlong_buffer_tokens", 4), ("grpo",)),
    Draw(0.5, one_of("options.group_baseline", True), ("reinforce_pp",)),
    Draw(0.3, ({"options.ptx_coef": 0.3, "pretraining.source": "PLACE/examples.jsonl"},), REWARDED),
    Draw(1, ({"options.ptx_coef": 0.5, "options.cost_window": 8},), ("safe_rlhf",)),
    Draw(1, ({"reference.model": "PLACE/teacher", **DREW},), ("distill",)),
    Draw(0.7, one_of("options.top_k", 3, 8, 300), ("distill", flows.TOLD, flows.SHOWN)),
    Draw(0.7, one_of("options.beta", 0, 0.3), ("distill", flows.TOLD, flows.SHOWN)),
    Draw(1, ({"data.source": "PLACE/rows.jsonl"},), flows.OF_FILES),
    Draw(1, (DREW,), (flows.JUDGED, flows.SHOWN)),
    Draw(0.5, one_of("options.own", True), (flows.JUDGED,)),
    Draw(0.5, one_of("options.verdicts", 2), (flows.JUDGED,)),
    Draw(0.3, one_of("judge.model", "PLACE/teacher"), (flows.JUDGED,)),
    Draw(0.5, one_of("options.with_next", True), (flows.ATTEMPTED,)),
    Draw(1, ({"pretraining.source": "PLACE/rows.jsonl"},), (flows.DEMONSTRATED,)),
    Draw(0.3, ({"options.mix": "luffy"},), (flows.DEMONSTRATED,)),
    Draw(0.5, one_of("options.weights", "one", "entropy"), (flows.DEMONSTRATED,)),
    Draw(0.5, one_of("options.live", True), (flows.TOLD, flows.SHOWN)),
    Draw(1, one_of("options.success", 0.5), (flows.TOLD,)),
    Draw(1, one_of("options.advantage", "maxrl", "pass_at_k", "best", "tracked"), (flows.TRACKED,)),
    Draw(0.4, one_of("options.mini_batches", 2), (flows.JUDGED, flows.DEMONSTRATED, flows.TOLD, flows.TRACKED)),
    Draw(0.5, one_of("options.loss_type", "ipo", "hinge"), ("dpo",)),
    Draw(0.5, one_of("options.mini_batches", 2), (*ON_PAIRS, "sft")),
    Draw(0.35, one_of("model", *(f"PLACE/{name}" for name in flows.FAMILIES))),
    Draw(0.25, CALLS, (*BUILT_IN, flows.JUDGED, flows.ATTEMPTED)),
    Draw(0.3, one_of("sampling.stop", ["7"], ["e", "12", "\n"]), ROLLOUTS),
    Draw(0.5, one_of("optimizer.router_aux_loss_coef", 0.02)),
    Draw(0.6, one_of("sampling.router_replay", True), ROLLOUTS),
    Draw(0.25, one_of("lora.rank", 1, 4)),
    Draw(0.2, one_of("reference.sync_every", 2), ("dpo", "kto", *BUILT_IN, flows.JUDGED)),
    Draw(0.4, ({"evaluation.items": 3, "evaluation.every": 1}, {"evaluation.items": 3})),
    Draw(0.3, ({"optimizer.schedule": "cosine", "optimizer.warmup_steps": 1},)),
    Draw(0.3, one_of("optimizer.weight_decay", 0.1)),
    Draw(0.3, one_of("optimizer.max_grad_norm", 0.05)),
)
"""What is trained."""
HOW = (
    Draw(1, one_of("micro_batch_tokens", 150, 400, 4096)),
    Draw(0.3, one_of("checkpoint_activations", True, False)),
    Draw(0.2, one_of("sequence_parallel", True)),
    Draw(0.3, one_of("optimizer.shard_gradients", True)),
    Draw(0.7, one_of("sampling.speculation", "auto", "adaptive", 2, 5), ROLLOUTS),
    Draw(0.2, ({"sampling.speculation": "adaptive", "sampling.draft_model": "PLACE/draft"},), ROLLOUTS),
    Draw(0.7, one_of("sampling.max_running", 2, 5), ROLLOUTS),
    Draw(0.4, one_of("sampling.max_prefill_tokens", 5, 17, 60), ROLLOUTS),
    Draw(0.3, one_of("sampling.kv_tokens", 320, 512), ROLLOUTS),
    Draw(0.3, one_of("sampling.prefix_cache_tokens", 64, 300), ROLLOUTS),
    Draw(0.5, one_of("fusion", "off", 0.4), ROLLOUTS),
    Draw(0.5, one_of("rebalance", "auto"), ROLLOUTS),
)
"""How it is run: none of these changes a result."""


SHARING = ("optimizer.shard_weights", "critic.optimizer.shard_weights")
"""Keys of `sharing`."""
ENDINGS = ("kill", "rank", "interrupt")
"""SIGKILL to the command, or to one of its processes; SIGINT to the command."""


@dataclass(frozen=True)
class Drawn:
    flow: Flow
    ways: dict[str, Any]
    plan: str | dict[str, str]
    ends: int | None
    """Its process is killed when so many steps are recorded; None: it is not."""
    then: str | dict[str, str]
    """The plan that it goes on with."""
    by: str = "kill"
    """How it is ended, one of `ENDINGS`."""


PlanOf = Callable[[random.Random, str, dict[str, Any]], str | dict[str, str]]
"""Draws a plan for an algorithm, with the keys of what is trained."""
Fit = Callable[[str, dict[str, Any], dict[str, Any]], None]
"""Takes away what an algorithm refuses, of the keys of what is trained and of how."""


def random_recipe(seed: int, *, fits: bool = True) -> Drawn:
    """A recipe, and a way to run it. PLACE in a value stands for the folder of runs that are compared.

    Args:
        fits: whether its keys go together; else whatever comes, which may be refused.
    """
    fit = leave_what_goes_together if fits else None
    return sharing(drawn_by(random.Random(f"recipe {seed}"), (WHAT, HOW), _plan, fit=fit), f"recipe {seed}", fits=fits)


def drawn_by(
    chance: random.Random,
    among: tuple[Sequence[Draw], Sequence[Draw]],
    plan_of: PlanOf,
    algorithms: Sequence[str] = ALGORITHMS,
    *,
    fit: Fit | None,
) -> Drawn:
    """As `random_recipe`, of these keys of what is trained and of how, of these plans and algorithms."""
    algorithm = chance.choice(algorithms)
    what, how = ({k: v for draw in draws for k, v in draw.drawn(chance, algorithm).items()} for draws in among)
    if algorithm in GIVEN:
        source = f"PLACE/{'examples' if algorithm == 'sft' else 'pairs'}.jsonl"
        what |= NO_ROLLOUT | {"data.source": what.get("data.source", source)}
    if fit is not None:
        fit(algorithm, what, how)
    plan, then = (plan_of(chance, algorithm, what) for _ in range(2))
    ends = chance.randrange(1, what["steps"]) if chance.random() < 0.4 else None
    options = {key.removeprefix("options."): value for key, value in what.items() if key.startswith("options.")}
    keys = {key: value for key, value in what.items() if not key.startswith("options.")}
    return Drawn((algorithm, keys | {"options": options}), how, plan, ends, then)


def sharing(drawn: Drawn, seed: str, *, fits: bool = True) -> Drawn:
    """The same; some with weights that ranks of dp share. This draw is its own: all else that a seed says stays.

    Args:
        fits: as of `random_recipe`.
    """
    chance = random.Random(f"shares of {seed}")
    ways = {key: True for key in SHARING if chance.random() < 0.4}
    if drawn.flow[0] not in WITH_CRITIC:
        ways.pop("critic.optimizer.shard_weights", None)
    if fits and ways:
        plans = [text for plan in (drawn.plan, drawn.then) if isinstance(plan, dict) for text in plan.values()]
        if any("schedule=both" in text for text in plans):  # a role with shared weights trains by itself
            return drawn
        if drawn.ways.get("fusion", "off") != "off":  # and scores by itself
            ways["fusion"] = "auto"
    return replace(drawn, ways=drawn.ways | ways)


def leave_what_goes_together(algorithm: str, what: dict[str, Any], how: dict[str, Any]) -> None:
    """Takes away what is refused beside something else."""
    if "turns.reply" in what:
        what |= TURNS
        without(how, "fusion", "rebalance")
    if "lora.rank" in what or "ref.logprobs" not in calls_of(algorithm, what):
        without(what, "reference.sync_every")
    if algorithm in (flows.JUDGED, flows.ATTEMPTED, "remax"):  # they generate more than once
        without(what, "partial_rollout", "tokens_per_version")
    if "partial_rollout" in what:
        without(how, "fusion", "rebalance")
        without(what, "options.dynamic_sampling", "options.max_sampling_rounds")
    if what.get("partial_rollout") == "keep":
        without(how, "sampling.kv_tokens")
    _leave_what_goes_with_options(algorithm, what)
    _leave_what_a_model_can(algorithm, what, how)


def _leave_what_goes_with_options(algorithm: str, what: dict[str, Any]) -> None:
    if "options.own" in what:
        without(what, "judge.model")
    if what.get("options.mix") == "luffy":
        without(what, "evaluation.items", "evaluation.every", "options.weights")
    if what.get("options.advantage") == "tracked":
        what["samples_per_prompt"] = None
    if algorithm not in WITH_CRITIC:
        without(what, "critic.model")
    if what.get("options.credit") == "turn" or "options.whiten_rewards" in what:
        without(what, "options.reward_norm")
    if len(what.get("reward.functions") or ()) + len(what.get("reward.model", ())) < 2:
        without(what, "options.multi_objective_aggregation")
    if "options.multi_objective_aggregation" in what:
        without(what, "options.kl_in", "options.dynamic_sampling", "options.max_sampling_rounds")
        without(what, "options.overlong_buffer_tokens")
    if "options.ptx_coef" in what and what.get("options.mini_batches", 1) > what["prompts_per_step"]:
        what["options.mini_batches"] = 2


def _leave_what_a_model_can(algorithm: str, what: dict[str, Any], how: dict[str, Any]) -> None:
    family = flows.family_of(what)
    several_draw = algorithm == flows.ATTEMPTED or (algorithm == flows.JUDGED and "options.own" not in what)
    if family not in flows.EXPERTS or several_draw:
        without(what, "sampling.router_replay")
    if family not in flows.BALANCED:
        without(what, "optimizer.router_aux_loss_coef")
    if family in flows.KEEP_STATE:
        without(how, "sampling.speculation", "sampling.draft_model", "sampling.prefix_cache_tokens", "rebalance")
        if what.get("partial_rollout") == "keep":
            what["partial_rollout"] = "recompute"


def without(keys: dict[str, Any], *names: str) -> None:
    for name in names:
        keys.pop(name, None)


def calls_of(algorithm: str, what: dict[str, Any]) -> Sequence[str]:
    calls = ["reward.train" if algorithm == "reward_model" else "actor.train"]
    if algorithm not in GIVEN:
        calls.append("actor.generate")
    critics = {"ppo": ["critic"], "safe_rlhf": ["critic", "cost_critic"]}.get(algorithm, [])
    asked = ("train", "values", "score") if "options.bootstrap_truncated" in what else ("train", "values")
    calls += [f"{critic}.{call}" for critic in critics for call in asked]
    if algorithm in ("kto", "safe_rlhf") or "options.kl_coef" in what:
        calls.append("ref.logprobs")
    if algorithm == "dpo" and "options.reference_free" not in what:
        calls.append("ref.logprobs")
    if algorithm == "distill" or (algorithm in (flows.TOLD, flows.SHOWN) and "options.live" not in what):
        calls.append("ref.top_logprobs")
    if algorithm == flows.JUDGED and "options.own" not in what:
        calls.append("judge.generate")
    calls += flows.CALLS.get(algorithm, ())
    if "reward.model" in what:
        calls += ["reward.score", "reward_2.score"][: 2 if what["reward.model"] == TWO_MODELS["reward.model"] else 1]
    return calls


def _plan(chance: random.Random, algorithm: str, what: dict[str, Any]) -> str | dict[str, str]:
    calls = tuple(calls_of(algorithm, what))
    roles = {call.partition(".")[0] for call in calls}
    if chance.random() < 0.35:
        named = ["colocated 2", *(["split 2"] if len(roles) > 1 else [])]
        return chance.choice(
            [*named, "standalone 3"] if 1 < len(roles) <= 3 and algorithm not in WITH_CRITIC else named
        )
    keeps_state = flows.family_of(what) in flows.KEEP_STATE
    plan = random_plan(calls, chance.choice((1, 2, 2) if keeps_state else (1, 2, 2, 3)), str(chance.random()))
    if keeps_state or "partial_rollout" in what:
        plan = {call: text for call, text in plan.items() if not call.endswith(" prefill")}
    return plan
