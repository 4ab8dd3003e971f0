"""What exact mode costs, and how often fast mode says something else.

Samples are drawn in fast mode. Then exact mode computes the logits of every response token after the same tokens, and
draws with the same noise: the share of places where the token differs is what fast mode's rounding does, without the
consequences of an earlier difference. Its log-probs are compared, too. The cost is the time of a rollout of few tokens
in either mode.

    python -m benchmarks.exact_mode --model smollm2-135m-instruct --dtype bfloat16 --tokens 100000
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable

import torch

from plait.data.records import Prompt, Sample
from plait.generation.engine import Engine, drain
from plait.generation.exact import ExactForward
from plait.generation.pool import KVPool
from plait.generation.ragged import NewTokens
from plait.generation.request import Request
from plait.generation.sampler import SamplingRows, sample
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels import noise
from plait.kernels.noise import NoiseKey
from plait.models.language_loading import load_model
from plait.models.language_model import LanguageModel
from plait.policy.blocks import BLOCK_TOKENS, num_blocks_for

KEY = NoiseKey(seed=0)
PROMPT = "Write a short story about a village by the sea, number {}."


def requests(model: LanguageModel, count: int, length: int) -> list[Request]:
    asked = []
    for uid in range(count):
        messages = [{"role": "user", "content": PROMPT.format(uid)}]
        text = model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        token_ids = tuple(model.tokenizer(text, add_special_tokens=False)["input_ids"])
        asked.append(Request(Prompt(uid, text, token_ids), 1, Sampling(), KEY, lengths=(length,)))
    return asked


def rollout(model: LanguageModel, asked: Iterable[Request], *, exact: bool) -> tuple[list[Sample], float]:
    """Samples and seconds."""
    engine = Engine(model, SamplingSettings(max_running=64, exact=exact, speculation="off"))
    for request in asked:
        engine.add(request)
    started = time.perf_counter()
    samples = list(drain(engine))
    return samples, time.perf_counter() - started


@torch.no_grad()
def differences(model: LanguageModel, response: Sample) -> tuple[int, torch.Tensor]:
    """Tokens of a sample that exact mode would have drawn otherwise, and the absolute differences of its log-probs."""
    tokens = [*response.prompt.token_ids, *response.token_ids[:-1]]
    first = len(response.prompt.token_ids) - 1
    pool = KVPool(BLOCK_TOKENS)
    pool.reserve(num_blocks_for(len(tokens)), num_blocks_for(len(tokens)))
    table = list(range(pool.num_blocks))
    forward = ExactForward(model, pool)
    forward.logits([NewTokens(tokens[:first], 0, table)], [0])
    rest = tokens[first:]
    logits = forward.logits([NewTokens(rest, first, table)], [len(rest)])
    assert logits is not None, "every row is read"
    keys = torch.full((len(rest),), noise.signed(KEY.sample_key(response.prompt.uid, response.index)))
    of_draws = noise.DrawNoise(keys, torch.arange(len(rest)))
    rows = SamplingRows.of([Sampling()] * len(rest), logits.shape[1], logits.device)
    drawn, _ = sample(logits, of_draws, rows)
    token_ids = torch.tensor(response.token_ids)
    logprobs = logits.float().log_softmax(-1).gather(1, token_ids[:, None])[:, 0]
    return int((drawn != token_ids).sum()), (logprobs - torch.tensor(response.logprobs)).abs()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--length", type=int, default=200)
    options = parser.parse_args()
    model = load_model(options.model, dtype=options.dtype)
    few = requests(model, 8, 16)
    seconds = {exact: rollout(model, few, exact=exact)[1] for exact in (False, True, False, True)}
    samples, _ = rollout(model, requests(model, -(-options.tokens // options.length), options.length), exact=False)
    num_different = num_tokens = 0
    errors = []
    for response in samples:
        different, error = differences(model, response)
        num_different += different
        num_tokens += len(response.token_ids)
        errors.append(error)
    error = torch.cat(errors)
    print(
        json.dumps(
            {
                "dtype": options.dtype,
                "tokens": num_tokens,
                "different": num_different,
                "share": num_different / num_tokens,
                "logprob_mean_difference": float(error.mean()),
                "logprob_largest_difference": float(error.max()),
                "exact_over_fast_seconds": seconds[True] / seconds[False],
            }
        )
    )


if __name__ == "__main__":
    main()
