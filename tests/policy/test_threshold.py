import random
from hashlib import sha256
from itertools import pairwise

import pytest

from plait.errors import ConfigError
from plait.policy.migration import Transfer
from plait.policy.step import Limits, StepKind
from plait.policy.threshold import Rollout, outcome
from plait.policy.tuning import bootstrap, spread, tune
from plait.policy.unfinished import Decoding, Left, finish_times, merged
from tests.policy.played_engine import Request, SimulatedEngine
from tests.simulator.played_rollouts import Fusion, Scoring, simulate_rollout

WIDE = Limits(max_running=10_000, max_prefill_tokens=10**9)


def decode_time(step_s):
    """Prefill is free and the first token comes with it, as the closed forms assume."""
    return lambda step: 0.0 if step.kind is StepKind.PREFILL else step_s(step.num_sequences)


def affine(rows: int) -> float:
    return 1.0 + 0.05 * max(0, rows - 4)


def single(lengths, start=0):
    return [Request(start + k, 4, (length,)) for k, length in enumerate(lengths)]


def instances(lengths, num):
    parts, start = spread(lengths, num), 0
    queues = []
    for part in parts:
        queues.append(single(part, start))
        start += len(part)
    return queues


def test_the_stream_of_decisions_by_hand():
    """Two places; prompt 7 has samples of 3 and 1 tokens, prompt 8 one of 2.

    Prefill 7 starts both samples, one ends at once; prefill 8 beside a row of the other; then both end in a decode.
    """
    engine = SimulatedEngine(Limits(max_running=2, max_prefill_tokens=100))
    engine.add(Request(7, 5, (3, 1)))
    engine.add(Request(8, 6, (2,)))
    steps = []
    while engine.has_work:
        steps.append(engine.step())
    assert [(s.kind, s.num_sequences, s.num_tokens, s.num_context_tokens, s.finished) for s in steps] == [
        (StepKind.PREFILL, 1, 5, 0, ((7, 1),)),
        (StepKind.PREFILL, 2, 1 + 6, 5, ()),
        (StepKind.DECODE, 2, 2, 6 + 6, ((7, 0), (8, 0))),
    ]


def test_serial_execution_equals_the_closed_form_exactly():
    lengths = [random.Random(3).randint(1, 60) for _ in range(48)]
    steps = [[length - 1 for length in part] for part in spread(lengths, 4)]
    scoring = Scoring(("reward",), lambda role, tokens: 0.5, max_tokens=1)
    simulated = simulate_rollout(instances(lengths, 4), WIDE, decode_time(affine), scoring=scoring)
    closed = outcome(Rollout(4, affine, 0.5, max_batch=8), steps, 0)
    assert simulated.generation_s == pytest.approx(closed.generation_s)
    assert simulated.timeline.makespan_s == pytest.approx(closed.total_s)
    assert simulated.migration is None
    for threshold in (0, -1):
        off = simulate_rollout(
            instances(lengths, 4), WIDE, decode_time(affine), scoring=scoring, fusion=Fusion(threshold, 8)
        )
        assert off == simulated


@pytest.mark.parametrize(("threshold", "kept"), [(4, 1), (8, 1), (12, 1), (16, 1), (8, 3), (16, 4)])
def test_migration_agrees_with_the_closed_form_within_a_step_and_a_score(threshold, kept):
    rng = random.Random(5)
    lengths = [min(400, 1 + int(rng.lognormvariate(4, 0.9))) for _ in range(64)]
    steps = [[length - 1 for length in part] for part in spread(lengths, 8)]
    scoring = Scoring(("reward",), lambda role, tokens: 1.0, max_tokens=1)
    simulated = simulate_rollout(
        instances(lengths, 8), WIDE, decode_time(affine), scoring=scoring, fusion=Fusion(threshold, 8, kept=kept)
    )
    closed = outcome(Rollout(8, affine, 1.0, max_batch=8), steps, threshold, kept)
    assert simulated.migration is not None
    assert len(simulated.migration.keep) == closed.kept
    slack = 3 * affine(8) + 2.0
    assert simulated.generation_s == pytest.approx(closed.generation_s, abs=slack)
    assert simulated.timeline.makespan_s == pytest.approx(closed.total_s, abs=slack)


