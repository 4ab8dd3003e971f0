"""Seconds of a decode step of vLLM, of B samples as in `decode`: what further tokens take, divided by their number.

Run by the Python that vLLM is installed for, without plait.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from on_device.job import SHAPES, Job, random_ids


def main() -> int:
    from vllm import LLM

    job = Job.read()
    for shape in job.shapes:
        sizes = (1, 2) if job.is_tiny else (1, 4, 16, 64, 256)
        prompt_tokens, few, many = (8, 2, 6) if job.is_tiny else (480, 4, 40)
        llm = LLM(
            model=job.model(shape),
            dtype=job.dtype,
            max_model_len=1024,
            max_num_seqs=max(sizes),
            gpu_memory_utilization=0.4,
            enable_prefix_caching=False,
        )

        for samples in sizes:
            vocabulary = SHAPES[shape].vocabulary
            prompts = [list(random_ids(prompt_tokens, vocabulary, uid)) for uid in range(samples)]
            seconds_of(llm, prompts, many)
            step_s = (seconds_of(llm, prompts, many) - seconds_of(llm, prompts, few)) / (many - few)
            print(f"{shape}, vLLM, {samples} samples: {step_s * 1e3:.3f} ms")
            job.record("vllm", shape, samples=samples, step_s=step_s)
        del llm
    return 0


def seconds_of(llm: Any, prompts: list[list[int]], tokens: int) -> float:
    """To generate so many tokens for each prompt."""
    from vllm import SamplingParams

    asked = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
