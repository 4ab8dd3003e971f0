"""vLLM with n-gram speculation or without, in its own environment: rollouts of `speculation_vllm.py`.

PEER_PYTHON vllm_drafting.py JOB.json      # prints a line of JSON: versions, seconds and tokens of each rollout
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Run the rollouts of a job; the first is not counted by who asks."""
    from vllm import LLM, SamplingParams

    drafts: dict[str, Any] = {}
    if job["drafts"]:
        drafts["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": job["drafts"],
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        max_model_len=job["positions"],
        max_num_seqs=job["running"],
        skip_tokenizer_init=True,
        generation_config="vllm",
        seed=0,
        **drafts,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt, count in job["prompts"] for _ in range(count)]
    rollouts = []
    for rollout in range(job["rollouts"]):
        llm.reset_prefix_cache()
        asked = [
            SamplingParams(
                temperature=job["temperature"],
                max_tokens=job["tokens"],
                stop_token_ids=job["stop_token_ids"],
                detokenize=False,
                seed=rollout * len(prompts) + place,
            )
            for place in range(len(prompts))
        ]
        began = time.perf_counter()
        outputs = llm.generate(prompts, asked, use_tqdm=False)
        seconds = time.perf_counter() - began
        rollouts.append((seconds, sum(len(output.outputs[0].token_ids) for output in outputs)))
    return {"vllm": importlib.metadata.version("vllm-cpu"), "rollouts": rollouts}


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
    found = main(json.loads(Path(sys.argv[1]).read_text()))
    print(json.dumps(found), file=out, flush=True)
