"""`plait generate --model M --prompts FILE --out FILE`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from plait.cli.app import Whole
from plait.errors import ConfigError, DataError

if TYPE_CHECKING:
    from plait.generation.settings import Sampling

_SEVERAL = Parameter(consume_multiple=1)


def generate(
    *,
    model: str,
    prompts: Path,
    out: Path,
    n: Whole = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: Whole = 0,
    max_tokens: Whole = 256,
    stop: Annotated[tuple[str, ...], _SEVERAL] = (),
    stop_token_ids: Annotated[tuple[Whole, ...] | None, _SEVERAL] = None,
    system_prompt: str | None = None,
    lengths: Path | None = None,
    max_running: Whole = 64,
    seed: Whole = 0,
    dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16",
    device: Literal["cpu", "cuda"] = "cpu",
    threads: Whole = 0,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Sample responses to the prompts of a JSONL file.

    Parameters
    ----------
    model
        smollm2-135m-instruct, a local folder, or a hub id.
    prompts
        JSONL with a column `prompt`: text or messages.
    out
        JSONL to write: prompt, response, token ids, log-probs.
    n
        Responses per prompt.
    temperature
        Divides the logits; 0 is greedy.
    top_p
        Sample from the most probable tokens of this mass.
    top_k
        Sample from this many most probable tokens; 0 is all.
    max_tokens
        Longest response.
    stop
        Strings that end a response.
    stop_token_ids
        Tokens that end a response; by default the model's own.
    system_prompt
        System message put before each prompt.
    lengths
        JSONL of lists, one per prompt: the exact lengths of its n responses, for timing.
    max_running
        Samples decoded at the same time.
    seed
        Of the sampling noise.
    dtype
        float32, bfloat16 or float64, of the weights.
    device
        cpu or cuda.
    threads
        CPU threads; 0 is one per core.
    as_json
        Print the figures as JSON.
    """
    from plait.generation.settings import Sampling
    from plait.observe.run_log import write_rows

    sampling = Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        stop=stop,
    )
    check_numbers(sampling, n=n, max_running=max_running, seed=seed, threads=threads)
    wanted = read_lengths(lengths, n) if lengths else None
    check_out(out)
    from plait.runtime.generate import generate as run
    from plait.runtime.process import set_up

    if device == "cuda":
        check_cuda()
    set_up(threads)
    report = run(
        model,
        prompts,
        sampling,
        samples_per_prompt=n,
        lengths=wanted,
        system_prompt=system_prompt,
        max_running=max_running,
        seed=seed,
        dtype=dtype,
        device=device,
    )
    write_rows(out, report.rows())
    figures = report.figures()
    print(json.dumps(figures) if as_json else summary(figures, out))
    return 0


def check_numbers(sampling: Sampling, *, n: int, max_running: int, seed: int, threads: int) -> None:
    """Raises ConfigError, naming the option, for a number below what it may be."""
    for option, value, least in (
        ("--n", n, 1),
        ("--max-running", max_running, 1),
        ("--seed", seed, 0),
        ("--threads", threads, 0),
        ("--stop-token-ids", min(sampling.stop_token_ids or (0,)), 0),
    ):
        if value < least:
            raise ConfigError(f"{option}: expected at least {least}, found {value}")


def check_out(out: Path) -> None:
    """Make the folder of `out` and see that it can be written, so that no response is lost for want of a place.

    Raises:
        ConfigError: the file exists, or its folder cannot be made or written.
    """
    if out.exists():
        raise ConfigError(f"--out: `{out}` exists; give another file")
    part = out.with_name(out.name + ".tmp")
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
    if not path.is_file():
        raise DataError(f"--lengths: `{path}` does not exist; give a JSONL file of lists")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"--lengths: `{path}` is not UTF-8 ({error.reason} at byte {error.start})") from None
    wanted = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"--lengths: {path}:{number}: malformed JSON ({error.msg})") from None
        if not isinstance(values, list) or not all(type(value) is int and value > 0 for value in values):
            raise DataError(f"--lengths: {path}:{number}: expected a list of positive whole numbers, found {line[:60]}")
        if len(values) != n:
            raise DataError(
                f"--lengths: {path}:{number} has {len(values)} lengths, but --n is {n}; they must be the same"
            )
        wanted.append(values)
    return wanted


def summary(figures: dict[str, Any], out: Path) -> str:
    step = figures["step_ms"]
    return (
        f"{figures['samples']} samples, {figures['tokens']:,} tokens in {figures['seconds']:.1f} s: "
        f"{figures['tokens_per_s']:,.0f} tokens/s (prefill {figures['prefill_tokens_per_s']:,.0f}, "
        f"decode {figures['decode_tokens_per_s']:,.0f})\n"
        f"decode step {step['p50']:.1f} ms median, {step['p90']:.1f} p90, {step['p99']:.1f} p99; "
        f"KV cache at most {figures['kv_peak_bytes'] / 2**20:.0f} MiB\nwritten to {out}"
    )
