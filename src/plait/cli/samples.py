"""`plait samples RUN_DIR [STEP]`: what the model said in a step, and what it got for it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from plait.cli.app import Place, Whole
from plait.cli.line_text import in_a_line, visible
from plait.data.records import shown_uid
from plait.json_text import kind_of
from plait.runtime.evaluating.parts import OF_REWARDS

if TYPE_CHECKING:
    from plait.observe.console import SafeConsole

Row = Mapping[str, Any]

_REWARDS = ("reward_score", "cost_score", "reward")
"""Columns that stand first among the numbers of a sample; of an evaluation's item it is `reward`."""
_NEEDED = {"uid": str, "prompt": str, "response": str, "token_ids": list, "finish_reason": str}
_NOT_TOLD = ("policy_version",)
"""Numbers of a sample that say nothing of what it got."""
_MOST = 400
"""Characters of a text, unless it is asked for whole."""
_MOST_OF_VALUE = 60
"""Characters of a value of the data that stands beside the prompt."""


def samples(
    run_dir: Place,
    step: Whole | None = None,
    /,
    *,
    evaluation: bool = False,
    prompts: Whole = 3,
    uid: str = "",
    of_set: Annotated[str, Parameter(name="--set")] = "",
    whole: bool = False,
) -> int:
    """Show what the model said in a step of a run, and which rewards it got.

    The samples of a prompt stand together, those with the highest reward first.

    Parameters
    ----------
    run_dir
        Folder of a run; it may still go on.
    step
        Which step, or after which the evaluation was; by default the newest there is.
    evaluation
        Show the items of an evaluation.
    prompts
        How many prompts are shown, from the first.
    uid
        Show the samples of this prompt (7) or this sample (7.2) alone.
    of_set
        Show the items of this one of several evaluation sets alone.
    whole
        Show long texts whole, and with their line ends.
    """
    from plait.errors import ConfigError
    from plait.observe.console import SafeConsole

    if prompts < 1:
        raise ConfigError(f"--prompts: expected 1 or more, found {prompts}")
    step, path = _file(run_dir, "eval" if evaluation else "step", step)
    rows = _rows(path, of_set)
    groups = _by_prompt(rows)
    chosen = {of: asked for of, group in groups.items() if (asked := [row for row in group if _is_asked(row, uid)])}
    if uid and not chosen:
        there = _listed(shown_uid(of) for _, of in groups)
        raise ConfigError(f"--uid: {path} has no sample `{uid}`; its prompts are {there}")
    console = SafeConsole()
    where = f"the evaluation after step {step}" if evaluation else f"step {step}"
    console.print(f"{where} of {run_dir}: {_summary(rows, len(groups))}", soft_wrap=True)
    for group in islice(chosen.values(), prompts):
        _print_group(console, group, whole=whole)
    if (left := len(chosen) - prompts) > 0:
        console.print(
            f"\n{_counted(left, 'more prompt')} (--prompts {len(chosen)} shows all); every column is in {path}",
            soft_wrap=True,
        )
    return 0


def _rows(path: Path, of_set: str) -> list[Row]:
    """The samples of a file; with `of_set` those of an evaluation set alone.

    Raises:
        ConfigError: no set has this name.
        DataError: the file is damaged.
    """
    from plait.errors import ConfigError
    from plait.observe.run_log import damaged, read_rows

    rows = read_rows(path)
    for number, row in enumerate(rows, start=1):
        if fault := _fault(row):
            raise damaged(f"{path}:{number}", fault)
    if not of_set:
        return rows
    if chosen := [row for row in rows if row.get("evaluation_set") == of_set]:
        return chosen
    names = dict.fromkeys(row.get("evaluation_set") or "none" for row in rows)
    raise ConfigError(f"--set: {path} has no evaluation set `{of_set}`; it has {_listed(names)}")


def _file(folder: Path, kind: str, step: int | None) -> tuple[int, Path]:
    """The step, and the file of its samples (kind `step`) or of its evaluation (`eval`). Raises ConfigError."""
    from plait.errors import ConfigError
    from plait.runtime.folder.run_files import SAMPLES

    files = [path for path in folder.glob(f"{SAMPLES}/{kind}-*.jsonl") if path.stat().st_size]  # empty of given data
    paths = {path.stem.removeprefix(f"{kind}-"): path for path in files}
    there = {int(number): path for number, path in paths.items() if number.isdecimal()}
    if not there:
        raise ConfigError(f"RUN_DIR: {_why_none(folder, kind)}")
    if step is None:
        step = max(there)
    if step not in there:
        raise ConfigError(
            f"STEP: {folder} has {'no evaluation after' if kind == 'eval' else 'no samples of'} step "
            f"{step}; there are those of {_listed(map(str, sorted(there)))}"
        )
    return step, there[step]


def _why_none(folder: Path, kind: str) -> str:
    from plait.runtime.folder.run_files import RECIPE, SAMPLES

    if not folder.exists():
        return f"`{folder}` does not exist"
    filled = {path.parent.parent for path in folder.glob(f"*/{SAMPLES}/{kind}-*.jsonl") if path.stat().st_size}
    if runs := _listed(f"`{run}`" for run in sorted(filled or {path.parent for path in folder.glob(f"*/{RECIPE}")})):
        return f"`{folder}` holds runs, and is none itself; give one of {runs}"
    if not (folder / RECIPE).is_file():
        around = next((place for place in folder.parents if (place / RECIPE).is_file()), None)
        return f"`{folder}` holds no run" if around is None else f"`{folder}` is in the run `{around}`; give that"
    if kind == "eval":
        return (
            f"`{folder}` has no evaluation with answers: it has none (`evaluation.items`), or of given data (SFT, DPO, "
            "a reward model), whose numbers are in its evaluations.jsonl"
        )
    return (
        f"`{folder}` has no samples: none are drawn where all are given (SFT, DPO, a reward model), or no step is done"
    )


