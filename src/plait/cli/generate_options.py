"""The options of `plait generate`, and what is checked of them before anything is loaded."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from plait.cli.app import Number, Place, Whole
from plait.errors import ConfigError, DataError
from plait.file_writes import why_not_written
from plait.json_text import Malformed
from plait.json_text import parse as parse_json
from plait.output import check_file
from plait.policy.blocks import BLOCK_TOKENS
from plait.settings import MOST

_SEVERAL = Parameter(consume_multiple=1)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command takes; each field is an option."""

    model: str
    """smollm2-135m-instruct, a local folder, or a hub id."""
    prompts: Place
    """JSONL, JSON, CSV, Parquet or a saved data set, with a column of prompts: texts or messages."""
    prompt_column: str = "prompt"
    """Column of the file that holds the prompt."""
    out: Place
    """JSONL to write: the data's columns, row number, response, token ids, log-probs."""
    resume: bool = False
    """Continue an interrupted run: draw what OUT.partial lacks."""
    overwrite: bool = False
    """Replace a file that exists, and what an interrupted run has left."""
    n: Whole = 1
    """Responses per prompt."""
    temperature: Number = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: Number = 1.0
    """Sample from the most probable tokens of this mass."""
    top_k: Whole = 0
    """Sample from this many most probable tokens; 0 is all."""
    min_p: Number = 0.0
    """Sample from tokens at least this probable, as a share of the most probable one; 0 is all."""
    max_tokens: Whole = 256
    """Longest response."""
    stop: Annotated[tuple[str, ...], _SEVERAL] = ()
    """Strings that end a response."""
    stop_token_ids: Annotated[tuple[Whole, ...] | None, _SEVERAL] = None
    """Tokens that end a response; by default the model's own."""
    system_prompt: str | None = None
    """System message put before each prompt."""
    chat_template: Literal["auto", "true", "false"] = "auto"
    """Send text prompts as a user message: true, false (raw), or auto, if the model has a chat template."""
    lengths: Place | None = None
    """JSONL of lists, one per prompt: the exact lengths of its n responses, for timing."""
    max_running: Whole | None = None
    """Samples decoded at the same time by each process; by default 64, on a GPU 256."""
    kv_tokens: Whole | None = None
    """Tokens that the cache holds at most; by default what max_running samples may need."""
    speculation: str = "auto"
    """Draft next tokens from what is known: auto, adaptive, off, or how many tokens; changes no response."""
    draft_model: str | None = None
    """A small draft model with the tokenizer of --model, used where that is faster."""
    history: Place | None = None
    """Output of an earlier run of this command, or the folder of a training run, whose newest samples --speculation
    drafts from, too."""
    seed: Whole = 0
    """Seed of the sampling noise."""
    dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16"
    """float32, bfloat16 or float64, of the weights."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cpu or cuda."""
    devices: Whole = 1
    """Processes that each answer a part of the prompts, with a copy of the model; with --device cuda, GPUs."""
    threads: Whole = 0
    """CPU threads of each process; 0 is one per core, divided among the processes."""
    as_json: Annotated[bool, Parameter(name="--json")] = False
    """Print the figures as JSON."""


_LATER = {"chat_template": "auto", "prompt_column": "prompt"}
"""Options that earlier versions did not have, with the value that is equal to what these did."""


def asked_of(options: Options) -> dict[str, Any]:
    """What decides the responses, by option: a run that is resumed draws the rest as it would have drawn them.

    How many run at a time, and on how many threads, decides nothing but the last bits of a log-prob. What was not asked
    for is left out where runs of before had no such option.
    """
    drawn = ("model", "n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "stop_token_ids")
    later = tuple(name for name, usual in _LATER.items() if getattr(options, name) != usual)
    names = (*drawn, "system_prompt", *later, "seed", "dtype")
    values = {name.replace("_", "-"): getattr(options, name) for name in names}
    files = {name: path for name in ("prompts", "lengths") if (path := getattr(options, name)) is not None}
    return values | {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}


_OPTIONS = {
    "`data.source`": "`--prompts`",
    "`data.system_prompt`": "`--system-prompt`",
    ", or make rows of these by `data.rows`": "",
    "`data.prompt_column`": "`--prompt-column`",
    "`model`": "`--model`",
    "`sampling.speculation`": "`--speculation`",
    ", or reasoning_gym:TASK": "",
    "`data.chat_template: false`": "`--chat-template false`",
    "`data.chat_template`": "`--chat-template`",
}


def in_own_words(message: str) -> str:
    """A message about a recipe's keys, with the options of this command in their place."""
    for key, option in _OPTIONS.items():
        message = message.replace(key, option)
    return message


def check_numbers(options: Options) -> None:
    """Raises ConfigError, naming the option, for a number below or above what it may be."""
    for option, value, least, most in (
        ("--n", options.n, 1, 1 << 20),
        ("--max-running", options.max_running, 1, 1 << 20),
        ("--max-tokens", options.max_tokens, 1, MOST),
        ("--top-k", options.top_k, 0, MOST),
        ("--kv-tokens", options.kv_tokens, BLOCK_TOKENS, MOST),
        ("--seed", options.seed, 0, 2**63 - 1),
        ("--devices", options.devices, 1, 4096),
        ("--threads", options.threads, 0, 4096),
        ("--stop-token-ids", min(options.stop_token_ids or (0,)), 0, MOST),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{option}: expected at least {least}, found {value}")
        if value is not None and value > most:
            raise ConfigError(f"{option}: expected at most {most:,}, found {value}")


def check_out(options: Options) -> None:
    """See that `out` can be written and make its folder, so that no response is lost for want of a place.

    Raises:
        ConfigError: the file exists, or its folder cannot be made or written.
    """
    out = options.out
    read = [path for path in (options.prompts, options.lengths, options.history) if path is not None]
    check_file(out, "--out", overwrite=options.overwrite, inputs=read)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out: `{out}` cannot be written: {why_not_written(out, error)}; give another file"
        ) from None


def read_lengths(path: Path, n: int) -> list[list[int]]:
    """One list of `n` response lengths per line; blank lines are skipped.

    Raises:
        DataError: the file is missing or no text, or a line is no list of `n` positive integers.
    """
    from plait.data.files import why_no_file

    if not os.path.isfile(path):
        raise DataError(f"--lengths: `{path}` {why_no_file(path)}; give a JSONL file of lists")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"--lengths: `{path}` is not UTF-8 ({error.reason} at byte {error.start})") from None
    wanted = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            values = parse_json(line)
        except Malformed as error:
            raise DataError(f"--lengths: {path}:{number}: malformed JSON ({error})") from None
        if not isinstance(values, list) or not all(type(value) is int and 0 < value <= MOST for value in values):
            raise DataError(f"--lengths: {path}:{number}: expected a list of positive whole numbers, found {line[:60]}")
        if len(values) != n:
            raise DataError(
                f"--lengths: {path}:{number} has {len(values)} lengths, but --n is {n}; they must be the same"
            )
        wanted.append(values)
    return wanted