@pytest.mark.slow
def test_the_tuned_threshold_is_as_good_in_the_simulator_as_the_best_of_a_scan():
    rng = random.Random(11)
    lengths = [min(300, 1 + int(rng.lognormvariate(4, 0.8))) for _ in range(64)]
    rollout = Rollout(8, affine, 4.0, max_batch=8)
    tuned = tune(rollout, bootstrap(lengths, 64, draws=8, seed=1))
    scoring = Scoring(("reward",), lambda role, tokens: 4.0, max_tokens=1)

    def total(threshold):
        fusion = Fusion(threshold, 8)
        return simulate_rollout(
            instances(lengths, 8), WIDE, decode_time(affine), scoring=scoring, fusion=fusion
        ).timeline.makespan_s

    assert 0 < tuned.threshold < 64
    assert total(tuned.threshold) < 0.95 * total(0)
    assert total(tuned.threshold) <= 1.1 * min(total(r) for r in range(0, 64, 8))


@pytest.mark.parametrize("transfer", list(Transfer))
def test_every_sample_is_decoded_to_its_length_and_scored_once_whatever_migrates(transfer):
    rng = random.Random(2)
    queues = [
        [Request(10 * i + k, 5 + k, tuple(rng.randint(1, 40) for _ in range(3))) for k in range(4)] for i in range(3)
    ]
    total = sum(length for queue in queues for request in queue for length in request.lengths)
    samples = sum(len(request.lengths) for queue in queues for request in queue)
    scoring = Scoring(("ref", "reward"), lambda role, tokens: 0.01 * tokens, max_tokens=60)
    for threshold in range(0, samples + 1, 3):
        done = simulate_rollout(
            queues,
            Limits(max_running=12, max_prefill_tokens=32),
            lambda step: 1.0 + 0.1 * step.num_tokens,
            scoring=scoring,
            fusion=Fusion(threshold, 12, move_s=lambda sample, transfer: 0.25, transfer=lambda s: transfer),
        )
        finished = [key for steps in done.steps for step in steps for key in step.finished]
        assert len(finished) == len(set(finished)) == samples
        computed = sum(step.num_tokens for steps in done.steps for step in steps)
        prompts = sum(request.prompt_tokens for queue in queues for request in queue)
        moved = done.migration is not None and done.migration.moves
        if moved and transfer is Transfer.RECOMPUTE:
            assert computed + samples > prompts + total
        else:
            assert computed + samples == prompts + total
        scored = sum(span.tokens for span in done.timeline.spans if span.kind == "SCORE" and span.role == "ref")
        assert scored == total + sum(r.prompt_tokens * len(r.lengths) for q in queues for r in q)
        for rank in done.timeline.ranks:
            lane = [s for s in done.timeline.spans if s.rank == rank and s.lane == "compute"]
            assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(lane))
        names = [(span.rank, span.action) for span in done.timeline.spans]
        assert len(names) == len(set(names))


def test_scoring_waits_for_the_end_without_migration_and_not_with_it():
    queues = [single([2, 2, 50]), single([2, 2, 60], 3)]
    scoring = Scoring(("reward",), lambda role, tokens: 1.0, max_tokens=1)
    serial = simulate_rollout(queues, WIDE, decode_time(affine), scoring=scoring)
    fused = simulate_rollout(queues, WIDE, decode_time(affine), scoring=scoring, fusion=Fusion(2, 4))
    first = lambda done: min(s.start_s for s in done.timeline.spans if s.kind == "SCORE")
    assert first(serial) == serial.generation_s == 59
    assert first(fused) < 5
    assert fused.migration is not None
    assert [span.action for span in fused.timeline.spans if span.kind == "MOVE"] == ["actor/1:0MOVE5"]
    assert fused.timeline.makespan_s < serial.timeline.makespan_s


RECORDED = (
    ("dcb85d51330f", 64.0, 64.5, 1),
    ("b06c6ca0980c", 56.0, 56.5, 1),
    ("71a92206ff81", 57.0, 57.5, 1),
    ("c4531bd688ea", 68.0, 68.5, 1),
    ("5b41cb707c87", 39.0, 39.5, 3),
    ("f1198e44f206", 37.0, 37.5, 2),
    ("2888a10d295b", 63.0, 63.5, 4),
    ("278d0c2a2b9c", 40.0, 40.5, 2),
)
"""A digest of every span of a rollout; the end of generation and of all, moves."""


