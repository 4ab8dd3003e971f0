"""What a GPU does by plait, against Transformers, the device's own limits, vLLM, TRL and plait's predictions.

    python benchmarks/gpu.py                                  # 28 minutes of a machine with one GPU
    python benchmarks/gpu.py --within-s 570                   # what is newest and says most, in ten minutes
    python benchmarks/gpu.py --within-s 200 --parts drafts,turns           # and what a quarter of an hour has room for
    python benchmarks/gpu.py --tiny                           # on a CPU: does the benchmark itself work?

Each part is a process of its own, of some parts for each shape, with a time of its own (`--limits` prints them), and
what those before it have left: one that fails or takes longer is said and left, and the next one begins. First come
those that say most, of the largest shape. Models have random weights: nothing is fetched. `--folder` keeps
them, so that parts may be run by several commands.

In the folder of `--report` (by default that of `--folder`, and without either `gpu-report` where the command is given)
stand `results.jsonl`, one line for each measurement, written when it is made, and for how each part ended; and what
each part printed, whole, as `PART.log`.

    features    whole runs of what was built without a GPU, by tiny models, against the same on a CPU
    decode      seconds of a decode step of 1 to 256 samples, as a share of the roofline of memory
    training    MFU of micro-batches of 16k tokens, activations kept and recomputed, and what the rest of it goes to
    tests       plait's own tests that need a GPU
    prompts     rollouts in which prompts come as samples end: their steps by graphs, against launched; of the largest
    drafts      what drafts of a draft model cost and gain; of that shape, the last one of `--shapes`
    turns       rounds of turns whose keys and values stay, against such as are computed again; of that shape
    predicted   `plait profile`, then a run of GRPO: step time and peak memory beside what was forecast; of that shape
    grpo        a step against TRL's; of plait alone where TRL is not installed
    products    how fast products of a decode step read their weights, by cuBLAS and by others
    tokens      greedy tokens and log-probs against Transformers
    two         two processes on one device, where NCCL allows it
    vllm        seconds of a decode step by vLLM, where it is installed (`--vllm-python`)
    ppo         a step against TRL 1.10's, where it is installed

Exit code 1: a part failed, or took too long, or found what it compares far off; 2: something that all need is missing.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from ending import ends_when_terminated
from on_device.job import SHAPES, Job
from ppo_step import peer_python

Shapes = Callable[[Sequence[str]], Sequence[str]]
"""Which of the shapes that are asked for, from the smallest to the largest, a round is run for."""
_LARGEST: Shapes = lambda shapes: shapes[-1:]
_OTHERS: Shapes = lambda shapes: shapes[-2::-1]
_ALL: Shapes = lambda shapes: shapes[::-1]
_OF_NONE: Shapes = lambda shapes: ("",)
ROUNDS: Sequence[tuple[Sequence[str], Shapes]] = (
    (("features",), _OF_NONE),
    (("decode", "training"), _LARGEST),
    (("tests",), _OF_NONE),
    (("prompts",), _LARGEST),
    (("drafts",), _LARGEST),
    (("turns",), _LARGEST),
    (("predicted",), _LARGEST),
    (("products",), _OF_NONE),
    (("decode",), _OTHERS),
    (("grpo",), _OF_NONE),
    (("tokens",), _ALL),
    (("training",), _OTHERS),
    (("two",), _OF_NONE),
    (("vllm",), _ALL),
    (("ppo",), _OF_NONE),
)
"""Parts in the order in which they are run; of one round all of a shape before those of the next one. First what would
spoil what is measured if it were wrong, then the two figures that say most, of the largest shape, as of it less is what
launches take; then what was never measured."""
LIMITS: Mapping[str, int] = {
    "features": 150,
    "decode": 85,
    "prompts": 55,
    "drafts": 130,
    "turns": 50,
    "predicted": 230,
    "products": 55,
    "grpo": 75,
    "tokens": 85,
    "training": 110,
    "tests": 120,
    "two": 60,
    "vllm": 55,
    "ppo": 55,
}
"""Seconds of each part, for each shape."""
LEAST = 0.5
"""Of its seconds, below which a part is not begun: a shorter one behind it may still have room."""
TESTS_AT_A_TIME, TEST_S = 6, 90
"""Processes that test, where pytest-xdist is installed: for most tests the host compiles kernels. Seconds of a test."""
DUMP_S = 5.0
"""For a part that is stopped to say where it was."""
_AS_THEIR_PACKAGE = "torch transformers accelerate safetensors numpy numba psutil pydantic cyclopts rich gguf jinja2"
NEEDED: Mapping[str, str] = {"yaml": "pyyaml", **{name: name for name in _AS_THEIR_PACKAGE.split()}}
"""Module → package: what plait needs, which is not installed itself."""
TESTED_BY: Mapping[str, str] = {"pytest": "pytest", "pytest_timeout": "pytest-timeout", "hypothesis": "hypothesis"}
"""Module → package: what plait's tests need beside."""
HERE = Path(__file__).resolve().parent
FEATURES = HERE.parent / "tests" / "runs" / "test_on_gpus.py"
"""Which are a part of their own, as each of them is two runs."""
LEFT_OUT = "left out"
REPORT = Path("gpu-report")
"""Where what was found stays, if no folder is named."""


