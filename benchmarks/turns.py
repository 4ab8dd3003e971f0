"""Turns that find the keys and values of the turns before them, against turns that compute them again.

    python benchmarks/turns.py [--turns 8] [--tokens 32] [--reply-tokens 32] [--recipe recipes/demo.yaml]
                               [--prompts 4] [--samples 4] [--dtype bfloat16] [--threads 1] [--repeats 5] [--tiny]

One engine draws samples of prompts of the recipe, in rounds: all draw a turn of so many tokens, all get a reply, and
all go on. It is told that samples go on (`Request.in_turns`, what a run with `turns.reply` does), or not. Printed are
the tokens of prompts and turns that were computed anew, medians of seconds, those of packing weights included, and
their ratio.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from common_prompts import DEMO, first_prompts, recipe_and_model
from sides import positive

from plait.data.records import Prompt, Reply, Sample
from plait.generation.engine import Engine
from plait.generation.request import GoingOn, Request
from plait.generation.sampling import Sampling
from plait.kernels.noise import NoiseKey
from plait.models.language_model import LanguageModel
from plait.recipes.recipe import Recipe


class Talk(NamedTuple):
    """What is drawn: so many samples of each prompt, in turns and replies of so many tokens."""

    prompts: Sequence[Prompt]
    samples: int
    turns: int
    tokens: int
    reply_tokens: int


class Taken(NamedTuple):
    tokens: int
    """Of prompts and earlier turns, that were computed."""
    seconds: float
    samples: Sequence[Sample] = ()
    """As they are behind their last turns."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        recipe, model = recipe_and_model(options, Path(folder))
        talk = _talk(recipe, model, options)
        engine = Engine(model, recipe.sampling)
        taken: dict[bool, list[Taken]] = {True: [], False: []}
        for number in range(1 + options.repeats):
            for in_turns in taken:
                taken_now = once(engine, talk, in_turns=in_turns)
                if number:  # the first one warms up
                    taken[in_turns].append(taken_now)
    kept, again = (Taken(some[0].tokens, median(one.seconds for one in some)) for some in taken.values())
    print(f"{recipe.model}, {options.dtype}, {options.threads} thread(s), medians of {options.repeats}")
    print(
        f"{len(talk.prompts) * talk.samples} samples of {talk.turns} turns: computed {kept.tokens} tokens in "
        f"{kept.seconds:.3f} s where turns are found, {again.tokens} in {again.seconds:.3f} s where they are computed "
        f"again: {again.seconds / kept.seconds:.2f} times as long"
    )
    return 0


def _talk(recipe: Recipe, model: LanguageModel, options: argparse.Namespace) -> Talk:
    room = options.turns * (options.tokens + options.reply_tokens)
    prompts = first_prompts(recipe, model, options.prompts, room)
    return Talk(prompts, options.samples, options.turns, options.tokens, options.reply_tokens)


def once(engine: Engine, talk: Talk, *, in_turns: bool) -> Taken:
    """All turns of all samples.

    Args:
        in_turns: whether the engine is told that samples go on.
    """
    began, tokens = time.perf_counter(), 0
    samples: dict[int, list[Sample]] = {prompt.uid: [] for prompt in talk.prompts}
    for turn in range(talk.turns):
        stop = turn * (talk.tokens + talk.reply_tokens) + talk.tokens
        sampling = Sampling(max_tokens=stop, stop_token_ids=())
        for prompt in talk.prompts:
            begun = tuple(_replied(sample, talk.reply_tokens) for sample in samples[prompt.uid])
            engine.add(Request(prompt, talk.samples, sampling, NoiseKey(0), None, GoingOn(begun), in_turns))
        samples = {prompt.uid: [] for prompt in talk.prompts}
        while engine.has_work:
            for sample in engine.step():
                samples[sample.prompt.uid].append(sample)
            assert engine.last_step is not None
            tokens += engine.last_step.num_prefill_tokens
    engine.state.scheduler.turns.end()
    engine.rest()
    said = [sample for some in samples.values() for sample in some]
    return Taken(tokens, time.perf_counter() - began, said)


def _replied(sample: Sample, num_tokens: int) -> Sample:
    """A sample behind a reply that depends on what it has said."""
    vocabulary = 2 + max(sample.prompt.token_ids)
    ids = tuple((sample.token_ids[-1] + 7 * place) % vocabulary for place in range(num_tokens))
    return replace(sample, replies=(*sample.replies, Reply(len(sample.token_ids), ids)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=positive, default=8)
    parser.add_argument("--tokens", type=positive, default=32, help="of a turn")
    parser.add_argument("--reply-tokens", type=positive, default=32, help="of a reply")
    parser.add_argument("--prompts", type=positive, default=4)
    parser.add_argument("--samples", type=positive, default=4, help="of each prompt")
    parser.add_argument("--recipe", type=Path, default=DEMO)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--tiny", action="store_true", help="a random model of 32 dims: shows that it runs")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
