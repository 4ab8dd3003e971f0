"""Sample from a model: prompts of a file in, responses and figures of speed out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
from plait.observe.progress import Progress
from plait.policy.batching import StepKind
from plait.runtime.checks import check_models
from plait.runtime.estimate import model_shape
from plait.runtime.prepare import load_tokenizer
from plait.runtime.role_models import RoleModel


@dataclass(frozen=True)
class GenerationReport:
    """Samples in the order of the prompts, and how fast they came. Tokens are response tokens unless named."""

    samples: tuple[Sample, ...]
    seconds: float
    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float
    decode_step_ms: tuple[float, ...]
    kv_peak_bytes: int

    def figures(self) -> dict[str, Any]:
        tokens = sum(len(sample.token_ids) for sample in self.samples)
        steps = self.decode_step_ms or (0.0,)
        return {
            "samples": len(self.samples),
            "tokens": tokens,
            "seconds": self.seconds,
            "tokens_per_s": tokens / self.seconds,
            "prefill_tokens_per_s": _rate(self.prefill_tokens, self.prefill_seconds),
            "decode_tokens_per_s": _rate(self.decode_tokens, self.decode_seconds),
            "step_ms": {f"p{q}": float(np.percentile(steps, q)) for q in (50, 90, 99)},
            "kv_peak_bytes": self.kv_peak_bytes,
        }

    def rows(self) -> list[dict[str, Any]]:
        """One record per sample, for a JSONL file."""
        return [
            {
                "prompt": sample.prompt.columns["prompt"],
                "sample": sample.index,
                "response": sample.text,
                "finish_reason": sample.finish_reason.value,
                "token_ids": list(sample.token_ids),
                "logprobs": list(sample.logprobs),
            }
            for sample in self.samples
        ]


def generate(
    model: str,
    prompts: Path,
    sampling: Sampling,
    *,
    samples_per_prompt: int = 1,
    lengths: Sequence[Sequence[int]] | None = None,
    system_prompt: str | None = None,
    max_running: int = 64,
    seed: int = 0,
    dtype: str = "bfloat16",
    device: str = "cpu",
) -> GenerationReport:
    """Answer every prompt of a JSONL file. Everything is checked before the model is loaded.

    Args:
        lengths: per prompt the exact response lengths of its samples, instead of stop tokens.

    Raises:
        DataError: the file is missing, malformed or empty, a prompt leaves no room for a response, or the lengths are
            not those of as many prompts.
        ConfigError: a stop token that the model does not have.
        ModelError: the model cannot be used.
    """
    try:
        rows = read_jsonl(prompts, key="--prompts")
        if lengths is not None and len(lengths) != len(rows):
            raise DataError(
                f"--lengths: {len(lengths)} lists of lengths for {len(rows)} prompts of `{prompts}`; give one for each"
            )
        shape = model_shape(model)
        check_models((RoleModel("actor", model, scalar=False, trained=False, key="model"),), {})
        if beyond := [token for token in sampling.stop_token_ids or () if token >= shape.vocabulary]:
            raise ConfigError(f"--stop-token-ids: the model has {shape.vocabulary} tokens, found {beyond[0]}")
        source = Source(str(prompts), tuple(rows))
        encoder = PromptEncoder(
            load_tokenizer(model),
            DataSettings(source=str(prompts), system_prompt=system_prompt),
            conversational=source.conversational,
        )
        asked = [_prompt(uid, row, encoder) for uid, row in enumerate(rows)]
    except UserError as error:
        raise type(error)(_in_own_words(str(error))) from error
    requests = [
        Request(prompt, samples_per_prompt, sampling, NoiseKey(seed), lengths=tuple(lengths[uid]) if lengths else None)
        for uid, prompt in enumerate(asked)
    ]
    _check_room(requests, rows, shape.max_positions)
    engine = Engine(load_model(model, dtype=dtype, device=device), SamplingSettings(max_running=max_running))
    for request in requests:
        engine.add(request)
    return _drain(engine)


def _prompt(uid: int, row: Row, encoder: PromptEncoder) -> Prompt:
    text = encoder.render(row)
    token_ids = encoder.token_ids(text)
    if not token_ids:
        raise DataError(f"{row.place}: the prompt is empty; remove the row from `--prompts`")
    return Prompt(uid, text, token_ids, row.columns)


def _check_room(requests: Sequence[Request], rows: Sequence[Row], max_positions: int) -> None:
    """Raises DataError, naming the line, where a prompt and its shortest or asked response exceed the positions."""
    for request, row in zip(requests, rows, strict=True):
        tokens, response = len(request.prompt.token_ids), max(request.lengths or (1,))
        if tokens + response > max_positions:
            found = f"of {response} tokens that `--lengths` asks for" if request.lengths else "of one token"
            raise DataError(
                f"{row.place}: the prompt has {tokens} tokens, and with a response {found} exceeds the {max_positions} "
                f"positions of the model; shorten it or remove it from `--prompts`, or take another `--model`"
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


def _drain(engine: Engine) -> GenerationReport:
    samples: list[Sample] = []
    seconds = dict.fromkeys(StepKind, 0.0)
    tokens = dict.fromkeys(StepKind, 0)
    decode_ms: list[float] = []
    kv_peak = 0
    started = time.perf_counter()
    with Progress(0) as progress:
        progress.start()
        progress.phase("generate", engine.num_waiting, "samples")
        while engine.has_work:
            before = time.perf_counter()
            finished = engine.step()
            took = time.perf_counter() - before
            record = engine.last_step
            assert record is not None, "a step leaves a record"
            # A step that computes prompts beside running samples is shared by its tokens.
            share = record.num_prefill_tokens / max(1, record.num_tokens)
            seconds[StepKind.PREFILL] += share * took
            seconds[StepKind.DECODE] += (1 - share) * took
            tokens[StepKind.PREFILL] += record.num_prefill_tokens
            tokens[StepKind.DECODE] += record.num_tokens - record.num_prefill_tokens
            if record.kind is StepKind.DECODE:
                decode_ms.append(1000 * took)
            kv_peak = max(kv_peak, engine.kv_bytes)
            samples += finished
            progress.advance(len(finished))
    return GenerationReport(
        tuple(sorted(samples, key=lambda sample: (sample.prompt.uid, sample.index))),
        time.perf_counter() - started,
        tokens[StepKind.PREFILL],
        seconds[StepKind.PREFILL],
        tokens[StepKind.DECODE],
        seconds[StepKind.DECODE],
        tuple(decode_ms),
        kv_peak,
    )


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0
