"""Settings of the policy `fusion` by the cost model, computed by hand on a machine of round numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.cost.cluster import ClusterSpec
from plait.cost.drafts import Drafts
from plait.cost.fusion_times import with_fusion_times
from plait.cost.hardware import Device, Link, Software
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.model_costs import ModelCosts
from plait.cost.workload import Workload
from plait.layout.mesh import Layout
from plait.models.shape import ModelShape
from plait.policy.early_scores import APART
from plait.recipes.algorithm import load_flow, trace_algorithm
from plait.recipes.role_models import MODEL_ROLES, REWARD_ROLES
from plait.schedule.fusion_times import FusionTimes
from plait.schedule.plan import Placement, Plan, PolicyChoice

SHAPE = ModelShape(4, 64, 128, 4, 4, 16, 1000, False, 4096, 4 * 64 * 64)
CLUSTER = ClusterSpec(
    1,
    2,
    Device("round", 1e9, 1 << 30, 1e8),
    Link(1e8, 1e-4),
    Link(1e7, 1e-3),
    Link(1e7, 0.0),
    None,
    "round",
    Software(products=0.5, memory=0.5, links=0.5, layer_s=0.0, hop_s=0.0),
)
LENGTHS = SampleLengths(Lengths.fixed(8), Lengths.fixed(8))
FLOW = trace_algorithm(load_flow("ppo"), {}, (*MODEL_ROLES, *REWARD_ROLES))
COSTS = ModelCosts(
    Workload(4, 2, LENGTHS, "bfloat16", micro_batch_tokens=1000, gathers=True),
    dict.fromkeys(FLOW.roles, SHAPE),
    FLOW,
    CLUSTER,
)
SCORES = ("reward.score", "ref.logprobs", "critic.values")


def plan(policies: tuple[PolicyChoice, ...], **ranks: tuple[int, ...]) -> Plan:
    """All on both, but for the calls whose ranks are given (`_` for the dot)."""
    placements = [Placement("actor.generate", "decode", (0, 1), dp=2)]
    for call in SCORES:
        at = ranks.get(call.replace(".", "_"), (0, 1))
        placements.append(Placement(call, "score", at, dp=len(at)))
    return Plan("p", 2, tuple(placements), policies=policies)


def settings(plan: Plan) -> FusionTimes:
    told = with_fusion_times(plan, COSTS).policies[0]
    return FusionTimes.of(told.settings, "plan")


OPEN = (PolicyChoice("fusion"),)


def test_what_models_take_that_score_where_samples_are_generated() -> None:
    """96 tokens a step: 4 prompts and 8 responses of 8 tokens. Each of three models scores on two devices at once."""
    times = settings(plan(OPEN))
    costs = [COSTS.call(call, "score", Layout.on(range(2), dp=2)) for call in SCORES]
    seconds = [cost.seconds for cost in costs]
    assert times.prompt_tokens == 8
    assert times.token_s == pytest.approx(2 * sum(seconds) / 96)
    apart_s = 2 * APART * sum(s * s for s in seconds) / sum(seconds)
    assert times.parts_s == pytest.approx(2 * sum(cost.in_parts_s for cost in costs) + apart_s)
    assert sum(cost.in_parts_s for cost in costs) > 0
    assert (times.step_s, times.more_s, times.step_tokens) == COSTS.step_line(
        "actor.generate", Layout.on(range(2), dp=2), 2
    )
    assert 0 < times.more_s < times.step_s


def test_steps_with_drafts_bring_several_tokens() -> None:
    """2.5 of four rows. While all that takes time is to read the weights, a step of one sample takes as long as
    without."""
    drafts = replace(COSTS.workload, drafts=Drafts(2.5, 4.0))
    drafted = with_fusion_times(plan(OPEN), ModelCosts(drafts, COSTS.shapes, FLOW, CLUSTER)).policies[0]
    times = FusionTimes.of(drafted.settings, "plan")
    assert times.step_tokens == 2.5
    assert settings(plan(OPEN)).step_tokens == 1.0
    assert times.step_s * times.step_tokens == pytest.approx(settings(plan(OPEN)).step_s)


def test_a_model_on_one_of_two_devices_counts_once() -> None:
    alone = COSTS.call("ref.logprobs", "score", Layout.on(range(1))).seconds
    both = [COSTS.call(call, "score", Layout.on(range(2), dp=2)).seconds for call in SCORES if call != "ref.logprobs"]
    times = settings(plan(OPEN, ref_logprobs=(1,)))
    assert times.token_s == pytest.approx((alone + 2 * sum(both)) / 96)


def test_what_is_stated_stays_and_other_policies_too() -> None:
    stated = PolicyChoice("fusion", FusionTimes(1.0, 0.5, 0.1, 0.0, 8.0).settings())
    shares = PolicyChoice("shares", (("actor", 0.5),))
    given = plan((stated, shares))
    assert with_fusion_times(given, COSTS) == given
    assert with_fusion_times(replace(given, policies=(shares,)), COSTS).policies == (shares,)


def test_of_batches_that_are_drawn_ahead_what_scores_them_then_is_told_of() -> None:
    (ref,) = (node.id for node in FLOW.nodes if node.call == "ref.logprobs")
    ahead = replace(COSTS.workload, scores_ahead=frozenset({ref}))
    told = with_fusion_times(plan(OPEN), ModelCosts(ahead, COSTS.shapes, FLOW, CLUSTER)).policies
    alone = replace(plan(OPEN), placements=tuple(p for p in plan(OPEN).placements if p.role in ("actor", "ref")))
    assert told == with_fusion_times(alone, COSTS).policies


def test_scores_with_copies_are_not_told_of() -> None:
    """They begin when all samples have ended: a plan tells the same that has no such call."""
    given = plan(OPEN)
    told = with_fusion_times(given, COSTS, copied=("critic",)).policies
    alone = replace(given, placements=tuple(p for p in given.placements if p.call != "critic.values"))
    assert told == with_fusion_times(alone, COSTS).policies
    assert told != with_fusion_times(given, COSTS).policies
