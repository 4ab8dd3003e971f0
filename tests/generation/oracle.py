"""Generation as plainly as it can be said: a whole eager Transformers forward for every token, then Python floats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from plait.data.records import FinishReason, Sample
from plait.generation.request import Request
from plait.generation.settings import Sampling
from plait.kernels import noise
from tests.kernels.plain_noise import draw_key_of, gumbel_of, uniform_of


def log_softmax(logits: Sequence[float], temperature: float) -> list[float]:
    scaled = [x / temperature for x in logits]
    top = max(scaled)
    log_total = top + math.log(math.fsum(math.exp(x - top) for x in scaled))
    return [x - log_total for x in scaled]


def kept_tokens(logprobs: Sequence[float], top_k: int, top_p: float) -> list[int]:
    """Token ids that survive top-k, then top-p; most probable first."""
    order = sorted(range(len(logprobs)), key=lambda i: -logprobs[i])
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        target, mass = top_p * math.fsum(math.exp(logprobs[i]) for i in order), 0.0
        for count, i in enumerate(order, 1):
            mass += math.exp(logprobs[i])
            if mass >= target:
                return order[:count]
    return order


def draw(logits: Sequence[float], draw_key: int, sampling: Sampling, num_candidates: int) -> tuple[int, float]:
    """One token and its log-prob (unfiltered) from one row of logits without ties."""
    logprobs = log_softmax(logits, sampling.temperature or 1.0)
    if sampling.temperature == 0:
        token_id = max(range(len(logits)), key=lambda i: (logits[i], -i))
        return token_id, logprobs[token_id]
    candidates = sorted(range(len(logits)), key=lambda i: -logits[i])[:num_candidates]
    kept = kept_tokens(logprobs, sampling.top_k, sampling.top_p)
    scores = {i: logprobs[i] + gumbel_of(draw_key, i) for i in kept if i in candidates}
    token_id = max(scores, key=scores.__getitem__)
    tail = sorted(i for i in kept if i not in candidates)
    mass = math.fsum(math.exp(logprobs[i]) for i in tail)
    if tail and math.log(mass) + gumbel_of(draw_key, noise.TAIL_GUMBEL) > scores[token_id]:
        point, token_id = uniform_of(draw_key, noise.TAIL_UNIFORM) * mass, tail[-1]
        for i in tail:
            point -= math.exp(logprobs[i])
            if point < 0:
                token_id = i
                break
    return token_id, logprobs[token_id]


def generate(module: Any, tokenizer: Any, request: Request, *, max_positions: int, num_candidates: int) -> list[Sample]:
    """All samples of a request, one after the other, without a cache. `module`: the bare eager Transformers model."""
    samples = []
    for index in range(request.num_samples):
        limit = min(request.sampling.max_tokens, max_positions - len(request.prompt.token_ids))
        said = turn(module, tokenizer, request, index, limit=limit, num_candidates=num_candidates)
        text = tokenizer.decode(said[0], skip_special_tokens=True)
        samples.append(Sample(request.prompt, index, tuple(said[0]), tuple(said[1]), text, said[2]))
    return samples


@torch.no_grad()
def turn(
    module: Any,
    tokenizer: Any,
    request: Request,
    index: int,
    *,
    limit: int,
    num_candidates: int,
    behind: Sequence[int] = (),
) -> tuple[list[int], list[float], FinishReason]:
    """What a sample says behind the tokens that its response has: tokens, log-probs, and why it ends.

    Args:
        limit: tokens of the response, those `behind` included.
    """
    sampling = request.sampling
    stop_ids = sampling.stop_token_ids
    if stop_ids is None:
        stop_ids = (module.config.eos_token_id,)
    key = request.noise.sample_key(request.prompt.uid, index)
    token_ids: list[int] = []
    logprobs: list[float] = []
    while len(behind) + len(token_ids) < limit:
        context = [*request.prompt.token_ids, *behind, *token_ids]
        logits = module(input_ids=torch.tensor([context]), use_cache=False).logits[0, -1]
        draw_key = draw_key_of(key, len(behind) + len(token_ids))
        token_id, logprob = draw(logits.double().tolist(), draw_key, sampling, num_candidates)
        token_ids.append(token_id)
        logprobs.append(logprob)
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
        if token_id in stop_ids or any(string in text for string in sampling.stop):
            return token_ids, logprobs, FinishReason.STOP
    return token_ids, logprobs, FinishReason.LENGTH
