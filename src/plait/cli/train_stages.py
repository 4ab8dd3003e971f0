"""`plait train RECIPE` where the recipe has several stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.cli.opening import opening, stages_facts, title_of

if TYPE_CHECKING:
    from plait.recipes.stages import Stages


def train_stages(path: Path, overrides: Sequence[tuple[str, Any]], *, dry_run: bool, resume: bool, trust: bool) -> int:
    """Run every stage, or print what each will do. All of them are checked before the first begins.

    Raises:
        UserError: a stage cannot be run; its name is given.
    """
    from plait.recipes.stages import load_stages

    stages = load_stages(path, overrides, trust_run_code=trust)
    flags = [flag for flag, given in (("--dry-run", dry_run), ("--resume", resume)) if given]
    with opening(title_of("train", path, *flags), stages_facts(stages)):
        return _print_plans(stages, resume=resume) if dry_run else _run(stages, resume=resume)


def _print_plans(stages: Stages, *, resume: bool) -> int:
    from plait.cli.dry_run import print_plan
    from plait.observe.console import SafeConsole
    from plait.runtime.stage_runs import check_stages

    for name, prepared in check_stages(stages, resume=resume):
        SafeConsole().rule(name)
        print_plan(prepared)
    return 0


def _run(stages: Stages, *, resume: bool) -> int:
    from plait.cli.report import print_outcome
    from plait.observe.console import SafeConsole
    from plait.recipes.stages import final_folder
    from plait.runtime.stage_runs import check_stages, run_stages

    for _ in check_stages(stages, resume=resume):
        pass
    console = SafeConsole()
    for name, recipe, outcome in run_stages(stages, resume=resume):
        console.rule(name)
        if outcome is None:
            console.print(f"done before: {final_folder(recipe)}")
            continue
        print_outcome(recipe, outcome)
        if not outcome.finished:
            return 130
    return 0
