"""Transformers' continuous batching, by a manager that runs as long as the process."""

from __future__ import annotations

import torch
import transformers
from transformers import ContinuousBatchingConfig

from generation.serving import Outcome, Runner, serve
from generation.workload import Case, Workload

PAGE_TOKENS = 256
"""Its default."""


def load(workload: Workload) -> tuple[Runner, str]:
    torch.set_num_threads(workload.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(workload.model, dtype=getattr(torch, workload.dtype))
    model.eval()
    config = transformers.GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=workload.max_tokens, eos_token_id=-1
    )
    pages = -(-workload.max_tokens // PAGE_TOKENS) + 1
    batching = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=workload.max_samples * pages,  # else it sizes its cache by the machine's free memory
        max_batch_tokens=max(2048, workload.max_samples),
        max_requests_per_batch=workload.max_samples,
    )

    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=batching)
    manager.start()

    def run(case: Case, number: int) -> Outcome:
        names = [
            manager.add_request(list(prompt), request_id=f"{number}-{place}", max_new_tokens=length)
            for place, (prompt, length) in enumerate(case.samples)
        ]
        done = {}
        while len(done) < len(names):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done[result.request_id] = len(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError("continuous batching stopped by itself")
        return Outcome([done[name] for name in names], 0)

    return run, f"transformers {transformers.__version__}, torch {torch.__version__}"


if __name__ == "__main__":
    serve(load)
