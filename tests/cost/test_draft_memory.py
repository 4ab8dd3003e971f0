"""Bytes of a draft model's packed copy by hand, and what they grow by where a CPU widens it."""

from __future__ import annotations

import pytest

from plait.cost.device_memory import memory_by_device
from plait.cost.draft_memory import draft_rows, draft_widened
from plait.cost.engine_memory import engine_bytes
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import role_model
from tests.cost.smollm2 import SHAPE as SMOLLM2
from tests.cost.test_device_memory import facts_of, named

PACKED = 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536) + 576 * 49152
"""Numbers of the linear layers and the head."""
COPY = "draft model: weights packed for decoding"
DRAFTS = {"speculation": 4, "draft_model": "it"}
NEEDS = "packed weights, where a CPU without AVX-512 computes with the family's own layers"


def a_recipe(**keys: object) -> Recipe:
    return Recipe.model_validate({"model": "it", "data": {"source": "x"}, "sampling": DRAFTS, **keys})


@pytest.mark.parametrize(
    ("keys", "copy_bytes", "more_bytes"),
    [
        ({}, 2 * PACKED, 2 * PACKED),
        ({"dtype": "float32"}, 4 * PACKED, 0),
        ({"dtype": "float64"}, 0, 0),
        ({"device": "cuda"}, 0, 0),
        ({"sampling": {"speculation": 4}}, 0, 0),
    ],
    ids=["bfloat16 has four bytes at most", "float32 as it is", "float64 is not packed", "nor on a GPU", "no model"],
)
def test_a_packed_copy_has_two_bytes_a_number_and_may_have_four(
    keys: dict[str, object], copy_bytes: int, more_bytes: int
) -> None:
    recipe = a_recipe(**keys)
    assert dict(draft_rows(recipe, {"it": SMOLLM2})).get(COPY, 0) == copy_bytes
    of_role = engine_bytes(recipe, {"it": SMOLLM2}, [role_model("actor", recipe, trained=True)])
    assert draft_widened(recipe, {"it": SMOLLM2}) == of_role["actor"].widened == more_bytes


def test_it_grows_all_moments_of_a_step() -> None:
    """The copy is there all the time, and comes on top of the policy's own, which is there in the fullest moment."""
    widened = []
    for sampling in ({"speculation": 4}, DRAFTS):
        facts = facts_of(named("colocated", 1), "grpo", model="it", sampling=sampling)
        (alone,) = memory_by_device(facts)
        assert max(alone.during, key=lambda row: row[1])[0] == "actor.generate"
        widened.append(dict(alone.slack)[NEEDS])
    assert widened == [2 * PACKED, 4 * PACKED]
