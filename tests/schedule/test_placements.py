"""Named plans and completed ones, on flows of one's own: no model, no torch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.dataflow import Dataflow, trace
from plait.errors import ConfigError
from plait.layout.mesh import Layout
from plait.schedule.completion import complete
from plait.schedule.named_plans import NAMES, Cut, PlannedModel, named_plan, shares
from plait.schedule.placements import RolePlacement, layouts_of, placements_of
from plait.schedule.plan import Placement, Plan, PolicyChoice
from plait.schedule.training_order import RuleOrder
from tests.schedule.workloads import never

SPEAKS, JUDGES = PlannedModel(scalar=False, num_elements=100), PlannedModel(scalar=True, num_elements=100)


def ppo_like(prompts, actor, critic, ref, reward):
    samples = actor.generate(prompts)
    rewards = reward.score(samples)
    kept, values = ref.logprobs(samples), critic.values(samples)
    actor.train(samples, loss=never, rewards=rewards, kept=kept, values=values)
    critic.train(samples, loss=never, rewards=rewards, epochs=2)


def alone(prompts, actor, reward):
    """Samples twice, scores twice, and trains twice."""
    samples, greedy = actor.generate(prompts), actor.generate(prompts, greedy=True)
    first, second = actor.logprobs(samples), actor.logprobs(greedy)
    actor.train(samples, loss=never, first=first, rewards=reward.score(samples))
    actor.train(greedy, loss=never, second=second)


def fine_tuning(examples, actor):
    actor.train(examples, loss=never)


PPO = trace(ppo_like, roles=("actor", "critic", "ref", "reward"))
ALONE = trace(alone, roles=("actor", "reward"))
SFT = trace(fine_tuning, roles=("actor",))
FOUR = {"actor": SPEAKS, "critic": JUDGES, "ref": SPEAKS}
ONE = {"actor": SPEAKS}


def places(plan: Plan) -> dict[str, tuple[tuple[int, ...], int, int, int]]:
    return {p.call: (p.ranks, p.dp, p.tp, p.pp) for p in plan.placements}


def test_colocated_is_every_call_on_every_device() -> None:
    plan = named_plan("colocated", PPO, FOUR, 3)
    everywhere = ((0, 1, 2), 3, 1, 1)
    calls = ["actor.generate", "ref.logprobs", "critic.values", "actor.train", "critic.train"]
    assert places(plan) == dict.fromkeys(calls, everywhere)
    assert [p.mode for p in plan.placements] == ["decode", "score", "score", "train", "train"]


def test_split_puts_those_that_judge_on_the_other_half() -> None:
    found = places(named_plan("split", PPO, FOUR, 5))
    assert found["actor.generate"] == found["ref.logprobs"] == found["actor.train"] == ((0, 1, 2), 3, 1, 1)
    assert found["critic.values"] == found["critic.train"] == ((3, 4), 2, 1, 1)


def test_split_of_one_model_is_training_and_generation() -> None:
    found = places(named_plan("split", ALONE, ONE, 2))
    assert found["actor.generate"] == found["actor.generate#2"] == ((0,), 1, 1, 1)
    assert found["actor.logprobs"] == found["actor.train"] == found["actor.train#2"] == ((1,), 1, 1, 1)
    with pytest.raises(ConfigError, match=r"`plan` split: the flow `fine_tuning` only trains actor.*take `colocated`"):
        named_plan("split", SFT, ONE, 2)


def test_standalone_gives_every_model_devices_of_its_own_by_its_work() -> None:
    # forwards: actor 3 (generation) + 3 (training), critic 1 + 2 x 3, ref 1
    found = places(named_plan("standalone", PPO, FOUR, 8))
    assert found["actor.generate"] == found["actor.train"] == ((0, 1, 2), 3, 1, 1)
    assert found["critic.values"] == found["critic.train"] == ((3, 4, 5, 6), 4, 1, 1)
    assert found["ref.logprobs"] == ((7,), 1, 1, 1)
    with pytest.raises(ConfigError, match="standalone needs at least 3 devices for the flow `ppo_like`, found 2"):
        named_plan("standalone", PPO, FOUR, 2)


def test_a_stated_cut_is_that_of_every_mesh() -> None:
    """Copies of four devices; generation by two each. Devices are dealt out in whole copies."""
    cut = Cut(tp=2, pp=2, decode_tp=2)
    found = places(named_plan("colocated", PPO, FOUR, 8, cut=cut))
    everywhere = tuple(range(8))
    assert found["actor.generate"] == (everywhere, 4, 2, 1)
    assert {found[call] for call in found if call != "actor.generate"} == {(everywhere, 2, 2, 2)}
    found = places(named_plan("split", PPO, FOUR, 12, cut=cut))
    assert found["actor.train"] == (tuple(range(8)), 2, 2, 2)
    assert found["critic.train"] == (tuple(range(8, 12)), 1, 2, 2)
    with pytest.raises(ConfigError, match="standalone needs at least 12 devices for the flow `ppo_like`, found 8"):
        named_plan("standalone", PPO, FOUR, 8, cut=cut)
    with pytest.raises(ConfigError, match=r"`plan` colocated: expected a multiple of 4 `devices`.*found 6"):
        named_plan("colocated", PPO, FOUR, 6, cut=cut)


def test_several_devices_of_one_copy() -> None:
    assert places(named_plan("colocated", SFT, ONE, 6, tp=4))["actor.train"] == (tuple(range(6)), 2, 3, 1)
    assert places(named_plan("colocated", SFT, ONE, 8, tp=4))["actor.train"] == (tuple(range(8)), 2, 4, 1)


@given(st.data())
def test_shares_are_whole_and_no_one_goes_without(data) -> None:
    work = data.draw(st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
    devices = data.draw(st.integers(len(work), 64))
    found = shares(devices, work)
    assert sum(found) == devices
    assert min(found) >= 1
    for mine, given_to in zip(work, found, strict=True):  # no more than its part, rounded up
        assert given_to <= max(1, -(-devices * mine // sum(work)) + 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("flow", "models"), [(PPO, FOUR), (ALONE, ONE)])
@pytest.mark.parametrize("devices", [3, 4, 7])
def test_a_named_plan_is_complete(name: str, flow: Dataflow, models, devices: int) -> None:
    plan = named_plan(name, flow, models, devices)
    assert complete(plan, flow, models, "here") == plan
    assert Plan.from_json(plan.to_json()) == plan


def test_what_a_role_needs_of_a_plan() -> None:
    plan = Plan(
        "mixed",
        4,
        (
            Placement("actor.generate", "decode", (0, 1), tp=2, after="drop"),
            Placement("actor.generate", "decode", (2, 3), dp=2),
            Placement("actor.train", "train", (0, 1, 2, 3), dp=2, pp=2, micro_batch_tokens=64, schedule="gpipe"),
            Placement("ref.logprobs", "score", (3,), after="offload"),
        ),
    )
    done = complete(plan, PPO, FOUR, "mixed")
    train = Layout.on(range(4), dp=2, pp=2)
    assert placements_of(done, "actor") == RolePlacement(
        "actor",
        train,
        None,
        (Layout.on((0, 1), tp=2), Layout.on((2,)), Layout.on((3,))),
        {"train": 64},
        {("decode", 0): "drop", ("decode", 1): "drop"},
        RuleOrder("gpipe"),
    )
    assert placements_of(done, "actor").home == train
    assert placements_of(done, "ref") == RolePlacement("ref", None, Layout.on((3,)), (), {}, {("score", 3): "offload"})
    assert placements_of(done, "ref").ranks == (3,)
    everywhere = Layout.on(range(4), dp=4)  # a role that is not named
    assert placements_of(done, "critic") == RolePlacement("critic", everywhere, everywhere)
    assert placements_of(done, "critic").layouts == (everywhere,)
    actors = (train, Layout.on((0, 1), tp=2), Layout.on((2,)), Layout.on((3,)))
    assert layouts_of(done) == (*actors, everywhere)  # that of the reference is there already


def test_a_call_that_is_not_named_runs_as_the_others_of_its_role() -> None:
    plan = Plan("file", 2, (Placement("actor.train", "train", (1, 0), tp=2, micro_batch_tokens=9, after="offload"),))
    done = complete(plan, ALONE, ONE, "file")
    assert set(places(done).values()) == {((1, 0), 1, 2, 1)}
    actor = placements_of(done, "actor")
    assert actor.generate == (Layout.on((1, 0), tp=2),)
    assert (actor.micro_batch_tokens, actor.after) == (
        {"train": 9},
        {("train", 1): "offload", ("train", 0): "offload"},
    )
    # instances of two sizes say nothing of a score, training does
    instances = (Placement("actor.generate", "decode", (0,)), Placement("actor.generate", "decode", (1, 2), tp=2))
    done = complete(Plan("file", 3, (*instances, Placement("actor.train", "train", (2,)))), ALONE, ONE, "file")
    assert places(done)["actor.logprobs"] == ((2,), 1, 1, 1)
    assert [p.ranks for p in done.placements_of("actor.generate#2", "decode")] == [(0,), (1, 2)]
    # frozen and generating only: everything else where it generates
    done = complete(Plan("file", 2, (Placement("ref.logprobs", "score", (0,)),)), PPO, FOUR, "file")
    assert places(done)["actor.train"] == ((0, 1), 2, 1, 1)


def test_prompts_may_be_computed_elsewhere() -> None:
    """The instances that draw come first, and those that compute prompts behind them; both generations of the flow
    have them. Where they are the same ones, prefill says nothing."""
    train, decode = Placement("actor.train", "train", (0,)), Placement("actor.generate", "decode", (0, 1), dp=2)
    prefill = Placement("actor.generate", "prefill", (3, 2), tp=2, after="drop")
    done = complete(Plan("file", 4, (train, prefill, decode)), ALONE, ONE, "file")
    for call in ("actor.generate", "actor.generate#2"):
        assert [p.ranks for mode in ("prefill", "decode") for p in done.placements_of(call, mode)] == [(3, 2), (0, 1)]
    actor = placements_of(done, "actor")
    assert actor.prefill == (Layout.on((3, 2), tp=2),)
    assert actor.drawing == (Layout.on((0,)), Layout.on((1,)))
    assert actor.generate == (*actor.drawing, *actor.prefill)
    assert actor.after == {("decode", 3): "drop", ("decode", 2): "drop"}
    assert {rank for (rank, _), modes in actor.uses.items() if "decode" in modes} == {0, 1, 2, 3}
    same = Plan("file", 2, (train, decode, Placement("actor.generate", "prefill", (0, 1), dp=2)))
    assert complete(same, ALONE, ONE, "file").placements_of("actor.generate", "prefill") == ()


TRAIN = Placement("actor.train", "train", (0, 1), dp=2)


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ([Placement("actor.trian", "train", (0, 1), dp=2)], r"placements\[0\].call: .* no call.*mean `actor.train`"),
        ([TRAIN, Placement("reward.score", "score", (0,))], r"placements\[1\].call: `reward.score` asks no model"),
        ([Placement("actor.generate", "train", (0, 1), dp=2)], "mode: expected prefill or decode for actor.generate"),
        ([Placement("actor.train", "score", (0, 1), dp=2)], "mode: expected train for actor.train, found score"),
        ([Placement("actor.generate", "decode", (0, 1), dp=2, micro_batch_tokens=8)], "only train and score have"),
        ([Placement("actor.train", "train", (0, 1), dp=2, schedule="1F1B")], "with pp above 1"),
        ([Placement("actor.train", "train", (0, 1), pp=2, schedule="gpip")], "schedule: .* mean `gpipe`"),
        ([TRAIN, Placement("actor.train#2", "train", (0,))], "actor.train and actor.train#2 are of one model"),
        (
            [TRAIN, Placement("actor.generate", "prefill", (0,))],
            "expected prefill on other ranks .* found rank 0 in both",
        ),
        (
            [
                TRAIN,
                *(
                    Placement("actor.generate", mode, (0, 1), **{cut: 2})
                    for mode, cut in (("prefill", "tp"), ("decode", "dp"))
                ),
            ],
            "expected prefill on other ranks than decode, or on the same in the same layout",
        ),
        ([TRAIN, Placement("actor.generate", "prefill", (0, 1), dp=2, after="drop")], "set `after: drop` in decode"),
        ([Placement("actor.train", "train", (0, 1), dp=2, after="drop")], "lose the only weights"),
        ([TRAIN, Placement("actor.logprobs", "score", (0, 1), dp=2, after="drop")], "actor.logprobs score: `after`"),
        ([Placement("actor.train", "train", (0,))], "rank 1 has nothing to do; lower `num_ranks`"),
    ],
)
def test_what_a_plan_may_not_say(placements: list[Placement], message: str) -> None:
    with pytest.raises(ConfigError, match="here: .*" + message):
        complete(Plan("file", 2, tuple(placements)), ALONE, ONE, "here")


def test_stages_get_equal_work_where_the_plan_does_not_state_them() -> None:
    """The head is worth 8 layers of 30 (SmolLM2-135M), one of the critic nothing."""
    speaks, judges = PlannedModel(False, 100, 30, 8.0), PlannedModel(True, 100, 30, 0.0)
    given_plan = Plan(
        "mine",
        2,
        (
            Placement("actor.train", "train", (0, 1), pp=2),
            Placement("actor.generate", "decode", (0, 1), dp=2),
            Placement("ref.logprobs", "score", (0, 1), pp=2, stages=(14, 16)),
            Placement("critic.train", "train", (1, 0), pp=2),
        ),
    )
    plan = complete(given_plan, PPO, {"actor": speaks, "critic": judges, "ref": speaks}, "plan")
    assert {p.call: p.stages for p in plan.placements} == {
        "actor.generate": (),
        "ref.logprobs": (14, 16),
        "critic.values": (15, 15),
        "actor.train": (19, 11),
        "critic.train": (15, 15),
    }
    assert complete(plan, PPO, {"actor": speaks, "critic": judges, "ref": speaks}, "plan") == plan


def test_shares_have_a_number_of_every_model() -> None:
    """One that the file states, else the one of the model; roles that are no models of the flow have none."""
    models = {"actor": PlannedModel(False, pair_tokens=0.5), "critic": PlannedModel(True, pair_tokens=0.25)}
    given_plan = Plan("mine", 2, policies=(PolicyChoice("shares", (("critic", 3),)), PolicyChoice("fusion")))
    plan = complete(given_plan, PPO, models | {"ref": SPEAKS}, "plan")
    assert plan.policies == (
        PolicyChoice("shares", (("actor", 0.5), ("critic", 3), ("ref", 0.0))),
        PolicyChoice("fusion"),
    )
    assert [plan.pair_tokens(role) for role in ("actor", "critic", "ref", "other")] == [0.5, 3.0, 0.0, 0.0]
    assert given_plan.pair_tokens("actor") == 0.0
    assert complete(plan, PPO, models | {"ref": SPEAKS}, "plan") == plan
    without = complete(Plan("mine", 2), PPO, FOUR, "plan")
    assert (without.policies, without.pair_tokens("actor")) == ((), 0.0)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (("shares", (("reward", 1),)), "settings of `shares`: expected roles actor, critic, ref, found `reward`"),
        *(
            (("shares", (("critic", value),)), "`shares` of critic: expected a number from 0 on, found ")
            for value in (-0.5, float("inf"), float("nan"), "0.1", True)
        ),
        (("fusion", (("actor", 1),)), "settings of `fusion`: expected none, or all of step_s, .*, found actor$"),
        (("pool", (("actor", 1),)), "settings of `pool`: expected none, found `actor`$"),
        (("migration", ()), "expected `fusion`, `pool`, `shares`, or none, found `migration`$"),
    ],
)
def test_policies_that_cannot_be(policy: tuple[str, tuple[tuple[str, float], ...]], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^mine: `policies`: {message}"):
        complete(Plan("mine", 2, policies=(PolicyChoice(*policy),)), PPO, FOUR, "mine")


def test_equal_stages_are_one_part_however_they_were_said() -> None:
    """(19, 11) by the rule and as stated: to drop the one is to drop the only weights."""
    placements = (
        Placement("actor.train", "train", (0, 1), pp=2, stages=(19, 11)),
        Placement("actor.generate", "decode", (0, 1), pp=2, after="drop"),
    )
    with pytest.raises(ConfigError, match="`after` drop would lose the only weights"):
        complete(Plan("mine", 2, placements), ALONE, {"actor": PlannedModel(False, 100, 30, 8.0)}, "plan")
