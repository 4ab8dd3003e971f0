"""Generation as plainly as it can be said: a whole eager Transformers forward for every token, then Python floats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from plait.data.records import FinishReason, Sample
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.kernels import noise
from tests.kernels.plain_noise import draw_key_of, gumbel_of, uniform_of


def log_softmax(logits: Sequence[float], temperature: float) -> list[float]:
    scaled = [x / temperature for x in logits]
    top = max(scaled)
    log_total = top + math.log(math.fsum(math.exp(x - top) for x in scaled))
    return [x - log_total for x in scaled]


def kept_tokens(logprobs: Sequence[float], top_k: int, top_p: float, min_p: float = 0.0) -> list[int]:
    """Token ids that survive top-k, then top-p, then min-p; most probable first."""
    kept = _ranked(logprobs, top_k, top_p)
    return [i for i in kept if math.exp(logprobs[i] - logprobs[kept[0]]) >= min_p]


def _ranked(logprobs: Sequence[float], top_k: int, top_p: float) -> list[int]:
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


def draw(
    logits: Sequence[float], draw_key: int, sampling: Sampling, num_candidates: int
) -> tuple[int, float, list[int] | None]:
    """One token and its log-prob from one row of logits without ties: unfiltered, or over the tokens that the filters
    leave, which come with it, where the sampling keeps them."""
    logprobs = log_softmax(logits, sampling.temperature or 1.0)
    if sampling.temperature == 0:
        token_id = max(range(len(logits)), key=lambda i: (logits[i], -i))
        return token_id, logprobs[token_id], None
    candidates = sorted(range(len(logits)), key=lambda i: -logits[i])[:num_candidates]
    kept = kept_tokens(logprobs, sampling.top_k, sampling.top_p, sampling.min_p)
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
    if not sampling.keeps_support:
        return token_id, logprobs[token_id], None
    return token_id, logprobs[token_id] - math.log(math.fsum(math.exp(logprobs[i]) for i in kept)), kept


def generate(module: Any, tokenizer: Any, request: Request, *, max_positions: int, num_candidates: int) -> list[Sample]:
    """All samples of a request, one after the other, without a cache. `module`: the bare eager Transformers model."""
    samples = []
    for index in range(request.num_samples):
        limit = min(request.sampling.max_tokens, max_positions - len(request.prompt.token_ids))
        said = turn(module, tokenizer, request, index, limit=limit, num_candidates=num_candidates)
        text = tokenizer.decode(said[0], skip_special_tokens=True)
        supports = tuple(map(as_bytes, said[3])) if request.sampling.keeps_support else None
        spoken = tuple(said[0]), tuple(said[1])
        samples.append(Sample(request.prompt, index, *spoken, text, said[2], supports=supports))
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
) -> tuple[list[int], list[float], FinishReason, list[list[bool]]]:
    """What a sample says behind the tokens that its response has: tokens, log-probs, why it ends, and which tokens each
    could have been, where it keeps that.

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
    could_be: list[list[bool]] = []
    while len(behind) + len(token_ids) < limit:
        context = [*request.prompt.token_ids, *behind, *token_ids]
        logits = module(input_ids=torch.tensor([context]), use_cache=False).logits[0, -1]
        draw_key = draw_key_of(key, len(behind) + len(token_ids))
        token_id, logprob, kept = draw(logits.double().tolist(), draw_key, sampling, num_candidates)
        if kept is not None:
            could_be.append([token in kept for token in range(len(logits))])
        token_ids.append(token_id)
        logprobs.append(logprob)
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
        if token_id in stop_ids or any(string in text for string in sampling.stop):
            return token_ids, logprobs, FinishReason.STOP, could_be
    return token_ids, logprobs, FinishReason.LENGTH, could_be


def as_bytes(could_be: Sequence[bool]) -> bytes:
    """A set of tokens as a sample has it, by the words of `plait.data.supports`, one gap after another."""
    if all(could_be):
        return b""
    gaps, last = b"", -1
    for token in (token for token, can in enumerate(could_be) if can):
        gap, last = token - last - 1, token
        while gap > 127:
            gaps, gap = gaps + bytes([gap % 128 + 128]), gap // 128
        gaps += bytes([gap])
    bits = bytes(
        sum(can << place for place, can in enumerate(could_be[at : at + 8])) for at in range(0, len(could_be), 8)
    )
    return b"\0" + gaps if len(gaps) <= len(bits) else b"\1" + bits
