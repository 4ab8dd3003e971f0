"""Sample from a model: prompts of a file in, responses and figures of speed out."""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from plait.cost.estimate import model_shape
from plait.cost.generation_memory import kv_bytes_per_token
from plait.cost.measured.rates import measure_rates
from plait.data.formats import Row
from plait.data.prompts import PromptEncoder
from plait.data.records import Prompt, Sample, logprobs_with, replies_in, with_replies
from plait.data.settings import DataSettings
from plait.data.sources import Source, read_jsonl
from plait.errors import ConfigError, DataError, ModelError
from plait.generation.engine import Engine
from plait.generation.request import Request
from plait.generation.settings import Sampling, SamplingSettings
from plait.kept_memory import give_back_freed
from plait.kernels.noise import NoiseKey
from plait.models.loading import load_model
from plait.models.shape import ModelShape
from plait.observe.progress import Progress
from plait.policy.blocks import BLOCK_TOKENS, num_blocks_for
from plait.recipes.checks import check_models
from plait.recipes.role_models import RoleModel, draft_model
from plait.runtime.evaluating.generation_report import OWN_COLUMNS, GenerationReport, Meter, limit_of
from plait.runtime.inputs.tokenizers import check_draft_model, check_ids, load_tokenizer
from plait.runtime.steps.drawing import drawing
from plait.runtime.stopping import stop_signals
from plait.schedule.work import Done, to_the_end
from plait.speculation.pool import most_entries

DRAFT_OPTION = "--draft-model"
ANY_LENGTH = 1 << 62
"""The limit of a tokenizer: prompts that are too long are refused by us, with their line."""

Earlier = tuple[tuple[int, ...], Sequence[int], Sequence[float]]
"""A sample that was drawn earlier: token ids of its prompt, its own, and their log-probs."""


@dataclass(frozen=True)
class Job:
    """What is asked for."""

    model: str
    prompts: Source
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
    history: Sequence[Path] = ()
    """Files of earlier samples, of this command or of a training run, to guess from; the oldest first."""


def generate(job: Job, keep: Callable[[Sample], None], done: Collection[tuple[int, int]] = ()) -> GenerationReport:
    """Answer every prompt. Everything is checked before the model is loaded.

    A signal to stop ends it after the step under way: the samples that have ended are in the report.

    Args:
        keep: is given each sample as soon as it has ended.
        done: (row, sample) that are not drawn again; the others are what they would be beside them.

    Raises:
        DataError: a prompt leaves no room for a response.
        ConfigError: a stop token that the model does not have, a cache that is too small for one sample, or a draft
            model with other tokens.
        ModelError: the model cannot be used.
    """
    if job.device != "cpu":
        job = replace(job, engine=_sized(job))
    shape, requests, earlier = _checked(job)
    engine = Engine(load_model(job.model, dtype=job.dtype, device=job.device), job.engine)
    not_compiled = engine.state.forward.refusals.compiled
    for prompt_ids, token_ids, logprobs in earlier:
        engine.speculates.recall(prompt_ids, token_ids, logprobs)
    give_back_freed()
    for request in requests:
        _ask(engine, request, done)
    num_asked = engine.occupancy.num_waiting
    started = time.perf_counter()
    meter = Meter(is_kv_limited=job.engine.kv_tokens is not None)
    samples = _drain(engine, meter, keep)
    seconds = time.perf_counter() - started
    limit_s = None
    if samples and len(samples) == num_asked:
        rates = measure_rates(job.dtype, job.device)
        limit_s = limit_of(samples, shape, job.dtype, job.engine.max_running, rates)
    return GenerationReport(
        tuple(samples), num_asked, seconds, meter, limit_s, not_compiled, speculation=engine.speculation
    )


def _sized(job: Job) -> SamplingSettings:
    """Limits whose pool has room in the memory of the GPU."""
    import torch

    shape, drafts = model_shape(job.model), job.engine.draft_model
    shapes = [shape] if drafts is None else [shape, _draft_shape(drafts)]
    token_bytes = sum(kv_bytes_per_token(shape, job.dtype) for shape in shapes)
    memory = torch.cuda.get_device_properties(0).total_memory
    return job.engine.sized(shape.max_positions, token_bytes, job.device, lambda: memory)


