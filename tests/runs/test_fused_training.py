"""Runs whose plan has two roles train together by one schedule: it is executed, and nothing that is computed changes.
Real processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.model_parameters import parameters_of
from plait.cost.placed import Facts
from plait.errors import ConfigError
from plait.planner.evaluate import score
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.prediction.fusing import with_order, workload_of
from plait.runtime.prediction.run_planning import costs_of_run
from plait.runtime.prepare import prepare
from plait.schedule.action import Action, Kind, parse_action
from plait.schedule.fused import FusedOrder
from plait.schedule.pipeline import Pipeline, Workload, fused_workload
from plait.schedule.placements import placements_of
from plait.schedule.plan import Plan
from plait.schedule.schedule import Schedule
from plait.schedule.timeline import load_any
from tests.cases import slow_but
from tests.models.tiny import save_tiny
from tests.runs.placed_runs import PPO, SAFE, SUMMED_PPO, Flow
from tests.runs.plan_files import write_plan
from tests.runs.plans import assert_equal_runs
from tests.training.schedules import shuffled

STEPS = 2
WARM_UP: Flow = ("ppo", {"options": {"kl_coef": 0.05, "mini_batches": 2, "epochs": 2, "critic_warmup_steps": 1}})
DEEP: Flow = ("ppo", PPO[1] | {"model": "PLACE/deep"})
"""A model of four layers."""
BALANCED: Flow = (
    "ppo",
    PPO[1]
    | {"model": "PLACE/experts", "optimizer.router_aux_loss_coef": 0.1, "critic.optimizer.router_aux_loss_coef": 0.2},
)
"""Mixtures of experts: what is known of their routers goes from stage to stage behind the hidden states."""

ACTOR_CRITIC = {
    "actor.generate": "0,1 dp2",
    "actor.train": "0,1 pp2 schedule=both",
    "ref.logprobs": "0",
    "critic.train": "1,0 pp2 schedule=both",
}
CRITICS = {
    "actor.generate": "0,1 dp2",
    "actor.train": "0,1 tp2",
    "ref.logprobs": "0",
    "critic.train": "0,1 pp2 schedule=both",
    "cost_critic.train": "1,0 pp2 schedule=both",
}
FOUR = {
    "actor.generate": "0,1,2,3 dp4",
    "actor.train": "0,1,2,3 pp4 schedule=both",
    "ref.logprobs": "0",
    "critic.train": "3,2,1,0 pp4 schedule=both",
}
BESIDE = {
    "actor.generate": "0,1,2,3 dp4",
    "actor.train": "0,1,2,3 dp2 pp2 schedule=both",
    "ref.logprobs": "0",
    "critic.train": "1,0,3,2 dp2 pp2 schedule=both",
}


def schedule_of(stages: tuple[int, ...], counts: tuple[int, ...], models: tuple[str, ...] = ("actor", "critic")) -> str:
    """A random valid one, as a file."""
    workload = fused_workload(stages, counts, (1.0, 1.0), models=models)
    return replace(shuffled(workload, sum(counts)), name="both").to_json()


CASES: dict[str, tuple[Flow, dict[str, str], str]] = {
    "actor and critic": (PPO, ACTOR_CRITIC, schedule_of((2, 2), (2, 2))),
    "one micro-batch": (PPO, ACTOR_CRITIC, schedule_of((2, 2), (1, 1))),
    "many": (PPO, ACTOR_CRITIC, schedule_of((2, 2), (4, 8))),
    "critic warm-up": (WARM_UP, ACTOR_CRITIC, schedule_of((2, 2), (2, 4))),
    "adapters": (("ppo", PPO[1] | {"lora.rank": 2}), ACTOR_CRITIC, schedule_of((2, 2), (2, 3))),
    "balanced experts": (BALANCED, ACTOR_CRITIC, schedule_of((2, 2), (2, 3))),
    "two losses of the actor": (SUMMED_PPO, ACTOR_CRITIC, schedule_of((2, 2), (2, 3))),
    "two losses of adapters": ((SUMMED_PPO[0], SUMMED_PPO[1] | {"lora.rank": 2}), BESIDE, schedule_of((2, 2), (3, 2))),
    "two critics": (SAFE, CRITICS, schedule_of((2, 2), (2, 3), ("critic", "cost_critic"))),
    "actor twice": (SAFE, ACTOR_CRITIC | {"cost_critic.train": "0,1 dp2"}, schedule_of((2, 2), (2, 2))),
    "a critic of one stage": (
        PPO,
        ACTOR_CRITIC | {"critic.train": "0,1 dp2 schedule=both"},
        schedule_of((2, 1), (2, 2)),
    ),
    "dp beside it": (PPO, BESIDE, schedule_of((2, 2), (2, 2))),
    "copies beside it": (
        PPO,
        BESIDE | {"critic.train": "0,1,2,3 dp4 schedule=both"},
        schedule_of((2, 1), (3, 2)),
    ),
    "four": (DEEP, FOUR, schedule_of((4, 4), (4, 4))),
    "four and two": (DEEP, FOUR | {"critic.train": "1,0,3,2 dp2 pp2 schedule=both"}, schedule_of((4, 2), (4, 2))),
    "tensor parallel": (
        PPO,
        BESIDE | {"actor.train": "0,1,2,3 tp2 pp2 schedule=both", "critic.train": "2,3,0,1 tp2 pp2 schedule=both"},
        schedule_of((2, 2), (2, 2)),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def deep(place: Path) -> None:
    save_tiny(place / "deep", num_hidden_layers=4)
    save_tiny(place / "experts", family="qwen3_moe")


def fused_run(
    place: Path,
    placed: Callable[..., Recipe],
    name: str,
    flow: Flow,
    places: dict[str, str],
    schedule: str,
    **keys: Any,
) -> Path:
    plan = write_plan(place, name.replace(" ", "-"), places, [schedule] if schedule else [])
    recipe = placed(flow[0], name, **{"steps": STEPS, **flow[1], "plan": str(plan), **keys})
    assert run(recipe).finished
    return recipe.run_dir


@pytest.mark.parametrize("name", slow_but(("actor and critic",), CASES))
def test_training_together_changes_nothing(
    name: str, place: Path, placed: Callable[..., Recipe], reference: Callable[..., Path]
) -> None:
    flow, places, schedule = CASES[name]
    found = fused_run(place, placed, name, flow, places, schedule)
    assert_equal_runs(found, reference(flow[0], steps=STEPS, **flow[1]))
    plan = Plan.load(found / "plan.json")
    assert plan.schedules == (Schedule.from_json(schedule),)
    order = placements_of(plan, schedule_roles(plan)[0]).together
    assert order is not None
    second = "actor.train#2" if flow[1] is SUMMED_PPO[1] else None
    assert_executed(found, order, 1 + flow[1]["options"].get("critic_warmup_steps", 0), second)


ACTOR_DIVIDES = {"optimizer.shard_gradients": True}
BOTH_DIVIDE = ACTOR_DIVIDES | {"critic.optimizer.shard_gradients": True}
DIVIDED = {
    "dp beside it": BOTH_DIVIDE,
    "copies beside it": ACTOR_DIVIDES,
    "two losses of adapters": BOTH_DIVIDE,
    "balanced experts": BOTH_DIVIDE,
}
"""Of `CASES`, on two copies of all: what divides gradients over them."""


@pytest.mark.slow
@pytest.mark.parametrize("name", DIVIDED)
def test_gradients_that_are_divided_while_roles_train_together_change_nothing(
    name: str, place: Path, placed: Callable[..., Recipe], reference: Callable[..., Path]
) -> None:
    """Of mini-batches of six samples copies have unequal numbers of micro-batches; a role that does not divide its own,
    of which a copy has no more, goes on beside one that does."""
    flow, places, schedule = CASES[name]
    places = places if "2,3" in places["actor.train"] else BESIDE
    few = {"micro_batch_tokens": 48}
    found = fused_run(place, placed, f"divided {name}", flow, places, schedule, **few, **DIVIDED[name])
    assert_equal_runs(found, reference(flow[0], steps=STEPS, **flow[1], **few))


FOUND = {call: text.replace("=both", "=fused") for call, text in ACTOR_CRITIC.items()}


@pytest.mark.slow
def test_an_order_is_found_once_and_followed_by_the_run_that_goes_on(
    place: Path, placed: Callable[..., Recipe], reference: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {**PPO[1], "plan": str(write_plan(place, "found", FOUND))}
    recipe = placed("ppo", "found", steps=STEPS, **keys)
    plan = prepare(recipe).plan
    (schedule,) = plan.schedules
    assert schedule.name == "fused"
    assert prepare(recipe).plan == plan, "no clock has a say in it"
    assert run(recipe.model_copy(update={"steps": STEPS - 1})).finished
    kept = Plan.load(recipe.run_dir / "plan.json")
    assert replace(kept, predicted=None) == plan, "the run keeps it, with what it predicts by it"

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was found before")

    monkeypatch.setattr("plait.runtime.prediction.fusing.search", never)
    assert run(recipe, resume=True).finished
    assert_equal_runs(recipe.run_dir, reference(PPO[0], steps=STEPS, **PPO[1]))
    order = placements_of(plan, "actor").together
    assert order is not None
    assert_executed(recipe.run_dir, order, first_step=1)


def test_an_order_is_as_short_as_it_can_be_and_keeps_to_the_memory_that_is_left(
    place: Path, placed: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two equal models of two stages: no bubbles, but where a rank may hold one micro-batch of each alone."""
    recipe = placed("ppo", "short", **PPO[1], plan=str(write_plan(place, "short", FOUND)))
    prepared = prepare(recipe)
    plan = prepared.plan
    facts = facts_of(prepared, replace(plan, schedules=()))
    costs = costs_of_run(prepared, SampleLengths(Lengths.fixed(8), prepared.lengths.responses))
    workload = workload_of(facts, costs)
    assert [(p.model, p.ranks, p.num_microbatches) for p in workload.pipelines] == [
        ("critic", (0, 1), 6),
        ("actor", (1, 0), 6),
    ], "six samples in a mini-batch"
    assert score(workload, plan.schedules[0]).makespan <= 1.02 * max(workload.work_s())
    monkeypatch.setattr("plait.runtime.prediction.fusing.device_bytes", lambda *_: 0)
    tight = workload_of(facts, costs)
    most = [p.activation[0][0] for p in tight.pipelines]
    assert tight.caps == (max(most),) * 2
    found = with_order(facts, lambda: costs).schedules[0]
    assert all(peak <= cap for peak, cap in zip(score(tight, found).peak_memory, tight.caps, strict=True))


