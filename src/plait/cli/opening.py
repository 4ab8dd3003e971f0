"""What a command prints at once, before torch is imported: what will run; then what is being loaded."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from plait.observe.loading import loading, loading_shown
from plait.observe.screen import say

if TYPE_CHECKING:
    from plait.data.formats import RowKind
    from plait.recipes.recipe import Recipe
    from plait.recipes.stages import Stages

_NO_TERMINAL_COLUMNS = 1 << 16
"""A log is not wrapped."""
_LEAST_COLUMNS = 24


@contextmanager
def opening(title: str, facts: Mapping[str, str]) -> Iterator[None]:
    """Print the header on stderr, then each thing that is loaded while inside, from torch on."""
    for line in header(title, facts, _columns()):
        say(line, file=sys.stderr)
    with loading_shown(_show_loading):
        loading("torch and transformers")
        yield


def header(title: str, facts: Mapping[str, str], columns: int) -> list[str]:
    """A title, and one line for each fact; lines that are too long go on below their beginning."""
    room = max(map(len, facts), default=0)
    lines = _wrapped(title, "", columns)
    for name, value in facts.items():
        lines += _wrapped(value, f"  {name:<{room}}  ", columns)
    return lines


def recipe_facts(recipe: Recipe, *, resume: bool = False) -> dict[str, str]:
    """What a run of one stage will do, in the words of its recipe."""
    take = "takes" if recipe.epochs == 1 else "take"
    count = str(recipe.steps) if recipe.epochs is None else f"as many as {_length(recipe)} {take},"
    rows = _rows(recipe)
    batch = f"{count} of {recipe.prompts_per_step} {'rows' if rows is None else rows.noun}"
    says = recipe.samples_per_prompt != type(recipe).model_fields["samples_per_prompt"].default
    if rows == "prompts" or (rows is None and says):
        batch += f" x {recipe.samples_per_prompt} samples"
    how = {True: "to be continued", False: "to be replaced" if recipe.overwrite and recipe.run_dir.exists() else ""}
    remark = f" ({how[resume]})" if how[resume] else ""
    return {
        "model": recipe.model,
        "algorithm": recipe.algorithm,
        "data": recipe.data.title,
        **({} if recipe.pretraining is None else {"pretraining": recipe.pretraining.title}),
        "steps": batch,
        "device": device_text(recipe),
        "run_dir": f"{recipe.run_dir}{remark}",
    }


def _rows(recipe: Recipe) -> RowKind | None:
    """What rows of the data are; None: nobody knows, of a flow in a file, which is not read before torch. That may
    state a number of samples of its own, too."""
    from plait.recipes.algorithm import BUILT_IN, rows_of, traced_flow

    return rows_of(traced_flow(recipe.letting_be())) if recipe.algorithm in BUILT_IN else None


def device_text(recipe: Recipe) -> str:
    """`cpu, bfloat16`, and the plan where there is one."""
    placed = [f"plan {recipe.plan}"] if recipe.plan not in ("auto", "colocated") else []
    count = [f"{recipe.devices} processes"] if recipe.devices > 1 else []
    return ", ".join((recipe.device, *count, recipe.dtype.value, *placed))


def _length(recipe: Recipe) -> str:
    if recipe.epochs is None:
        return "1 step" if recipe.steps == 1 else f"{recipe.steps} steps"
    return "1 epoch" if recipe.epochs == 1 else f"{recipe.epochs:g} epochs"


def stages_facts(stages: Stages) -> dict[str, str]:
    """One line for each stage of a recipe."""
    return {
        name: f"{recipe.algorithm}, {_length(recipe)}, from {recipe.model}, on {_data_text(recipe)}; "
        f"run_dir {recipe.run_dir}"
        for name, recipe in stages.recipes.items()
    }


def _data_text(recipe: Recipe) -> str:
    return recipe.data.title + (f" beside {recipe.pretraining.title}" if recipe.pretraining is not None else "")


def title_of(command: str, path: Path | None, *flags: str) -> str:
    return " ".join(("plait", command, *([] if path is None else [str(path)]), *flags))


def _show_loading(what: str) -> None:
    for line in _wrapped(what, "loading ", _columns()):
        say(line, file=sys.stderr)


def _columns() -> int:
    return shutil.get_terminal_size().columns if sys.stderr.isatty() else _NO_TERMINAL_COLUMNS


def _wrapped(text: str, begin: str, columns: int) -> Sequence[str]:
    return textwrap.wrap(
        text,
        max(columns, _LEAST_COLUMNS),
        initial_indent=begin,
        subsequent_indent=" " * len(begin),
        break_on_hyphens=False,
    ) or [begin.rstrip()]
