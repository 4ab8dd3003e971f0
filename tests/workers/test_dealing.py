"""Which instance gets which requests."""

from __future__ import annotations

import pickle

from plait.data.records import FinishReason, Prompt, Sample
from plait.generation.request import GoingOn, Request
from plait.generation.sampling import Sampling
from plait.kernels.noise import NoiseKey
from plait.workers.dealing import Dealer


def request(uid: int, rollout: int, going_on: GoingOn | None = None, *, in_turns: bool = False) -> Request:
    prompt, sampling = Prompt(uid, "", (1,)), Sampling(max_tokens=9)
    return Request(prompt, 2, sampling, NoiseKey(0, rollout), going_on=going_on or GoingOn(), in_turns=in_turns)


def places(dealer: Dealer, *requests: Request) -> dict[int, int]:
    """Prompt → its instance."""
    return {one.prompt.uid: place for place, told in dealer.deal(requests) for one in told}


def test_rollouts_that_take_turns_each_reach_all_instances() -> None:
    """As prompts do that go on one by one, of the step's own batch and of a later one."""
    dealer = Dealer(2)
    assert [places(dealer, request(uid, uid % 2)) for uid in range(4)] == [{0: 0}, {1: 0}, {2: 1}, {3: 1}]


def test_a_rollout_that_goes_on_after_a_rest_is_the_same_and_another_one_ends_it() -> None:
    dealer = Dealer(2)
    assert places(dealer, request(0, 7)) == {0: 0}
    dealer.rest()
    assert places(dealer, request(1, 7)) == {1: 1}
    dealer.rest()
    assert places(dealer, request(2, 8)) == {2: 0}
    assert places(dealer, request(3, 7)) == {3: 0}


def test_rollouts_that_are_over_are_forgotten_though_each_step_begins_with_one_that_goes_on() -> None:
    dealer, sizes = Dealer(2), list[int]()
    for step in range(30):
        for rollout in (step, step + 1):
            places(dealer, request(rollout, rollout))
        dealer.rest()
        sizes.append(len(pickle.dumps(dealer)))
    assert max(sizes) < 1.1 * sizes[3]


def test_what_is_kept_goes_on_where_it_lies() -> None:
    dealer = Dealer(2)
    assert places(dealer, request(0, 7), request(1, 7)) == {0: 0, 1: 1}
    parked = Sample(Prompt(1, "", (1,)), 0, (2,), (-1.0,), "", FinishReason.OPEN)
    for keeps, place in ((frozenset({0}), 1), (frozenset(), 0)):
        dealer.delivered(parked, 1)
        dealer.rest()
        assert places(dealer, request(1, 8 + place, GoingOn((parked,), keeps=keeps))) == {1: place}


def test_a_next_turn_goes_where_the_turns_before_lie_unless_it_is_less_to_compute_them_again() -> None:
    """Of a first turn 19 tokens are expected: the prompt's, and 9 of each sample. Instance 0 has 38 of them."""
    for drawn, place in ((9, 0), (8, 1)):
        dealer = Dealer(2)
        assert places(dealer, *(request(uid, 7, in_turns=True) for uid in range(3))) == {0: 0, 1: 1, 2: 0}
        samples = [
            Sample(Prompt(0, "", (1,)), index, (5,) * drawn, (-1.0,) * drawn, "", FinishReason.OPEN)
            for index in range(2)
        ]
        going_on = GoingOn(tuple(samples))
        dealer.rest()
        assert places(dealer, request(0, 7, going_on, in_turns=True)) == {0: place}, "38 against 19 + 1 + 2 · drawn"
    dealer.end_turns()
    assert places(dealer, request(2, 7, going_on, in_turns=True)) == {2: 1}, "38 against 22, and 22 + 17 before"
