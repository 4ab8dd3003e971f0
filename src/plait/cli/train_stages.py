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
    from plait.runtime.recipes.stages import final_folder, load_stages
    from plait.runtime.stage_runs import check_stages, run_stages

    stages = load_stages(path, overrides)
    console = Console()
    for name, prepared in check_stages(stages, resume=resume):
        if dry_run:
            from plait.cli.dry_run import print_plan

            console.rule(name)
            print_plan(prepared)
    if dry_run:
        return 0
    for name, recipe, outcome in run_stages(stages, resume=resume):
        console.rule(name)
        if outcome is None:
            console.print(f"done before: {final_folder(recipe)}")
            continue
        print_outcome(recipe, outcome)
        if not outcome.finished:
            return 130
    return 0
