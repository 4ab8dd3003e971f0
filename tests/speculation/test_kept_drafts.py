"""Drafts are held against what samples say, token by token, until one is wrong."""

from __future__ import annotations

import numpy as np

from plait.speculation.drafter import DraftTokens
from plait.speculation.kept_drafts import KeptDrafts


def drafts(*tokens: list[int]) -> DraftTokens:
    """Of at most three tokens each; the cell of a token is ten times the token."""
    ids_BK = np.array([row + [0] * (3 - len(row)) for row in tokens], np.int32)
    return DraftTokens(
        ids_BK, np.array([len(row) for row in tokens]), 10 * ids_BK.astype(np.int64), np.ones(ids_BK.shape)
    )


def test_a_draft_is_tried_until_a_token_of_it_is_wrong() -> None:
    kept, slots = KeptDrafts(3), np.array([0, 20])
    for slot in (0, 20):
        kept.clear(slot)
    kept.keep(slots, drafts([5, 6, 7], [8]), np.array([2, 0]))
    trials = kept.hear(slots, np.array([2, 2]), np.array([5, 9, 8, 8]))
    assert trials.cells_X.tolist() == [50, 60, 80]
    assert trials.hits_X.tolist() == [1, 0, 1]
    assert trials.places_X.tolist() == [0, 1, -1], "the draft of slot 20 was only looked up"
    assert trials.num_computed == 2
    assert len(kept.hear(slots, np.array([1, 1]), np.array([7, 8]))) == 0, "nothing is followed any more"


def test_a_draft_that_was_only_looked_up_is_followed_to_its_end() -> None:
    kept, slot = KeptDrafts(3), np.array([0])
    kept.clear(0)
    kept.keep(slot, drafts([1, 2, 3]), np.array([0]))
    kept.hear(slot, np.array([1]), np.array([1]))
    kept.keep(slot, drafts([4]), np.array([0]))
    assert kept.hear(slot, np.array([1]), np.array([2])).cells_X.tolist() == [20]
    kept.keep(slot, drafts([4]), np.array([1]))
    assert kept.hear(slot, np.array([1]), np.array([4])).cells_X.tolist() == [40], (
        "one that is computed takes its place"
    )


def test_drafts_that_found_no_room_count_as_looked_up() -> None:
    """Those of slot 0; those of slot 1 are in another step, and are computed."""
    kept, slots = KeptDrafts(3), np.array([0, 1])
    for slot in (0, 1):
        kept.clear(slot)
    kept.keep(slots, drafts([1, 2], [3]), np.array([2, 1]))
    kept.not_computed(np.array([0]))
    trials = kept.hear(slots, np.array([1, 1]), np.array([1, 3]))
    assert (trials.places_X.tolist(), trials.num_computed) == ([-1, 0], 1)