def _ask(engine: Engine, request: Request, done: Collection[tuple[int, int]]) -> None:
    """Queue the samples of a prompt that are not done."""
    uid = request.prompt.uid
    finished = [index for index in range(request.num_samples) if (uid, index) in done]
    if len(finished) == request.num_samples:
        return
    engine.add(request)
    for index in finished:
        engine.abort(uid, index)


def _checked(job: Job) -> tuple[ModelShape, list[Request], list[Earlier]]:
    """What the engine will be asked, of a job that can be done, and the earlier samples that it is told."""
    source = job.prompts
    if taken := sorted(OWN_COLUMNS & {name for row in source.rows for name in row.columns}):
        listed = ", ".join(f"`{name}`" for name in taken)
        raise ConfigError(
            f"--prompts: `{source.name}` has columns named {listed}, as the output has its own; rename or remove them"
        )
    shape = model_shape(job.model)
    check_models((RoleModel("actor", job.model, scalar=False, trained=False, key="model"),), {})
    if (drafts := job.engine.draft_model) is not None:
        _draft_shape(drafts)
    if beyond := [token for token in job.sampling.stop_token_ids or () if token >= shape.vocabulary]:
        raise ConfigError(f"--stop-token-ids: the model has {shape.vocabulary} tokens, found {beyond[0]}")
    tokenizer = load_tokenizer(job.model)
    if drafts is not None:
        check_draft_model(tokenizer, job.model, drafts, DRAFT_OPTION)
    tokenizer.model_max_length = ANY_LENGTH
    settings = DataSettings(source=source.name, system_prompt=job.system_prompt)
    encoder = PromptEncoder(tokenizer, settings, conversational=source.conversational)
    requests = [
        Request(
            _prompt(uid, row, encoder),
            job.samples_per_prompt,
            job.sampling,
            NoiseKey(job.seed),
            lengths=tuple(job.lengths[uid]) if job.lengths else None,
        )
        for uid, row in enumerate(source.rows)
    ]
    places = (row.place for row in source.rows)
    ids = zip(places, (request.prompt.token_ids for request in requests), strict=True)
    check_ids(tokenizer, shape.vocabulary, ids, job.model)
    for request, row in zip(requests, source.rows, strict=True):
        _check_positions(request, row, shape.max_positions)
    _check_cache(requests, source.rows, job.engine, shape.max_positions)
    return shape, requests, _history(job, encoder, shape.vocabulary)


def _draft_shape(name: str) -> ModelShape:
    """Raises where a draft model could not be loaded, or is a reward model."""
    try:
        shape = model_shape(name)
    except ModelError as error:
        raise ModelError(f"{DRAFT_OPTION}: {error}") from error
    check_models((draft_model(name, DRAFT_OPTION),), {})
    return shape


def _history(job: Job, encoder: PromptEncoder, vocabulary: int) -> list[Earlier]:
    """The newest of the earlier samples, as many as the pool of texts has room for, the oldest first.

    One file is read at a time, from the newest on: the rows of a large step take gigabytes.

    Raises:
        DataError: a file that is read is missing or malformed, or has rows that are no samples.
    """
    kept: list[Earlier] = []
    prompts: dict[tuple[int, ...], tuple[int, ...]] = {}
    room = most_entries(job.engine.draft_pool_bytes)
    for file in reversed(job.history):
        samples = [_earlier(row, encoder, vocabulary) for row in read_jsonl(file, key="--history")]
        while samples and room > 0:
            prompt_ids, token_ids, logprobs = samples.pop()
            room -= len(token_ids) + (0 if prompt_ids in prompts else len(prompt_ids))
            kept.append((prompts.setdefault(prompt_ids, prompt_ids), token_ids, logprobs))
        if room <= 0:
            break
    return kept[::-1]


