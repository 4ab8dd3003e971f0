"""plait's engine, as `plait train` and `plait generate` run it."""

from __future__ import annotations

import time

import torch
import transformers.models.llama.modeling_llama  # noqa: F401 (else loaded with the model, and counted as its memory)

from generation.serving import Outcome, Runner, Step, serve
from generation.workload import Case, Workload
from plait.data.records import Prompt, Sample
from plait.generation.engine import Engine
from plait.generation.request import Request
from plait.generation.settings import SamplingSettings
from plait.kept_memory import give_back_freed
from plait.kernels.noise import NoiseKey
from plait.models.language_loading import load_model
from plait.runtime.process import set_up


def load(workload: Workload) -> tuple[Runner, str]:
    set_up(workload.threads)
    settings = SamplingSettings(max_running=workload.max_samples, speculation="off")  # repeats would be known texts
    engine = Engine(load_model(workload.model, dtype=workload.dtype, device="cpu"), settings)
    give_back_freed()

    def run(case: Case, number: int) -> Outcome:
        for uid, (prompt, lengths) in enumerate(zip(case.prompts, case.lengths, strict=True)):
            asked = Prompt(uid, "", prompt)
            engine.add(Request(asked, len(lengths), settings.sampling(), NoiseKey(seed=0, rollout=number), lengths))
        samples: list[Sample] = []
        steps: list[Step] = []
        packing_s = 0.0
        while engine.has_work:
            before = time.perf_counter()
            samples += engine.step()
            took = time.perf_counter() - before
            record = engine.last_step
            assert record is not None, "a step leaves a record"
            packing_s += record.packing_s
            took -= record.packing_s
            steps.append(Step(record.num_sequences, record.num_context_tokens, record.num_tokens, took))
        samples.sort(key=lambda sample: (sample.prompt.uid, sample.index))
        rows = sum(len(sample.token_ids) - 1 for sample in samples)
        return Outcome([len(sample.token_ids) for sample in samples], rows, steps, packing_s)

    return run, f"torch {torch.__version__}"


if __name__ == "__main__":
    serve(load)
