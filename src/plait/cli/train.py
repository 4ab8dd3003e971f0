"""`plait train RECIPE [--key value …]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from plait.cli.app import TRAIN
from plait.errors import ConfigError

FLAGS = {
    "--dry-run": "resolve everything, print the batch arithmetic and a memory estimate; load no weights",
    "--resume": "continue the run in run_dir from its last checkpoint",
    "--help": "this list",
    "--help-all": "every key",
}

BASIC_KEYS = (
    "model",
    "algorithm",
    "steps",
    "prompts_per_step",
    "samples_per_prompt",
    "data.source",
    "data.system_prompt",
    "data.prompt_template",
    "data.max_prompt_tokens",
    "reward.functions",
    "sampling.temperature",
    "sampling.max_response_tokens",
    "sampling.stop",
    "optimizer.learning_rate",
    "optimizer.warmup_steps",
    "optimizer.max_grad_norm",
    "evaluation.every",
    "evaluation.items",
    "checkpoint.every",
    "run_dir",
    "overwrite",
    "seed",
    "dtype",
    "device",
    "threads",
    "micro_batch_tokens",
    "options.kl_coef",
    "options.clip_low",
    "options.clip_high",
    "options.aggregation",
    "options.mini_batches",
    "options.epochs",
)


def train(*tokens: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> int:
    """Train a model: generate, score, learn, again and again."""
    arguments = list(tokens)
    if "--help-all" in arguments:
        return _print_keys(everything=True)
    if not arguments or "--help" in arguments or "-h" in arguments:
        return _print_keys(everything=False)
    flags = {flag: flag in arguments for flag in ("--dry-run", "--resume")}
    recipe, overrides = split_recipe([token for token in arguments if token not in flags])

    from plait.runtime.recipe import load_recipe

    loaded = load_recipe(recipe, overrides)
    if flags["--dry-run"]:
        from plait.cli.dry_run import dry_run

        return dry_run(loaded)
    from plait.cli.report import print_outcome
    from plait.runtime.api import run

    outcome = run(loaded, resume=flags["--resume"])
    print_outcome(loaded, outcome)
    return 0 if outcome.finished else 130


def split_recipe(tokens: list[str]) -> tuple[Path | None, list[tuple[str, Any]]]:
    """The recipe's path, if the first token is one, and the `--key value` pairs after it."""
    from plait.runtime.recipe import parse_overrides

    path = Path(tokens.pop(0)) if tokens and not tokens[0].startswith("--") else None
    if path is None and not tokens:
        raise ConfigError("give a recipe: `plait train RECIPE [--key value …]`")
    return path, parse_overrides(tokens)


def listed_keys(everything: bool) -> list[tuple[str, str, str]]:
    """(key, default, description) in the order of the help."""
    from plait.runtime.algorithm import BUILT_IN, load_flow, options_class
    from plait.runtime.recipe import describe_keys

    keys = {key: (default, text) for key, default, text in describe_keys() if key != "options"}
    for algorithm in BUILT_IN:  # the default algorithm comes first; of the others, what it does not have
        for key, default, text in describe_keys(options_class(load_flow(algorithm))):
            keys.setdefault(f"options.{key}", (default, text if algorithm == "grpo" else f"{algorithm}: {text}"))
    names = list(keys) if everything else list(BASIC_KEYS)
    return [(name, *keys[name]) for name in names]


def _print_keys(everything: bool) -> int:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"[bold]plait train[/] RECIPE \\[--key value …]\n\n{TRAIN}\n")
    table = Table("key", "default", "meaning", box=None, pad_edge=False, header_style="bold")
    for flag, text in FLAGS.items():
        table.add_row(flag, "", text)
    for key, default, text in listed_keys(everything):
        table.add_row(f"--{key}", default, text)
    console.print(table)
    return 0
