"""The work of the benchmark: prompts as token ids and the length of every response, the same for all engines.

Imports the standard library alone, for it is read in the peers' environments as well.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist

LENGTH_SIGMA = 0.8
"""Of the logarithm of the response lengths: a long tail, as measured on real chats."""
FIRST_ORDINARY_TOKEN = 100
"""Token ids below are special in SmolLM2."""


@dataclass(frozen=True)
class Shape:
    """A case before its tokens are drawn."""

    prompts: int
    samples_per_prompt: int

    @property
    def name(self) -> str:
        return f"{self.prompts}x{self.samples_per_prompt}" if self.samples_per_prompt > 1 else str(self.prompts)


SHAPES = {shape.name: shape for shape in (Shape(8, 1), Shape(32, 1), Shape(8, 8))}


@dataclass(frozen=True)
class Case:
    """One batch."""

    name: str
    """Of its shape: `8`, `32`, `8x8`."""
    cap: int
    """Longest response that could have been drawn."""
    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[tuple[int, ...], ...]
    """Of each prompt's samples."""

    @property
    def key(self) -> str:
        return f"{self.name}@{self.cap}"

    @property
    def samples(self) -> list[tuple[tuple[int, ...], int]]:
        """(prompt, length of the response) of every sample, prompt by prompt."""
        return [(prompt, n) for prompt, wanted in zip(self.prompts, self.lengths, strict=True) for n in wanted]

    @property
    def flat_lengths(self) -> list[int]:
        return [length for _, length in self.samples]

    @property
    def longest(self) -> int:
        return max(self.flat_lengths)


@dataclass(frozen=True)
class Workload:
    """What the sides of one dtype and one number of threads work on."""

    title: str
    model: str
    """Checkpoint folder."""
    gguf: str
    """The same weights for llama.cpp; empty where it takes no part."""
    dtype: str
    threads: int
    cases: dict[str, Case]

    @property
    def max_samples(self) -> int:
        return max(len(case.samples) for case in self.cases.values())

    @property
    def max_tokens(self) -> int:
        """Of the longest prompt with its response."""
        return max(len(prompt) + length for case in self.cases.values() for prompt, length in case.samples)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Workload:
        raw = json.loads(path.read_text(encoding="utf-8"))
        cases = {}
        for key, case in raw["cases"].items():
            nested = {name: tuple(map(tuple, case[name])) for name in ("prompts", "lengths")}
            cases[key] = Case(**{**case, **nested})
        return cls(**{**raw, "cases": cases})


def draw_case(shape: Shape, cap: int, *, prompt_tokens: int, vocabulary: int) -> Case:
    """Random prompts, and lengths of a log-normal distribution of median cap / 4, cut at `cap`; the same in every run.

    The lengths are the distribution's quantiles in random order, so that a small batch has its tail as a large one has.
    """
    draw = random.Random(f"{shape.name}@{cap}")
    first = min(FIRST_ORDINARY_TOKEN, vocabulary // 2)
    prompts = tuple(
        tuple(draw.randrange(first, vocabulary) for _ in range(prompt_tokens)) for _ in range(shape.prompts)
    )
    count = shape.prompts * shape.samples_per_prompt
    normal = NormalDist(math.log(cap / 4), LENGTH_SIGMA)
    pool = [max(1, min(cap, round(math.exp(normal.inv_cdf((i + 0.5) / count))))) for i in range(count)]
    draw.shuffle(pool)
    per_prompt = shape.samples_per_prompt
    return Case(shape.name, cap, prompts, tuple(tuple(pool[i : i + per_prompt]) for i in range(0, count, per_prompt)))
