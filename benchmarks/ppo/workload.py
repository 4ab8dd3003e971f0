"""The work of the benchmark: models, prompts and settings that both sides get, in a folder. Runs without plait."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from random_llama import word_tokenizer, write_llama

KL_COEF = 0.05
CLIP_RANGE = 0.2
VALUE_CLIP_RANGE = 0.2
VALUE_COEF = 0.1
GAMMA, LAMBDA = 1.0, 0.95
LEARNING_RATE = 1e-6
TEMPERATURE = 1.0
EPOCHS, MINI_BATCHES = 1, 1
DTYPES = ("float32", "bfloat16")
PEER_PRECISIONS = ("float32", "autocast", "bfloat16")
"""TRL: all in float32; training under bfloat16 autocast, the rest float32; all in bfloat16, without masters."""


@dataclass(frozen=True)
class Size:
    """What makes the full and the tiny work differ."""

    title: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    prompt_tokens: int
    response_tokens: int


FULL = Size("Llama of 4 layers, hidden 256, vocabulary 4096", 256, 688, 4, 4, 2, 4096, 128, 128)
TINY = Size("Llama of 2 layers, hidden 64, vocabulary 512", 64, 128, 2, 4, 2, 512, 16, 12)


@dataclass(frozen=True)
class Workload:
    """What one step works on. Every response has `response_tokens` tokens: the sampling knows no end of sequence."""

    title: str
    policy: str
    """Folder of the causal LM that the policy and the reference start from."""
    value: str
    """Folder of a sequence classifier of one label: the value model."""
    reward: str
    """The same: the reward model."""
    prompts: tuple[str, ...]
    prompt_token_ids: tuple[tuple[int, ...], ...]
    response_tokens: int
    dtype: str
    """plait computes in it: float32, or bfloat16 with float32 masters and moments."""
    peer_precision: str
    """One of PEER_PRECISIONS."""
    threads: int
    device: str
    """cpu or cuda."""
    num_steps: int
    """The warm-up step included."""

    @property
    def prompt_digest(self) -> str:
        return digest(self.prompt_token_ids)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Workload:
        raw = json.loads(path.read_text(encoding="utf-8"))
        raw["prompts"] = tuple(raw["prompts"])
        raw["prompt_token_ids"] = tuple(map(tuple, raw["prompt_token_ids"]))
        return cls(**raw)


def digest(prompts: Iterable[Sequence[int]]) -> str:
    """Of a batch of prompts as token ids, whatever its order: the sides shuffle."""
    return hashlib.sha256(json.dumps(sorted(map(list, prompts))).encode()).hexdigest()[:16]


def create(folder: Path, size: Size, *, num_prompts: int, **settings: Any) -> Workload:
    """Write the three checkpoints, random but for their seeds, in float32, and draw the prompts.

    Args:
        settings: the fields of Workload from `dtype` on.
    """
    tokenizer = word_tokenizer(size.vocabulary)
    folders = {name: folder / name for name in ("policy", "value", "reward")}
    for seed, (name, path) in enumerate(folders.items()):
        write_llama(
            path,
            tokenizer,
            hidden=size.hidden,
            intermediate=size.intermediate,
            layers=size.layers,
            heads=size.heads,
            kv_heads=size.kv_heads,
            positions=512,
            scalar=name != "policy",
            seed=seed,
        )
    draw = random.Random(1)
    token_ids = tuple(
        tuple(draw.randrange(2, size.vocabulary) for _ in range(size.prompt_tokens)) for _ in range(num_prompts)
    )
    texts = tuple(" ".join(f"w{token}" for token in ids) for ids in token_ids)
    assert tuple(tokenizer(texts[0])["input_ids"]) == token_ids[0], "a word of a prompt is not one token"
    paths: dict[str, Any] = {name: str(path) for name, path in folders.items()}
    return Workload(
        size.title,
        prompts=texts,
        prompt_token_ids=token_ids,
        response_tokens=size.response_tokens,
        **settings,
        **paths,
    )
