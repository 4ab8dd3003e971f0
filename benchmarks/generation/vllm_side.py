"""vLLM on the CPU, in an environment of its own (setup_peers.sh).

Its front end and its engine are processes of their own, which wait busily for each other: with one worker core it keeps
two cores at work. Samples of one prompt find its blocks by the prefix cache, which is emptied before each run.
"""

from __future__ import annotations

import importlib.metadata
import os

from generation.workload import Case, Workload

KV_GIB = 2
"""For 64 samples of 640 tokens in float32, 1.9 GB; its default of 4 GiB is resident as well."""
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(KV_GIB))
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import LLM, SamplingParams  # noqa: E402

from generation.serving import Outcome, Runner, serve  # noqa: E402


def load(workload: Workload) -> tuple[Runner, str]:
    # The worker's threads go to the last cores, the front end has the others; with as many threads as cores they share.
    cores = sorted(os.sched_getaffinity(0))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores[-workload.threads :]))
    llm = LLM(
        model=workload.model,
        dtype=workload.dtype,  # "auto" would compute a float32 checkpoint in bfloat16
        max_model_len=workload.max_tokens + 1,
        max_num_seqs=workload.max_samples,
        skip_tokenizer_init=True,
        generation_config="vllm",
        seed=0,
    )

    def run(case: Case, number: int) -> Outcome:
        if not llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache")
        prompts = [{"prompt_token_ids": list(prompt)} for prompt, _ in case.samples]
        asked = [
            SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in case.flat_lengths
        ]
        outputs = llm.generate(prompts, asked, use_tqdm=False)
        return Outcome([len(output.outputs[0].token_ids) for output in outputs], 0)

    return run, f"vllm-cpu {importlib.metadata.version('vllm-cpu')}, torch {importlib.metadata.version('torch')}"


if __name__ == "__main__":
    serve(load)
