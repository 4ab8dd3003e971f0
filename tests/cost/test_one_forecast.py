"""What a search and a simulation say of memory, and what a dry run says, is one forecast, but where a part of a model
lies in another that is not the whole of it: there a simulation says more."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.cost.calibration import VENDORS, Calibration
from plait.cost.call_memory import ON_THEIR_WAY
from plait.cost.cluster_file import read_cluster
from plait.cost.device_memory import READING, DeviceMemory, memory_by_device
from plait.cost.generation_memory import packed_bytes
from plait.cost.kept_sets import SETS, SETS_READ
from plait.cost.lengths import SampleLengths
from plait.cost.placed import Facts
from plait.cost.vllm_memory import pool_tokens_of_vllm
from plait.cost.working_memory import KEPT, MESSAGES, NCCL, PROCESS, PROCESS_BYTES, process_terms
from plait.errors import ConfigError
from plait.layout.mesh import Layout
from plait.policy.packing import GroupTokens
from plait.runtime.prediction.planning import Planning
from plait.schedule.named_plans import named_plan
from plait.schedule.plan import POOL, Placement, Plan, PolicyChoice
from plait.simulator.step_memory import ENGINE, POOLS, RankMemory
from tests.cost.smollm2 import SHAPE
from tests.cost.test_device_memory import facts_of, named, row_of
from tests.cost.test_profile import PROFILE

SIZES = [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)]
ZERO_UNIT = 32 * 18
RECIPES = {
    "cpu": {},
    "cuda": {"device": "cuda", "sampling": {"kv_tokens": 1 << 15}},
    "float32": {"dtype": "float32", "checkpoint_activations": True},
    "mini-batches": {"options": {"mini_batches": 8}},
    "divided": {"optimizer": {"shard_gradients": True}},
    "shared": {"optimizer": {"shard_weights": True}, "critic": {"optimizer": {"shard_weights": True}}},
    "adapters": {"lora": 8},
    "follows": {"reference": {"sync_every": 2}},
}


DRAFTED = {"draft_model": "smollm2-135m", "speculation": 4}


def plan_of(sizes, **train):
    """All calls on four ranks, in one layout."""
    dp, tp, pp = sizes
    where = {"ranks": tuple(range(4)), "dp": dp, "tp": tp, "pp": pp}
    modes = {"train": "train", "generate": "decode"}

    def make(flow, planned):
        nodes = [node for node in flow.nodes if node.role in planned]
        placed = (Placement(node.call, modes.get(node.asks, "score"), **where) for node in nodes)
        return Plan("mine", 4, tuple(replace(p, **train) if p.mode == "train" else p for p in placed))

    return make


def leaving(flow, planned):
    """Two ranks train two stages and generate with whole copies: what is idle leaves, of the critic its state alone."""
    return Plan(
        "leaving",
        2,
        (
            Placement("actor.train", "train", (0, 1), pp=2, after="offload"),
            Placement("actor.generate", "decode", (0, 1), dp=2, after="drop"),
            Placement("critic.train", "train", (0, 1), dp=2, after="offload"),
            Placement("critic.values", "score", (0, 1), dp=2),
            Placement("ref.logprobs", "score", (0, 1), dp=2, after="offload"),
        ),
    )


def both(facts: Facts) -> list[tuple[RankMemory, DeviceMemory]]:
    """Of each rank what is simulated, and what a dry run says of a run that has found what its memory is spent on."""
    cluster = read_cluster(f"{facts.plan.num_ranks}xA100-80G")
    planning = Planning(facts.recipe, facts.flow, facts.models, facts.shapes, cluster, facts.lengths, VENDORS)
    run = planning.followed(facts.plan)
    devices = memory_by_device(replace(facts, recipe=run.recipe, parameters=run.parameters))
    by_rank = {rank: device for device in devices for rank in device.ranks}
    return [(memory, by_rank[memory.rank]) for memory in planning.predict(facts.plan).memory]


def facts_for(make_plan, algorithm="ppo", lora=0, **keys) -> Facts:
    return facts_of(make_plan, algorithm, lora, model="smollm2-135m", **keys)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_each_rank_holds_the_same(sizes, recipe) -> None:
    """A simulation takes of a stage's ranks the one with most of all that they divide, such as three heads over two
    ranks; and of each role's ZeRO ranges the longest, by 32 elements of 18 bytes at most, though no rank may have the
    longest of both roles. Beside that the fullest rank of each stage agrees to the byte."""
    check_each(facts_for(plan_of(sizes), **RECIPES[recipe]), sizes)


@pytest.mark.parametrize("sizes", [(4, 1, 1), (2, 1, 2)])
def test_each_rank_holds_the_same_of_shared_weights_under_adapters(sizes) -> None:
    keys = RECIPES["cuda"] | {"optimizer": {"shard_weights": True}}
    check_each(facts_for(plan_of(sizes), "grpo", 8, **keys), sizes)


def check_each(facts: Facts, sizes: tuple[int, int, int]) -> None:
    found, stage = both(facts), Layout.on(range(4), *sizes).coordinates
    for memory, _ in found:
        same = [device.most_bytes for other, device in found if stage(other.rank).pp == stage(memory.rank).pp]
        assert memory.peak_bytes == pytest.approx(max(same), abs=ZERO_UNIT)
        assert sum(memory.terms.values()) == pytest.approx(memory.peak_bytes, abs=8)


def test_prompts_that_instances_cannot_share_evenly() -> None:
    """Of five prompts with 8 samples each one of four instances has two."""
    for memory, device in both(facts_for(plan_of((4, 1, 1)), "grpo", prompts_per_step=5, samples_per_prompt=8)):
        assert memory.peak_bytes == pytest.approx(device.most_bytes, abs=ZERO_UNIT)
        assert row_of("actor: KV cache (16 samples x 384 tokens)", dict(device.rows)) > 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("sizes", [(4, 1, 1), (2, 2, 1), (1, 1, 4)])
def test_a_draft_model_is_counted_on_the_ranks_that_generate(sizes, device) -> None:
    """Its weights all the time, its keys and values while samples are drawn, on a GPU with its graphs. Of an instance's
    ranks one has it, and a simulation takes each for that one: no less than a dry run says, and as much where each rank
    is an instance."""
    keys = RECIPES[device]
    drafts, off = ({"sampling": keys.get("sampling", {}) | more} for more in (DRAFTED, {"speculation": "off"}))
    found, plain = (both(facts_for(plan_of(sizes), **(keys | own))) for own in (drafts, off))
    for (memory, device), (without, _) in zip(found, plain, strict=True):
        assert memory.peak_bytes >= device.most_bytes - ZERO_UNIT
        assert memory.peak_bytes - without.peak_bytes >= memory.terms[ENGINE] > 0
        assert sum(memory.terms.values()) == pytest.approx(memory.peak_bytes, abs=8)
        if sizes == (4, 1, 1):
            assert memory.peak_bytes == pytest.approx(device.most_bytes, abs=ZERO_UNIT)


def test_another_engine_holds_its_own_weights_and_pool() -> None:
    """On one device, as it generates for a run of one; on several it is refused by name, as by a run."""
    facts = facts_for(
        lambda flow, planned: named_plan("colocated", flow, planned, 1), "grpo", sampling={"engine": "vllm"}
    )
    there = (facts.recipe, facts.flow, facts.models, facts.shapes)
    ((memory, device),) = both(facts)
    assert memory.peak_bytes == pytest.approx(device.most_bytes, abs=2)
    pool = [what for what in dict(device.rows) if "KV cache" in what]
    assert pool == [f"KV cache of vLLM, a pool of {pool_tokens_of_vllm(facts.recipe, SHAPE)} tokens"]
    rows, weights = dict(device.rows), SHAPE.parameters * 2
    assert rows["weights in vLLM's process"] == weights
    assert memory.terms[ENGINE] == weights + rows[pool[0]]
    with pytest.raises(ConfigError, match=r"`sampling\.engine` is vllm, which generates for a run of one"):
        Planning(*there, read_cluster("2xA100-80G"), facts.lengths, VENDORS).given("colocated")


TWO_ROLLOUTS = """
from dataclasses import dataclass
@dataclass(frozen=True)
class Options:
    kl_coef: float = 0.0
