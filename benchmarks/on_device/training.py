"""Model FLOPs utilisation (MFU) of training: micro-batches of 16k packed tokens, forward and backward.

Counted are the products of forward and backward, three times those of a forward, with the pairs of tokens that see each
other; recomputed forwards are not counted (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), as in `perf/mfu` of a
run.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from on_device.job import SHAPES, Job, most_bytes, random_ids, rates_of, synchronize
from on_device.kernels import profiled, say_kernels
from plait.algorithms.grpo import GRPOOptions, grpo
from plait.cost.estimate import model_shape
from plait.cost.model_flops import training_flops
from plait.cost.model_work import ModelWork
from plait.data.computing import evaluate
from plait.data.records import FinishReason, Prompt, Sample
from plait.data.rows import Rows
from plait.dataflow import CallKind, trace
from plait.models.language_loading import load_model
from plait.runtime.utilisation import counted
from plait.training.mini_batch import LossCall, LossTerm
from plait.training.settings import OptimizerSettings
from plait.training.trainer import Trainer
from plait.training.trainer_settings import ExecutionSettings, SampleSettings, UpdateSettings

GOAL = 0.4
MICRO_BATCH_TOKENS = 16_384
WARM_UP, STEPS = 2, 4


def main() -> int:
    job = Job.read()
    rates = rates_of(job)
    print(rates)
    job.record("training", "", **asdict(rates))
    for shape in job.shapes:
        for checkpoints in (True, False):
            try:
                measure(job, shape, rates.best_flops_per_s, checkpoints)
            except torch.OutOfMemoryError as error:
                kept = "recomputed" if checkpoints else "kept"
                print(f"{shape}, {kept} activations: no room: {error}")
                job.record("training", shape, checkpoints=checkpoints, no_room=str(error))
    return 0


PROMPT_TOKENS, SAMPLES, TOKENS, GROUPS = 128, 8, 496, 8
"""A prompt and its samples are 4,096 tokens, so four of them fill a micro-batch."""


def measure(job: Job, shape: str, flops_per_s: float, checkpoints: bool) -> None:
    prompt_tokens, samples, tokens, groups = (8, 2, 6, 2) if job.is_tiny else (PROMPT_TOKENS, SAMPLES, TOKENS, GROUPS)
    model = load_model(job.model(shape), dtype=job.dtype, device=job.device)
    node, rows = batch(groups, samples, prompt_tokens, tokens, SHAPES[shape].vocabulary)
    trainer = Trainer(
        model,
        ExecutionSettings(MICRO_BATCH_TOKENS, checkpoint_activations=checkpoints),
        SampleSettings(1.0, tokens),
        UpdateSettings(OptimizerSettings(learning_rate=1e-6), WARM_UP + STEPS + 1),
    )
    passes, optimizer = [], []
    for step in range(WARM_UP + STEPS):
        by_kind, micros = seconds_of_step(trainer, rows, node, job.device, step)
        if step >= WARM_UP:
            passes.append(by_kind["TRAIN"])
            optimizer.append(by_kind["STEP"])
    work = ModelWork(sizes := model_shape(job.model(shape)), job.dtype, sizes.vocabulary)
    share = training_flops(work, counted(rows.samples).micro(sizes)) / median(passes) / flops_per_s
    what = {"checkpoints": checkpoints, "micro_batches": micros, "passes_s": passes, "optimizer_s": optimizer}
    job.record("training", shape, **what, mfu=share, most_bytes=most_bytes(job.device))
    how = f"{'recomputed' if checkpoints else 'kept'} activations"
    print(
        f"{shape}, micro-batches of {' + '.join(map(str, micros))} tokens, {how}: forward and backward "
        f"{median(passes):.3f} s, optimizer {median(optimizer):.3f} s, MFU {share:.1%} (goal {GOAL:.0%})"
    )
    with profiled(job.device) as profiler:
        by_kind, _ = seconds_of_step(trainer, rows, node, job.device, WARM_UP + STEPS)
    say_kernels(job, "training", shape, f"{shape}, {how}", profiler, sum(by_kind.values()), 1, checkpoints=checkpoints)


def batch(groups: int, samples: int, prompt_tokens: int, tokens: int, vocabulary: int) -> tuple[Any, Rows]:
    """A TRAIN node of GRPO, and rows of random responses with what it reads."""
    flow = trace(grpo, roles=("actor", "reward"), options=GRPOOptions(kl_coef=0.0))
    said = tuple(
        Sample(
            Prompt(group, "", random_ids(prompt_tokens, vocabulary, group)),
            index,
            random_ids(tokens, vocabulary, 1000 * (group + 1) + index),
            (-10.0,) * tokens,
            "",
            FinishReason.LENGTH,
        )
        for group in range(groups)
        for index in range(samples)
    )
    rows = Rows(said)
    for node in flow.nodes:
        match node.kind:
            case CallKind.SCORE:
                rows = rows.with_column(node.outputs[0], [float(i % 2) for i in range(len(said))])
            case CallKind.COMPUTE:
                rows = rows.with_column(node.outputs[0], evaluate(node, {node.rows: rows}))
            case CallKind.TRAIN:
                return node, rows
            case _:
                pass
    raise AssertionError("GRPO trains")


def seconds_of_step(
    trainer: Trainer, rows: Rows, node: Any, device: str, step: int
) -> tuple[dict[str, float], list[int]]:
    """Seconds by kind of action, and the packed tokens of each micro-batch."""
    work = trainer.train([LossTerm(rows, LossCall.of(node))], step=step)
    synchronize(device)
    marks, micros = [("", mark(device))], []
    while (done := next(work, None)) is not None:
        # As the device comes to it: to wait here would keep the host from packing the next micro-batch meanwhile.
        marks.append((done.kind, mark(device)))
        if done.kind == "TRAIN":
            micros.append(done.tokens)
    synchronize(device)
    seconds = {"TRAIN": 0.0, "STEP": 0.0}
    for (_, before), (kind, after) in pairwise(marks):
        seconds[kind] += between(before, after)
    return seconds, micros


def mark(device: str) -> Any:
    """When the device comes to what is asked of it next."""
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(before: Any, after: Any) -> float:
    """Seconds between two marks that the device has come to."""
    return after - before if isinstance(before, float) else before.elapsed_time(after) / 1e3


if __name__ == "__main__":
    sys.exit(main())
