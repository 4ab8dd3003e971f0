"""Plans that are chosen and compared: by what is predicted of each as a run would follow it. Models by their shapes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from plait.cost.cluster_file import read_cluster
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.rank_order import better_orders
from plait.errors import ConfigError
from plait.layout.mesh import Layout, Parallelism
from plait.planner.plan_leaders import Candidate
from plait.planner.plan_objective import LEAST_FUSED_GAIN, Valued
from plait.planner.plan_search import Budget, SearchResult
from plait.recipes.recipe_file import load_recipe
from plait.runtime.prediction.choosing import (
    MOST_ALTERNATIVES,
    Choice,
    beside_others,
    choose,
    choose_best,
    in_better_order,
    predicted,
)
from plait.runtime.prediction.misfit import misfit
from plait.runtime.prediction.planning import Planning
from plait.runtime.prepare import outline
from plait.schedule.fused import FUSED
from plait.schedule.named_plans import BASELINES, NAMES
from plait.schedule.plan import Placement, Plan
from plait.simulator.steps import places_of
from tests.cases import slow_but

RECIPE = Path(__file__).parents[3] / "examples" / "large_ppo.yaml"
WORDS = {**{name: name for name in NAMES}, **{title: word for word, title in BASELINES.items()}}
"""Title of a baseline → the word by which a user asks for it."""


def planning(cluster: str, model: str = "smollm2-135m", critic: str = "smollm2-135m", **keys: object) -> Planning:
    reward = str(RECIPE.parent / "length_reward.py:brief")
    stated = {"model": model, "critic.model": critic, "reward.functions": [reward], "prompts_per_step": 64, **keys}
    spec = read_cluster(cluster)
    run = outline(load_recipe(RECIPE, list(stated.items())), device_memory=spec.device.memory_bytes)
    lengths = SampleLengths(Lengths.fixed(64), Lengths.lognormal(100, 0.8, 1024))
    return Planning(run.recipe, run.flow, run.models, run.shapes, spec, lengths)


def weighed(choice: Choice) -> float:
    """Seconds of the plan taken, as they are compared: more where roles train together."""
    together = any(p.schedule == FUSED for p in choice.best.plan.placements)
    return choice.best.prediction.seconds_per_step / (1 - LEAST_FUSED_GAIN * together)


@pytest.mark.parametrize(
    ("cluster", "model", "evaluations"),
    slow_but(
        [("2xA100-80G", "smollm2-135m", 60), ("8xA100-80G", "llama-2-13b", 200)],
        [
            ("2xA100-80G", "smollm2-135m", 60),
            ("8xA100-80G", "smollm2-135m", 60),
            ("8xA100-80G", "llama-2-13b", 200),
            ("16xA100-80G", "llama-2-7b", 60),
        ],
    ),
)
def test_nothing_that_is_shown_is_faster_than_the_plan_taken(cluster: str, model: str, evaluations: int) -> None:
    """And each plan of others takes what it takes by itself."""
    here = planning(cluster, model)
    choice = choose(here, Budget(evaluations), 1)
    assert choice.best.prediction.feasible
    assert choice.best.prediction.seconds_per_step == here.predict(choice.best.plan).seconds_per_step
    assert {"colocated", "HybridFlow"} <= {one.name for one in choice.baselines}
    alone = planning(cluster, model)
    for one in choice.baselines:
        told = alone.predict(alone.given(WORDS[one.name]))
        assert one.prediction.seconds_per_step == told.seconds_per_step
        assert one.prediction.feasible == told.feasible
        if told.feasible:
            assert weighed(choice) <= told.seconds_per_step
    shown = [plan.plan.placements for plan in (choice.best, *choice.alternatives)]
    assert len(set(map(frozenset, shown))) == len(shown)
    if model == "llama-2-13b":
        kept = {frozenset(replace(one, after="keep") for one in placements) for placements in shown}
        assert len(kept) == 1 + MOST_ALTERNATIVES, "they differ in more than what becomes of weights between calls"
    least = choice.best.prediction.seconds_per_step
    seconds = [one.prediction.seconds_per_step for one in choice.alternatives]
    assert all(each >= least for each in seconds)
    assert [one.name for one in choice.alternatives] == [f"plan {n}" for n in range(2, 2 + len(seconds))]
    assert choice.evaluations >= evaluations or choice.stopped_by == "exhaustive"


def test_as_many_evaluations_choose_the_same_plan() -> None:
    one, other = (choose(planning("2xA100-80G"), Budget(80), 3) for _ in range(2))
    assert one.best == other.best
    assert [a.plan for a in one.alternatives] == [a.plan for a in other.alternatives]


def test_a_given_plan_is_shown_beside_those_of_others() -> None:
    here = planning("4xA100-80G")
    choice = beside_others(here, here.given("split"), lambda text: None)
    assert (choice.best.name, choice.alternatives, choice.stopped_by) == ("split", (), None)
    assert [one.name for one in choice.baselines] == [*BASELINES.values(), *here.named]
    assert choice.evaluations == 1 + len(choice.baselines)
    assert choice.seconds > 0
    same = next(one for one in choice.baselines if one.name == "split")
    assert same.prediction.seconds_per_step == choice.best.prediction.seconds_per_step


def test_where_no_plan_fits_the_largest_part_is_named() -> None:
    """13,015,864,320 weights of two bytes on one device are more than the 24 GiB that it has; of what trains, a
    quarter of 18 bytes for each, 54.5 GiB and more, is too much for each of four. Fewer samples help neither."""
    with pytest.raises(ConfigError) as alone:
        choose(planning("1xRTX-4090", "llama-2-13b"), Budget(50))
    assert "no plan on 1 device of 24.0 GiB has room for actor" in str(alone.value)
    assert "24.2 GiB of weights and " in str(alone.value)
    assert str(alone.value).endswith("; take more devices, or a smaller model")
    with pytest.raises(ConfigError) as four:
        choose(planning("4xRTX-4090", "llama-2-13b"), Budget(50))
    (held,) = re.findall(
        r"\(train\), however it is sharded: ([\d.]+) GiB of weights and optimizer state", str(four.value)
    )
    assert 54.5 <= float(held) < 57
    assert str(four.value).endswith(
        "take more devices, a smaller model, `lora.rank`, `optimizer.shard_gradients` or `optimizer.shard_weights`"
    )


def test_models_with_adapters_are_cut_where_none_has_room_whole() -> None:
    """24.2 GiB of weights on devices of 24 GiB, which all roles share: in two parts they leave room for the rest."""
    keys = {"lora.rank": 8, "critic.model": None}
    here = planning("4xRTX-4090", "llama-2-13b", **keys)
    found = choose(here, Budget(50))
    assert found.best.prediction.feasible
    assert found.stopped_by == "evaluations", "not the named plans alone, which are cut in any case"
    assert all(p.tp * p.pp > 1 for p in found.best.plan.placements)
    named = here.given("colocated")
    assert {p.tp for p in named.placements} == {2}
    weights = [mem.terms["actor: weights"] / 2**30 for mem in here.predict(named).memory]
    assert weights == pytest.approx([24.24 / 2] * 4, rel=0.02)
    with pytest.raises(
        ConfigError, match=r"plan `hybridflow`: sharded .* does not fit on 4 devices; take more devices"
    ):
        planning("4xRTX-4090", "llama-2-70b", **keys).given("hybridflow")


def test_models_whose_layers_keep_a_state_are_cut_where_none_has_room_whole(tmp_path: Path) -> None:
    """Of 9 billion weights of two bytes, which all roles share, a rank has half."""
    from transformers import Qwen3_5TextConfig

    (path := tmp_path / "config.json").write_text(json.dumps(Qwen3_5TextConfig().to_dict()))
    keys = {"lora.rank": 8, "critic.model": None, "data.max_prompt_tokens": 64}
    here = planning("2xRTX-4090", str(path), **keys)
    named = here.given("colocated")
    assert {p.tp for p in named.placements} == {2}
    weights = [mem.terms["actor: weights"] for mem in here.predict(named).memory]
    assert weights == pytest.approx([here.parameters["actor"].num_elements] * 2, rel=0.001)


def test_models_with_adapters_stay_whole_where_one_has_room() -> None:
    choice = choose(planning("2xA100-80G", "llama-2-7b", **{"lora.rank": 8, "critic.model": None}), Budget(50))
    assert {p.tp * p.pp for p in choice.best.plan.placements} == {1}
    shown = [frozenset(plan.plan.placements) for plan in (choice.best, *choice.alternatives)]
    assert len(set(shown)) == len(shown), "a plan is not shown beside itself"


def test_a_recipe_with_other_keys_takes_no_longer_than_on_the_plan_that_was_found() -> None:
    """One plan beside the named ones would not find as good a one; what cannot be followed is no start."""
    found = choose(planning("4xA100-80G", "llama-2-7b"), Budget(40), 1).best.plan
    stale = planning("4xA100-80G", "llama-2-7b", max_staleness=1)
    start = places_of(stale.followable(found), stale.space.places)
    known = stale.predict(stale.plan_of(start, "known"))
    assert known.feasible
    alien = Plan("alien", 4, (Placement("nobody.train", "train", (0,)),))
    plans = (choose_best(stale, Budget(1), 0, start) for start in (None, alien, found))
    alone_s, beside_alien_s, from_found_s = (plan.prediction.seconds_per_step for plan in plans)
    assert from_found_s <= known.seconds_per_step < alone_s == beside_alien_s


def test_what_comes_nearest_is_said_of_the_rank_that_lacks_room(tmp_path: Path) -> None:
    """Models whole on devices of 80 and of 40 GiB: each holds about as much, in half the room on the latter."""
    link = {"gb_per_s": 200, "latency_us": 5}
    devices = [{"devices": 1, "device": name, "intra": link, "inter": link} for name in ("A100-80G", "A100-40G")]
    (tmp_path / "two.yaml").write_text(yaml.safe_dump({"nodes": devices, "host": link}))
    here, both = planning(str(tmp_path / "two.yaml")), (0, 1)
    sizes = Parallelism(2, 1, 1)
    forms = [here.space.forms.form_of(slot, both, sizes) for slot in range(len(here.graph.slots))]
    places = tuple(here.space.place(slot, both, form) for slot, form in enumerate(forms))
    nearest = Candidate(places, Valued(0.0, 0.0, 0.0, 0))
    first, second = here.predict(here.plan_of(places, "nearest")).memory
    assert first.peak_bytes >= second.peak_bytes
    said = misfit(here, SearchResult(None, nearest, (), (), 0, 0.0, (), "asked"))
    assert re.search(r" GiB on rank 1, of which the process takes \S+ GiB and .* GiB; lower ", said)
    assert said.endswith("or take more devices")


def test_a_device_that_has_room_for_nothing_is_named(tmp_path: Path) -> None:
    """A process alone takes more than a GPU of 1 GiB has; its neighbours have room for all, but none may be idle."""
    weak = {"name": "weak", "tflops": 10, "memory_gib": 1, "memory_gb_per_s": 100}
    link = {"gb_per_s": 200, "latency_us": 5}
    nodes = [{"devices": 2, "device": device} for device in ("H200", weak)]
    tree = {"nodes": nodes, "intra": link, "inter": link, "host": link}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=r"uses all of them: .* nothing of rank 2, weak of 1.0 GiB") as told:
        choose(planning(str(tmp_path / "two.yaml")), Budget(50))
    assert "num_ranks" not in str(told.value)


def test_devices_without_room_for_a_process_are_refused_before_plans_are_searched(tmp_path: Path) -> None:
    """As on a machine whose memory is divided between too many ranks: more of them would not help."""
    weak = {"name": "weak", "tflops": 10, "memory_gib": 0.5, "memory_gb_per_s": 100}
    link = {"gb_per_s": 200, "latency_us": 5}
    tree = {"nodes": [{"devices": 64, "device": weak}], "intra": link, "inter": link, "host": link}
    (tmp_path / "weak.yaml").write_text(yaml.safe_dump(tree))
    here = planning(str(tmp_path / "weak.yaml"))
    with pytest.raises(ConfigError, match=r"no plan on 64 devices of 0.5 GiB .* by itself; take fewer devices") as told:
        choose(here, Budget(50))
    assert "more devices" not in str(told.value)
    assert "space" not in here.__dict__, "nothing of it was made"


def test_layers_are_divided_beside_what_embedding_and_head_take() -> None:
    """llama-3-8b: 128,256 rows of 4,096 are worth 2.41 layers of 218,103,808 weights, so of four stages the last has 6
    layers, beside 8, 9 and 9; the embedding multiplies nothing. Both are memory of their stages, 18 bytes a number
    where they are trained; the head's stage has the last norm, too."""
    here = planning("4xA100-80G", "llama-3-8b")
    facts, rows = here.space.problem.roles["actor"], 128_256 * 4096
    assert facts.layer_work == (1.0,) * 32
    assert (facts.first, facts.last) == (0.0, pytest.approx(rows / 218_103_808))
    train = next(n for n, slot in enumerate(here.graph.slots) if str(slot) == "actor train")
    (sizes,) = [one for one in here.space.forms.parallelisms(train, (0, 1, 2, 3)) if one.pp == 4]
    assert sizes.stages == (8, 9, 9, 6)
    equal = here.space.problem.costs.held_bytes("actor", Layout.on(range(4), pp=4), trained=True)
    first, middle, _, last = equal
    assert (first - middle, last - middle) == (18 * rows, 18 * (rows + 4096))


