"""`plait generate --model M --prompts FILE --out FILE`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from plait.cli.generate_options import (
    Options,
    asked_of,
    check_numbers,
    check_out,
    in_own_words,
    read_lengths,
)
from plait.cli.opening import opening, title_of
from plait.errors import ConfigError, DataError, ModelError, RunError, UserError
from plait.observe.screen import say
from plait.settings import said_of_value

if TYPE_CHECKING:
    from pathlib import Path

    from plait.cli.kept import Kept
    from plait.data.sources import Source
    from plait.generation.sampling import Sampling
    from plait.generation.settings import SamplingSettings
    from plait.runtime.evaluating.generate_job import Job


def generate(options: Options) -> int:
    """Sample responses to the prompts of a file."""
    try:
        return _generate(options)
    except UserError as error:
        raise type(error)(in_own_words(str(error))) from error


def _generate(options: Options) -> int:
    from plait.cli.kept import Kept
    from plait.observe.run_log import write_rows

    check_numbers(options)
    if options.resume and options.overwrite:
        raise ConfigError("--resume goes on with what is there, --overwrite drops it; give one of them")
    sampling, source, lengths = _sampling(options), *_files(options)
    history = _history(options)
    _engine(options)
    _models(options)
    check_out(options)
    with (
        Kept(options.out, asked_of(options), resume=options.resume, overwrite=options.overwrite) as kept,
        opening(title_of("generate", None), _facts(options, source)),
    ):
        from plait.models.devices import check_cuda
        from plait.runtime.processes.generating import generate as run

        if options.device == "cuda":
            check_cuda(options.dtype, "--device")
        try:
            report = run(_job(options, sampling, source, lengths, history), kept.add, kept.done)
            if report.is_whole:
                write_rows(options.out, kept.ordered())
                kept.drop()
        except RunError as error:
            ends = "\n" if "\n" in str(error) else "; "  # behind a stack on a line of its own
            raise RunError(f"{error}{ends}{_what_is_kept(kept)}") from error
        except KeyboardInterrupt:
            said = f"interrupted; {_what_is_kept(kept)}"
            say(said, file=sys.stderr)
            raise KeyboardInterrupt(said) from None
    figures = report.figures()
    say(json.dumps(figures) if options.as_json else summary(figures, drafts=options.speculation == "auto"))
    if report.is_whole:
        if not options.as_json:
            say(f"written to {options.out}")
        return 0
    num_asked = len(source) * options.n
    say(f"interrupted: {len(kept.rows)} of {num_asked} responses are finished; {_what_is_kept(kept)}", file=sys.stderr)
    return 130


def _facts(options: Options, source: Source) -> dict[str, str]:
    how = "greedy" if options.temperature == 0 else f"temperature {options.temperature:g}"
    samples = f", {options.n} samples each" if options.n > 1 else ""
    processes = min(options.devices, len(source))
    several = [f"{processes} processes"] if processes > 1 else []
    return {
        "model": options.model,
        "prompts": f"{len(source):,} of {source.name}{samples}",
        "sampling": f"{how}, at most {options.max_tokens} tokens",
        "device": ", ".join([options.device, *several, options.dtype]),
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
    from plait.data.sources import Source, read_prompts

    source = Source(str(options.prompts), tuple(read_prompts(options.prompts, options.prompt_column, key="--prompts")))
    lengths = read_lengths(options.lengths, options.n) if options.lengths else None
    if lengths is not None and len(lengths) != len(source):
        raise DataError(
            f"--lengths: {len(lengths)} lists of lengths for {len(source)} prompts of `{source.name}`; "
            "give one for each"
        )
    return source, lengths


def _sampling(options: Options) -> Sampling:
    """Raises ConfigError, naming the option, for a value out of its range."""
    from plait.generation.sampling import Sampling

    try:
        return Sampling(
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            max_tokens=options.max_tokens,
            stop_token_ids=options.stop_token_ids,
            stop=options.stop,
        )
    except ConfigError as error:
        key, _, problem = str(error).partition(":")
        raise ConfigError(f"--{key.replace('_', '-')}:{problem}") from error


def _models(options: Options) -> None:
    """See that the models are there, as far as their files tell, before anything is loaded. Raises ModelError."""
    from plait.models.files.hub import check_model

    check_model(options.model)
    try:
        if options.draft_model is not None:
            check_model(options.draft_model)
    except ModelError as error:
        raise ModelError(f"--draft-model: {error}") from error


def _engine(options: Options) -> SamplingSettings:
    """Raises ConfigError, naming the option, where its value is none of its choices, or a draft model is of no use."""
    from pydantic import ValidationError

    from plait.generation.settings import SamplingSettings

    if options.draft_model is not None and options.speculation == "off":
        raise ConfigError("--draft-model proposes next tokens, but --speculation is off; set it to auto")
    if options.draft_model is not None and options.device != "cpu" and options.speculation == "auto":
        raise ConfigError(
            f"--draft-model proposes next tokens, but --speculation is auto, which drafts nothing where --device is "
            f"{options.device}; set it to adaptive"
        )
    stated = {} if options.max_running is None else {"max_running": options.max_running}
    try:
        return SamplingSettings(
            **stated,
            kv_tokens=options.kv_tokens,
            speculation=options.speculation,  # type: ignore[arg-type]
            draft_model=options.draft_model,
        )
    except ValidationError as error:
        detail = error.errors()[0]
        option = str(detail["loc"][0]).replace("_", "-")
        raise ConfigError(f"--{option}: {said_of_value(detail)}, found {detail['input']!r}") from None


def _history(options: Options) -> list[Path]:
    """Files of earlier samples, if there are any.

    Raises:
        ConfigError: they are given, and nothing is drafted; there is no such file; the folder is no run's, or the run
            has none yet.
    """
    from plait.runtime.folder.run_files import newest_samples

    if options.history is None:
        return []
    if options.speculation == "off":
        raise ConfigError("--history is what drafts are taken from, but --speculation is off; set it to auto")
    if options.history.is_dir():
        return newest_samples(options.history, "--history")
    if not options.history.exists():
        raise ConfigError(
            f"--history: {options.history} is not there; give what an earlier `plait generate` wrote, or a run's folder"
        )
    return [options.history]


def _job(
    options: Options,
    sampling: Sampling,
    source: Source,
    lengths: list[list[int]] | None,
    history: list[Path],
) -> Job:
    """The options in the words of the runtime."""
    from plait.runtime.evaluating.generate_job import Job

    return Job(
        options.model,
        source,
        sampling,
        samples_per_prompt=options.n,
        lengths=lengths,
        system_prompt=options.system_prompt,
        chat_template=options.chat_template == "true" if options.chat_template != "auto" else "auto",
        engine=_engine(options),
        history=history,
        seed=options.seed,
        dtype=options.dtype,
        device=options.device,
        devices=options.devices,
        threads=options.threads,
    )


def _of_speculation(counts: dict[str, float]) -> str:
    if not counts["draft_tokens"]:
        return "speculation: no draft token was worth computing"
    by_place, by_source = (
        ", ".join(
            f"{name.removeprefix(prefix)} {share:.0%}" for name, share in counts.items() if name.startswith(prefix)
        )
        for prefix in ("acceptance_at_", "acceptance_of_")
    )
    often = f" ({counts['drafted_steps']:.0%} of steps)" if "drafted_steps" in counts else ""
    return (
        f"speculation: {counts['mean_acceptance_length']:.2f} tokens per sample and step with draft tokens"
        f"{often}\n"
        f"  {counts['draft_tokens']:,.0f} rows verified draft tokens, {counts['draft_acceptance_rate']:.0%} of which "
        f"were accepted; where all before were, by position in the draft: {by_place}; by source: {by_source}\n"
        f"  {counts['saved_s']:.1f} s saved by the fitted cost of a step, {counts['drafting_s']:.1f} s spent"
        " on drafting"
    )


def summary(figures: dict[str, Any], *, drafts: bool) -> str:
    """
    Args:
        figures: of the report.
        drafts: whether drafts were asked for where they change no bit.
    """
    from plait.recipes.engine_checks import none_by_layers

    step, share, reason = figures["step_ms"], figures["limit_share"], figures["not_compiled"]
    limit = "" if share is None else f"; {share:.0%} of what this machine can at most"
    auto_is_idle = drafts and reason is not None and figures["speculation"] is None
    return (
        f"{figures['samples']} samples, {figures['tokens']:,} tokens in {figures['seconds']:.1f} s: "
        f"{figures['tokens_per_s']:,.0f} tokens/s (prefill {figures['prefill_tokens_per_s']:,.0f}, "
        f"decode {figures['decode_tokens_per_s']:,.0f}){limit}\n"
        f"decode step {step['p50']:.1f} ms median, {step['p90']:.1f} p90, {step['p99']:.1f} p99; "
        f"KV cache at most {figures['kv_peak_bytes'] / 2**20:.0f} MiB"
        + ("" if figures["speculation"] is None else "\n" + _of_speculation(figures["speculation"]))
        + ("" if reason is None else f"\ncomputed by the model's own layers, not by compiled ones: {reason}")
        + (f"\nspeculative decoding: {none_by_layers('--speculation', str(reason))}" if auto_is_idle else "")
    )
