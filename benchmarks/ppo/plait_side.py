"""One PPO step by plait: a session of a recipe, as `plait train` opens it, stepped by its own controller."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from grpo.measure import Channel, Ready, Stopwatch, max_rss_bytes

from plait.recipes.recipe import Recipe
from plait.runtime.controller import run_step
from plait.runtime.folder.claim import claim
from plait.runtime.prepare import prepare
from plait.runtime.process import set_up
from plait.runtime.processes.alone import Alone
from plait.runtime.session import Session
from ppo.measure import PHASES, PPOStep
from ppo.workload import (
    CLIP_RANGE,
    EPOCHS,
    GAMMA,
    KL_COEF,
    LAMBDA,
    LEARNING_RATE,
    MINI_BATCHES,
    TEMPERATURE,
    VALUE_CLIP_RANGE,
    Workload,
    digest,
)

PHASE_OF_KIND = {
    **dict.fromkeys(("PREFILL", "DECODE"), "generation"),
    **dict.fromkeys(("SCORE", "COMPUTE"), "scoring"),
    **dict.fromkeys(("TRAIN", "STEP"), "training"),
}
"""By the kind of an action; advantages count as scoring, as they do on TRL's side."""


class Probe:
    """Times and counts what a session records."""

    def __init__(self, session: Session, watch: Stopwatch) -> None:
        self._session = session
        self._watch = watch
        self._advance, self._span = session.recorder.advance, session.recorder.span
        self._record_step = session.record_step
        self.report = PPOStep({}, [], [], scored_tokens=0, trained_tokens=0)
        session.recorder.advance = self._timed_advance  # type: ignore[method-assign]
        session.recorder.span = self._timed_span  # type: ignore[method-assign]
        session.record_step = self._read_step  # type: ignore[method-assign]

    def step(self) -> PPOStep:
        self.report = PPOStep({}, [], [], scored_tokens=0, trained_tokens=0)
        self._watch.restart()
        run_step(self._session)
        self.report.phases = self._watch.stop()
        self.report.max_rss_bytes = max_rss_bytes()
        return self.report

    def _timed_advance(self, work: Any, role: str = "") -> Any:
        done, phase = None, "other"
        self._watch.enter(phase)
        try:
            done = self._advance(work, role)
            phase = PHASE_OF_KIND.get(done.kind, "other") if done is not None else phase
        finally:
            self._watch.leave(phase)
        if done is None:
            return done
        self.report.scored_tokens += done.tokens * (done.kind == "SCORE")
        self.report.trained_tokens += done.tokens * (done.kind == "TRAIN")
        self.report.optimizer_steps += done.kind == "STEP"
        return done

    @contextmanager
    def _timed_span(self, action: str, kind: str) -> Iterator[None]:
        with self._watch.phase(PHASE_OF_KIND.get(kind, "other")), self._span(action, kind):
            yield

    def _read_step(self, state: Any, metrics: Any) -> None:
        (rows,) = state.generated.values()
        self.report.prompt_lengths = [len(sample.prompt.token_ids) for sample in rows.samples]
        self.report.response_lengths = [len(sample.token_ids) for sample in rows.samples]
        self.report.prompt_digest = digest(sample.prompt.token_ids for sample in rows.samples)
        self._record_step(state, metrics)


def recipe(workload: Workload, folder: Path) -> Recipe:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in workload.prompts), encoding="utf-8")
    optimizer = {"learning_rate": LEARNING_RATE, "max_grad_norm": float("inf")}
    return Recipe.model_validate(
        {
            "model": workload.policy,
            "algorithm": "ppo",
            "options": {
                "kl_coef": KL_COEF,
                "old_logprobs": "engine",  # as TRL takes them
                "clip_low": CLIP_RANGE,
                "clip_high": CLIP_RANGE,
                "value_clip": VALUE_CLIP_RANGE,
                "gamma": GAMMA,
                "lam": LAMBDA,
                "epochs": EPOCHS,
                "mini_batches": MINI_BATCHES,
            },
            "steps": workload.num_steps,
            "prompts_per_step": len(workload.prompts),
            "samples_per_prompt": 1,
            "data": {"source": str(prompts)},
            "reward": {"model": [workload.reward]},
            "critic": {"model": workload.value, "optimizer": optimizer},
            "sampling": {
                "temperature": TEMPERATURE,
                "max_response_tokens": workload.response_tokens,
                "stop_token_ids": (),
            },
            "optimizer": optimizer,
            "checkpoint": {"every": 0},
            "run_dir": folder / "run",
            "dtype": workload.dtype,
            "device": workload.device,
            "threads": workload.threads,
        }
    )


def main() -> None:
    channel = Channel()
    imported = max_rss_bytes()
    workload = Workload.load(Path(sys.argv[1]))
    with ExitStack() as stack:
        work = recipe(workload, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        set_up(work.threads)
        directory = stack.enter_context(claim(work, resume=False))
        prepared = prepare(work)
        leading: Any = Alone(prepared)
        session = stack.enter_context(Session(prepared, directory, resume=False, leading=leading))
        probe = Probe(session, Stopwatch(PHASES))
        channel.send(Ready(imported, max_rss_bytes()))
        for _ in range(workload.num_steps):
            channel.wait()
            channel.send(probe.step())


if __name__ == "__main__":
    main()
