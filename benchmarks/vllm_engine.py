"""Samples a second of plait's own engine and of vLLM behind its engine protocol, on the same weights and noise.

    python benchmarks/vllm_engine.py [--model M] [--dtype bfloat16] [--prompts 8] [--samples 8] [--tokens 128]
                                     [--threads 1] [--repeats 3] [--tiny]

Both are opened once; rounds alternate, and a first one does not count. Every response has a recorded length, so both
draw as many tokens. Printed: median samples/s and tokens/s of each, their ratio, seconds to bring weights to vLLM, and
how far its log-probs are from plait's on the tokens that both drew. Exit code 2: vLLM is not set up (docs/engines.md).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from random_llama import word_tokenizer, write_llama
from sides import positive

from plait.cost.estimate import model_shape
from plait.data.records import Prompt, Sample
from plait.errors import ConfigError
from plait.generation.engine import Engine, drain
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.models.files import hub
from plait.models.loading import load_model
from plait.recipes.recipe_file import load_recipe
from plait.vllm.engine import VllmEngine
from plait.vllm.process import start_vllm
from plait.workers.vllm_engines import loading_of

PROMPT_TOKENS = 64
Samples = dict[tuple[int, int], Sample]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        start = start_vllm("cpu", options.threads, 60.0)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        if options.tiny:
            write_llama(folder, word_tokenizer(512), hidden=128, intermediate=256, positions=256)
            options.prompts, options.samples, options.tokens, options.repeats = 2, 2, 8, 1
        else:
            folder = hub.resolve(options.model)
        model = load_model(str(folder), dtype=options.dtype)
        running = options.prompts * options.samples
        recipe = load_recipe(
            None,
            [
                ("model", str(folder)),
                ("dtype", options.dtype),
                ("data.source", "none"),
                ("data.max_prompt_tokens", PROMPT_TOKENS),
                ("sampling.max_response_tokens", options.tokens),
                ("sampling.max_running", running),
            ],
        )
        own = Engine(model, SamplingSettings(max_running=running, speculation="off"))  # repeats would be known texts
        loading = loading_of(recipe, str(folder), model_shape(str(folder)))
        other = VllmEngine("actor", model, lambda: model.export(model.dtype).state, loading, start)
        try:
            _measure(own, other, options)
        finally:
            other.close()
    return 0


def _measure(own: Engine, other: VllmEngine, options: argparse.Namespace) -> None:
    seconds: dict[str, list[float]] = {"plait": [], "vllm": []}
    weights_s: list[float] = []
    for number in range(1 + options.repeats):
        other.update_weights(number)
        began = time.perf_counter()
        other._bring_weights()
        brought = time.perf_counter() - began
        requests = _requests(options, number)
        drawn: dict[str, Samples] = {}
        for name in ("plait", "vllm") if number % 2 else ("vllm", "plait"):
            began = time.perf_counter()
            drawn[name] = _drawn(own if name == "plait" else other, requests)
            if number:
                seconds[name].append(time.perf_counter() - began)
        if number:
            weights_s.append(brought)
    samples, tokens = options.prompts * options.samples, sum(sum(one.lengths or ()) for one in requests)
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:6}  {samples / median:8.2f} samples/s  {tokens / median:9.1f} tokens/s")
    ratio = statistics.median(seconds["plait"]) / statistics.median(seconds["vllm"])
    print(f"vllm against plait: {ratio:.2f} times the samples/s")
    print(f"new weights reach vllm in {statistics.median(weights_s):.2f} s")
    print(_differences(drawn["plait"], drawn["vllm"]))


def _requests(options: argparse.Namespace, number: int) -> list[Request]:
    """Of round `number`: other prompts and other lengths in each."""
    draw = random.Random(number)
    found = []
    for uid in range(options.prompts):
        ids = tuple(draw.randrange(100, 500) for _ in range(PROMPT_TOKENS))
        lengths = tuple(draw.randint(max(1, options.tokens // 4), options.tokens) for _ in range(options.samples))
        found.append(Request(Prompt(uid, "", ids), options.samples, Sampling(), NoiseKey(0, number), lengths=lengths))
    return found


def _drawn(engine: Engine | VllmEngine, requests: list[Request]) -> Samples:
    for request in requests:
        engine.add(request)
    if isinstance(engine, Engine):
        return {(one.prompt.uid, one.index): one for one in drain(engine)}
    samples: Samples = {}
    while engine.has_work:
        samples |= {(one.prompt.uid, one.index): one for one in engine.advance("generate")[1]}
    return samples


def _differences(ours: Samples, theirs: Samples) -> str:
    """Of the tokens up to the first that differs."""
    apart: list[float] = []
    same = 0
    for key, one in ours.items():
        other = theirs[key]
        same += one.token_ids == other.token_ids
        for mine, its, logprob, its_logprob in zip(
            one.token_ids, other.token_ids, one.logprobs, other.logprobs, strict=True
        ):
            if mine != its:
                break
            apart.append(abs(logprob - its_logprob))
    mean = statistics.fmean(apart)
    return f"{same} of {len(ours)} samples are the same to the last token; log-probs are {mean:.2g} apart"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--prompts", type=positive, default=8)
    parser.add_argument("--samples", type=positive, default=8, help="of each prompt")
    parser.add_argument("--tokens", type=positive, default=128, help="longest response")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--repeats", type=positive, default=3, help="counted rounds")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model: checks the benchmark, not the speed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
