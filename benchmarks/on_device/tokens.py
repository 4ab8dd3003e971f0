"""Greedy tokens and log-probs of plait's engine against Transformers, which is given the tokens that plait said.

With random weights two tokens may be nearly equal: so beside how many tokens Transformers would have said, too, it is
printed how much better (in log-probs) its own were at most. The exit code is 1 where that, or a log-prob, is far off.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from on_device.job import SHAPES, Job, random_ids
from plait.data.records import Prompt, Sample
from plait.generation.engine import Engine, drain
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.models.language_loading import load_model

FAR = {"float32": 1e-3, "bfloat16": 0.15}
"""Of log-probs; in bfloat16 logits near 8 lie 1/32 apart, of which two are subtracted."""


def main() -> int:
    job, is_far = Job.read(), False
    for shape in job.shapes:
        samples, refusals = said(job, shape)
        off, behind, same, count = compared(job, shape, samples)
        print(
            f"{shape}: {same} of {count} greedy tokens are those of Transformers, whose own are better by "
            f"{behind:.2g} at most; log-probs differ by {off:.2g} at most"
        )
        job.record("tokens", shape, same=same, count=count, behind=behind, off=off)
        for way, why in refusals.items():
            print(f"{shape}: steps {way}: {why}")
            job.record("tokens", shape, way=way, refused=why)
        is_far |= not max(off, behind) <= FAR[job.dtype]
    return int(is_far)


def said(job: Job, shape: str) -> tuple[list[Sample], dict[str, str]]:
    """Greedy samples of plait, and ways to capture steps that were refused."""
    num_prompts, prompt_tokens, tokens = (2, 8, 6) if job.is_tiny else (8, 100, 64)
    model = load_model(job.model(shape), dtype=job.dtype, device=job.device)
    engine = Engine(model, SamplingSettings(max_running=num_prompts, kv_tokens=64 * (prompt_tokens + tokens)))
    greedy = Sampling(temperature=0.0, max_tokens=tokens, stop_token_ids=())
    for uid in range(num_prompts):
        ids = random_ids(prompt_tokens + uid, SHAPES[shape].vocabulary, uid)
        engine.add(Request(Prompt(uid, "", ids), 1, greedy, NoiseKey(0, 0)))
    samples = list(drain(engine))
    captured = engine.state.forward.module.captured
    return samples, {} if captured is None else captured.refusals


@torch.no_grad()
def compared(job: Job, shape: str, samples: list[Sample]) -> tuple[float, float, int, int]:
    """The largest difference of a log-prob, the largest lead of another token, tokens that are the same, tokens."""
    model: Any = AutoModelForCausalLM.from_pretrained(job.model(shape), dtype=getattr(torch, job.dtype))
    peer = model.to(job.device)
    off = behind = 0.0
    same = count = 0
    for sample in samples:
        ids_1T = torch.tensor([[*sample.prompt.token_ids, *sample.token_ids]], device=job.device)
        first = len(sample.prompt.token_ids) - 1
        logprobs_RV = peer(ids_1T).logits[0, first:-1].float().log_softmax(-1)
        own_R = logprobs_RV.gather(1, ids_1T[0, first + 1 :, None])[:, 0]
        given_R = torch.tensor(sample.logprobs, device=job.device)
        off = max(off, float((own_R - given_R).abs().max()))
        behind = max(behind, float((logprobs_RV.amax(-1) - own_R).max()))
        same += int((logprobs_RV.argmax(-1) == ids_1T[0, first + 1 :]).sum())
        count += len(sample.token_ids)
    return off, behind, same, count


if __name__ == "__main__":
    sys.exit(main())
