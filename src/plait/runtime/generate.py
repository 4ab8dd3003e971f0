"""Sample from a model: prompts of a file in, responses and figures of speed out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from plait.data.prompts import PromptEncoder
from plait.data.records import Prompt, Sample
from plait.data.settings import DataSettings
from plait.data.sources import Row, Source, read_jsonl
from plait.errors import ConfigError, DataError, UserError
from plait.generation.engine import Engine
from plait.generation.noise import NoiseKey
from plait.generation.request import Request
from plait.generation.settings import Sampling, SamplingSettings
from plait.models.language_model import load_model
from plait.models.shape import ModelShape
from plait.observe.progress import Progress
from plait.policy.blocks import BLOCK_TOKENS, num_blocks_for
from plait.runtime.checks import check_models
from plait.runtime.estimate import model_shape
from plait.runtime.generation_report import GenerationReport, Meter, limit_of
from plait.runtime.limit import measure_rates
from plait.runtime.prepare import load_tokenizer
from plait.runtime.process import give_back_freed
from plait.runtime.role_models import RoleModel
from plait.runtime.stopping import stop_signals


@dataclass(frozen=True)
class Job:
    """What is asked for."""

    model: str
    prompts: Path
    sampling: Sampling
    samples_per_prompt: int = 1
    lengths: Sequence[Sequence[int]] | None = None
    """Per prompt the exact response lengths of its samples, instead of stop tokens."""
    system_prompt: str | None = None
    engine: SamplingSettings = field(default_factory=SamplingSettings)
    """Its limits; what a request carries is in `sampling`."""
    seed: int = 0
    dtype: str = "bfloat16"
    device: str = "cpu"


def generate(job: Job) -> GenerationReport:
    """Answer every prompt of a JSONL file. Everything is checked before the model is loaded.

    A signal to stop ends it after the step under way: the samples that have ended are in the report.

    Raises:
        DataError: the file is missing, malformed or empty, a prompt leaves no room for a response, or the lengths are
            not those of as many prompts.
        ConfigError: a stop token that the model does not have, or a cache that is too small for one sample.
        ModelError: the model cannot be used.
    """
    try:
        shape, requests = _checked(job)
    except UserError as error:
        raise type(error)(_in_own_words(str(error))) from error
    engine = Engine(load_model(job.model, dtype=job.dtype, device=job.device), job.engine)
    give_back_freed()
    for request in requests:
        engine.add(request)
    num_asked = engine.num_waiting
    started = time.perf_counter()
    samples, meter = _drain(engine)
    seconds = time.perf_counter() - started
    limit_s = None
    if len(samples) == num_asked:
        rates = measure_rates(job.dtype, job.device)
        limit_s = limit_of(samples, shape, job.dtype, job.engine.max_running, rates)
    return GenerationReport(tuple(samples), num_asked, seconds, meter, limit_s)


def _checked(job: Job) -> tuple[ModelShape, list[Request]]:
    """What the engine will be asked, of a job that can be done."""
    rows = read_jsonl(job.prompts, key="--prompts")
    if job.lengths is not None and len(job.lengths) != len(rows):
        raise DataError(
            f"--lengths: {len(job.lengths)} lists of lengths for {len(rows)} prompts of `{job.prompts}`; give one for "
            "each"
        )
    shape = model_shape(job.model)
    check_models((RoleModel("actor", job.model, scalar=False, trained=False, key="model"),), {})
    if beyond := [token for token in job.sampling.stop_token_ids or () if token >= shape.vocabulary]:
        raise ConfigError(f"--stop-token-ids: the model has {shape.vocabulary} tokens, found {beyond[0]}")
    source = Source(str(job.prompts), tuple(rows))
    encoder = PromptEncoder(
        load_tokenizer(job.model),
        DataSettings(source=source.name, system_prompt=job.system_prompt),
        conversational=source.conversational,
    )
    requests = [
        Request(
            _prompt(uid, row, encoder),
            job.samples_per_prompt,
            job.sampling,
            NoiseKey(job.seed),
            lengths=tuple(job.lengths[uid]) if job.lengths else None,
        )
        for uid, row in enumerate(rows)
    ]
    for request, row in zip(requests, rows, strict=True):
        _check_positions(request, row, shape.max_positions)
    for request, row in zip(requests, rows, strict=True):
        _check_cache(request, row, job.engine, shape.max_positions)
    return shape, requests


def _prompt(uid: int, row: Row, encoder: PromptEncoder) -> Prompt:
    text = encoder.render(row)
    token_ids = encoder.token_ids(text)
    if not token_ids:
        raise DataError(f"{row.place}: the prompt is empty; remove the row from `--prompts`")
    return Prompt(uid, text, token_ids, row.columns)


def _check_positions(request: Request, row: Row, max_positions: int) -> None:
    """Raises DataError, naming the line, where a prompt and its shortest or asked response exceed the positions."""
    tokens, response = len(request.prompt.token_ids), max(request.lengths or (1,))
    if tokens + response > max_positions:
        found = f"of {response} tokens that `--lengths` asks for" if request.lengths else "of one token"
        raise DataError(
            f"{row.place}: the prompt has {tokens} tokens, and with a response {found} exceeds the {max_positions} "
            f"positions of the model; shorten it or remove it from `--prompts`, or take another `--model`"
        )


def _check_cache(request: Request, row: Row, engine: SamplingSettings, max_positions: int) -> None:
    """Raises ConfigError, naming the line, where the cache has no room for one sample alone."""
    tokens = len(request.prompt.token_ids)
    response = max(request.limit(index, max_positions) for index in range(request.num_samples))
    needed, room = num_blocks_for(tokens + response), engine.num_blocks(max_positions)
    if needed > room:
        raise ConfigError(
            f"--kv-tokens: the cache holds {room * BLOCK_TOKENS} tokens, but {row.place} has a prompt of {tokens} and "
            f"its response up to {response}; set it to {needed * BLOCK_TOKENS} or more, or lower `--max-tokens`"
        )


_OPTIONS = {
    "`data.source`": "`--prompts`",
    "`data.system_prompt`": "`--system-prompt`",
    "`model`": "`--model`",
    ", or reasoning_gym:TASK": "",
    ", or give text prompts with `data.chat_template: false`": "",
}


def _in_own_words(message: str) -> str:
    """A message about a recipe's keys, with the options of `plait generate` in their place."""
    for key, option in _OPTIONS.items():
        message = message.replace(key, option)
    return message


def _drain(engine: Engine) -> tuple[list[Sample], Meter]:
    """Step until no work is left or somebody says stop; the samples that ended, in the order of the prompts."""
    samples: list[Sample] = []
    meter = Meter()
    with Progress(0) as progress, stop_signals(progress) as stop, contextlib.suppress(KeyboardInterrupt):
        stop.doing = "stopping after this step, with the responses so far"
        progress.start()
        progress.phase("generate", engine.num_waiting, "samples")
        while engine.has_work and not stop.asked:
            before = time.perf_counter()
            finished = engine.step()
            samples += finished
            record = engine.last_step
            assert record is not None, "a step leaves a record"
            meter.step(record, time.perf_counter() - before, engine.kv_bytes)
            progress.advance(len(finished), note=meter.now(engine))
    samples.sort(key=lambda sample: (sample.prompt.uid, sample.index))
    return samples, meter
