"""Sample from a model: prompts of a file in, responses and figures of speed out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plait.data.prompts import prompt_set
from plait.data.records import Sample
from plait.data.settings import DataSettings
from plait.data.sources import Source, read_jsonl
from plait.generation.engine import Engine
from plait.generation.noise import NoiseKey
from plait.generation.request import Request
from plait.generation.settings import Sampling, SamplingSettings
from plait.models.hub import read_config
from plait.models.language_model import load_model
from plait.observe.progress import Progress
from plait.policy.batching import StepKind
from plait.runtime.estimate import ModelShape
from plait.runtime.prepare import load_tokenizer


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
    """Answer every prompt of a JSONL file.

    Args:
        lengths: per prompt the exact response lengths of its samples, instead of stop tokens.

    Raises:
        DataError: the file is missing, malformed or empty, or a prompt leaves no room for a response.
        ModelError: the model cannot be used.
    """
    rows = read_jsonl(prompts, key="--prompts")
    room = ModelShape.from_config(read_config(model)).max_positions - 1
    settings = DataSettings(source=str(prompts), system_prompt=system_prompt)
    chosen = prompt_set(Source(str(prompts), tuple(rows)), load_tokenizer(model), settings, room)
    engine = Engine(load_model(model, dtype=dtype, device=device), SamplingSettings(max_running=max_running))
    for index in range(len(chosen)):
        asked = None if lengths is None else tuple(lengths[index])
        count = samples_per_prompt if asked is None else len(asked)
        engine.add(Request(chosen.prompt(index, index), count, sampling, NoiseKey(seed), lengths=asked))
    return _drain(engine)


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
            seconds[record.kind] += took
            tokens[record.kind] += record.num_tokens
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
