"""Which weights what generates has, by a number that all ranks are told."""

from __future__ import annotations

from collections.abc import Sequence

from plait.cost.offload_policy import Copies
from plait.schedule.plan import After
from plait.workers.freshness import Freshness


def freshness(after: After, held: Sequence[int] = ()) -> Freshness:
    copies = Copies(frozenset(("decode",)), after, frozenset(((1, ("half",)), (2, ("half",)))), (0, 1, 2))
    return Freshness({"actor": (copies,)}, {"actor": held})


def test_weights_that_are_moved_anew_have_the_number_that_they_had() -> None:
    fresh = freshness("drop")
    fresh.moved([("actor", 0)])
    began = fresh.weights_number("actor")
    fresh.told([2], ())  # one of two ranks has to make room
    assert not fresh.is_fresh("actor", "decode")
    fresh.moved([("actor", 0)])
    assert fresh.weights_number("actor") == began
    fresh.trained("actor")
    fresh.moved([("actor", 0)])
    assert fresh.weights_number("actor") == began + 1


def test_weights_that_are_held_get_another_number_when_they_are_published() -> None:
    fresh = freshness("keep", held=(0,))
    fresh.trained("actor")
    fresh.trained("actor")
    assert fresh.is_fresh("actor", "decode"), "it generates with the older ones on purpose"
    assert fresh.weights_number("actor") == 0
    fresh.moved([("actor", number) for number in fresh.behind("actor", None)])
    assert fresh.weights_number("actor") == 2
