"""What a run says of functions that fail: the first failures whole, and then ever fewer."""

from __future__ import annotations

from plait.rewards.scores import Failure, FailureKind, GroupScores, Worked
from plait.runtime.steps.function_reports import FunctionReports
from plait.schedule.busy import busiest_s, call_of
from plait.workers.recorder import Recorder


def group(*kinds: FailureKind, recovered: tuple[str, ...] = ()) -> GroupScores:
    failures = tuple(Failure("0:0", "judge", kind, f"{kind}!", where="sample 0 of prompt 7") for kind in kinds)
    worked = (Worked("judge", worker=2, start_s=1.0, end_s=1.5),)
    return GroupScores(0, (), {}, (), failures=failures, recovered=recovered, worked=worked)


def test_a_service_that_is_away_is_told_ever_more_rarely():
    told: list[str] = []
    report = FunctionReports(Recorder(), told.append)
    for _ in range(120):
        report("reward.score", "reward", group(FailureKind.RAISED))
    heads = [text.splitlines()[0] for text in told]
    whole = "reward `judge` failed on sample 0 of prompt 7: raised!"
    assert heads == [whole] * 3 + [f"failure 10 of its kind: {whole}", f"failure 100 of its kind: {whole}"]
    assert told[2].endswith("(further failures of this kind are counted; the 10th, the 100th, … is shown)")


def test_each_kind_and_each_function_counts_by_itself():
    told: list[str] = []
    report = FunctionReports(Recorder(), told.append)
    for _ in range(5):
        report("reward.score", "reward", group(FailureKind.RAISED, FailureKind.TIMEOUT, recovered=("it was away",)))
    report("cost.score", "cost", group(FailureKind.RAISED))
    assert [sum(word in text for text in told) for word in ("raised!", "timeout!", "it was away")] == [4, 3, 3]


def test_calls_of_functions_are_actions_in_lanes_of_their_workers():
    recorder = Recorder()
    FunctionReports(recorder, print)("reward.score", "reward", group())
    (span,) = recorder.take().spans
    assert (span.action, span.lane, span.end_s - span.start_s) == ("reward.score/judge", "reward worker 2", 0.5)


def test_calls_that_wait_together_have_lanes_of_their_own_and_take_the_time_of_one():
    recorder = Recorder()
    worked = tuple(Worked("judge", 2, 1.0, 1.5 + number, number) for number in range(2))
    FunctionReports(recorder, lambda text: None)("reward.score", "reward", GroupScores(0, (), {}, (), worked=worked))
    timeline = recorder.take()
    assert [span.lane for span in timeline.spans] == ["reward worker 2", "reward worker 2 beside 1"]
    assert busiest_s(timeline, call_of) == {"reward.score": 0.5}
