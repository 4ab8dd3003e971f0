"""Samples that move between two engines of one rank: whatever is asked, moved and lost, they say the same."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from plait.data.records import Sample
from plait.generation.engine import Engine, drain
from plait.generation.moves import SampleMoves
from plait.generation.settings import SamplingSettings
from plait.layout.mesh import Layout
from plait.models.parallel.peers import Peers
from plait.policy.step import Key
from plait.schedule.work import to_the_end
from plait.workers.sample_mover import End, SampleMover
from tests.cases import examples
from tests.generation.requests import with_head
from tests.generation.test_engine import by_uid
from tests.models.tiny import shared_model
from tests.training.exact import ExactFloat64

HERE = Layout.on((0,))


@settings(max_examples=examples(3, 8), deadline=None, phases=[Phase.generate])
@given(
    asked=st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.integers(2, 20), min_size=1, max_size=3), st.integers(0, 1)),
        min_size=1,
        max_size=3,
    ),
    pool=st.sampled_from([None, 64, 96]),
    cache=st.sampled_from([0, 32, 200]),
    stages=st.lists(
        st.tuples(
            st.sets(st.tuples(st.integers(0, 2), st.integers(0, 2))),
            st.sampled_from(["ahead", "ahead", "at once", "recompute", "some"]),
            st.integers(0, 4),
        ),
        min_size=1,
        max_size=4,
    ),
    recompute=st.integers(0, 8),
)
def test_samples_that_move_say_the_same(asked, pool, cache, stages, recompute) -> None:
    """Any samples, at any token, ahead or at once or computed again, into a pool that may be too small or have their
    beginnings, from a source that may compute all again on the way: and nothing is left over in either pool."""
    options = {"max_running": 4, "max_prefill_tokens": 25, "prefix_cache_tokens": cache}
    source = Engine(shared_model(), SamplingSettings(**options))
    target = Engine(shared_model(), SamplingSettings(**options, kv_tokens=pool))
    mover = SampleMover(Peers.alone(), End(HERE, source), End(HERE, target))
    delivered: list[Sample] = []
    with ExactFloat64():
        for uid, (size, lengths, head) in enumerate(asked):
            source.add(with_head(uid, size, lengths, head))
            delivered += source.step()
        target.add(with_head(9, 20, [30], 0))
        for number, (keys, how, count) in enumerate(stages):
            here: list[Key] = [key for key in sorted(keys) if key in SampleMoves(source.state).started]
            if how == "ahead":
                prompts = [
                    with_head(uid, size, lengths, head).prompt for uid, (size, lengths, head) in enumerate(asked)
                ]
                mover.take(mover.give(here, mover.here(prompts), number), number)
            else:
                again = here if how == "recompute" else here[::2] if how == "some" else ()
                to_the_end(mover.moving(here, recompute=again))
            assert (how != "ahead") == all(key not in SampleMoves(source.state).started for key in here) or not here
            if number == recompute:
                source.update_weights(source.policy_version)
            for engine in (source, target):
                for _ in range(count):
                    delivered += engine.step() if engine.has_work else []
        for engine in (source, target):
            delivered += drain(engine)
            blocks = engine.state.scheduler.blocks
            assert blocks.num_held == 0
            assert blocks.num_cached * 16 <= cache
            assert (engine.occupancy.kv_bytes == 0) == (blocks.num_cached == 0)
        said = {key: one for key, one in by_uid(delivered).items() if key != "9.0"}
        alone = Engine(shared_model(), SamplingSettings())
        for uid, (size, lengths, head) in enumerate(asked):
            alone.add(with_head(uid, size, lengths, head))
        expected = by_uid(drain(alone))
    assert {key: one.token_ids for key, one in said.items()} == {key: one.token_ids for key, one in expected.items()}
    for key, one in said.items():
        assert one.logprobs == pytest.approx(expected[key].logprobs, abs=1e-9)