def main(arguments: Sequence[str] | None = None) -> int:
    began, options = time.monotonic(), _parser().parse_args(arguments)
    if options.limits:
        print("\n".join(f"{part:<10} {seconds:>4} s" for part, seconds in LIMITS.items()))
        return 0
    if (wrong := unready(options.tiny)) is not None:
        print(f"benchmarks/gpu.py: {wrong}", file=sys.stderr)
        return 2
    with ends_when_terminated(), tempfile.TemporaryDirectory(prefix="plait-gpu-") as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        report = (options.report or options.folder or REPORT).resolve()
        for one in (folder, report):
            one.mkdir(parents=True, exist_ok=True)
        device, dtype = ("cpu", "float32") if options.tiny else ("cuda", "bfloat16")
        shapes = ("tiny",) if options.tiny else tuple(options.shapes)
        job = Job(device, dtype, shapes, options.tiny, str(folder), str(report))
        job.record("machine", "", **machine())
        until = began + options.within_s if options.within_s else float("inf")
        ended: dict[tuple[str, str], str] = {}
        due = time.monotonic()
        for part, shape in order(options.parts, shapes):
            due += options.limit_s or LIMITS[part]
            ended[part, shape] = run_part(part, shape, job, options, until, due)
    print("\n".join(("== in all", *(f"{f'{part} {shape}':<16} {how}" for (part, shape), how in ended.items()))))
    return int(not all(how == "done" or how.startswith(LEFT_OUT) for how in ended.values()))


def order(parts: Sequence[str], shapes: Sequence[str]) -> list[tuple[str, str]]:
    """Each part with each of its shapes ("" where it has none), in the order in which they are run."""
    return [(part, shape) for together, of in ROUNDS for shape in of(shapes) for part in together if part in parts]


def unready(is_tiny: bool) -> str | None:
    """What all parts need and is not there."""
    needed = dict(NEEDED) if is_tiny else {**NEEDED, "triton": "triton"}
    if missing := [package for module, package in needed.items() if find_spec(module) is None]:
        return f"expected what plait needs to be installed, found no {', '.join(missing)}; `pip install` them"
    import torch

    if not is_tiny and not torch.cuda.is_available():
        return "expected a CUDA device, found none; `--tiny` runs on a CPU"
    for module, package in needed.items():
        try:
            import_module(module)
        except ImportError as error:  # brought along without what it needs itself: each part would say so by itself
            if module != "numba":  # of a CPU alone, and plait computes without it
                return f"expected {package} to be imported, found: {error}"
    return None


