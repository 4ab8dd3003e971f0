"""Turns that wait for those of their own prompt, against turns that wait for those of the whole step.

    python benchmarks/turn_rounds.py [--prompts 8] [--samples 4] [--turns 4] [--tokens 256] [--seconds 0.5]
                                     [--sigma 1.0] [--workers 32] [--steps 2] [--repeats 3] [--tiny]

Both sides are runs of the recipe: a function replies to each turn but the last, after seconds that are log-normal and
depend on the sample and the turn alone. Printed are medians of the seconds of a step, waiting for replies included,
their ratio, and whether both sides drew the same tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common_prompts import DEMO, recipe_of
from sides import positive

from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import run

SIDES = ("step", "prompt")
TOOL = """
import random
import time

def reply(messages, **columns):
    time.sleep(min(random.lognormvariate({mu}, {sigma}), 20.0))
    return {{"role": "user", "content": "Go on, and count from where you are."}}

def words(completions, **columns):
    return [float(len(set(str(said).split()))) for said in completions]
"""


class Drawn(NamedTuple):
    seconds: list[float]
    """In each step but the first."""
    tokens: list[Any]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    tokens: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = recipe_of(options, folder)
        (folder / "tool.py").write_text(TOOL.format(mu=math.log(options.seconds), sigma=options.sigma))
        for number in range(options.repeats):
            for side in SIDES:
                drawn = _drawn(recipe, folder, f"{side}{number}", side, options)
                seconds[side] += drawn.seconds
                tokens[side] = drawn.tokens
    step, prompt = (median(seconds[side]) for side in SIDES)
    same = "the same tokens" if tokens["step"] == tokens["prompt"] else "other tokens"
    print(
        f"{options.prompts} prompts x {options.samples} samples of {options.turns} turns, replies after "
        f"{options.seconds:g} s in the median (sigma {options.sigma:g}), medians of {len(seconds['step'])} steps"
    )
    print(f"turns wait for the step {step:.2f} s, for their prompt {prompt:.2f} s: {step / prompt:.2f}x, {same}")
    return 0


def _drawn(recipe: Recipe, folder: Path, name: str, side: str, options: argparse.Namespace) -> Drawn:
    keys = {
        "run_dir": folder / name,
        "steps": 1 + options.steps,
        "prompts_per_step": options.prompts,
        "samples_per_prompt": options.samples,
        "turns": {"reply": f"{folder}/tool.py:reply", "max_turns": options.turns, "workers": options.workers},
        "reward": {"functions": [f"{folder}/tool.py:words"]},
        "evaluation": {"items": 0},
        "checkpoint": {"every": 0},
        "dtype": options.dtype,
        "threads": options.threads,
        "algorithm": "grpo" if options.samples > 1 else "reinforce_pp",
        "options": {},
    }
    keys["turns"]["wait_for"] = side  # type: ignore[index]
    sampling = recipe.sampling.model_dump(exclude_unset=True) | {"max_response_tokens": options.tokens}
    if options.tiny:
        sampling["stop_token_ids"] = (*range(3, 500, 12),)  # a random model hardly ends a turn by itself
    tried = Recipe.model_validate(recipe.model_dump(exclude_unset=True) | keys | {"sampling": sampling})
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        run(tried)
    rows = read_rows(tried.run_dir / "metrics.jsonl")[1:]
    samples = [read_rows(path) for path in sorted((tried.run_dir / "samples").glob("step-*"))]
    drawn = [(sample["uid"], sample["token_ids"]) for step in samples for sample in step]
    return Drawn([row["timing_s/step"] for row in rows], drawn)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=positive, default=8)
    parser.add_argument("--samples", type=positive, default=4, help="of each prompt")
    parser.add_argument("--turns", type=positive, default=4)
    parser.add_argument("--tokens", type=positive, default=256, help="of a response, replies included, at most")
    parser.add_argument("--seconds", type=float, default=0.5, help="that a reply takes, in the median")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of these seconds")
    parser.add_argument("--workers", type=positive, default=32, help="replies that are made at once")
    parser.add_argument("--steps", type=positive, default=2)
    parser.add_argument("--recipe", type=Path, default=DEMO)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--tiny", action="store_true", help="a random model of 32 dims: shows that it runs")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
