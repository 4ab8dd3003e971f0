"""Open batches: in which order they take the prompts of the run, and what a checkpoint keeps of them."""

from __future__ import annotations

from plait.data.records import Prompt
from plait.runtime.folder.moments import Round
from plait.runtime.inputs.feed import Feed
from plait.runtime.steps.batches import Batches
from tests.runtime.samples import halted_batch, prompt, whole_batch

NODE = 3


class Numbered:
    """Prompts whose uids are their places."""

    def take(self, start: int, count: int) -> list[Prompt]:
        return [prompt(uid) for uid in range(start, start + count)]


def feed(drawn: int = 0) -> Feed:
    return Feed(Numbered(), {}, per_step=2, drawn=drawn)  # type: ignore[arg-type]


def uids(prompts) -> list[int]:
    return [one.uid for one in prompts]


def test_a_batch_takes_the_next_prompts_once() -> None:
    batches = Batches(feed(), per_step=2)
    first, second = batches.at(0), batches.at(1)
    assert (uids(first.prompts), first.drawn) == ([0, 1], 2)
    assert (uids(second.prompts), second.drawn) == ([2, 3], 4)
    assert batches.at(0) is first


def test_what_a_rollout_asks_for_again_comes_before_later_batches() -> None:
    batches = Batches(feed(), per_step=2)
    first = batches.at(0)
    assert uids(batches.draw(first, 3, None, is_later=False)) == [2, 3, 4]
    assert first.drawn == 5
    assert (uids(first.prompts), uids(batches.at(1).prompts)) == ([0, 1], [5, 6])


def test_rounds_that_began_are_told_when_the_step_has_ended_and_count_for_their_batch_and_later_ones() -> None:
    batches = Batches(feed(), per_step=2)
    states = [batches.at(step) for step in range(3)]
    assert uids(batches.draw(states[1], 1, None, is_later=True)) == [6]
    assert uids(batches.draw(states[0], 2, None, is_later=False)) == [7, 8]
    assert [state.drawn for state in states] == [4, 7, 9], "prompts up to each"
    assert batches.rounds == ()
    batches.end(0)
    assert batches.rounds == ((1, 6, 1), (0, 7, 2))
    batches.end(1)
    assert batches.rounds == ()


def test_rounds_on_record_have_the_same_prompts_in_whichever_order_they_begin() -> None:
    """And as many, whatever is asked for now; a round of an older record has as many as the batch began with."""
    record = (Round(1, 6, 2), Round(0, 8, 2), Round(1, 10, None), Round(1, 12, 3))
    batches = Batches(feed(), per_step=2)
    own, later = batches.at(0), batches.at(1)
    batches.at(2)
    assert uids(batches.draw(own, 2, record, is_later=False)) == [8, 9]
    assert uids(batches.draw(later, 1, record, is_later=True)) == [6, 7]
    assert uids(batches.draw(later, 1, record, is_later=True)) == [10, 11]
    assert uids(batches.draw(later, 3, record, is_later=True)) == [12, 13, 14]
    assert batches.draw(later, 3, record, is_later=True) is None, "its next one began in a later step"
    assert uids(batches.draw(own, 1, record, is_later=False)) == [15], "more than is on record, behind all of it"
    batches.end(0)
    assert batches.rounds == (*record, (0, 15, 1))
    assert uids(batches.at(3).prompts) == [16, 17]


def test_batches_of_an_earlier_stay_are_not_drawn_again() -> None:
    kept = whole_batch(4, NODE, 7, 8)
    batches = Batches(feed(drawn=9), per_step=2, kept=[kept])
    assert batches.at(4) is kept
    assert uids(batches.at(5).prompts) == [9, 10]


def test_a_checkpoint_keeps_the_batches_that_were_open_when_a_step_ended() -> None:
    batches = Batches(feed(), per_step=2)
    assert batches.whole == ()
    batches.at(0)
    batches.at(1)
    assert batches.whole == (), "no step has ended"
    batches.end(0)
    assert [(batch.step, batch.drawn, batch.prompts) for batch in batches.whole] == [(1, 4, (2, 3))]
    batches.at(2)
    assert [batch.step for batch in batches.whole] == [1], "begun since"
    batches.end(1)
    batches.end(2)
    assert batches.whole == ()


def test_rollouts_that_are_done_and_what_has_scored_them() -> None:
    state = whole_batch(4, NODE, 7)
    state.scored.add(6)
    batches = Batches(feed(), per_step=2, kept=[state, halted_batch(5, NODE)])
    assert batches.done == {(4, NODE), (4, 6)}


def test_samples_stand_where_their_last_token_is_and_finished_ones_nowhere() -> None:
    batches = Batches(feed(), per_step=2, kept=[whole_batch(4, NODE, 7), halted_batch(5, NODE)])
    assert batches.standing == {8: {0: 0}, 9: {0: 3, 1: 0}}
