"""`plait generate --model M --prompts FILE --out FILE`."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from plait.cli.app import Number, Whole
from plait.cli.opening import opening, title_of
from plait.errors import ConfigError, DataError, RunError, UserError
from plait.json_text import Malformed
from plait.json_text import parse as parse_json
from plait.observe.screen import say
from plait.output import check_file
from plait.policy.blocks import BLOCK_TOKENS
from plait.settings import MOST

if TYPE_CHECKING:
    from plait.cli.kept import Kept
    from plait.data.sources import Row, Source
    from plait.generation.settings import Sampling, SamplingSettings
    from plait.runtime.generate import Job

_SEVERAL = Parameter(consume_multiple=1)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """Of the command; each field is an option."""

    model: str
    """smollm2-135m-instruct, a local folder, or a hub id."""
    prompts: Path
    """JSONL with a column `prompt`: text or messages."""
    out: Path
    """JSONL to write: the data's columns, row number, response, token ids, log-probs."""
    resume: bool = False
    """Go on with a run that was broken off: draw what OUT.partial lacks."""
    overwrite: bool = False
    """Replace a file that exists, and what a run that was broken off has left."""
    n: Whole = 1
    """Responses per prompt."""
    temperature: Number = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: Number = 1.0
    """Sample from the most probable tokens of this mass."""
    top_k: Whole = 0
    """Sample from this many most probable tokens; 0 is all."""
    max_tokens: Whole = 256
    """Longest response."""
    stop: Annotated[tuple[str, ...], _SEVERAL] = ()
    """Strings that end a response."""
    stop_token_ids: Annotated[tuple[Whole, ...] | None, _SEVERAL] = None
    """Tokens that end a response; by default the model's own."""
    system_prompt: str | None = None
    """System message put before each prompt."""
    lengths: Path | None = None
    """JSONL of lists, one per prompt: the exact lengths of its n responses, for timing."""
    max_running: Whole = 64
    """Samples decoded at the same time."""
    kv_tokens: Whole | None = None
    """Tokens that the cache holds at most; by default what max_running samples may need."""
    speculation: str = "off"
    """auto, off, or how many next tokens are guessed from what is known; changes no response."""
    history: Path | None = None
    """Output of an earlier run, or samples of training: what --speculation guesses from, too."""
    seed: Whole = 0
    """Of the sampling noise."""
    dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16"
    """float32, bfloat16 or float64, of the weights."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cpu or cuda."""
    threads: Whole = 0
    """CPU threads; 0 is one per core."""
    as_json: Annotated[bool, Parameter(name="--json")] = False
    """Print the figures as JSON."""


def generate(options: Options) -> int:
    """Sample responses to the prompts of a JSONL file."""
    try:
        return _generate(options)
    except UserError as error:
        raise type(error)(_in_own_words(str(error))) from error


def _generate(options: Options) -> int:
    from plait.cli.kept import Kept
    from plait.observe.run_log import write_rows

    check_numbers(options)
    if options.resume and options.overwrite:
        raise ConfigError("--resume goes on with what is there, --overwrite drops it; give one of them")
    sampling, source, lengths = _sampling(options), *_files(options)
    history = _history(options)
    _engine(options)
    check_out(options)
    kept = Kept(options.out, asked_of(options), resume=options.resume, overwrite=options.overwrite)
    with opening(title_of("generate", None), _facts(options, source)):
        from plait.runtime.generate import generate as run
        from plait.runtime.process import set_up

        if options.device == "cuda":
            check_cuda()
        set_up(options.threads)
        try:
            report = run(_job(options, sampling, source, lengths, history), kept.add, kept.done)
            if report.is_whole:
                write_rows(options.out, kept.ordered())
                kept.drop()
        except RunError as error:
            raise RunError(f"{error}; {_what_is_kept(kept)}") from error
    figures = report.figures()
    say(json.dumps(figures) if options.as_json else summary(figures))
    if report.is_whole:
        if not options.as_json:
            say(f"written to {options.out}")
        return 0
    num_asked = len(source) * options.n
    say(f"interrupted: {len(kept.rows)} of {num_asked} responses are finished; {_what_is_kept(kept)}", file=sys.stderr)
    return 130


def asked_of(options: Options) -> dict[str, Any]:
    """What decides the responses, by option: a run that is resumed draws the rest as it would have drawn them.

    How many run at a time, and on how many threads, decides nothing but the last bits of a log-prob.
    """
    names = ("model", "n", "temperature", "top_p", "top_k", "max_tokens", "stop", "stop_token_ids", "system_prompt")
    asked = {name.replace("_", "-"): getattr(options, name) for name in (*names, "seed", "dtype")}
    files = {name: path for name in ("prompts", "lengths") if (path := getattr(options, name)) is not None}
    return asked | {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}


def _facts(options: Options, source: Source) -> dict[str, str]:
    how = "greedy" if options.temperature == 0 else f"temperature {options.temperature:g}"
    samples = f", {options.n} samples each" if options.n > 1 else ""
    return {
        "model": options.model,
        "prompts": f"{len(source):,} of {source.name}{samples}",
        "sampling": f"{how}, at most {options.max_tokens} tokens",
        "device": f"{options.device}, {options.dtype}",
        "out": f"{options.out} (to be continued)" if options.resume else str(options.out),
    }


def _what_is_kept(kept: Kept) -> str:
    if not kept.rows:
        return "nothing is written"
    return f"{len(kept.rows)} responses are in {kept.path}; the same command with --resume draws the others"