def machine() -> dict[str, object]:
    """The device and the versions of what computes on it."""
    import torch

    found: dict[str, object] = {"python": sys.version.split()[0], "cpus": os.cpu_count()}
    for package in ("torch", "triton", "transformers", "numba"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if torch.cuda.is_available():
        sizes = torch.cuda.get_device_properties(0)
        found |= {"device": sizes.name, "bytes": sizes.total_memory, "cuda": torch.version.cuda}
    return found


def run_part(part: str, shape: str, job: Job, options: argparse.Namespace, until: float, due: float = 0.0) -> str:
    """One part, for one shape; how it ended.

    Args:
        until: no part goes on after this time of the monotonic clock.
        due: when it would end if it and all before it took their whole time: what they left is its.
    """
    now, title = time.monotonic(), f"{part} {shape}".rstrip()
    print(f"== {title}", flush=True)
    wanted_s = options.limit_s or LIMITS[part]
    limit_s = min(max(wanted_s, due - now), until - now)
    if (missing := lacks(part, options)) is not None:
        ended = f"{LEFT_OUT}: {missing}"
    elif limit_s < LEAST * wanted_s:
        ended = "not begun: there is no time left"
    else:
        own = replace(job.of_shape(shape) if shape else job, ends=time.time() + limit_s)
        ended = run(command_of(part, own.saved(), options), own, Path(job.report) / f"{part}.log", limit_s)
    seconds = time.monotonic() - now
    print(f"-- {title}: {ended}, {seconds:.0f} s", flush=True)
    job.record(part, shape, ended=ended, seconds=round(seconds, 1))
    return ended


def run(command: Sequence[str], job: Job, log: Path, limit_s: float) -> str:
    """Run a part; how it ended. What it prints goes to its log, and from there to the screen."""
    paths = [str(HERE), str(HERE.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PLAIT_CACHE": str(Path(job.folder) / "cache"),
        "HF_HUB_OFFLINE": "1",
        "PLAIT_GPU_TESTS": job.device,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # where it was, when it is stopped or crashes
    }
    until = time.monotonic() + limit_s
    with open(log, "ab") as written, open(log, "rb") as read:
        read.seek(0, os.SEEK_END)
        # A group of its own, so that what a part has started ends with it.
        process = subprocess.Popen(
            command, env=environment, stdout=written, stderr=subprocess.STDOUT, cwd=HERE.parent, start_new_session=True
        )
        try:
            while process.poll() is None and time.monotonic() < until:
                _show(read)
                time.sleep(0.1)
            is_late = process.poll() is None
        finally:
            _end(process)
            _show(read)
    if is_late:
        return f"stopped after {limit_s:.0f} s"
    return "done" if process.returncode == 0 else f"exit code {process.returncode}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part and what it has started; one that still runs says where it is before."""
    for number, wait_s in ((signal.SIGABRT, DUMP_S), (signal.SIGKILL, None)):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _show(read: IO[bytes]) -> None:
    """What has come to a log."""
    sys.stdout.write(read.read().decode(errors="replace"))
    sys.stdout.flush()


def lacks(part: str, options: argparse.Namespace) -> str | None:
    """What a part needs and is not there."""
    if part == "tests" and options.tiny:
        return "they are of a GPU"
    if part in ("features", "tests") and (
        missing := [package for module, package in TESTED_BY.items() if find_spec(module) is None]
    ):
        return f"{', '.join(missing)}: not installed"
    if part == "vllm" and not (options.vllm_python and options.vllm_python.is_file()):
        return "no vLLM: name the Python that it is installed for by --vllm-python"
    if part == "ppo" and not options.ppo_python.is_file():
        return f"no TRL 1.10: {options.ppo_python} does not exist; benchmarks/ppo/setup_peer.sh makes it"
    return None


def command_of(part: str, job: Path, options: argparse.Namespace) -> list[str]:
    if part == "vllm":
        return [str(options.vllm_python), "-m", "on_device.vllm_decode", str(job)]
    if part in ("features", "tests"):
        several = ["-n", str(TESTS_AT_A_TIME)] if find_spec("xdist") is not None else []
        limit_s = TEST_S * (10 if options.tiny else 1)  # a CPU compiles kernels first
        how = ["-v", "-p", "no:cacheprovider", "--timeout", str(limit_s), *several]
        which = [str(FEATURES)] if part == "features" else ["-m", "cuda and not slow", *tests_of_gpus()]
        return [sys.executable, "-m", "pytest", *how, *which, *(["-k", "gpu_trains and kept"] if options.tiny else [])]
    if part != "ppo":
        return [sys.executable, "-m", f"on_device.{part}", str(job)]
    how = ["--tiny", "--repeats", "1"] if options.tiny else ["--device", "cuda", "--threads", "8"]
    how += ["--peer-python", str(options.ppo_python)]
    how += [] if options.tiny else ["--dtype", "bfloat16", "--peer-precision", "bfloat16"]
    return [sys.executable, str(HERE / "ppo_step.py"), *how]


def tests_of_gpus() -> list[str]:
    """Files with tests that need a GPU, or run on one where there is one."""
    files = sorted((HERE.parent / "tests").rglob("test_*.py"))
    return [str(file) for file in files if file != FEATURES and "pytest.mark.cuda" in file.read_text(encoding="utf-8")]


def _parts(text: str) -> list[str]:
    parts = text.split(",")
    if unknown := [part for part in parts if part not in LIMITS]:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(LIMITS)}, found {', '.join(unknown)}")
    return parts


def _shapes(text: str) -> list[str]:
    shapes = text.split(",")
    if unknown := [shape for shape in shapes if shape not in SHAPES]:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(SHAPES)}, found {', '.join(unknown)}")
    return shapes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers, on a CPU")
    parser.add_argument("--parts", type=_parts, default=list(LIMITS), help="comma-separated")
    parser.add_argument("--shapes", type=_shapes, default=["135M", "1.5B"], help="comma-separated")
    parser.add_argument("--limit-s", type=int, default=0, help="of each part, in place of its own")
    parser.add_argument("--limits", action="store_true", help="print the seconds of each part")
    parser.add_argument("--within-s", type=int, default=0, help="of the whole command: what has no time is left")
    parser.add_argument("--folder", type=Path, help="for models and measurements, which are kept there")
    parser.add_argument("--report", type=Path, help="for results.jsonl and logs; --folder, or gpu-report")
    parser.add_argument("--vllm-python", type=Path, help="the Python that vLLM is installed for")
    parser.add_argument("--ppo-python", type=Path, default=peer_python(), help="has TRL 1.10")
    return parser


if __name__ == "__main__":
    sys.exit(main())