def facts_of(prepared: Prepared, plan: Plan) -> Facts:
    parameters = parameters_of(prepared.models)
    return Facts(
        prepared.recipe,
        prepared.models,
        prepared.shapes,
        parameters,
        plan,
        prepared.flow,
        prepared.lengths,
    )


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"critic.train": "1,0 pp2"}, "`schedule` fused of actor.train: expected several roles that train together"),
        ({"critic.train": "0 schedule=fused"}, "expected critic on the same ranks and with the same tp as actor"),
        (
            {"actor.train": "0,1 dp2 schedule=fused", "critic.train": "0,1 dp2 schedule=fused"},
            "expected `pp` above 1 of actor or another role",
        ),
    ],
)
def test_an_order_that_cannot_be_found_is_refused(
    places: dict[str, str], message: str, place: Path, placed: Callable[..., Recipe]
) -> None:
    recipe = placed("ppo", "refused", **PPO[1], plan=str(write_plan(place, "refused", FOUND | places)))
    with pytest.raises(ConfigError, match=message):
        prepare(recipe)


def schedule_roles(plan: Plan) -> tuple[str, ...]:
    return tuple(dict.fromkeys(action.model for action in plan.schedules[0]))


def assert_executed(run_dir: Path, order: FusedOrder, first_step: int, second: str | None = None) -> None:
    """Every rank did the actions of its row in that order, those of each role under its own name.

    Args:
        second: a call whose gradients meet those of the first: its micro-batches are behind the others.
    """
    done = executed(run_dir, order, second)
    assert {step for _, step, _ in done} == set(range(1, STEPS + 1))
    assert {action.model for actions in done.values() for action in actions} == set(order.roles)
    for (rank, step, _), actions in done.items():
        if step is not None and step < first_step:
            assert {action.model for action in actions} == {"critic"}
            continue
        at = order.layout.coordinates(rank)
        counts = Counter((a.model, a.copy) for a in actions if a.kind is Kind.FORWARD)
        assert counts, "a copy without samples has nothing to do"
        pipelines = []
        for role, copy, rows in order.copies_in(at.dp):
            table = ((1.0,) * counts[role, copy],) * len(rows)
            pipelines.append(Pipeline(role, copy, rows, table, table, table))
        row = order(Workload(tuple(pipelines), len(order.rows))).ids()[at.pp]
        mine = {(role, copy) for role, copy, rows in order.copies_in(at.dp) if at.pp in rows}
        assert [a.id for a in actions] == [
            name for name in row if (parse_action(name).model, parse_action(name).copy) in mine
        ]


def executed(run_dir: Path, order: FusedOrder, second: str | None) -> dict[tuple[int, int | None, str], list[Action]]:
    """(rank, step, mini-batch) → forwards and backwards of the first training calls, in the order in which they ran."""
    found: dict[tuple[int, int | None, str], list[Action]] = {}
    for span in load_any(run_dir / "trace.json").ordered().spans:
        if span.kind in (Kind.FORWARD, Kind.BACKWARD) and (span.whole.endswith(".train") or span.whole == second):
            call, batch, name = span.action.split("/", 2)
            action = parse_action(name)
            assert (call, span.role) in ((f"{action.model}.train", action.model), (second, "actor"))
            if action.model in order.roles:
                found.setdefault((span.rank, span.step, batch), []).append(action)
    return found
