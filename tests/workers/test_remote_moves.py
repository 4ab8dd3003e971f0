"""Samples that the leader has move between two instances: where they count, which stay, and when a move is over."""

from __future__ import annotations

from plait.data.records import Prompt
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.kernels.noise import NoiseKey
from plait.policy.migration import Bounds
from plait.workers.dealing import Outstanding
from plait.workers.gathering import Gathering, Left, Stage
from plait.workers.remote_moves import RemoteMoves

COMMAND = 7
"""The number of every command that is told."""


def dealt(*samples: int) -> tuple[RemoteMoves, Outstanding, list[Gathering]]:
    """A prompt for each instance, of which it has so many samples; and what is told."""
    outstanding, told = Outstanding(), list[Gathering]()
    for place, count in enumerate(samples):
        request = Request(Prompt(place, "", (1, 1)), count, Sampling(max_tokens=9), NoiseKey(0))
        outstanding.dealt([request], place, number=10 + place)

    def tell(stage: Gathering) -> int:
        told.append(stage)
        return COMMAND

    return RemoteMoves(len(samples), outstanding, tell, gathers=True), outstanding, told


def test_unfinished_samples_are_listed_by_instance_as_they_were_dealt() -> None:
    moves, outstanding, _ = dealt(2, 1)
    assert moves.unfinished == (((0, 0), (0, 1)), ((1, 0),))
    assert outstanding.running(2) == (2, 1)


def test_samples_count_in_their_target_until_the_source_says_which_stayed() -> None:
    """One of two that are to leave had not begun when they left: it is the first instance's again."""
    moves, outstanding, told = dealt(3, 1)
    assert moves.move({(0, 1): [(0, 1), (0, 2)]}) == 2
    assert [stage.stage for stage in told] == [Stage.REST]
    assert dict(told[0].numbers) == {0: 10}, "they are delivered under the command that asked for them"
    assert outstanding.running(2) == (1, 3)
    assert (moves.is_moving, moves.instances, moves.numbers, moves.moved_s) == (True, {0, 1}, {COMMAND}, None)
    moves.heard(COMMAND, 0, Left([(0, 1)]))
    assert moves.unfinished == (((0, 0), (0, 2)), ((0, 1), (1, 0)))
    assert not moves.is_moving
    assert moves.moved_s is not None
    assert moves.moved_s >= 0


def test_one_move_at_a_time_and_none_of_what_is_elsewhere() -> None:
    moves, _, told = dealt(2, 1)
    assert moves.move({(1, 0): [(0, 0)]}) == 0, "it is not there"
    assert moves.move({(0, 1): [(0, 0), (5, 0)]}) == 1, "the other has ended"
    assert moves.move({(1, 0): [(1, 0)]}) == 0, "others are on their way"
    assert len(told) == 1


def test_none_moves_while_requests_wait_to_be_dealt() -> None:
    moves, outstanding, told = dealt(1, 1)
    outstanding.pending.append(Request(Prompt(9, "", (1,)), 1, Sampling(max_tokens=9), NoiseKey(0)))
    assert moves.gathering(Bounds(8, 9)) == {}
    assert moves.move({(0, 1): [(0, 0)]}) == 0
    assert told == []


def test_what_is_left_is_gathered_where_it_has_room_and_goes_back_nowhere() -> None:
    """Two samples and one: the one goes to the two. When these have ended and one of its prompt has begun there, it
    stays, though the first instance has none."""
    moves, outstanding, _ = dealt(2, 1)
    pairs = moves.gathering(Bounds(8, 9))
    assert pairs == {(1, 0): [(1, 0)]}
    assert moves.gathering(Bounds(2, 9)) == {}, "no instance takes all three"
    moves.move(pairs)
    moves.heard(COMMAND, 1, Left([(1, 0)]))
    assert moves.gathering(Bounds(8, 9)) == {}, "one instance has all"
    outstanding.where[8, 0] = outstanding.where[8, 1] = 1
    outstanding.prompts[8] = Prompt(8, "", (1,))
    del outstanding.where[0, 0], outstanding.where[0, 1]
    assert moves.gathering(Bounds(8, 9)) == {}, "it would come back to where it began"
    moves.forget()
    assert moves.gathering(Bounds(8, 9)) == {(0, 1): [(1, 0)]}


def test_nothing_is_gathered_where_keys_and_values_have_no_room() -> None:
    """Three samples whose prompts have one token each and whose responses may have nine take thirty tokens."""
    moves, outstanding, _ = dealt(2, 1)
    most = sum(len(outstanding.prompts[uid].token_ids) + 9 for uid, _ in outstanding.where)
    assert moves.gathering(Bounds(8, 9, most - 1)) == {}
    assert moves.gathering(Bounds(8, 9, most)) == {(1, 0): [(1, 0)]}
