"""How much vLLM gains by n-gram speculation on the prompts of `speculation.py`, for its table to stand beside.

    python benchmarks/speculation_vllm.py --task code --temperature 0.3 --running 1 4 8
    python benchmarks/speculation_vllm.py --tiny --repeats 1      # does the benchmark itself work?

vLLM runs in its own environment (docs/engines.md), with the kernels and graphs that it has by itself, once without
drafts and once with, one after the other: its engine waits busily for its front end, so two of them would disturb each
other. It draws with its own noise, so rollouts are not those of plait: seconds are counted per token, wall time, the
median of the rollouts after the first. Exit code 2: vLLM is not set up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from random_llama import word_tokenizer, write_llama
from sides import positive

from plait.models.files import hub
from plait.models.language_loading import load_model
from plait.vllm.environment import look
from speculation import TASKS, requests

SIDE = Path(__file__).parent / "generation" / "vllm_drafting.py"
DEADLINE_S = 1800.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = _parser().parse_args(arguments)
    environment = look("cpu")
    if environment is None or environment.fault("cpu"):
        print("vLLM is not set up: `plait doctor engines` says how to install it", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.tiny:
            options.running, options.tokens, path = [2], 20, folder
            write_llama(folder, word_tokenizer(512), hidden=128, intermediate=256, positions=256)
        else:
            path = hub.resolve(options.model)
        model = load_model(str(path), dtype=options.dtype)
        print(
            f"{'a tiny model' if options.tiny else options.model}, {options.task}, temperature {options.temperature:g}"
        )
        for running in options.running:
            asked = requests(model, options, running, 0)
            job = {
                "model": str(path),
                "dtype": str(model.dtype).removeprefix("torch."),
                "positions": max(len(request.prompt.token_ids) for request in asked) + options.tokens + 8,
                "running": running,
                "temperature": options.temperature,
                "tokens": options.tokens,
                "stop_token_ids": list(model.eos_token_ids),
                "prompts": [(list(request.prompt.token_ids), request.num_samples) for request in asked],
                "rollouts": 1 + options.repeats,
            }
            per_token = {
                drafts: _ms_per_token(environment.python, folder, job, drafts) for drafts in (0, *options.lengths)
            }
            row = ", ".join(
                f"{drafts} drafted {ms:.2f} ms a token ({per_token[0] / ms:.2f}x)" for drafts, ms in per_token.items()
            )
            print(f"{running} running: {row}", flush=True)
    return 0


def _ms_per_token(python: Path, folder: Path, job: dict[str, Any], drafts: int) -> float:
    """Wall milliseconds, the median of the rollouts after the first.

    Raises:
        SystemExit: vLLM failed; with the end of what it said.
    """
    file = folder / "job.json"
    file.write_text(json.dumps(job | {"drafts": drafts}))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["VLLM_CPU_OMP_THREADS_BIND"] = str(max(os.sched_getaffinity(0)))
    done = subprocess.run(
        [str(python), str(SIDE), str(file)],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=environment,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"vLLM ended with {done.returncode}:\n{done.stderr[-3000:]}")
    rollouts = json.loads(done.stdout.splitlines()[-1])["rollouts"]
    return median(1e3 * seconds / tokens for seconds, tokens in rollouts[1:])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--task", choices=tuple(TASKS), default="code")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 4, 8], help="samples that run at a time")
    parser.add_argument("--lengths", type=int, nargs="*", default=[2, 4], help="numbers of draft tokens")
    parser.add_argument("--tokens", type=int, default=128, help="of a response at most")
    parser.add_argument("--temperature", type=float, default=0.3)
    parser.add_argument("--repeats", type=positive, default=3, help="rollouts after the first")
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers")
    return parser


if __name__ == "__main__":
    sys.exit(main())
