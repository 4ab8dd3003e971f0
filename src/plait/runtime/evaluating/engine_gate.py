"""Before the first step of a stay: an engine that is another program must give the log-probs that the trainer gives.

What the trainer takes for the probabilities of samples is what they were drawn with, so an engine that holds other
weights, another dtype's kernels or another head would bias every update, and no loss would show it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plait.data.records import Sample
from plait.data.rows import FloatArray, Rows
from plait.dataflow import CallKind, Score
from plait.engines import GenerationEngine
from plait.errors import ConfigError
from plait.generation.request import Request
from plait.kernels.noise import NoiseKey
from plait.observe.doctor_reading import limits_of
from plait.observe.progress import ProgressSink
from plait.recipes.engine_checks import abilities
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.steps.between_steps import BetweenSteps
from plait.runtime.steps.engine_loop import engine_loop
from plait.runtime.steps.roles import ModelRole, Roles, models_of
from plait.schedule.work import Work

NUM_PROMPTS = 16
SAMPLES_PER_PROMPT = 4
MAX_TOKENS = 64
CALL = "gate"
"""What it is in the trace."""
GATE_ROLLOUT = -1
"""None of a run's rollouts: the noise of these samples is theirs alone."""


def check_engines(prepared: Prepared, roles: Roles, between_steps: BetweenSteps) -> None:
    """Compare the log-probs of samples of each engine with those of its role's trainer, where it computes elsewhere.

    Raises:
        ConfigError: they are too far apart.
        RunError: the engine failed.
    """
    if not abilities(prepared.recipe).computes_elsewhere:
        return
    for name in dict.fromkeys(str(node.role) for node in prepared.flow.of_kind(CallKind.GENERATE)):
        role = models_of(roles)[name]
        if role.engine is not None:
            ranks = role.trainer.mesh(CallKind.GENERATE, begins=True) | role.trainer.mesh(CallKind.SCORE, begins=True)
            rows, expected = between_steps.run(CALL, _compared(prepared, role, role.engine), ranks, name)
            _check(prepared, name, rows, expected, between_steps.progress)


def _compared(prepared: Prepared, role: ModelRole, engine: GenerationEngine) -> Work[tuple[Rows, FloatArray]]:
    """Samples, and the log-probs that the trainer has of their tokens, in nats: [rows.num_tokens]."""
    samples = yield from _drawn(prepared, engine)
    rows, temperature = Rows(tuple(samples)).ordered(), prepared.recipe.sampling.temperature
    return rows, (yield from role.trainer.score(rows, Score.LOGPROBS, temperature=temperature, call=CALL))


def _check(prepared: Prepared, name: str, rows: Rows, expected: FloatArray, progress: ProgressSink) -> None:
    recipe = prepared.recipe
    apart = float(np.abs(np.exp(rows.sampling_logprobs) - np.exp(expected)).mean())
    limit = limits_of(recipe.doctor, recipe.dtype.value, recipe.sampling.temperature).probs_diff
    distance = (
        f"over {rows.num_tokens} tokens of {len(rows)} samples the probabilities of `sampling.engine` "
        f"{recipe.sampling.engine} are {apart:.2g} off those of the trainer of `{name}` on average"
    )
    if not apart <= limit:
        raise ConfigError(
            f"{distance}, expected at most {limit:g} (`doctor.rollout_probs_diff`, by default that of `dtype` "
            f"{recipe.dtype.value}): what is trained would not be what was drawn. Set `sampling.engine` to plait, or "
            "take another `dtype` or `model`"
        )
    progress.message(f"{distance} (at most {limit:g})")


def _drawn(prepared: Prepared, engine: GenerationEngine) -> Work[list[Sample]]:
    """Samples of the run's first prompts, drawn as its own are, but short."""
    recipe = prepared.recipe
    sampling = recipe.sampling.sampling(max_tokens=min(MAX_TOKENS, recipe.sampling.max_response_tokens))
    for prompt in prepared.feed().draw(NUM_PROMPTS):
        engine.add(Request(prompt, SAMPLES_PER_PROMPT, sampling, NoiseKey(recipe.seed, GATE_ROLLOUT)))
    samples: list[Sample] = []

    def take(finished: Sequence[Sample]) -> bool:
        samples.extend(finished)
        return False

    yield from engine_loop(engine, CALL, take)
    return samples
