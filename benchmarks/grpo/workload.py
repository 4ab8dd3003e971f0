"""The work of the benchmark: one list of prompts and response lengths that every side gets, as a JSON file."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, dataclass
from pathlib import Path

from random_llama import word_tokenizer, write_llama

KL_COEF = 0.04
LEARNING_RATE = 1e-6
MAX_GRAD_NORM = 1.0
LENGTH_SIGMA = 0.8
"""Of the logarithm of the response lengths; a long tail, as measured on real chats."""


@dataclass(frozen=True)
class Workload:
    """What one step works on, and the settings that both sides share."""

    title: str
    model: str
    """Checkpoint folder."""
    dtype: str
    threads: int
    device: str
    """cpu or cuda."""
    num_steps: int
    """The warm-up step included."""
    max_response_tokens: int
    prompts: tuple[str, ...]
    prompt_token_ids: tuple[tuple[int, ...], ...]
    response_lengths: tuple[tuple[int, ...], ...]
    """Of each prompt's samples."""

    @property
    def samples_per_prompt(self) -> int:
        return len(self.response_lengths[0])

    @property
    def wanted_prompt_lengths(self) -> list[int]:
        """Of each sample, a group's prompt counted for each of its samples."""
        return [len(ids) for ids in self.prompt_token_ids for _ in range(self.samples_per_prompt)]

    @property
    def wanted_response_lengths(self) -> list[int]:
        return [length for lengths in self.response_lengths for length in lengths]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Workload:
        raw = json.loads(path.read_text(encoding="utf-8"))
        nested = ("prompt_token_ids", "response_lengths")
        raw |= {"prompts": tuple(raw["prompts"])} | {name: tuple(map(tuple, raw[name])) for name in nested}
        return cls(**raw)


def full(
    model: str = "smollm2-135m-instruct",
    *,
    num_prompts: int,
    samples_per_prompt: int,
    threads: int,
    num_steps: int,
    device: str = "cpu",
) -> Workload:
    """A model in bfloat16, 128-token prompts, response lengths of median 32, cut at 128."""
    from plait.models.files import hub

    folder = hub.resolve(model)
    lengths = drawn_lengths(num_prompts, samples_per_prompt, median=32, cap=128)
    texts, token_ids = _prompts(folder, num_prompts, 128)
    title = "SmolLM2-135M-Instruct, bfloat16" if model == "smollm2-135m-instruct" else f"{folder.name}, bfloat16"
    return Workload(title, str(folder), "bfloat16", threads, device, num_steps, 128, texts, token_ids, lengths)


def tiny(
    folder: Path, *, num_prompts: int, samples_per_prompt: int, threads: int, num_steps: int, device: str = "cpu"
) -> Workload:
    """A random Llama of two layers written to `folder`, 16-token prompts, lengths of median 6, cut at 12."""
    write_llama(folder, word_tokenizer(512), hidden=64, intermediate=128, positions=128)
    lengths = drawn_lengths(num_prompts, samples_per_prompt, median=6, cap=12)
    texts, token_ids = _prompts(folder, num_prompts, 16)
    title = "tiny random Llama, float32"
    return Workload(title, str(folder), "float32", threads, device, num_steps, 12, texts, token_ids, lengths)


def reward_of(token_ids: list[int]) -> float:
    """The reward of both sides, next to no work: the share of distinct tokens in the response."""
    return len(set(token_ids)) / len(token_ids)


def drawn_lengths(num_prompts: int, samples_per_prompt: int, median: int, cap: int) -> tuple[tuple[int, ...], ...]:
    draw = random.Random(0)

    def length() -> int:
        return max(1, min(cap, round(draw.lognormvariate(math.log(median), LENGTH_SIGMA))))

    return tuple(tuple(length() for _ in range(samples_per_prompt)) for _ in range(num_prompts))


def _prompts(folder: Path, count: int, num_tokens: int) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Texts of random words that are one token each, so that a text has exactly `num_tokens` tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    draw = random.Random(1)
    texts, token_ids = [], []
    for _ in range(count):
        words: list[str] = []
        while len(words) < num_tokens:
            word = tokenizer.decode([draw.randrange(len(tokenizer))]).strip()
            if word.isascii() and word.isalnum() and all(len(tokenizer.encode(t)) == 1 for t in (word, f" {word}")):
                words.append(word)
        texts.append(" ".join(words))
        token_ids.append(tuple(tokenizer.encode(texts[-1])))
        assert len(token_ids[-1]) == num_tokens, f"expected {num_tokens} tokens, found {len(token_ids[-1])}"
    return tuple(texts), tuple(token_ids)