def _files(options: Options) -> tuple[Source, list[list[int]] | None]:
    """The prompts, and the lengths of their responses where there are any.

    Raises:
        DataError: a file is missing or malformed, or they are not of as many prompts.
    """
    from plait.data.sources import Source, read_jsonl

    source = Source(str(options.prompts), tuple(read_jsonl(options.prompts, key="--prompts")))
    lengths = read_lengths(options.lengths, options.n) if options.lengths else None
    if lengths is not None and len(lengths) != len(source):
        raise DataError(
            f"--lengths: {len(lengths)} lists of lengths for {len(source)} prompts of `{source.name}`; "
            "give one for each"
        )
    return source, lengths


def _sampling(options: Options) -> Sampling:
    """Raises ConfigError, naming the option, for a value out of its range."""
    from plait.generation.settings import Sampling

    try:
        return Sampling(
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            max_tokens=options.max_tokens,
            stop_token_ids=options.stop_token_ids,
            stop=options.stop,
        )
    except ConfigError as error:
        key, _, said = str(error).partition(":")
        raise ConfigError(f"--{key.replace('_', '-')}:{said}") from error


def _engine(options: Options) -> SamplingSettings:
    """Raises ConfigError, naming the option, where speculation is none of its choices."""
    from pydantic import ValidationError

    from plait.generation.settings import SamplingSettings

    try:
        return SamplingSettings(
            max_running=options.max_running,
            kv_tokens=options.kv_tokens,
            speculation=options.speculation,  # type: ignore[arg-type]
        )
    except ValidationError as error:
        raise ConfigError(f"--speculation: {error.errors()[0]['ctx']['error']}") from None


def _history(options: Options) -> tuple[Row, ...]:
    """Earlier samples, if there are any.

    Raises:
        ConfigError: they are given, and nothing is guessed.
        DataError: the file is missing or malformed, or its rows are no samples.
    """
    from plait.data.sources import read_jsonl

    if options.history is None:
        return ()
    if options.speculation == "off":
        raise ConfigError("--history is what guesses are taken from, but --speculation is off; set it to auto")
    return tuple(read_jsonl(options.history, key="--history"))


def _job(
    options: Options,
    sampling: Sampling,
    source: Source,
    lengths: list[list[int]] | None,
    history: tuple[Row, ...],
) -> Job:
    """The options in the words of the runtime."""
    from plait.runtime.generate import Job

    return Job(
        options.model,
        source,
        sampling,
        samples_per_prompt=options.n,
        lengths=lengths,
        system_prompt=options.system_prompt,
        engine=_engine(options),
        history=history,
        seed=options.seed,
        dtype=options.dtype,
        device=options.device,
    )


_OPTIONS = {
    "`data.source`": "`--prompts`",
    "`data.system_prompt`": "`--system-prompt`",
    "set `data.prompt_column`": "name the one with the prompts `prompt`",
    "`model`": "`--model`",
    ", or reasoning_gym:TASK": "",
    ", or give text prompts with `data.chat_template: false`": "",
}


def _in_own_words(message: str) -> str:
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
        ("--threads", options.threads, 0, 4096),
        ("--stop-token-ids", min(options.stop_token_ids or (0,)), 0, MOST),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{option}: expected at least {least}, found {value}")
        if value is not None and value > most:
            raise ConfigError(f"{option}: expected at most {most:,}, found {value}")


def check_out(options: Options) -> None:
    """Make the folder of `out` and see that it can be written, so that no response is lost for want of a place.

    Raises:
        ConfigError: the file exists, or its folder cannot be made or written.
    """
    out = options.out
    read = [path for path in (options.prompts, options.lengths, options.history) if path is not None]
    check_file(out, "--out", overwrite=options.overwrite, inputs=read)
    part = out.with_name(f".{out.name}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        part.unlink()
    except OSError as error:
        raise ConfigError(f"--out: `{out}` cannot be written: {error.strerror or error}; give another file") from None


def check_cuda() -> None:
    """Raises ConfigError where there is no CUDA device."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("--device: cuda is asked for, but torch finds no CUDA device; set it to cpu")


def read_lengths(path: Path, n: int) -> list[list[int]]:
    """One list of `n` response lengths per line; blank lines are skipped.

    Raises:
        DataError: the file is missing or no text, or a line is no list of `n` positive integers.
    """
    from plait.data.files import why_no_file

    if not path.is_file():
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


def _of_speculation(found: dict[str, float]) -> str:
    if not found["draft_tokens"]:
        return "speculation: no guess was worth computing"
    return (
        f"speculation: {found['mean_acceptance_length']:.2f} tokens per sample and step where guesses were computed "
        f"({found['drafted_steps']:.0%} of steps), {found['draft_acceptance_rate']:.0%} of "
        f"{found['draft_tokens']:,.0f} guesses came true; {found['saved_s']:.1f} s saved by its own account"
    )


def summary(figures: dict[str, Any]) -> str:
    step, share, reason = figures["step_ms"], figures["limit_share"], figures["not_compiled"]
    limit = "" if share is None else f"; {share:.0%} of what this machine can at most"
    return (
        f"{figures['samples']} samples, {figures['tokens']:,} tokens in {figures['seconds']:.1f} s: "
        f"{figures['tokens_per_s']:,.0f} tokens/s (prefill {figures['prefill_tokens_per_s']:,.0f}, "
        f"decode {figures['decode_tokens_per_s']:,.0f}){limit}\n"
        f"decode step {step['p50']:.1f} ms median, {step['p90']:.1f} p90, {step['p99']:.1f} p99; "
        f"KV cache at most {figures['kv_peak_bytes'] / 2**20:.0f} MiB"
        + ("" if figures["speculation"] is None else "\n" + _of_speculation(figures["speculation"]))
        + ("" if reason is None else f"\ncomputed by the model's own layers, not by compiled ones: {reason}")
    )
