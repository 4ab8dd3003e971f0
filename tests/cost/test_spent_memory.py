"""On a GPU long micro-batches and kept activations are taken as they fit, where a recipe leaves them open."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import pytest

from plait.cost.device_memory import memory_by_device
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.placed import Facts, Placed
from plait.cost.spent_memory import POOL_MARGIN, WAYS, with_idle_away, with_memory_spent, with_pools
from plait.recipes.recipe import Recipe
from tests.cost.test_device_memory import facts_of, named

SAMPLES = SampleLengths(Lengths.fixed(500), Lengths.fixed(3_000))
KEYS = {"device": "cuda", "prompts_per_step": 64, "sampling": {"kv_tokens": 1 << 20, "max_response_tokens": 3_000}}


def facts_on_a_gpu(**keys: object) -> Facts:
    """SmolLM2-135M learns by PPO on one GPU, by samples so long that the longest micro-batches are filled."""
    return replace(facts_of(named("colocated", 1), **KEYS | keys), lengths=SAMPLES)


def way_of(recipe: Recipe) -> tuple[int, bool]:
    return recipe.micro_batch_tokens, recipe.checkpoint_activations


def with_way(facts: Facts, way: tuple[int, bool]) -> Facts:
    update = {"micro_batch_tokens": way[0], "checkpoint_activations": way[1]}
    return replace(facts, recipe=facts.recipe.model_copy(update=update))


def most(facts: Facts) -> int:
    return max(device.most_bytes for device in memory_by_device(facts))


def expected(facts: Facts) -> int:
    return max(device.expected_bytes for device in memory_by_device(facts))


def room_for(facts: Facts) -> float:
    """The least device that has it, but for what is to be free."""
    return (most(facts) + 1) / (1 - POOL_MARGIN)


def test_the_first_way_is_taken_that_fits_beside_pools() -> None:
    facts = facts_on_a_gpu()
    with_pool = [replace(one, plan=with_pools(one)) for one in (with_way(facts, way) for way in WAYS)]
    sizes = [most(one) for one in with_pool]
    assert len(set(sizes)) == len(WAYS), "each takes another amount of memory"
    for one in with_pool:
        room = room_for(one)
        expected = next(way for way, size in zip(WAYS, sizes, strict=True) if size <= (1 - POOL_MARGIN) * room)
        assert way_of(with_memory_spent(facts, room, may_leave=True)) == expected
    assert way_of(with_memory_spent(facts, 1e15, may_leave=True)) == (16_384, False)


def test_pools_that_stay_come_before_longer_micro_batches() -> None:
    """Where none fits beside them, they do not stay."""
    facts = facts_on_a_gpu()
    least = with_way(facts, WAYS[-1])
    pool = most(replace(least, plan=with_pools(least))) - most(least)
    longest = with_way(facts, WAYS[0])
    assert pool > most(longest) // 100, "a pool takes so much that it matters"
    assert way_of(with_memory_spent(facts, room_for(longest), may_leave=True)) != WAYS[0]
    without = room_for(replace(least, plan=with_pools(least))) - 10
    found = with_memory_spent(facts, without, may_leave=True)
    fitting = [way for way in WAYS if most(with_way(facts, way)) <= (1 - POOL_MARGIN) * without]
    assert way_of(found) == fitting[0]
    assert fitting[0] != WAYS[-1]


def test_what_idles_leaves_for_no_activation_that_could_be_computed_again() -> None:
    facts = facts_on_a_gpu()
    least = with_way(facts, WAYS[-1])
    room = room_for(least) - 10
    assert with_idle_away(least, room) == facts.plan, "it is expected to fit as it is"
    assert way_of(with_memory_spent(facts, room, may_leave=True)) == WAYS[-1]
    fourth = with_way(facts, WAYS[3])
    states_away = replace(fourth, plan=with_idle_away(fourth, expected(fourth) - 1))
    room = room_for(states_away)
    assert expected(with_way(facts, WAYS[4])) > room, "as it is, nothing fits"
    assert way_of(with_memory_spent(facts, room, may_leave=True)) == WAYS[3]
    assert way_of(with_memory_spent(facts, room, may_leave=False)) == WAYS[-1], "a plan of a file is followed as it is"


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"micro_batch_tokens": 5_000}, (5_000, False)),
        ({"checkpoint_activations": True}, (16_384, True)),
        ({"checkpoint_activations": False}, (16_384, False)),
        ({"micro_batch_tokens": 5_000, "checkpoint_activations": True}, (5_000, True)),
        ({}, (16_384, False)),
    ],
)
def test_what_is_stated_stays(stated: dict[str, object], expected: tuple[int, bool]) -> None:
    found = with_memory_spent(facts_on_a_gpu(**stated), 1e15, may_leave=True)
    assert way_of(found) == expected
    assert found.states("micro_batch_tokens"), "nothing is left to be found again"
    assert found.states("checkpoint_activations"), "nor this"


def test_what_fits_as_it_is_leaves_for_no_longer_micro_batch() -> None:
    """With keys and values of a few tokens it is the states of optimizers that would leave."""
    facts = facts_on_a_gpu(sampling={"kv_tokens": 4_096, "max_response_tokens": 3_000})
    least = with_way(facts, WAYS[-1])
    for room in range(expected(least), int(room_for(least)), (int(room_for(least)) - expected(least)) // 7):
        found = with_memory_spent(facts, room, may_leave=True)
        of_found = replace(facts, recipe=found)
        assert with_idle_away(of_found, room) == facts.plan


def test_what_was_found_is_left_open_again_for_other_devices() -> None:
    recipe = facts_on_a_gpu(micro_batch_tokens=5_000).recipe
    found = with_memory_spent(facts_on_a_gpu(micro_batch_tokens=5_000), 1e15, may_leave=True)
    assert way_of(found) == (5_000, False)
    again = found.reopened()
    assert way_of(again) == way_of(recipe) == (5_000, True)
    assert again.states("micro_batch_tokens"), "the user has said it"
    assert not again.states("checkpoint_activations")
    left = with_memory_spent(facts_on_a_gpu(), 1e15, may_leave=True).reopened()
    assert way_of(left) == (4_096, True)
    assert not left.states("micro_batch_tokens")


def test_without_room_a_stated_length_is_recomputed() -> None:
    found = with_memory_spent(facts_on_a_gpu(micro_batch_tokens=5_000), 1.0, may_leave=True)
    assert way_of(found) == (5_000, True)


def test_a_cpu_has_what_its_recipe_says() -> None:
    facts = facts_of(named("colocated", 1))
    assert with_memory_spent(facts, 1e15, may_leave=True) is facts.recipe
    assert way_of(facts.recipe) == (4_096, False)


def test_what_is_kept_of_one_way_is_that_of_the_others() -> None:
    """Whatever `Placed` keeps, made for one way and carried on to another, is what that one would make."""
    facts = replace(facts_of(named("split", 2), **KEYS), lengths=SAMPLES)
    kept = [name for name, member in vars(Placed).items() if isinstance(member, cached_property)]
    assert len(kept) >= 6
    for way in WAYS:
        fresh = with_way(facts, way)
        carried = facts.spending(fresh.recipe)
        assert carried.recipe is fresh.recipe
        assert memory_by_device(carried) == memory_by_device(fresh)
        assert [carried.__dict__[name] is facts.__dict__[name] for name in kept] == [True] * len(kept)
        assert (carried.alike, carried.connected, carried.moved) == (fresh.alike, fresh.connected, fresh.moved)
