"""How well a model does on some tasks before training: pass@1, pass@8, greedy accuracy, form.

    python benchmarks/choose_task.py [--items 50] [--temperature 1.0] [--tasks chain_sum,products]

A task is worth training on where pass@8 is well above pass@1: right answers are within reach, and not yet the habit.
The demo's task and prompt were chosen by this table; docs/demo.md has it.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from typing import Any

import torch

from plait.data.prompts import prompt_set
from plait.data.records import Prompt, Sample
from plait.data.settings import DataSettings
from plait.data.sources import open_splits
from plait.generation.engine import Engine, drain
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.models.language_loading import load_model
from plait.models.language_model import LanguageModel
from plait.rewards.answers import AnswerFormat, Verdict, extract_answer
from plait.rewards.statistics import pass_at_k
from plait.rewards.tasks import score_answer

SAMPLES = 8
GREEDY_UID = 1 << 20
CALCULATOR = "You are a calculator. You reply with a single number and nothing else."
ONE_WORD = "Answer with one word only."
SUM = "State the final answer to the following arithmetic problem: {} ="
TWO_DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
ADDITION = {**TWO_DIGITS, "operators": ["+"], "allow_parentheses": False, "allow_negation": False}


@dataclass(frozen=True)
class Candidate:
    """A task with a prompt."""

    task: str
    parameters: dict[str, Any]
    system_prompt: str | None = CALCULATOR
    answer: AnswerFormat = AnswerFormat.NUMBER
    examples: list[tuple[str, str]] = field(default_factory=list)

    @property
    def prompt_name(self) -> str:
        return "examples" if self.examples else "calculator" if self.system_prompt == CALCULATOR else "one word"


CANDIDATES = (
    Candidate(
        "basic_arithmetic",
        ADDITION,
        None,
        examples=[("Calculate 17 + 25.", "17 + 25 = 42"), ("Calculate 40 + 31.", "40 + 31 = 71")],
    ),
    Candidate("basic_arithmetic", ADDITION),
    Candidate(
        "chain_sum",
        TWO_DIGITS,
        None,
        examples=[(SUM.format("17 + 25"), "17 + 25 = 42"), (SUM.format("63 - 21"), "63 - 21 = 42")],
    ),
    Candidate("chain_sum", TWO_DIGITS),
    Candidate("chain_sum", {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}),
    Candidate("products", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
    Candidate("gcd", {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 60}),
    Candidate("lcm", {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 20}),
    Candidate("simple_equations", {"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 20}),
    Candidate("leg_counting", {"min_animals": 1, "max_animals": 2, "min_instances": 1, "max_instances": 9}),
    Candidate("count_primes", {"max_n": 60}),
    Candidate("needle_haystack", {"min_num_statements": 2, "max_num_statements": 4}, ONE_WORD, AnswerFormat.WHOLE),
    Candidate(
        "calendar_arithmetic",
        {"tasks": ["weekday_offset"], "offset_upper_bound": 10},
        ONE_WORD,
        AnswerFormat.WHOLE,
    ),
    Candidate("family_relationships", {"min_family_size": 3, "max_family_size": 4}, ONE_WORD, AnswerFormat.WHOLE),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--items", type=int, default=50)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tasks", default="", help="comma-separated; default: all")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    model = load_model(args.model)
    wanted = set(filter(None, args.tasks.split(",")))
    print("| task | parameters | prompt | pass@1 | pass@8 | greedy | well-formed | tokens |")
    print("|---|---|---|---|---|---|---|---|")
    for candidate in CANDIDATES:
        if not wanted or candidate.task in wanted:
            print(row(model, candidate, args.items, args.temperature), flush=True)


def row(model: LanguageModel, candidate: Candidate, items: int, temperature: float) -> str:
    """One line of the table; `tokens` is the mean response length."""
    settings = DataSettings(
        source=f"reasoning_gym:{candidate.task}",
        parameters=candidate.parameters,
        size=items,
        system_prompt=candidate.system_prompt,
        examples=tuple(candidate.examples),
    )
    prompts = prompt_set(open_splits(settings).train, model.tokenizer, settings, 1024)
    engine = Engine(model, SamplingSettings(max_running=128))
    sampled, greedy = Sampling(temperature, max_tokens=24), Sampling(temperature=0.0, max_tokens=24)
    for index in range(items):
        engine.add(Request(prompts.prompt(index, index), SAMPLES, sampled, NoiseKey(0)))
        engine.add(Request(prompts.prompt(index, GREEDY_UID + index), 1, greedy, NoiseKey(0)))
    groups: dict[int, list[Sample]] = {}
    for sample in drain(engine):
        groups.setdefault(sample.prompt.uid, []).append(sample)
    drawn = [[verdict(sample, candidate) for sample in groups[index]] for index in range(items)]
    best = [verdict(groups[GREEDY_UID + index][0], candidate) for index in range(items)]
    right = [sum(v is Verdict.EXACT for v in group) for group in drawn]
    every = [v for group in drawn for v in group]
    figures = (
        sum(pass_at_k(SAMPLES, count, 1) for count in right) / items,
        sum(pass_at_k(SAMPLES, count, SAMPLES) for count in right) / items,
        sum(v is Verdict.EXACT for v in best) / items,
        sum(v.well_formed for v in every) / len(every),
    )
    length = sum(len(s.token_ids) for index in range(items) for s in groups[index]) / len(every)
    parameters = ", ".join(f"{name}={value}" for name, value in candidate.parameters.items())
    cells = " | ".join(f"{figure:.0%}" if figure >= 0.1 else f"{figure:.1%}" for figure in figures)
    return f"| {candidate.task} | {parameters} | {candidate.prompt_name} | {cells} | {length:.0f} |"


def verdict(sample: Sample, candidate: Candidate) -> Verdict:
    prompt: Prompt = sample.prompt
    entry = {"question": prompt.columns["prompt"], **prompt.columns}
    outcome, _ = score_answer(
        candidate.task, candidate.parameters, extract_answer(sample.text, candidate.answer), entry
    )
    return outcome


if __name__ == "__main__":
    main()
