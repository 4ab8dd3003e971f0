"""What truncated sampling costs: the same rollout with the whole vocabulary, top-k, top-p and both, in turns.

    python benchmarks/sampling.py [--model smollm2-135m-instruct] [--dtype bfloat16] [--samples 1,16] [--tokens 64]
                                  [--repeats 5] [--tiny]

All take the same prompts and draw the same number of tokens. Printed are the medians of whole rollouts and their
ratio to plain sampling.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from random_llama import word_tokenizer, write_llama
from sides import positive

from plait.data.records import Prompt
from plait.generation.engine import Engine, drain
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.models.language_loading import load_model
from plait.models.language_model import LanguageModel

HOW = {
    "plain": Sampling(),
    "top_k 50": Sampling(top_k=50),
    "top_p 0.9": Sampling(top_p=0.9),
    "top_k 50, top_p 0.9": Sampling(top_k=50, top_p=0.9),
}
PROMPT = "Write a short story about a village by the sea."


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(_model(Path(folder), options.tiny, options.model), dtype=options.dtype)
        for count in options.samples:
            seconds: dict[str, list[float]] = {name: [] for name in HOW}
            for number in range(1 + options.repeats):
                for name, sampling in HOW.items():
                    took = rollout(model, count, options.tokens, sampling, number)
                    if number:  # the first one warms up
                        seconds[name].append(took)
            print(f"{count} samples of {options.tokens} tokens, {options.dtype}, medians of {options.repeats}")
            plain = median(seconds["plain"])
            for name, took in seconds.items():
                print(f"  {name:20}  {median(took):8.3f} s  {median(took) / plain:6.3f} of plain")
    return 0


def rollout(model: LanguageModel, samples: int, tokens: int, sampling: Sampling, number: int) -> float:
    """Seconds of one."""
    engine = Engine(model, SamplingSettings(max_running=samples, speculation="off"))
    token_ids = tuple(model.tokenizer(PROMPT, add_special_tokens=False)["input_ids"])
    engine.add(Request(Prompt(0, "", token_ids), samples, sampling, NoiseKey(0, number), (tokens,) * samples))
    started = time.perf_counter()
    drawn = sum(len(sample.token_ids) for sample in drain(engine))
    assert drawn == samples * tokens, f"expected {samples * tokens} tokens, found {drawn}"
    return time.perf_counter() - started


def _model(folder: Path, tiny: bool, name: str) -> str:
    if tiny:
        write_llama(folder, word_tokenizer(512), hidden=32, intermediate=64, positions=256)
    return str(folder) if tiny else name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--samples", type=lambda text: [positive(part) for part in text.split(",")], default=[1, 16])
    parser.add_argument("--tokens", type=positive, default=64)
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--tiny", action="store_true", help="a random model of 32 dims: shows that it runs")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
