"""Transformers' `generate`: one batch, on until its longest row ends.

One column of padding before the prompts, masked: with a mask, bfloat16 takes another attention kernel on CPUs and is
about half as slow again without it.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from generation.serving import Outcome, Runner, serve
from generation.workload import Case, Workload


def load(workload: Workload) -> tuple[Runner, str]:
    torch.set_num_threads(workload.threads)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(workload.model, dtype=getattr(torch, workload.dtype))
    model.eval()

    def run(case: Case, number: int) -> Outcome:
        torch.manual_seed(number)
        input_ids = torch.tensor([(0, *prompt) for prompt in case.prompts])
        mask = torch.ones_like(input_ids)
        mask[:, 0] = 0
        config = transformers.GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=case.longest,
            num_return_sequences=len(case.lengths[0]),
            eos_token_id=None,
            pad_token_id=0,
        )
        with torch.inference_mode():
            output = model.generate(input_ids, attention_mask=mask, generation_config=config)
        responses = output[:, input_ids.shape[1] :].tolist()
        delivered = [len(row[:length]) for row, length in zip(responses, case.flat_lengths, strict=True)]
        return Outcome(delivered, len(responses) * (case.longest - 1))

    # No token ends a row before its time: the model's own end of sequence would.
    model.generation_config.eos_token_id = None
    return run, f"transformers {transformers.__version__}, torch {torch.__version__}"


if __name__ == "__main__":
    serve(load)
