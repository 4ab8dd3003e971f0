"""What several instances draft from: what each has drawn itself, or what all have (`workers.drawn_texts`).

Prompts are asked once an epoch, in another order each time, a few in each rollout, and dealt as a run deals them.
Drafts have a fixed length, so nothing depends on the clock: steps, accepted tokens and bytes are counts, and other work
on the machine does not matter. Of both ways, the samples are compared: they are the same.

    python benchmarks/drafts_elsewhere.py                       # SmolLM2-135M-Instruct, 1, 2 and 4 instances, minutes
    python benchmarks/drafts_elsewhere.py --temperature 1 --instances 8
    python benchmarks/drafts_elsewhere.py --tiny --repeats 1    # does the benchmark itself work?
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from plait.data.records import Prompt, Sample
from plait.generation.engine import Engine, drain
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.models.language_loading import load_model
from plait.models.language_model import LanguageModel
from plait.speculation.counts import Counts
from plait.speculation.pool import most_entries
from plait.workers.dealing import Dealer
from plait.workers.drawn_texts import DrawnTexts, Untold
from plait.workers.upkeep import Recall
from speculation import TASKS, prompt_ids_of, tiny_model

WAYS = ("their own", "of all")


@dataclass
class Counted:
    """Of one epoch."""

    tokens: int = 0
    steps: float = 0.0
    """Of all instances."""
    accepted: float = 0.0
    sent_bytes: int = 0
    told_s: float = 0.0
    """CPU seconds of packing, unpacking and recording what was told."""


def prompts_of(model: LanguageModel, options: argparse.Namespace) -> list[Prompt]:
    texts = [text for task in options.tasks for text in TASKS[task]][: options.prompts]
    return [Prompt(uid, text, prompt_ids_of(model, text)) for uid, text in enumerate(texts)]


def run(model: LanguageModel, options: argparse.Namespace, num: int, *, tells: bool) -> tuple[list[Counted], list]:
    """All epochs with so many instances; what was counted of each, and all samples."""
    settings = SamplingSettings(speculation=options.length, max_running=options.samples * options.batch)
    engines = [Engine(model, settings) for _ in range(num)]
    untold, dealer = Untold(num, most_entries(settings.draft_pool_bytes)), Dealer(num)
    sampling = Sampling(temperature=options.temperature, max_tokens=options.tokens)
    asked, found, said, rollout = prompts_of(model, options), [], [], 0
    for epoch in range(options.epochs):
        counted = Counted()
        before = sum((engine.speculates.counts or Counts() for engine in engines), Counts())
        order = random.Random(epoch).sample(asked, len(asked))
        for start in range(0, len(order), options.batch):
            noise, rollout = NoiseKey(0, rollout), rollout + 1
            batch = order[start : start + options.batch]
            for place, share in dealer.deal([Request(one, options.samples, sampling, noise) for one in batch]):
                for request in share:
                    engines[place].add(request)
                for sample in drain(engines[place]):
                    said.append((rollout, sample.uid, sample.token_ids))
                    counted.tokens += sample.num_tokens
                    untold.drew(sample, place)
            dealer.rest()
            for place, samples in untold.take() if tells else ():
                tell(engines[place], samples, counted)
            untold.clear()
            for engine in engines:
                engine.speculates.new_policy()
        after = sum((engine.speculates.counts or Counts() for engine in engines), Counts())
        counted.steps, counted.accepted = after.steps - before.steps, after.accepted - before.accepted
        found.append(counted)
    return found, sorted(said)


def tell(engine: Engine, samples: Sequence[Sample], counted: Counted) -> None:
    """By a message, as to another process."""
    began = time.process_time()
    message = Recall("actor", DrawnTexts.told_of(samples)).to_message()
    counted.sent_bytes += len(message.to_bytes())
    for prompt_ids, token_ids, logprobs in Recall.of(message).texts:
        engine.speculates.recall(prompt_ids, token_ids, logprobs)
    counted.told_s += time.process_time() - began


def main() -> None:
    """Read the options, draw, and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=["code", "copy"])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4, help="prompts of a rollout")
    parser.add_argument("--samples", type=int, default=4, help="of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of a response at most")
    parser.add_argument("--temperature", type=float, default=0.3)
    parser.add_argument("--length", type=int, default=4, help="draft tokens")
    parser.add_argument("--instances", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=2, help="epochs after the first")
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.tiny:
        options.prompts, options.batch, options.samples, options.tokens, options.instances = 4, 2, 2, 12, [2]
    options.epochs = 1 + options.repeats
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder)) if options.tiny else load_model(options.model, dtype="bfloat16")
    print("| instances | texts | epoch | tokens | steps | accepted | bytes told | per token told | CPU µs a token |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for num in options.instances:
        samples = []
        for way in WAYS if num > 1 else WAYS[:1]:
            found, said = run(model, options, num, tells=way == WAYS[1])
            samples.append(said)
            for epoch, of in enumerate(found):
                told = max(1, of.tokens * (num - 1))
                print(
                    f"| {num} | {way} | {epoch} | {of.tokens} | {of.steps:.0f} | {of.accepted:.0f} | {of.sent_bytes} | "
                    f"{of.sent_bytes / told:.1f} | {1e6 * of.told_s / told:.1f} |",
                    flush=True,
                )
        assert all(said == samples[0] for said in samples), "what is known changes a sample"


if __name__ == "__main__":
    main()