def _earlier(row: Row, encoder: PromptEncoder, vocabulary: int) -> Earlier:
    """A row of this command's output, or of the samples of a run.

    Raises:
        DataError: it is neither, naming the line.
    """
    columns, replies = row.columns, replies_in(row.columns)
    token_ids: Any = columns.get("token_ids")
    logprobs = columns.get("logprobs", columns.get("sampling_logprobs"))
    prompt_ids = columns.get("prompt_ids")
    if prompt_ids is None:
        prompt_ids = list(encoder.token_ids(encoder.render(row)))
    for ids in (token_ids, prompt_ids, *(list(reply.token_ids) for reply in replies)):
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < vocabulary for i in ids):
            raise DataError(
                f"{row.place}: expected a sample of a model of {vocabulary} tokens, with its `token_ids`; give "
                "`--history` an output of `plait generate` or the folder of a run"
            )
    if (
        not isinstance(logprobs, list)
        or len(logprobs) != len(token_ids)
        or not all(isinstance(value, int | float) and value <= 0 for value in logprobs)
    ):
        raise DataError(f"{row.place}: expected the log-probs of its {len(token_ids)} tokens; `--history` needs them")
    all_ids = with_replies(token_ids, replies, lambda reply: reply.token_ids)
    return tuple(prompt_ids), array("i", all_ids), array("d", logprobs_with(replies, logprobs))


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
        shortest = f"of {response} tokens that `--lengths` asks for" if request.lengths else "of one token"
        shorter = "shorten the one or the other" if request.lengths else "shorten it or remove it from `--prompts`"
        raise DataError(
            f"{row.place}: the prompt has {tokens} tokens, and with a response {shortest} exceeds the {max_positions} "
            f"positions of the model; {shorter}, or take another `--model`"
        )


def _check_cache(requests: Sequence[Request], rows: Sequence[Row], engine: SamplingSettings, positions: int) -> None:
    """Raises ConfigError, naming the line that needs most, where the cache has no room for one sample alone."""
    responses = [max(request.limit(index, positions) for index in range(request.num_samples)) for request in requests]
    prompts = [len(request.prompt.token_ids) for request in requests]
    needed = [num_blocks_for(prompt + response) for prompt, response in zip(prompts, responses, strict=True)]
    most, room = max(range(len(rows)), key=needed.__getitem__), engine.num_blocks(positions)
    if needed[most] > room:
        raise ConfigError(
            f"--kv-tokens: the cache holds {room * BLOCK_TOKENS} tokens, but {rows[most].place} has a prompt of "
            f"{prompts[most]} and its response up to {responses[most]}; set it to {needed[most] * BLOCK_TOKENS} or "
            "more, or lower `--max-tokens`"
        )


class _Metered:
    """An engine of this process alone, whose steps are measured: `drawing.Draws`."""

    ready = True

    def __init__(self, engine: Engine, meter: Meter) -> None:
        self._engine, self._meter = engine, meter

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def advance(self, call: str) -> tuple[Done, list[Sample]]:
        before = time.perf_counter()
        finished = self._engine.step()
        record = self._engine.last_step
        assert record is not None, "a step leaves a record"
        self._meter.step(record, time.perf_counter() - before, self._engine.occupancy.kv_bytes)
        return record.done(call, 0, units=len(finished)), finished


def _drain(engine: Engine, meter: Meter, keep: Callable[[Sample], None]) -> list[Sample]:
    """Step until no work is left or somebody says stop; the samples that ended, in the order of the prompts."""
    samples: list[Sample] = []
    with Progress(0) as progress, stop_signals(progress) as stop, contextlib.suppress(KeyboardInterrupt):

        def take(finished: Sequence[Sample]) -> bool:
            samples.extend(finished)
            for sample in finished:
                keep(sample)
            progress.advance(len(finished), note=meter.now(engine.occupancy))
            return False

        stop.doing = "stopping after this step, with the responses so far"
        progress.start()
        progress.phase("generate", engine.occupancy.num_waiting, "samples")
        to_the_end(drawing(_Metered(engine, meter), "generate", take, until=lambda: stop.asked))
    samples.sort(key=lambda sample: (sample.prompt.uid, sample.index))
    return samples
