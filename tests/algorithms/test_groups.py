"""What flows that compare the responses of a group shape and leave out: by hand, and alike in each of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from plait.algorithms.groups import informative, stopped_properly, subtract_overlong
from plait.algorithms.grpo import GRPOOptions, grpo
from plait.algorithms.reinforce_pp import ReinforcePPOptions, reinforce_pp
from plait.algorithms.rloo import RLOOOptions, rloo
from plait.dataflow import Dataflow, trace
from tests.algorithms import oracle

BASELINE = {"group_baseline": True}
FLOWS = [(grpo, GRPOOptions, {}), (rloo, RLOOOptions, {}), (reinforce_pp, ReinforcePPOptions, BASELINE)]
each_flow = pytest.mark.parametrize(("flow", "make", "own"), FLOWS, ids=[flow.__name__ for flow, _, _ in FLOWS])


def graph_of(flow, options) -> Dataflow:
    return trace(flow, roles=["actor", "reward"], options=options)


def test_overlong_by_hand():
    # Limit 20, the last 8 tokens cost up to 2: free up to 12 tokens, half at 16, all of it at 20.
    by_length = {length: subtract_overlong(1.0, 20 - length, 8, 2.0) for length in (1, 12, 13, 16, 20)}
    assert by_length == {1: 1.0, 12: 1.0, 13: 0.75, 16: 0.0, 20: -1.0}


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0, 5), st.data())
def test_overlong_equals_the_oracle(limit, buffer, penalty, data):
    length = data.draw(st.integers(1, limit))
    found = subtract_overlong(0.5, limit - length, buffer, penalty)
    assert found == pytest.approx(0.5 + oracle.overlong(length, limit, buffer, penalty))


def test_a_response_that_did_not_stop_by_hand():
    assert stopped_properly(0.8, 1.0, 0.5) == 0.8, "it has stopped"
    assert stopped_properly(0.8, 0.0, 0.5) == 0.4
    assert stopped_properly(-2.0, 0.0, 0.5) == -1.0
    assert stopped_properly(0.8, 0.0, 0.0) == 0.0
    assert stopped_properly(0.8, 0.0, -0.5) == -0.5
    assert stopped_properly(0.8, 0.0, 1.0) == 0.8


@each_flow
def test_scores_are_shaped_before_they_are_compared(flow, make, own):
    """First what a truncated response gets, then what a long one loses; truncated ones are in the baseline, and out of
    the loss."""
    options = make(
        overlong_buffer_tokens=4, overlong_penalty=0.5, mask_truncated=True, stop_properly_penalty_coef=-1.0, **own
    )
    graph = graph_of(flow, options)
    stopped, shaped, compared = graph.nodes[2:5]
    assert [stopped.call, shaped.call] == ["scores_of_stopped", "shaped_rewards"]
    assert [str(column) for column in stopped.inputs.values()] == ["reward_score[sample]", "finished[sample]"]
    assert [str(column) for column in shaped.inputs.values()] == ["scores_of_stopped[sample]", "tokens_left[sample]"]
    assert [str(column) for column in compared.inputs.values()] == ["shaped_rewards[sample]"]
    assert str(graph.nodes[-1].keep) == "finished[sample]"
    assert set(graph.nodes[-1].inputs) == {"advantages", "keep"}
    plain = graph_of(flow, make(**own))
    assert [node.call for node in plain.nodes] == [node.call for node in graph.nodes if node not in (stopped, shaped)]
    assert plain.nodes[-1].keep is None


def test_groups_of_equal_scores_are_not_worth_a_place():
    # DAPO, eq. 11: 0 < right answers < group size.
    assert [informative(np.array(group)) for group in ([0.0, 1, 0], [1.0, 1, 1], [0.0, 0, 0])] == [True, False, False]
    assert informative(np.full(3, 0.1)) is False
    assert informative(np.array([1.0])) is False, "a group of one has no baseline"
    assert informative(np.array([])) is False


@each_flow
def test_dynamic_sampling_is_part_of_the_generate_call(flow, make, own):
    off = graph_of(flow, make(**own))
    on = graph_of(flow, make(dynamic_sampling=True, max_sampling_rounds=4, **own))
    assert off.nodes[0].generation.resample is None
    resample = on.nodes[0].generation.resample
    assert (resample.keep, resample.reward, resample.max_rounds) == (informative, "reward", 4)
    assert [node.call for node in on.nodes] == [node.call for node in off.nodes]


def test_groups_are_left_out_only_where_they_are_their_own_baseline():
    with pytest.raises(
        ValidationError, match=r"the baseline is the batch, .* set `options\.group_baseline` to true or"
    ):
        ReinforcePPOptions(dynamic_sampling=True)


@each_flow
def test_a_key_without_its_switch_is_refused(flow, make, own):
    switches = {"overlong_penalty": "overlong_buffer_tokens", "max_sampling_rounds": "dynamic_sampling"}
    for key, switch in switches.items():
        with pytest.raises(ValueError, match=f"has no effect without {switch}"):
            make(**{key: 3}, **own).check_read()
