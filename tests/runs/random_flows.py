"""Flows of files, models and data for recipes that nobody thought of (`random_recipes`): judges, second attempts, and
losses of two rollouts in one step, beside the examples that do more."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.models.tiny import save_tiny, tiny_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
FLOWS = """
import math

import numpy as np
from pydantic import BaseModel

from plait.dataflow import parse_grades, per_group, per_sample, build_prompts


class Judging(BaseModel):
    own: bool = False
    verdicts: int = 1
    mini_batches: int = 1


def judged(prompts, actor, judge, ref, options: Judging):
    samples = actor.generate(prompts)
    verdicts = (actor if options.own else judge).generate(
        build_prompts(samples, asks),
        samples_per_prompt=options.verdicts,
        greedy=options.verdicts == 1,
        max_tokens=4,
    )
    grades = parse_grades(samples, sums, name="grade", verdicts=verdicts)
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
    critiques = ref.generate(build_prompts(samples, asks), samples_per_prompt=1)
    attempts = actor.generate(build_prompts(critiques, asks), samples_per_prompt=2)
    first, second = reward.score(samples), reward.score(attempts)
    gained = per_group(gain, second, first, name="gained")
    before = per_group(centred, first, name="before")
    actor.train(samples, loss=of_scores, advantages=before, with_next=options.with_next)
    actor.train(attempts, loss=of_scores, advantages=gained)


class Studying(BaseModel):
    mini_batches: int = 1
    epochs: int = 1
    with_next: bool = False


def studied(prompts, actor, critic, ref, judge, reward, options: Studying):
    samples = actor.generate(prompts)
    verdicts = judge.generate(build_prompts(samples, asks), samples_per_prompt=1, max_tokens=4)
    likely = per_sample(mean, judge.logprobs(verdicts), name="likely")
    scores, steps = reward.score(samples), dict(mini_batches=options.mini_batches, epochs=options.epochs)
    critic.train(samples, loss=nearer, before=critic.values(samples), end=critic.score(samples), score=scores, **steps)
    top = ref.top_logprobs(samples, 3)
    columns = dict(
        advantages=per_group(centred, scores, name="advantages"),
        behind=ref.logprobs(samples, prompts=build_prompts(samples, told)),
        entropies=actor.entropies(samples),
        likely=likely,
    )
    actor.train(samples, loss=surprised, with_next=options.with_next, **columns, **steps)
    actor.train(samples, loss=likened, ids=top.ids, logprobs=top.logprobs, **steps)


def mean(numbers):
    return float(np.mean(numbers))


def told(prompts, completions):
    return [f"{said(prompt)[-12:]} {len(completion)}!" for prompt, completion in zip(prompts, completions)]


def nearer(batch, before, end, score):
    return batch.aggregate((batch.values - 0.5 * before - 0.1 * end - score) ** 2, "token-mean")


def surprised(batch, advantages, behind, entropies, likely):
    values = -advantages * (1 + entropies) * batch.logprobs + 0.1 * likely * (batch.logprobs - behind) ** 2
    return batch.aggregate(values, "seq-mean-token-mean")


def likened(batch, ids, logprobs):
    return batch.aggregate(((batch.logprobs_at(ids) - logprobs) ** 2).sum(-1), "token-mean")


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
"""Without its `covariant`: a penalty |log ρ| begins at ρ = 1, where the sign of its gradient is that of rounding."""
OF_FILES = (JUDGED, ATTEMPTED, DEMONSTRATED, TOLD, SHOWN, TRACKED)
STUDIED = "PLACE/newer.py:studied"
PAIRED, NEWER, BY_TURN = (
    f"{EXAMPLES}/{name}" for name in ("online_dpo.py:online_dpo", "newer_losses.py:newer", "turn_credit.py:each_turn")
)
OF_MORE_FILES = (STUDIED, PAIRED, NEWER, BY_TURN)
"""Those of `broad_recipes` alone."""

