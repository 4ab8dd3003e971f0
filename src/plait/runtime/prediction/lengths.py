"""Lengths of prompts and responses that a prediction counts: as a user says them, or as a run had them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from plait.cost.lengths import Lengths, SampleLengths
from plait.data.records import replies_in
from plait.dataflow import CallKind
from plait.errors import ConfigError
from plait.models.files.known_shapes import is_shape
from plait.observe.run_log import damaged, read_rows
from plait.paths import at_home
from plait.policy.packing import root_of
from plait.recipes.length_limits import prompt_limit
from plait.runtime.folder.run_files import newest_samples
from plait.runtime.prediction.predictable import Predictable


def lengths_of(text: str | None, run: Predictable, there: Callable[[], SampleLengths]) -> SampleLengths:
    """Read `--lengths`: a number of response tokens, `MEDIAN~SIGMA` of a log-normal distribution, or the folder of a
    run whose samples are taken. `PROMPT:` before one of the first two is the length of prompts. None: those of the
    data, and responses that are drawn are as long as they may be. Where a flow generates, what it reads beside is as
    the data has it.

    Args:
        there: lengths of the data, asked where something is not said.

    Raises:
        ConfigError: it is none of these, or longer than the recipe and its model allow.
    """
    if text is None:
        return there()
    lengths, most = _said(text, run, there), _most_of_a_prompt(run)
    if lengths.prompts.longest > most:
        raise ConfigError(
            f"--lengths: a prompt of {lengths.prompts.longest} tokens is longer than the {most} that the recipe and "
            f"the positions of `{run.recipe.model}` leave for one"
        )
    return lengths


def _said(text: str, run: Predictable, there: Callable[[], SampleLengths]) -> SampleLengths:
    """`lengths_of`, with prompts of any length."""
    kinds = {node.kind for node in run.flow.nodes}
    beside = there().beside if {CallKind.GENERATE, CallKind.READ} <= kinds else {}
    most, key = _most_of_a_response(run)
    if os.path.isdir(folder := at_home(text, "--lengths")):
        files = newest_samples(Path(folder), "--lengths")
        if (lengths := recorded(files, run)) is None:
            raise ConfigError(f"--lengths: no sample of the last steps of {folder} has tokens; give another folder")
        return replace(lengths, beside={**beside, **lengths.beside})
    match = re.fullmatch(r"(?:(\d{1,7}):)?(\d{1,7})(?:~(\d{1,2}(?:\.\d{1,6})?))?", text)
    if match is None or int(match[2]) < 1 or match[1] == "0":
        raise ConfigError(
            f"--lengths: expected a number of response tokens (512), MEDIAN~SIGMA (300~0.8), either after PROMPT: "
            f"(128:512), or the folder of a run, found `{text:.80}`"
        )
    if match[3] is None and int(match[2]) > most:
        raise ConfigError(f"--lengths: {match[2]} tokens are more than {key}, {most}")
    if match[1] is not None and CallKind.GENERATE not in kinds:
        whole, fits = int(match[1]) + int(match[2]), _most_of_an_example(run)
        if whole > fits:
            raise ConfigError(f"--lengths: {text} are {whole} tokens, more than the {fits} that an example may have")
    if match[1] is None and CallKind.GENERATE not in kinds and is_shape(run.recipe.model):
        raise ConfigError(
            f"--lengths: {run.recipe.model!r} has no tokenizer that could tell how long prompts are; give PROMPT: "
            f"before it (128:{text})"
        )
    prompts = Lengths.fixed(int(match[1])) if match[1] else there().prompts
    if match[3] is not None:
        return SampleLengths(prompts, Lengths.lognormal(float(match[2]), float(match[3]), most), beside=beside)
    return SampleLengths(prompts, Lengths.fixed(int(match[2])), beside=beside)


def _most_of_an_example(run: Predictable) -> int:
    """Tokens of a prompt and its given text."""
    most = run.shapes[run.recipe.model].max_positions
    return min(run.recipe.data.max_example_tokens or most, most)


def _most_of_a_prompt(run: Predictable) -> int:
    """Tokens that a prompt may have, before a response or one token of it."""
    recipe, shape = run.recipe, run.shapes[run.recipe.model]
    if run.flow.of_kind(CallKind.GENERATE):
        return prompt_limit(recipe, shape)
    most = _most_of_an_example(run) - 1
    return min(recipe.data.max_prompt_tokens or most, most)


def _most_of_a_response(run: Predictable) -> tuple[int, str]:
    """Tokens that a response may have, behind one of a prompt where it is given, and what says so."""
    recipe = run.recipe
    if run.flow.of_kind(CallKind.GENERATE):
        return recipe.sampling.max_response_tokens, "`sampling.max_response_tokens` of the recipe"
    if recipe.data.max_example_tokens is not None:
        return recipe.data.max_example_tokens - 1, "`data.max_example_tokens` of the recipe less one of a prompt"
    most = run.shapes[recipe.model].max_positions - 1
    return most, f"the positions of `{recipe.model}` less one of a prompt"


def _samples(file: Path) -> list[dict[str, Any]]:
    """Rows of a file of samples. Raises DataError where the tokens of one are none."""
    rows = read_rows(file)
    for number, row in enumerate(rows, start=1):
        for name in ("prompt_ids", "token_ids"):
            if not isinstance(row.get(name) or [], list):
                raise damaged(f"{file}:{number}", f"expected a list of tokens as `{name}`, found {row[name]!r:.40}")
    return rows


def _response_tokens(row: dict[str, Any]) -> int:
    """Tokens of a recorded response, replies included."""
    return len(row["token_ids"]) + sum(len(reply.token_ids) for reply in replies_in(row))


def recorded(files: Sequence[Path], run: Predictable) -> SampleLengths | None:
    """Lengths of prompts and responses in files of samples, those of samples that are made of others by themselves;
    None where none has both.

    Raises:
        DataError: one is damaged.
    """
    most, _ = _most_of_a_response(run)
    made = {node.call for node in run.flow.of_kind(CallKind.GENERATE) if node.prompts is not None}
    found: dict[str, _Recorded] = {}
    for file in files:  # one at a time: the samples of a large step take gigabytes
        _take(file, made, most, found)
    lengths = {call: told for call, told in ((call, rows.lengths) for call, rows in found.items()) if told is not None}
    main = lengths.pop("", None)
    return None if main is None else replace(main, beside=lengths)


def _take(file: Path, made: Collection[str], most: int, found: dict[str, _Recorded]) -> None:
    """Take in the samples of a step.

    Args:
        made: calls whose samples are made of others.
        most: tokens of a response that count.
        found: by the name of such a call; others have none.
    """
    by_call: dict[str, list[dict[str, Any]]] = {}
    for row in _samples(file):
        call = row.get("rollout", "")
        by_call.setdefault(call if call in made else "", []).append(row)
    for call, rows in by_call.items():
        found.setdefault(call, _Recorded()).take(rows, most)


@dataclass
class _Recorded:
    """What files say of the samples of some calls, in tokens."""

    prompts: list[int] = field(default_factory=list)
    responses: list[int] = field(default_factory=list)
    roots: list[int] = field(default_factory=list)

    def take(self, rows: Sequence[dict[str, Any]], most: int) -> None:
        """Take in those of a step; `most` as of `_take`."""
        self.prompts += [len(row["prompt_ids"]) for row in rows if row.get("prompt_ids")]
        self.responses += [min(most, _response_tokens(row)) for row in rows if row.get("token_ids")]
        self.roots.append(root_of({tuple(row["prompt_ids"]) for row in rows if row.get("prompt_ids")}))

    @property
    def lengths(self) -> SampleLengths | None:
        if not self.prompts or not self.responses:
            return None
        return SampleLengths(Lengths.recorded(self.prompts, min(self.roots)), Lengths.recorded(self.responses))
