"""What becomes of weights and optimizer state between calls: where several share a part; what is moved together."""

from __future__ import annotations

from plait.cost.offload_policy import Copies, OffloadPolicy
from plait.recipes.role_models import RoleModel
from plait.schedule.placements import WHOLE
from plait.schedule.plan import Mode, Placement, Plan
from tests.cost.roles import ACTOR, REF, generate, train

OTHER = RoleModel("other", "tiny", scalar=False, trained=False, key="model")


def idle(*placements: Placement, models: tuple[RoleModel, ...] = (ACTOR,), adapted: bool = False) -> OffloadPolicy:
    num_ranks = 1 + max(rank for p in placements for rank in p.ranks)
    return OffloadPolicy(models, Plan("file", num_ranks, placements), adapted=adapted)


def test_what_calls_share_stays_if_one_keeps_it() -> None:
    """One device: training alone reads the optimizer's state; the weights serve generation too."""
    both = idle(train(after="offload"), generate())
    assert (both.of_weights("actor", 0, WHOLE), both.of_state("actor", 0)) == ("keep", "offload")
    both = idle(train(after="offload"), generate(after="offload"))
    assert (both.of_weights("actor", 0, WHOLE), both.of_state("actor", 0)) == ("offload", "offload")
    both = idle(train(), generate(after="offload"))
    assert (both.of_weights("actor", 0, WHOLE), both.of_state("actor", 0)) == ("keep", "keep")
    assert not both.keeps_all
    assert idle(train(), generate()).keeps_all
    assert not both.copies("actor"), "one part serves both: nothing is moved"


def test_offload_rather_than_drop() -> None:
    """A copy of the whole model on rank 0 serves generation, which drops it, and scores, which offload it."""
    score = Placement("actor.logprobs", "score", (0,), after="offload")
    mixed = idle(train((0, 1), tp=2), generate((0, 1), "drop", dp=2), score)
    assert mixed.of_weights("actor", 0, WHOLE) == "offload"
    assert mixed.of_weights("actor", 1, WHOLE) == "drop"
    both: frozenset[Mode] = frozenset({"score", "decode"})
    alone: frozenset[Mode] = frozenset({"decode"})
    assert mixed.copies("actor") == (
        Copies(both, "offload", frozenset({(0, WHOLE)}), (0, 1)),
        Copies(alone, "drop", frozenset({(1, WHOLE)}), (0, 1)),
    )


def test_instances_may_differ() -> None:
    """Two placements of one call, on ranks of their own; what stays is moved together, whoever needs it."""
    places = [train((0, 1), tp=2), generate((0,), "drop"), generate((1,))]
    mixed = idle(*places, Placement("actor.logprobs", "score", (2,)))
    assert [(c.after, sorted(c.modes), sorted(c.parts), c.ranks) for c in mixed.copies("actor")] == [
        ("keep", ["decode", "score"], [(1, WHOLE), (2, WHOLE)], (0, 1, 2)),
        ("drop", ["decode"], [(0, WHOLE)], (0, 1)),
    ]


def test_frozen_roles_share_and_are_moved_only_where_they_are_dropped() -> None:
    ref = Placement("ref.logprobs", "score", (0, 1), tp=2, after="offload")
    sampled = Placement("ref.generate", "decode", (0, 1), dp=2, after="drop")
    other = Placement("other.logprobs", "score", (1,))
    frozen = idle(ref, sampled, other, models=(REF, OTHER))
    assert frozen.owner("ref") == frozen.owner("other")
    assert frozen.of_weights("ref", 1, WHOLE) == "keep", "the other role's only weights"
    assert [(c.after, sorted(c.parts)) for c in frozen.copies("ref")] == [("drop", [(0, WHOLE)])]
    assert frozen.copies("other") == ()


def test_with_adapters_all_share_the_base() -> None:
    places = train(after="offload"), generate(after="offload"), Placement("ref.logprobs", "score", (0,))
    adapted = idle(*places, models=(ACTOR, REF), adapted=True)
    assert adapted.owner("actor") == adapted.owner("ref")
    assert adapted.of_weights("actor", 0, WHOLE) == "keep", "the reference keeps what is under the adapter"
    assert adapted.of_adapter("actor", 0, WHOLE) == "offload"


def test_roles_that_score_with_copies() -> None:
    """A role scores with its own weights where parts are those that it trains; a frozen role, wherever it scores."""
    score = Placement("actor.logprobs", "score", (0, 1), dp=2)
    ref = Placement("ref.logprobs", "score", (0, 1), tp=2)
    models = (ACTOR, REF)
    assert not idle(train((0, 1), dp=2), score, ref, models=models).scores_with_copies
    assert not idle(train((0, 1), pp=2), generate((0, 1), dp=2), ref, models=models).scores_with_copies
    assert idle(train((0, 1), pp=2), score, ref, models=models).scores_with_copies == {"actor"}