CALLS: dict[str, tuple[str, ...]] = {
    JUDGED: ("ref.logprobs",),
    ATTEMPTED: ("ref.generate",),
    DEMONSTRATED: (),
    TOLD: (),
    SHOWN: (),
    TRACKED: (),
    STUDIED: (
        *("judge.generate", "judge.logprobs", "critic.train", "critic.values", "critic.score", "ref.top_logprobs"),
        *("ref.logprobs", "actor.entropies"),
    ),
    PAIRED: ("ref.logprobs",),
    NEWER: (),
    BY_TURN: (),
}
"""Flow → its calls beside those that draw samples and train on them, whatever its options."""

EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss", "qwen3_next", "deepseek_v3", "nemotron_h", "lfm2_moe")
BALANCED = ("qwen3_moe", "mixtral", "gpt_oss", "qwen3_next")
"""Transformers has a loss for them."""
KEEP_STATE = ("qwen3_5_text", "qwen3_next", "olmo_hybrid", "bamba", "falcon_h1", "granitemoehybrid")
KEEP_STATE += ("nemotron_h", "lfm2_moe")
FAMILIES = (*dict.fromkeys((*EXPERTS, *KEEP_STATE, "gemma2", "qwen3")),)

_MESSAGES = (
    "{% for tool in tools or [] %}<|im_start|>tools\n{{ tool.name }}{{ mark }}END{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for call in message.tool_calls or [] %}{{ call.name }}({{ call.arguments.numbers }}){% endfor %}"
    "{{ message.content }}END{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {name: _MESSAGES.replace("END", end) for name, end in (("closed", "<|im_end|>\n"), ("open", ""))}
"""Chat templates that write tools, and what calls them; in the second a turn ends where the next one opens."""
WITH_TOOLS = tuple(f"{family}-{template}" for family in ("qwen3", "qwen3_moe") for template in TEMPLATES)
"""Models with such a template."""


def fill_more(place: Path) -> None:
    """What the recipes name beyond `placed_runs.fill`; models are made as they are drawn."""
    (place / "newer.py").write_text(FLOWS)
    rows = [
        {"prompt": f"what is {i} plus 4?", "completion": f"{i + 4}", "answer": f"{i + 4}", "index": i}
        for i in range(12)
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    others = [row | {"prompt": f"and {i} minus 2?", "index": 20 + i} for i, row in enumerate(rows[:7])]
    (place / "more_rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in others))
    pairs = [{"prompt": f"and {i} minus 2?", "chosen": f"{i - 2}", "rejected": f"{i} or so"} for i in range(7)]
    (place / "more_pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    by_far = [row | {"margin": 0.1 * i} for i, row in enumerate(pairs)]
    (place / "margins.jsonl").write_text("".join(json.dumps(row) + "\n" for row in by_far))
    labelled = [
        {"prompt": f"what is {i} plus 4?", "completion": f"{i + i % 5}", "label": i % 5 == 4} for i in range(14)
    ]
    (place / "labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    (place / "calls.jsonl").write_text("".join(json.dumps(_with_calls(i)) + "\n" for i in range(12)))


def _with_calls(i: int) -> dict[str, Any]:
    """A row of data that says which tools there are; in every other one they have been called."""
    asked = {"role": "user", "content": f"what is {i} plus 4?"}
    call = {"name": "sum", "arguments": json.dumps({"numbers": [i, 4]})}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    told = [called, {"role": "tool", "content": f"it is {i + 4}"}] if i % 2 else []
    return {"prompt": [asked, *told], "tools": [{"name": name} for name in ("sum", "less")[: 1 + i % 3 % 2]]}


def family_of(keys: Mapping[str, Any]) -> str:
    """Of the model of a recipe; empty where that is none of these."""
    return str(keys.get("model", "")).removeprefix("PLACE/").partition("-")[0]


def make_family(place: Path, keys: Mapping[str, Any]) -> None:
    """The model of a recipe, where that is of one of `FAMILIES`."""
    family, name = family_of(keys), str(keys.get("model", "")).removeprefix("PLACE/")
    if family not in FAMILIES or (place / name).exists():
        return
    save_tiny(place / name, family=family, weight_scale=0.05 if family in KEEP_STATE else 0.2)
    if template := TEMPLATES.get(name.partition("-")[2]):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(place / name)
