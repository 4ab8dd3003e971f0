"""What `plait generate` asks for, and whether it can be had: all of it is checked before a model is loaded."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from plait.cost.estimate import model_shape
from plait.cost.generation_memory import kv_bytes_per_token
from plait.data.formats import Row
from plait.data.prompts import PromptEncoder
from plait.data.records import Prompt, logprobs_with, replies_in, with_replies
from plait.data.settings import DataSettings
from plait.data.sources import Source, read_prompts
from plait.errors import ConfigError, DataError, ModelError
from plait.generation.checks import check_speculation
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.models.shape import ModelShape
from plait.policy.blocks import BLOCK_TOKENS, num_blocks_for
from plait.recipes.checks import check_models
from plait.recipes.role_models import RoleModel, draft_model
from plait.runtime.evaluating.generation_report import OWN_COLUMNS
from plait.runtime.inputs.tokenizers import check_draft_model, check_ids, load_tokenizer
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
    chat_template: bool | Literal["auto"] = "auto"
    """Whether text prompts are a user's message, or raw; auto: a message, if the tokenizer has a template."""
    engine: SamplingSettings = field(default_factory=SamplingSettings)
    """Its limits; what a request carries is in `sampling`."""
    seed: int = 0
    dtype: str = "bfloat16"
    device: str = "cpu"
    devices: int = 1
    """Processes, at most: each answers its part of the prompts."""
    threads: int = 0
    """In each process; 0: as many as there are cores for it."""
    history: Sequence[Path] = ()
    """Files of earlier samples, of this command or of a training run, to draft from; the oldest first."""


@dataclass(frozen=True)
class Asked:
    """What an engine is asked."""

    shape: ModelShape
    """That of the model."""
    engine: SamplingSettings
    """Its limits have room on the device."""
    requests: Sequence[Request]
    """One for each prompt, of which the uid is the row."""
    earlier: Sequence[Earlier]
    """Samples that the engine is told before."""


def checked(job: Job) -> Asked:
    """Check a job, and return the requests that it makes of an engine.

    Raises:
        DataError: a prompt leaves no room for a response.
        ConfigError: a stop token that the model does not have, a cache that is too small for one sample, or a draft
            model with other tokens.
        ModelError: the model cannot be used.
    """
    if job.device != "cpu":
        job = replace(job, engine=_sized(job))
    source = job.prompts
    if taken := sorted(OWN_COLUMNS & {name for row in source.rows for name in row.columns}):
        listed = ", ".join(f"`{name}`" for name in taken)
        raise ConfigError(
            f"--prompts: `{source.name}` has columns named {listed}, as the output has its own; rename or remove them"
        )
    shape = model_shape(job.model)
    check_models((RoleModel("actor", job.model, scalar=False, trained=False, key="model"),), {})
    check_speculation(job.engine, keeps_state=bool(shape.recurrent))
    if (drafts := job.engine.draft_model) is not None:
        _draft_shape(drafts)
    if beyond := [token for token in job.sampling.stop_token_ids or () if token >= shape.vocabulary]:
        raise ConfigError(f"--stop-token-ids: the model has {shape.vocabulary} tokens, found {beyond[0]}")
    tokenizer = load_tokenizer(job.model)
    if drafts is not None:
        check_draft_model(tokenizer, job.model, drafts, DRAFT_OPTION)
    tokenizer.model_max_length = ANY_LENGTH
    settings = DataSettings(source=source.name, system_prompt=job.system_prompt, chat_template=job.chat_template)
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
    return Asked(shape, job.engine, requests, _history(job, encoder, shape.vocabulary))


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
        samples = [_earlier(row, encoder, vocabulary) for row in read_prompts(file, key="--history")]
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


def _sized(job: Job) -> SamplingSettings:
    """Limits whose pool has room in the memory of the GPU."""
    import torch

    shape, drafts = model_shape(job.model), job.engine.draft_model
    shapes = [shape] if drafts is None else [shape, _draft_shape(drafts)]
    token_bytes = sum(kv_bytes_per_token(shape, job.dtype) for shape in shapes)
    memory = torch.cuda.get_device_properties(0).total_memory
    return job.engine.sized(shape.max_positions, token_bytes, job.device, lambda: memory)