def test_what_is_found_takes_its_ranks_in_the_order_that_moves_least() -> None:
    """Training in quarters, generation in halves: ranks 0 and 2 have what one half is made of, 1 and 3 the other. The
    dry run has nothing to propose then."""
    here = planning("4xA100-80G")
    everyone = tuple(range(4))
    places = []
    for number, slot in enumerate(here.graph.slots):
        sizes = Parallelism(dp=2, tp=2) if slot.mode == "decode" else Parallelism(tp=4)
        form = here.space.forms.form_of(number, everyone, sizes)
        places.append(here.space.place(number, everyone, form))
    plain = predicted(here, here.plan_of(places, "mine"))
    (order,) = better_orders(here.recipe, here.models, plain.plan, here.parameters)
    better = in_better_order(here, tuple(places), plain)
    (generating,) = (p for p in better.plan.placements if p.mode == "decode")
    assert (generating.call, generating.ranks) == ("actor.generate", (0, 2, 1, 3))
    others = [[p for p in one.plan.placements if p.mode != "decode"] for one in (plain, better)]
    assert others[0] == others[1]
    moved = [
        sum(call.bytes for call in one.prediction.calls if call.call == "actor.weights") for one in (plain, better)
    ]
    assert moved == [order.stated_bytes, order.received_bytes]
    assert better.prediction.seconds_per_step < plain.prediction.seconds_per_step
    assert better_orders(here.recipe, here.models, better.plan, here.parameters) == []
    assert in_better_order(here, tuple(places), better) is better
