"""Prompts that begin alike: those of a recipe, against prompts of the same lengths that each begin with another token.

    python benchmarks/common_prompts.py [--recipe recipes/demo.yaml] [--dtype bfloat16] [--threads 1] [--repeats 5]
                                        [--tiny]

Both are computed by one engine, in turns: the prompts of a step alone, in one step of the engine; and the rollout of a
step as the recipe has it but for its ends: every response is as long as it may be. Printed are the tokens of prompts
that were computed, medians of seconds without those of packing weights, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from random_llama import word_tokenizer, write_llama
from sides import positive

from plait.data.prompts import prompt_set
from plait.data.records import Prompt
from plait.data.several_sources import open_sources
from plait.generation.engine import Engine
from plait.generation.request import Request
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.models.language_loading import load_model
from plait.models.language_model import LanguageModel
from plait.recipes.evaluation_sets import evaluation_sets
from plait.recipes.recipe import Recipe
from plait.recipes.recipe_file import load_recipe

FIRST = 100
"""The first of the tokens with which prompts begin that have nothing in common."""
DEMO = Path(__file__).parent.parent / "recipes/demo.yaml"


class Case(NamedTuple):
    """Prompts with so many samples each; `alone`: nothing but the prompts is computed."""

    name: str
    prompts: Sequence[Prompt]
    samples: int
    settings: SamplingSettings
    alone: bool = False


class Taken(NamedTuple):
    tokens: int
    """Of prompts, that were computed."""
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        recipe, model = recipe_and_model(options, Path(folder))
        print(f"{recipe.model}, {options.dtype}, {options.threads} thread(s), medians of {options.repeats}")
        for case in _cases(recipe, model):
            alike, apart = _compared(model, case, options.repeats)
            tokens = sum(len(prompt.token_ids) for prompt in case.prompts)
            print(
                f"{case.name}: {len(case.prompts)} prompts of {tokens} tokens; computed {alike.tokens} in "
                f"{alike.seconds:.3f} s where they begin alike, {apart.tokens} in {apart.seconds:.3f} s where not: "
                f"{apart.seconds / alike.seconds:.2f} times as long"
            )
    return 0


def recipe_of(options: argparse.Namespace, folder: Path) -> Recipe:
    """What the options of a benchmark name; with `tiny` it lies in the folder."""
    return _tiny(folder) if options.tiny else load_recipe(options.recipe)


def recipe_and_model(options: argparse.Namespace, folder: Path) -> tuple[Recipe, LanguageModel]:
    """The same with its model, on as many threads as the options say."""
    torch.set_num_threads(options.threads)
    recipe = recipe_of(options, folder)
    return recipe, load_model(recipe.model, dtype=options.dtype)


def first_prompts(recipe: Recipe, model: LanguageModel, count: int, room: int) -> list[Prompt]:
    """Prompts of the recipe that leave room for so many tokens."""
    held_out = max((one.items or 0 for one in evaluation_sets(recipe) if one.source is None), default=0)
    (settings,), (splits,) = recipe.data.sources, open_sources(recipe.data, held_out)
    rows = prompt_set(splits.train, model.tokenizer, settings, model.max_positions - room)
    return [rows.prompt(number, number) for number in range(count)]


def _cases(recipe: Recipe, model: LanguageModel) -> list[Case]:
    step = first_prompts(recipe, model, recipe.prompts_per_step, recipe.sampling.max_response_tokens)
    drawn = recipe.sampling.model_copy(update={"speculation": "off"})
    at_once = drawn.model_copy(update={"max_running": len(step), "max_prefill_tokens": 1 << 20})
    return [
        Case("prompts of a step", step, 1, at_once, alone=True),
        Case("rollout of a step", step, recipe.samples_per_prompt, drawn),
    ]


def _compared(model: LanguageModel, case: Case, repeats: int) -> tuple[Taken, Taken]:
    """What prompts take that begin alike, and those that do not."""
    engine = Engine(model, case.settings)
    unlike = [
        replace(prompt, token_ids=(FIRST + number, *prompt.token_ids[1:])) for number, prompt in enumerate(case.prompts)
    ]
    taken: dict[bool, list[Taken]] = {True: [], False: []}
    for number in range(1 + repeats):
        for alike, prompts in ((True, case.prompts), (False, unlike)):
            once = _once(engine, case._replace(prompts=prompts))
            if number:  # the first one warms up
                taken[alike].append(once)
    alike, apart = (Taken(some[0].tokens, median(one.seconds for one in some)) for some in taken.values())
    return alike, apart


def _once(engine: Engine, case: Case) -> Taken:
    sampling = case.settings.sampling(stop_token_ids=(), stop=())
    for prompt in case.prompts:
        engine.add(Request(prompt, case.samples, sampling, NoiseKey(0)))
    tokens, packing_s, started = 0, 0.0, time.perf_counter()
    while engine.has_work:
        engine.step()
        assert engine.last_step is not None
        tokens += engine.last_step.num_prefill_tokens
        packing_s += engine.last_step.packing_s
        if case.alone:
            break
    seconds = time.perf_counter() - started - packing_s
    for prompt in case.prompts:
        engine.abort(prompt.uid)
    return Taken(tokens, seconds)


def _tiny(folder: Path) -> Recipe:
    """Twelve prompts of 44 words that begin with the same 40, for a random model of 32 dims."""
    write_llama(folder / "model", word_tokenizer(512), hidden=32, intermediate=64, positions=256)
    common = " ".join(f"w{2 + number}" for number in range(40))
    rows = [{"prompt": f"{common} w{100 + number} w7 w8 w9"} for number in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    keys: dict[str, Any] = {
        "model": str(folder / "model"),
        "data.source": str(folder / "prompts.jsonl"),
        "prompts_per_step": 4,
        "samples_per_prompt": 2,
        "sampling.max_response_tokens": 16,
    }
    return load_recipe(None, list(keys.items()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=DEMO)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--tiny", action="store_true", help="a random model of 32 dims: shows that it runs")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