@pytest.mark.parametrize("seed", range(len(RECORDED)))
def test_rollouts_are_as_recorded_though_much_ends_at_one_moment(seed):
    """A step takes 1, a score and a move 0.5: who looks first at what has just ended decides where it is scored."""
    rng = random.Random(seed)
    lengths = lambda: tuple(rng.randint(1, 40) for _ in range(rng.randint(1, 4)))
    queues = [[Request(10 * i + k, rng.randint(1, 9), lengths()) for k in range(rng.randint(0, 6))] for i in range(5)]
    done = simulate_rollout(
        queues,
        Limits(max_running=8, max_prefill_tokens=64),
        lambda step: 1.0,
        scoring=Scoring(("ref", "reward"), lambda role, tokens: 0.5, max_tokens=60),
        fusion=Fusion(8, 6, move_s=lambda sample, how: 0.5, transfer=lambda s: list(Transfer)[s.tokens % 2]),
    )
    spans = done.timeline.spans
    rows = [(s.action, s.rank, s.start_s, s.end_s, s.bytes, s.tokens, s.lane, s.role) for s in spans]
    digest = sha256(repr(rows).encode()).hexdigest()[:12]
    assert done.migration is not None
    assert (digest, done.generation_s, done.timeline.makespan_s, len(done.migration.moves)) == RECORDED[seed]


def test_more_samples_than_an_instance_takes_are_refused():
    with pytest.raises(ConfigError, match="max_batch"):
        simulate_rollout([single([3])], Limits(4, 100), lambda step: 1.0, fusion=Fusion(1, 5))
    with pytest.raises(ConfigError, match="request 0"):
        simulate_rollout([single([3]), single([3])], Limits(4, 100), lambda step: 1.0)


def test_finish_times_by_hand():
    """Lengths 2, 5 with t(2) = 3, t(1) = 1: the first ends at 6, the second three steps later."""
    assert finish_times([2, 5], lambda n: {1: 1.0, 2: 3.0}[n]) == [6.0, 9.0]
    assert finish_times([0, 4], lambda n: 1.0, start_s=10.0) == [10.0, 14.0]
    # Two places: the third begins after two steps, the fourth after five, and runs alone from the tenth on.
    pace = lambda n: {1: 1.0, 2: 3.0}[n]
    assert finish_times([5, 2, 8, 6], pace, slots=2) == [15.0, 6.0, 30.0, 31.0]


def test_what_is_left_of_an_instance_by_hand():
    """Three samples of 5, 2 and 2 steps: steps of 3 s until 6 s, then of 1 s until 9 s."""
    instance = Decoding([5, 2, 2], lambda n: {1: 1.0, 3: 3.0}[n])
    assert (instance.ends, instance.last_s) == ([9.0, 6.0, 6.0], 9.0)
    assert instance.left(0.0, "abc") == [Left(5, "a"), Left(2, "b"), Left(2, "c")]
    assert instance.left(3.5, "abc") == [Left(3, "a"), Left(0, "b"), Left(0, "c")], "the second step is under way"
    assert instance.left(7.0, "abc") == [Left(2, "a")]
    assert instance.left(9.0, "abc") == []
    waits = Decoding([5, 2, 2], lambda n: {1: 1.0, 2: 3.0}[n], slots=2)
    assert waits.ends == [13.0, 6.0, 12.0]
    assert waits.left(3.0, "abc") == [Left(4, "a"), Left(1, "b"), Left(2, "c")], "the third waits for the second"
    assert waits.left(9.0, "abc") == [Left(2, "a"), Left(1, "c")]
    assert (Decoding([], lambda n: 1.0).last_s, Decoding([], lambda n: 1.0).left(0.0, "")) == (0.0, [])


def test_the_longest_go_to_whoever_has_fewest():
    """Of equally full instances to the one that had more steps left."""
    rows = [[Left(1, "a")], [Left(5, "b"), Left(5, "c")], [Left(3, "d"), Left(9, "e")], [Left(4, "f")]]
    assert merged(rows, 2) == [[rows[2][0], rows[2][1], rows[3][0]], [rows[1][0], rows[1][1], rows[0][0]]]