def loss(batch, advantages):
    return batch.aggregate(-batch.logprobs_R * advantages)
def two(prompts, actor, ref, reward, options: Options):
    ref.generate(prompts)
    samples = actor.generate(prompts)
    actor.train(samples, loss=loss, advantages=reward.score(samples))
"""


@pytest.mark.parametrize(
    "sampling",
    [{"engine": "vllm", "max_running": 2}, DRAFTED],
    ids=["vllm", "drafts"],
)
def test_each_role_that_generates_has_an_engine_of_its_own_model(tmp_path: Path, sampling: dict[str, Any]) -> None:
    """The reference is of another model, twice as deep, and gets half as many positions."""
    (tmp_path / "flow.py").write_text(TWO_ROLLOUTS)
    own = {"sampling": sampling, "reference": {"model": "mine"}}
    facts = facts_for(named("colocated", 1), f"{tmp_path}/flow.py:two", **own)
    deep = replace(SHAPE, layers=2 * SHAPE.layers, max_positions=1024)
    facts = replace(facts, shapes={**facts.shapes, "mine": deep})
    ((memory, device),) = both(facts)
    assert memory.peak_bytes == pytest.approx(device.most_bytes, abs=2)
    if "engine" in sampling:
        pools = [pool_tokens_of_vllm(facts.recipe, shape) for shape in (SHAPE, deep)]
        assert pools[0] > pools[1]
        of_token = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * 2
        assert memory.terms[ENGINE] == 2 * (SHAPE.parameters + deep.parameters) + (pools[0] + 2 * pools[1]) * of_token
    else:
        ((alone, _),) = both(facts_for(named("colocated", 1), "grpo", sampling=sampling))
        assert memory.terms[ENGINE] == 2 * alone.terms[ENGINE] > 0


@pytest.mark.parametrize("schedule", ["gpipe", "one at a time"])
def test_orders_of_a_pipeline_hold_as_much(schedule) -> None:
    held = {}
    for rule in ("1F1B", schedule):
        for memory, device in both(facts_for(plan_of((1, 1, 4), schedule=rule))):
            assert memory.peak_bytes == pytest.approx(device.most_bytes, abs=2)
            held[rule, memory.rank] = memory.peak_bytes
    assert (held[schedule, 1] > held["1F1B", 1]) == (schedule == "gpipe")


def test_terms_are_those_of_a_dry_run() -> None:
    """The process, what stays, and what may come on top; of calls a simulation names the fullest alone: on a CPU it
    is generation, which has pages of its own beside those that training leaves with the process."""
    facts = facts_for(plan_of((4, 1, 1)), checkpoint_activations=True)
    for memory, device in both(facts):
        rows, slack = dict(device.rows), dict(device.slack)
        assert memory.terms[PROCESS] == rows[PROCESS] == PROCESS_BYTES
        assert {what: memory.terms.get(what) for what in slack} == slack
        assert memory.terms["actor: weights"] == rows["actor: weights (bfloat16)"]
        assert max(device.during, key=lambda row: row[1])[0] == "actor.generate"
        assert memory.terms["actor decode"] == pytest.approx(
            row_of("actor: KV cache", rows) + packed_bytes(facts.shapes["smollm2-135m"], "bfloat16")
        )
        assert memory.terms[KEPT] == rows["activations"]
        held = sum(count for what, count in memory.terms.items() if what not in slack)
        assert held == pytest.approx(device.expected_bytes, abs=ZERO_UNIT)


PLANS = {
    "together": plan_of((2, 2, 1)),
    "stages": plan_of((1, 1, 4)),
    "apart": lambda flow, planned: named_plan("split", flow, planned, 4),
    "leaving": leaving,
}
MEETING = {
    "as it is": {},
    "gathering": {"fusion": 0.25},
    "giving samples": {"rebalance": "auto"},
    "following": {"reference": {"sync_every": 1}},
}


@pytest.mark.parametrize("keys", MEETING)
@pytest.mark.parametrize("plan", PLANS)
def test_a_gpus_reserve_is_a_term_of_both(plan, keys) -> None:
    """The groups of a plan and its messages among it, from rank to rank."""
    found = []
    for memory, device in both(facts_for(PLANS[plan], **RECIPES["cuda"] | MEETING[keys])):
        least, rows = process_terms("cuda", 4), dict(device.rows)
        assert {what: memory.terms.get(what) for what in least} == {what: rows.get(what) for what in least}
        reads = max(device.during, key=lambda row: row[1])[0] == READING
        assert memory.terms.get(MESSAGES, 0) == (0 if reads else rows.get(MESSAGES, 0))
        assert memory.peak_bytes == pytest.approx(sum(memory.terms.values()), abs=8)
        assert {what: count for what, count in least.items() if what != NCCL}.items() <= rows.items()
        assert PROCESS not in memory.terms
        found.append(rows[NCCL] - least[NCCL])
    assert all(found), "no group of the plan is that of all ranks"


@pytest.mark.parametrize("sizes", [(4, 1, 1), (2, 2, 1)])
def test_pools_that_stay_are_terms_of_both(sizes) -> None:
    make = lambda flow, planned: replace(plan_of(sizes)(flow, planned), policies=(PolicyChoice(POOL),))
    found = both(facts_for(make, **RECIPES["cuda"]))
    for memory, device in found:
        assert memory.peak_bytes == pytest.approx(max(other.most_bytes for _, other in found), abs=ZERO_UNIT)
        assert sum(memory.terms.values()) == pytest.approx(memory.peak_bytes, abs=8)
        assert max(device.during, key=lambda row: row[1])[0] != "actor.generate"
        assert memory.terms[POOLS] >= row_of("actor: KV cache", dict(device.rows))


def test_steps_of_pools_that_stay_capture_nothing() -> None:
    """By a profile in which a layer takes a second to be captured. What a rank holds is in its timeline, too."""
    facts = facts_for(lambda flow, planned: named_plan("colocated", flow, planned, 1), "grpo", **RECIPES["cuda"])
    measured = PROFILE.model_copy(update={"device": "cuda", "capture_s": 1.0, "packing_bytes_per_s": None})
    calibration = Calibration("mine", profile=measured)
    there = (facts.recipe, facts.flow, facts.models, facts.shapes)
    planning = Planning(*there, measured.cluster(1), facts.lengths, calibration)
    kept = replace(facts.plan, policies=(PolicyChoice(POOL),))
    seconds, found, points = [], [], []
    for plan in (facts.plan, kept):
        prediction = planning.predict(plan)
        seconds.append(prediction.seconds_per_step)
        found.append(next(call.terms for call in prediction.calls if call.call == "actor.generate"))
        points.append(min(point.held for point in prediction.timeline.memory))
    assert "capturing" not in found[1]
    assert seconds[0] - seconds[1] == pytest.approx(found[0]["capturing"])
    assert points[1] - points[0] >= row_of("actor: KV cache", dict(memory_by_device(facts)[0].rows))


def test_what_leaves_is_counted_while_it_is_there() -> None:
    for memory, device in both(facts_for(leaving)):
        assert memory.peak_bytes == pytest.approx(device.most_bytes, abs=ZERO_UNIT)
        assert any(what.endswith("brought back") for what in memory.terms)


LAYER, EMBEDDINGS, NORM = 2 * 3_540_096, 2 * 49_152 * 576, 2 * 576
"""Bytes in bfloat16."""


@pytest.mark.parametrize("recipe", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("order", "twice"),
    [
        ((0, 1, 2, 3), (8 * LAYER + EMBEDDINGS, 0, 0, 7 * LAYER + NORM + EMBEDDINGS)),
        ((0, 2, 1, 3), (8 * LAYER + EMBEDDINGS, 7 * LAYER, 8 * LAYER, 7 * LAYER + NORM + EMBEDDINGS)),
    ],
    ids=["ascending", "nested"],
)
def test_a_stage_in_another_stage_is_counted_twice_by_a_simulation(order, twice, recipe) -> None:
    """Four stages train, of 8, 7, 8 and 7 layers, and two generate, of 15 each. In a run a rank's stage lies in that of
    15 layers where this has it, and a dry run says so. A simulation lets parts lie in whole models alone
    (`simulator.step_weights`), so it says more by that stage."""

    def make(flow, planned):
        train = {"ranks": (0, 1, 2, 3), "pp": 4, "stages": (8, 7, 8, 7)}
        decode = {"ranks": order, "dp": 2, "pp": 2, "stages": (15, 15)}
        where = {"train": ("train", train), "generate": ("decode", decode)}
        scores = ("score", {"ranks": (0, 1, 2, 3), "dp": 4})
        found = [(node.call, *where.get(node.asks, scores)) for node in flow.nodes if node.role in planned]
        return Plan("mine", 4, tuple(Placement(call, mode, **on) for call, mode, on in found))

    found = both(facts_for(make, "grpo", **RECIPES[recipe]))
    assert tuple(memory.peak_bytes - device.most_bytes for memory, device in found) == pytest.approx(twice, abs=2)
    more = [memory.terms["actor: weights"] - dict(device.rows)["actor: weights (bfloat16)"] for memory, device in found]
    assert more == pytest.approx(twice, abs=2)


def test_adapters_are_small() -> None:
    for memory, device in both(facts_for(lambda flow, planned: named_plan("colocated", flow, planned, 2), lora=8)):
        assert memory.peak_bytes == pytest.approx(device.most_bytes, abs=2)


def apart(prompts: str, draws: str):
    """Prompts and samples of generations on devices of their own, each instance a placement of so many ranks; all else
    on all of them."""

    def make(flow, planned):
        sizes = [
            *((int(size), "prefill") for size in prompts.split()),
            *((int(size), "decode") for size in draws.split()),
        ]
        starts = list(itertools.accumulate((size for size, _ in sizes), initial=0))
        where = [
            (mode, {"ranks": tuple(range(start, start + size)), "tp": size})
            for (size, mode), start in zip(sizes, starts, strict=False)
        ]
        everywhere = {"ranks": tuple(range(starts[-1])), "dp": starts[-1]}
        placed: list[Placement] = []
        for node in (node for node in flow.nodes if node.role in planned):
            if node.asks == "generate":
                placed += [Placement(node.call, mode, **there) for mode, there in where]
            else:
                placed.append(Placement(node.call, "train" if node.asks == "train" else "score", **everywhere))
        return Plan("mine", starts[-1], tuple(placed))

    return make


APART = [("1", "1"), ("1 1", "1 1"), ("1 1 1", "1"), ("1", "1 1 1"), ("3", "1"), ("1 3", "1"), ("1", "1 3"), ("3", "3")]
"""Of tp 3, as the model has three heads of keys."""


@pytest.mark.parametrize("recipe", ["cpu", "cuda"])
@pytest.mark.parametrize("make", [plan_of((4, 1, 1)), plan_of((1, 1, 4)), leaving], ids=["copies", "stages", "leaving"])
def test_what_tokens_were_drawn_from_is_counted(make, recipe) -> None:
    """With the samples on a CPU, where the first rank has most; and as they are read."""
    keys = RECIPES[recipe]
    sampling = keys.get("sampling", {}) | {"top_p": 0.99}
    for memory, device in both(facts_for(make, **keys | {"sampling": sampling})):
        assert memory.peak_bytes == pytest.approx(device.most_bytes, abs=4 * ZERO_UNIT)
        assert sum(memory.terms.values()) == pytest.approx(memory.peak_bytes, abs=8)
        rows = dict(device.rows)
        assert memory.terms.get(SETS, 0) == rows.get(SETS, 0)
        assert (SETS in rows) == (recipe == "cpu")
        assert SETS_READ in rows or recipe == "cuda"


@pytest.mark.parametrize("recipe", ["cpu", "cuda"])
@pytest.mark.parametrize("draws", ["1 1", "1 3"])
def test_instances_of_several_placements_share_the_samples(draws, recipe) -> None:
    """Each holds the keys and values of half of them: of 6 prompts with 8 samples."""
    keys = {"prompts_per_step": 6, "samples_per_prompt": 8}
    for memory, device in both(facts_for(apart("", draws), "grpo", **RECIPES[recipe] | keys)):
        assert memory.peak_bytes == pytest.approx(device.most_bytes, abs=ZERO_UNIT)
        assert any(what.startswith("actor: KV cache (24 samples") for what, _ in device.rows)


@pytest.mark.parametrize("recipe", ["cpu", "cuda", "adapters", "drafts", "giving samples", "few prompts"])
@pytest.mark.parametrize(("prompts", "draws"), APART)
def test_where_prompts_are_computed_on_devices_of_their_own(prompts, draws, recipe) -> None:
    """Several instances on either side, of several sizes; more of them than prompts. Who computes prompts alone drafts
    nothing, and has no draft model."""
    more = {
        "drafts": {"sampling": DRAFTED},
        "giving samples": {"rebalance": "auto"},
        "few prompts": {"prompts_per_step": 2},
    }
    if recipe == "drafts" and "3" in draws:
        pytest.skip("a simulation takes each rank of an instance for the one that drafts")
    keys = more[recipe] if recipe in more else dict(RECIPES[recipe])
    alone = {*range(sum(map(int, prompts.split())))}
    for memory, device in both(facts_for(apart(prompts, draws), "grpo", **keys)):
        assert memory.peak_bytes == pytest.approx(device.most_bytes, abs=ZERO_UNIT)
        assert sum(memory.terms.values()) == pytest.approx(memory.peak_bytes, abs=8)
        rows = dict(device.rows)
        assert any(what.startswith(f"actor: {ON_THEIR_WAY}") for what in rows)
        if recipe == "drafts":
            assert ("draft model: weights (bfloat16)" in rows) == (memory.rank not in alone)


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "kto", "distill", "reward_model"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), *SIZES])
def test_of_given_texts(sizes, algorithm) -> None:
    """Of which a few are much longer than others, so that micro-batches are filled; and the fullest rank
    of each stage holds the same."""
    count = 1 if algorithm in ("sft", "kto", "distill") else 2
    texts = [GroupTokens(40 + n, (3 * n + 1,) * count) for n in range(100)]
    dp, tp, pp = sizes

    def make(flow, planned):
        nodes = [node for node in flow.nodes if node.role in planned]
        where = {"ranks": tuple(range(dp * tp * pp)), "dp": dp, "tp": tp, "pp": pp}
        placed = [Placement(node.call, "train" if node.asks == "train" else "score", **where) for node in nodes]
        return Plan("mine", dp * tp * pp, tuple(placed))

    options = {"on_policy": False, "top_k": 512} if algorithm == "distill" else {}
    facts = facts_for(make, algorithm, prompts_per_step=64, options=options)
    found = both(replace(facts, lengths=SampleLengths.given(texts, root=35)))
    stage = Layout.on(range(dp * tp * pp), *sizes).coordinates
    for memory, _ in found:
        same = [device.most_bytes for other, device in found if stage(other.rank).pp == stage(memory.rank).pp]
        assert memory.peak_bytes == pytest.approx(max(same), abs=ZERO_UNIT)


@pytest.mark.parametrize("recipe", ["cpu", "float32", "mini-batches"])
def test_one_device(recipe) -> None:
    facts = facts_for(lambda flow, planned: named_plan("colocated", flow, planned, 1), "grpo", **RECIPES[recipe])
    ((memory, device),) = both(facts)
    assert memory.peak_bytes == pytest.approx(device.most_bytes, abs=2)
