"""What a GPU does by plait, against Transformers, the device's own limits, vLLM, TRL and plait's predictions.

    python benchmarks/gpu.py                                  # 25 minutes of a machine with one GPU
    python benchmarks/gpu.py --parts tokens,decode --shapes 135M
    python benchmarks/gpu.py --tiny                           # on a CPU: does the benchmark itself work?

Each part is a process of its own with a time of its own (`--limits` prints them); a part that fails or takes longer is
said and left, and the next one begins. Models have random weights: nothing is fetched. `--folder` keeps them, so that
parts may be run by several commands.

    tokens      greedy tokens and log-probs against Transformers
    decode      seconds of a decode step of 1 to 256 samples, as a share of the roofline of memory
    vllm        the same by vLLM, where it is installed (`--vllm-python`)
    training    MFU of micro-batches of 16k tokens, activations kept and recomputed
    predicted   `plait profile`, then a run of GRPO: step time and peak memory beside what was forecast
    grpo, ppo   steps against TRL's, where it is installed
    two         two processes on one device, where NCCL allows it

Exit code 1: a part failed, or took too long, or found what it compares far off.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from on_device.job import SHAPES, Job
from ppo_step import peer_python

LIMITS: Mapping[str, int] = {
    "tokens": 120,
    "decode": 240,
    "vllm": 240,
    "training": 180,
    "predicted": 480,
    "grpo": 90,
    "ppo": 90,
    "two": 60,
}
"""Seconds of each part, in the order in which they are run."""
HERE = Path(__file__).resolve().parent


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.limits:
        print("\n".join(f"{part:<10} {seconds:>4} s" for part, seconds in LIMITS.items()))
        return 0
    if not options.tiny and not torch.cuda.is_available():
        print("benchmarks/gpu.py: expected a CUDA device, found none; `--tiny` runs on a CPU", file=sys.stderr)
        return 2
    failed = False
    with tempfile.TemporaryDirectory(prefix="plait-gpu-") as temporary:
        name = str(options.folder or temporary)
        Path(name).mkdir(parents=True, exist_ok=True)
        device, dtype = ("cpu", "float32") if options.tiny else ("cuda", "bfloat16")
        shapes = ("tiny",) if options.tiny else tuple(options.shapes)
        Job(device, dtype, shapes, options.tiny, name).save(Path(name) / "job.json")
        for part in options.parts:
            failed |= not run(part, Path(name) / "job.json", options)
    return int(failed)


def run(part: str, job: Path, options: argparse.Namespace) -> bool:
    """One part; whether it went well, or there is nothing to run it with."""
    print(f"== {part}", flush=True)
    if (missing := lacks(part, options)) is not None:
        print(f"left out: {missing}", flush=True)
        return True
    limit_s = options.limit_s or LIMITS[part]
    paths = [str(HERE), str(HERE.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "PLAIT_CACHE": str(job.with_name("cache"))}
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    began = time.perf_counter()
    # A group of its own, so that what a part has started ends with it.
    process = subprocess.Popen(
        command_of(part, job, options), env={**os.environ, **offline, **environment}, start_new_session=True
    )
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        print(f"-- {part}: stopped after {limit_s} s", flush=True)
        return False
    print(f"-- {part}: {time.perf_counter() - began:.0f} s{f', exit code {code}' if code else ''}", flush=True)
    return code == 0


def lacks(part: str, options: argparse.Namespace) -> str | None:
    """What a part needs and is not there."""
    if part == "vllm" and not (options.vllm_python and options.vllm_python.is_file()):
        return "no vLLM: name the Python that it is installed for by --vllm-python"
    if part == "grpo" and find_spec("trl") is None:
        return "TRL is not installed"
    if part == "ppo" and not options.ppo_python.is_file():
        return f"no TRL 1.10: {options.ppo_python} does not exist; benchmarks/ppo/setup_peer.sh makes it"
    return None


def command_of(part: str, job: Path, options: argparse.Namespace) -> list[str]:
    if part == "vllm":
        return [str(options.vllm_python), "-m", "on_device.vllm_decode", str(job)]
    if part not in ("grpo", "ppo"):
        return [sys.executable, "-m", f"on_device.{part}", str(job)]
    how = ["--tiny", "--repeats", "1"] if options.tiny else ["--device", "cuda", "--threads", "8"]
    if part == "grpo" and not options.tiny:
        how += ["--model", Job.load(job).model("135M")]
    if part == "ppo":
        how += ["--peer-python", str(options.ppo_python)]
        how += [] if options.tiny else ["--dtype", "bfloat16", "--peer-precision", "bfloat16"]
    return [sys.executable, str(HERE / f"{part}_step.py"), *how]


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
    parser.add_argument("--folder", type=Path, help="for models and measurements, which are kept there")
    parser.add_argument("--vllm-python", type=Path, help="the Python that vLLM is installed for")
    parser.add_argument("--ppo-python", type=Path, default=peer_python(), help="has TRL 1.10")
    return parser


if __name__ == "__main__":
    sys.exit(main())
