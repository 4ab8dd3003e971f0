"""`plait train RECIPE` where the recipe has several stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console


def train_stages(path: Path, overrides: Sequence[tuple[str, Any]], *, dry_run: bool, resume: bool) -> int:
    """Run every stage, or print what each will do. All of them are checked before the first begins.

    Raises:
        UserError: a stage cannot be run; its name is given.
    """
    from plait.cli.report import print_outcome
    from plait.runtime.api import check_stages, run_stages
    from plait.runtime.stages import load_stages

    stages = load_stages(path, overrides)
    console = Console()
    if dry_run:
        from plait.cli import dry_run as plan

        for name in stages.recipes:
            console.rule(name)
            plan.dry_run(stages.foreseen(name), resume=resume)
        return 0
    check_stages(stages, resume=resume)
    for name, recipe, outcome in run_stages(stages, resume=resume):
        console.rule(name)
        if outcome is None:
            console.print(f"done before: {recipe.run_dir}/final")
            continue
        print_outcome(recipe, outcome)
        if not outcome.finished:
            return 130
    return 0
