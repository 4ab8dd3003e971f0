"""Flows of files, models and data for recipes that nobody thought of (`random_recipes`): judges, second attempts, and
losses of two rollouts in one step, beside the examples that do more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.models.tiny import save_tiny

EXAMPLES = Path(__file__).parents[2] / "examples"
FLOWS = """
import math

import numpy as np
from pydantic import BaseModel

from plait.dataflow import grades_from, per_group, per_sample, prompts_from


class Judging(BaseModel):
    own: bool = False
    verdicts: int = 1
    mini_batches: int = 1


def judged(prompts, actor, judge, ref, options: Judging):
    samples = actor.generate(prompts)
    verdicts = (actor if options.own else judge).generate(
        prompts_from(samples, asks),
        samples_per_prompt=options.verdicts,
        greedy=options.verdicts == 1,
        max_tokens=4,
    )
    grades = grades_from(samples, sums, name="grade", verdicts=verdicts)
    actor.train(
        samples,
        loss=loss,
        mini_batches=options.mini_batches,
        keep=per_sample(is_read, grades, name="keep"),
        advantages=per_group(centred, grades, name="advantages"),
        ref_logprobs=ref.logprobs(samples),
    )


class Attempts(BaseModel):
    with_next: bool = False


def attempted(prompts, actor, ref, reward, options: Attempts):
    samples = actor.generate(prompts)
    critiques = ref.generate(prompts_from(samples, asks), samples_per_prompt=1)
    attempts = actor.generate(prompts_from(critiques, asks), samples_per_prompt=2)
    first, second = reward.score(samples), reward.score(attempts)
    gained = per_group(gain, second, first, name="gained")
    before = per_group(centred, first, name="before")
    actor.train(samples, loss=of_scores, advantages=before, with_next=options.with_next)
    actor.train(attempts, loss=of_scores, advantages=gained)


def asks(prompts, completions):
    return [f"{said(prompt)[-12:]} {said(completion)[:10]}?" for prompt, completion in zip(prompts, completions)]


def said(words):
    return words if isinstance(words, str) else words[-1]["content"]


def sums(completions, verdicts):
    sums = [sum(sum(map(ord, text)) % 13 for text in texts) for texts in verdicts]
    return [None if len(texts[0]) % 7 == 3 else float(total) for texts, total in zip(verdicts, sums)]


def gain(second, first):
    return second - first.mean() if len(first) else np.zeros(len(second))


def centred(grades):
    return np.nan_to_num(grades - np.nanmean(grades)) if np.isfinite(grades).any() else np.zeros(len(grades))


def is_read(grade):
    return float(math.isfinite(grade))


def of_scores(batch, advantages):
    return batch.aggregate(-advantages * batch.logprobs, "token-mean")


def loss(batch, advantages, ref_logprobs):
    values = -advantages * batch.logprobs + 0.1 * (batch.logprobs - ref_logprobs) ** 2
    return batch.aggregate(values, "token-mean")
"""
"""A file `newer.py`."""

JUDGED, ATTEMPTED = "PLACE/newer.py:judged", "PLACE/newer.py:attempted"
DEMONSTRATED = f"{EXAMPLES}/demonstrated.py:demonstrated"
TOLD, SHOWN = (f"{EXAMPLES}/self_distillation.py:{name}" for name in ("sdpo", "sdft"))
TRACKED = f"{EXAMPLES}/newer_advantages.py:newer"
OF_FILES = (JUDGED, ATTEMPTED, DEMONSTRATED, TOLD, SHOWN, TRACKED)

CALLS: dict[str, tuple[str, ...]] = {
    JUDGED: ("ref.logprobs",),
    ATTEMPTED: ("ref.generate",),
    DEMONSTRATED: (),
    TOLD: (),
    SHOWN: (),
    TRACKED: (),
}
"""Flow → its calls beside those that draw samples and train on them, whatever its options."""

EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss", "qwen3_next", "deepseek_v3", "nemotron_h", "lfm2_moe")
BALANCED = ("qwen3_moe", "mixtral", "gpt_oss", "qwen3_next")
"""Transformers has a loss for them."""
KEEP_STATE = ("qwen3_5_text", "qwen3_next", "olmo_hybrid", "bamba", "falcon_h1", "granitemoehybrid")
KEEP_STATE += ("nemotron_h", "lfm2_moe")
FAMILIES = (*dict.fromkeys((*EXPERTS, *KEEP_STATE, "gemma2", "qwen3")),)


def fill_more(place: Path) -> None:
    """What the recipes name beyond `placed_runs.fill`; models are made as they are drawn."""
    (place / "newer.py").write_text(FLOWS)
    rows = [
        {"prompt": f"what is {i} plus 4?", "completion": f"{i + 4}", "answer": f"{i + 4}", "index": i}
        for i in range(12)
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_family(place: Path, keys: dict[str, Any]) -> None:
    """The model of a recipe, where that is one of `FAMILIES`."""
    name = str(keys.get("model", "")).removeprefix("PLACE/")
    if name in FAMILIES and not (place / name).exists():
        save_tiny(place / name, family=name, weight_scale=0.05 if name in KEEP_STATE else 0.2)
