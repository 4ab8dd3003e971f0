"""Would a copy of the policy in 4 bits pay as its draft model on a CPU? What it reads, what its products take, how
often it is right, and what these come to.

The copy's weights are those of the policy, rounded in groups along the inputs, each with a scale and a smallest value.
The packaged SmolLM2 has been in 4 bits with groups of 32 before: a copy with groups of 32 or 64 is as good as it was
then, which says little of other models. So groups are such that do not fall together with those, 48 and 96. How often
the copy is right is measured by the engine on the tasks of `speculation.py`: it drafts with the samples' own noise. No
product of torch's takes such groups: seconds are those of `_weight_int4pack_mm_for_cpu` with groups of 64, against a
step of the policy by the compiled forward. Times are CPU seconds of the process (one thread); the least of the repeats.

    python benchmarks/low_bit_copy.py                            # SmolLM2-135M-Instruct, temperature 1, minutes
    python benchmarks/low_bit_copy.py --tiny --repeats 1         # does the benchmark itself work?
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from plait.generation.engine import Engine, drain
from plait.generation.settings import SamplingSettings
from plait.generation.speculator import Speculator, model_drafter
from plait.models.language_loading import load_model
from plait.models.language_model import LanguageModel
from plait.speculation.drafter import Asked, DraftTokens, PoolDrafter
from speculation import TASKS, requests, tiny_model

LEVELS = 15
"""Steps between the smallest and the largest of a group."""
SAMPLES = (1, 8)
"""That run at a time, in the figures of a step."""
TIMED = 64
"""Inputs of a group, in the products that are timed."""
PLACES = 4
"""Tokens of a draft."""


def rounded(weight_OI: Tensor, group: int) -> Tensor:
    """The numbers that 4 bits, a scale and a smallest value for each group of inputs can say."""
    grouped = weight_OI.float().view(-1, group)
    least, most = grouped.amin(1, keepdim=True), grouped.amax(1, keepdim=True)
    scale = ((most - least) / LEVELS).clamp(min=1e-8)
    return (((grouped - least) / scale).round() * scale + least).view_as(weight_OI).to(weight_OI.dtype)


def matrices(model: LanguageModel) -> list[Tensor]:
    """The weights of all products of a token: linear layers, and the head."""
    weights = {
        id(linear.weight): linear.weight for linear in model.module.modules() if isinstance(linear, torch.nn.Linear)
    }
    return [weight for weight in weights.values() if weight.ndim == 2]


def least_seconds(compute: Callable[[], object], repeats: int) -> float:
    """CPU seconds of one of them."""
    taken = []
    for _ in range(1 + repeats):
        began = time.process_time()
        compute()
        taken.append(time.process_time() - began)
    return min(taken[1:])


def step_seconds(model: LanguageModel, options: argparse.Namespace, samples: int) -> float:
    """A plain decode step: the median of the least half."""
    engine, taken = Engine(model, SamplingSettings(max_running=samples, speculation="off")), []
    for request in requests(model, options, samples, 0):
        engine.add(request)
    while engine.has_work:
        began = time.process_time()
        engine.step()
        if len(engine.state.scheduler.running) == samples:
            taken.append(time.process_time() - began)
    return float(np.median(sorted(taken)[: max(1, len(taken) // 2)])) if taken else 0.0


def products_seconds(weights: Sequence[Tensor], group: int, rows: int, repeats: int) -> float | None:
    """All products of a step in 4 bits; None where this CPU or a shape has none."""
    packed = []
    try:
        for weight in weights:
            num_out, num_in = weight.shape
            levels = torch.randint(0, LEVELS + 1, (num_out, num_in), dtype=torch.int32)
            scales = torch.ones(num_in // group, num_out, 2, dtype=torch.bfloat16)
            laid_out = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 2)
            packed.append((torch.randn(rows, num_in).bfloat16(), laid_out, scales))

        def compute() -> None:
            for x, laid_out, scales in packed:
                torch.ops.aten._weight_int4pack_mm_for_cpu(x, laid_out, group, scales)

        return least_seconds(compute, repeats)
    except RuntimeError as error:
        print(f"no products in 4 bits: {str(error).splitlines()[0]}")
        return None


class Nothing(PoolDrafter):
    """Looks nothing up."""

    def propose(self, asked: Asked, most: int, acceptance_C: np.ndarray, least: float) -> DraftTokens:
        """See Drafter.propose."""
        return DraftTokens.none(len(asked.slots_B), most)


def acceptance(model: LanguageModel, copy: LanguageModel, options: argparse.Namespace) -> list[float]:
    """Of drafts of PLACES tokens, by their place."""
    vocabulary = model.config.get_text_config().vocab_size
    drafter = model_drafter(copy, vocabulary=vocabulary, num_blocks=4096)
    speculator = Speculator(PLACES, Nothing(1 << 16), drafter)
    engine = Engine(model, SamplingSettings(max_running=8), speculates=speculator)
    for request in requests(model, options, 8 * options.prompts, 1):
        engine.add(request)
    list(drain(engine))
    counts = speculator.counts
    return (counts.accepted_at / np.maximum(counts.tried_at, 1))[:PLACES].tolist()


def best_gain(step_s: float, row_s: float, copy_s: float, right: Sequence[float]) -> tuple[float, int]:
    """Of one sample: times as fast as plain with drafts of the best length, and that length."""
    gains = []
    for length in range(1, len(right) + 1):
        tokens = 1 + float(np.cumprod(right[:length]).sum())
        gains.append(tokens * step_s / (step_s + length * (row_s + copy_s)))
    return max(gains), int(np.argmax(gains)) + 1


def main() -> None:
    """Read the options and say what a copy would come to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--groups", type=int, nargs="+", default=[48, 96], help="inputs that share a scale")
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--prompts", type=int, default=4, help="of each task, of 8 samples each")
    parser.add_argument("--tokens", type=int, default=64, help="of a response at most")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.tiny:
        options.tokens, options.prompts, options.groups, options.tasks = 20, 1, [16], ["chat"]

    def read() -> LanguageModel:
        with tempfile.TemporaryDirectory() as folder:
            return tiny_model(Path(folder)) if options.tiny else load_model(options.model, dtype="bfloat16")

    model = read()
    weights, options.task = matrices(model), options.tasks[0]
    steps = [step_seconds(model, options, samples) for samples in SAMPLES]
    row_s = (steps[1] - steps[0]) / (SAMPLES[1] - SAMPLES[0])
    num_weights = sum(weight.numel() for weight in weights)
    print(f"{num_weights / 1e6:.1f} million weights in products: {2 * num_weights / 1e6:.1f} MB a step in bfloat16")
    print(f"a step of 1 sample {1e3 * steps[0]:.2f} ms, each further row {1e3 * row_s:.2f} ms\n")
    seconds = products_seconds(weights, TIMED, 1, options.repeats)
    if seconds is not None:
        print(f"products in 4 bits of one row {1e3 * seconds:.2f} ms, with groups of {TIMED}\n")
    print("| group | MB a step | task | right, by place | times as fast, at most |")
    print("| --- | --- | --- | --- | --- |")
    for group in options.groups:
        copy = read()
        with torch.no_grad():
            for weight in matrices(copy):
                weight.copy_(rounded(weight, group))
        size = num_weights * (0.5 + 4 / group) / 1e6
        for task in options.tasks:
            options.task = task
            right = acceptance(model, copy, options)
            # At most: attention, norms and the rest of the copy's step are taken to cost nothing.
            gain = (
                "" if seconds is None else "{:.2f} with {} tokens".format(*best_gain(steps[0], row_s, seconds, right))
            )
            shares = ", ".join(f"{share:.0%}" for share in right)
            print(f"| {group} | {size:.1f} | {task} | {shares} | {gain} |", flush=True)


if __name__ == "__main__":
    main()
