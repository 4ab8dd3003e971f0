"""All numbers of a step that has been run: what its rows tell, what was measured, and where the run stands."""

from __future__ import annotations

from plait.runtime.process import resident_bytes
from plait.runtime.session import Session
from plait.runtime.step_metrics import step_metrics, tokens_of
from plait.runtime.steps.off_policy import idle_ratios, off_policy_metrics
from plait.runtime.steps.step import StepState
from plait.schedule.busy import busiest_s, busy_by_rank, call_of, kind_of


def finish_metrics(session: Session, state: StepState, seconds: float) -> dict[str, float]:
    """All numbers of a step, times last."""
    turns, sampling = session.recipe.turns, session.recipe.sampling
    limits = None if turns.replier is None else (turns.max_turns, sampling.max_response_tokens)
    metrics = step_metrics(session.prepared.flow, state, limits, has_tools=bool(turns.tools))
    timeline = session.recorder.peek()
    if most := session.recipe.max_staleness:
        metrics |= off_policy_metrics(session.prepared.flow, state, session.batches.whole, most)
        idle = idle_ratios(timeline, session.prepared.plan, seconds)
        metrics |= {f"perf/{side}_idle_ratio": share for side, share in idle.items()}
    busy = busy_by_rank(timeline, call_of)
    metrics |= {f"timing_s/{call}": max(ranks.values()) for call, ranks in busy.items()}
    metrics["timing_s/step"] = seconds
    metrics |= {f"perf/kind_s/{kind}": busy for kind, busy in busiest_s(timeline, kind_of).items()}
    metrics["perf/throughput"] = tokens_of(state) / seconds
    metrics |= session.utilisation.metrics(state, busy, session.executor.calls)
    metrics["perf/resident_bytes"] = resident_bytes()
    metrics |= session.workers.performance()
    metrics["training/policy_version"] = session.done.policy_version
    taken = session.done.step, state.drawn
    metrics["training/epoch"] = session.feed.epoch(*taken)
    metrics |= {f"training/epoch/{name}": n for name, n in session.feed.passes(*taken).items()}
    return metrics