def _fault(row: Row) -> str:
    """What of a row is not as a run writes it; empty where all is that is read here."""
    kinds = {**_NEEDED, **{name: kind for name, kind in (("turns", list), ("judged", dict)) if name in row}}
    for name, kind in kinds.items():
        if name not in row:
            return f"no `{name}`"
        if not isinstance(row[name], kind):
            return f"expected {kind_of(kind())} as `{name}`, found {kind_of(row[name])}"
    if not all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in row.get("turns", ())):
        return "expected messages with `role` and `content` as `turns`"
    try:
        _reward(row)
    except (TypeError, ValueError):
        return "its reward is no number"
    return ""


def _listed(names: Iterable[str]) -> str:
    """A few of them, and the last."""
    names = list(names)
    return ", ".join(names if len(names) <= 8 else [*names[:6], "…", names[-1]])


def _by_prompt(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """(rollout, uid of the prompt) → its samples, the highest reward first, those without one last."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.get("rollout", ""), row["uid"].rpartition(".")[0]), []).append(row)
    return {
        of: sorted(group, key=lambda row: (not _is_scored(row), -_reward(row) if _is_scored(row) else 0.0))
        for of, group in groups.items()
    }


def _reward(row: Row) -> float:
    """NaN where it has none."""
    value = next((row[name] for name in _REWARDS if name in row), None)
    return math.nan if value is None else float(value)


def _is_scored(row: Row) -> bool:
    return not math.isnan(_reward(row))


def _is_asked(row: Row, uid: str) -> bool:
    return not uid or any(name == uid or name.startswith(f"{uid}.") for name in (row["uid"], shown_uid(row["uid"])))


def _summary(rows: list[Row], num_prompts: int) -> str:
    rewards = [_reward(row) for row in rows if _is_scored(row)]
    told = f"{_counted(num_prompts, 'prompt')}, {_counted(len(rows), 'sample')}"
    if not rewards:
        return told
    without = f", {len(rows) - len(rewards)} without" if len(rewards) < len(rows) else ""
    mean = sum(rewards) / len(rewards)  # NaN where both infinities are among them
    return f"{told}; reward {mean:.4g} on average, from {min(rewards):.4g} to {max(rewards):.4g}{without}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _print_group(console: SafeConsole, group: list[Row], *, whole: bool) -> None:
    from rich.text import Text

    first = group[0]
    of = first.get("rollout") or first.get("evaluation_set")
    title = f"prompt {shown_uid(first['uid'].rpartition('.')[0])}" + (f" of {of}" if of else "")
    console.print()
    console.print(Text("  ").join([Text(title, "bold"), *map(Text, _of_data(first))]), soft_wrap=True)
    _print_text(console, first["prompt"], "  ", whole=whole, last=True)
    for row in group:
        told = [*(f"{name} {_number(value)}" for name, value in _numbers(row)), f"{len(row['token_ids'])} tokens"]
        parts = [Text(f"  {shown_uid(row['uid'])}", "bold"), *map(Text, told), Text(row["finish_reason"])]
        console.print(Text("  ").join(parts), soft_wrap=True)
        if "reply_error" in row:
            _print_text(console, f"no reply: {row['reply_error']}", "    ", whole=whole)
        for message in row.get("turns", ()):
            who = " ".join(str(message[key]) for key in ("role", "name") if message.get(key))
            _print_text(console, f"{who}: {message['content']}", "    ", whole=whole)
        if "turns" not in row:
            _print_text(console, row["response"], "    ", whole=whole)


def _print_text(console: SafeConsole, text: str, indent: str, *, whole: bool, last: bool = False) -> None:
    """A text below its heading; of a long one the beginning and the end, or with `last` the end alone. White space that
    is all there is stands as escapes."""
    text = visible(text) if whole else in_a_line(text)
    if not whole and len(text) > _MOST:
        text = f"… {text[-_MOST:]}" if last else f"{text[: _MOST // 2]} … {text[-_MOST // 2 :]}"
    for line in text.splitlines() or [""]:
        console.print(indent + line, soft_wrap=True)


def _of_data(row: Row) -> Iterator[str]:
    """Short values of the data, with their names."""
    for name, value in row.items():
        if name.startswith("data/") and value is not None:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            if len(text) <= _MOST_OF_VALUE:
                yield (
                    f"{name.removeprefix('data/')} {text!r}"
                    if isinstance(value, str)
                    else f"{name.removeprefix('data/')} {text}"
                )


def _numbers(row: Row) -> Iterator[tuple[str, Any]]:
    """(name, value) of what a sample got: its reward, the parts of that, and all else that is one number."""
    told = {**row, **row.get("judged", {})}
    rest = [name for name, value in told.items() if name not in _REWARDS and _is_told(name, value)]
    rest.sort(key=lambda name: not name.startswith(OF_REWARDS))
    for name in (*(name for name in _REWARDS if name in told), *rest):
        yield name.removesuffix("_score") if name in _REWARDS else name.removeprefix("rewards/"), told[name]


def _is_told(name: str, value: Any) -> bool:
    if name.startswith(OF_REWARDS) or name == "verdict":
        return True
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and name not in _NOT_TOLD and not name.startswith("data/")


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, int | float) else str(value)
