"""`plait generate --model M --prompts FILE --out FILE`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from plait.errors import ConfigError, DataError


def generate(
    *,
    model: str,
    prompts: Path,
    out: Path,
    n: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    max_tokens: int = 256,
    stop: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (),
    system_prompt: str | None = None,
    lengths: Path | None = None,
    max_running: int = 64,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16",
    device: Literal["cpu", "cuda"] = "cpu",
    threads: int = 0,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
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
        0 is greedy.
    top_p
        Sample from the most probable tokens of this mass.
    top_k
        Sample from this many most probable tokens; 0 is all.
    max_tokens
        Longest response.
    stop
        Strings that end a response.
    system_prompt
        System message put before each prompt.
    lengths
        JSONL of lists: exact response lengths per prompt, for timing.
    max_running
        Samples decoded at the same time.
    seed
        Of the sampling noise.
    dtype
        Of the weights.
    device
        cpu or cuda.
    threads
        CPU threads; 0 is one per core.
    as_json
        Print the figures as JSON.
    """
    from plait.generation.settings import Sampling
    from plait.observe.run_log import write_rows

    if out.exists():
        raise ConfigError(f"--out: `{out}` exists; give another file")
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens, stop=stop)
    if n < 1:
        raise ConfigError(f"--n: expected at least 1, found {n}")
    wanted = read_lengths(lengths) if lengths else None
    from plait.runtime.generate import generate as run
    from plait.runtime.process import set_up

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


def read_lengths(path: Path) -> list[list[int]]:
    """One list of response lengths per line.

    Raises:
        DataError: the file is missing, or a line is no list of positive integers.
    """
    if not path.is_file():
        raise DataError(f"--lengths: `{path}` does not exist")
    wanted = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{number}: malformed JSON ({error.msg})") from None
        if not isinstance(values, list) or not values or not all(isinstance(v, int) and v > 0 for v in values):
            raise DataError(f"{path}:{number}: expected a list of positive integers, found {line[:60]}")
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
