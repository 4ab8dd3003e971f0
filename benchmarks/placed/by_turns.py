"""A run of several ranks of which every step is done in several ways, one after the other, on the same prompts with the
same noise: what tells them apart is then not what a machine does between one minute and the next.

A way says what becomes of samples while they are generated; it changes no number. Nothing may be trained on, and the
first step does not count: what decides has seen none before.

    off       samples end where they begin, and models score when all have ended
    auto      what the recipe says
    0.25 …    samples are gathered when so large a share is unfinished

Responses have lengths that are given; who deals prompts to instances does not know them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from placed.fusion_flow import NEVER
from placed.lengths import LogNormal
from placed.runs import run_alone
from plait.dataflow import CallName
from plait.engines import GenerationEngine
from plait.generation.request import Request
from plait.observe.run_log import read_rows
from plait.runtime.controller import Outcome
from plait.runtime.processes import worker
from plait.runtime.session import Session
from plait.runtime.steps.batches import Batches
from plait.runtime.steps.gates import AtShare
from plait.runtime.steps.roles import ModelRole
from plait.runtime.steps.step import StepState
from plait.schedule.timeline import Span
from plait.workers import dealing
from plait.workers.dealing import expected_tokens

JOB, TURNS = "PLAIT_BENCHMARK_TURNS", "turns.jsonl"
WARM_UP = 1
"""Steps that do not count."""


@dataclass(frozen=True)
class Turn:
    """A step, done in one of the ways.

    moved: samples that went on elsewhere; responses: their token ids; spans: of all ranks
    """

    step: int
    way: str
    moved: int
    responses: list[list[int]]
    spans: list[Span]

    def seconds(self, *calls: str) -> float:
        """From the beginning of the first of these calls to the end of the last; `generate` is that of any role."""
        mine = self.of(*calls)
        return max(span.end_s for span in mine) - min(span.start_s for span in mine)

    @property
    def decode_steps(self) -> list[tuple[int, float]]:
        """(samples, seconds) of each, of all ranks; those that had a token behind their prompt."""
        return [(span.samples, span.duration_s) for span in self.spans if span.kind == "DECODE" and span.drawn]

    def of(self, *calls: str) -> list[Span]:
        return [span for span in self.spans if CallName.of(span.whole).asks in calls]


def turns_of(
    recipe: Mapping[str, Any], place: Path, ways: Sequence[str], lengths: LogNormal, *, steps: int
) -> list[dict[str, Turn]]:
    """Run a recipe for so many steps that count; of each its ways. Raises RunFailed."""
    os.environ[JOB] = json.dumps({"steps": WARM_UP + steps, "ways": list(ways), "lengths": asdict(lengths)})
    # Each way would know what the ways before it said.
    sampling = {"max_response_tokens": lengths.limit, "stop_token_ids": [], "max_running": 256, "speculation": "off"}
    job = {"recipe": {**recipe, "sampling": sampling, "steps": NEVER + 1}, "launched": True, "by_turns": True}
    done = run_alone(job, place, WARM_UP)
    turns: dict[int, dict[str, Turn]] = {}
    for row in read_rows(done.run_dir / TURNS):
        spans = [Span(**span) for span in row.pop("spans")]
        turn = Turn(**row, spans=spans)
        turns.setdefault(turn.step, {})[turn.way] = turn
    return [of_step for step, of_step in turns.items() if step > WARM_UP]


class Worker(worker.Worker):
    """Of a run by turns."""

    def run(self) -> Outcome | None:
        take_turns = lambda session, stopped_by: by_turns(session)
        with patch.object(worker, "train", take_turns), patch.object(worker, "conclude", lambda prepared, folder: None):
            return super().run()


def by_turns(session: Session) -> Outcome:
    """The steps of a run, each in all ways; the next step begins with the way that came second."""
    done, job = session.done, json.loads(os.environ[JOB])
    ways, lengths = job["ways"], LogNormal(**job["lengths"])
    model = next(role for role in session.roles.values() if isinstance(role, ModelRole) and role.engine is not None)
    rollout, engine = session.executor.calls.rollout, model.engine
    assert engine is not None, "nothing generates"
    assert engine.moves is not None, "samples cannot move"
    gathers = engine.moves.gathers
    with given(engine, lengths), open(session.directory.path / TURNS, "w", encoding="utf-8") as file:
        while done.step < job["steps"]:
            batch = session.begin_step()
            first = done.step % len(ways)
            for way in ways[first:] + ways[:first]:
                engine.moves.gathers = gathers and way != "off"
                rollout.gate, rollout.rebalancer = session.moves.gate, session.moves.rebalancer
                if way != "auto":
                    rollout.rebalancer = None
                    rollout.gate = AtShare(0.0 if way == "off" else float(way))
                turn, state, timeline = _turn(session, batch, way)
                file.write(json.dumps(asdict(turn)) + "\n")
                if way == "auto":
                    session.moves.learn(state, timeline, session.roles)
                done.policy_version += 1
                engine.update_weights(done.policy_version)  # nothing is known of prompts any more
            session.batches.end(batch.step)
            done.step += 1
    return Outcome(True, done.step, {}, steps=done.step)


@contextmanager
def given(engine: GenerationEngine, lengths: LogNormal) -> Iterator[None]:
    """Requests get their lengths, of which those who deal them out know nothing."""
    add = engine.add

    def adds(request: Request) -> None:
        add(replace(request, lengths=lengths.of(request.prompt.uid, request.num_samples)))

    def expects(request: Request) -> int:
        return expected_tokens(replace(request, lengths=None))

    with patch.object(engine, "add", adds), patch.object(dealing, "expected_tokens", expects):
        yield


def _turn(session: Session, batch: StepState, way: str) -> tuple[Turn, StepState, Any]:
    state = StepState(batch.step, batch.prompts, batch.drawn, batch.given)
    session.executor.run_step(state, Batches(session.feed, len(batch.prompts), [state]))
    session.recorder.extend(session.workers.spans())
    timeline = session.recorder.take()
    responses = [list(sample.token_ids) for rows in state.generated.values() for sample in rows.samples]
    moved = int(state.metrics.get("perf/samples_moved", 0))
    return Turn(batch.step + 1, way, moved, responses, list(timeline.spans)), state, timeline
