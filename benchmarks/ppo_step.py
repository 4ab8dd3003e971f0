"""One full PPO step of plait against that of TRL 1.10: policy, reference, value and reward model, in one run.

    bash benchmarks/ppo/setup_peer.sh                 # once: the peer's own environment
    python benchmarks/ppo_step.py [--tiny] [--repeats 5] [--prompts 32] [--threads 1] [--sides plait,trl]
                                  [--peer-python PATH]

Each side runs in its own process, which loads once, does a warm-up step that does not count, and then a step at a
time in turns with the other side. Printed are medians over the repeats, each side's tokens and its peak memory.
Exit code 1: a side did other work than was asked. README.md says what each side does.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ppo.measure import PHASES, PPOStep
from ppo.workload import DTYPES, EPOCHS, FULL, MINI_BATCHES, PEER_PRECISIONS, TINY, Workload, create
from sides import Side, compare, median_seconds, memory_rows, positive, row, warning_of_load

SIDES = ("plait", "trl")
NUM_TRAINED, NUM_SCORED = 2, 3
"""Models: policy and value; reference, value and reward."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 when a side did other work than was asked, 2 when a side failed."""
    options = _parser().parse_args(arguments)
    names = options.sides.split(",")
    if not names or not set(names) <= set(SIDES):
        print(f"--sides: expected some of {','.join(SIDES)}, found {options.sides}", file=sys.stderr)
        return 2
    if "trl" in names and not options.peer_python.is_file():
        print(
            f"--peer-python: {options.peer_python} does not exist; make the environment of TRL 1.10 with "
            "`bash benchmarks/ppo/setup_peer.sh`, give the interpreter of one, or take --sides plait",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workload = create(
            folder,
            TINY if options.tiny else FULL,
            num_prompts=options.prompts,
            dtype=options.dtype,
            peer_precision=options.peer_precision,
            threads=options.threads,
            device=options.device,
            num_steps=1 + options.repeats,
        )
        workload.save(folder / "workload.json")
        opened = (open_side(side, folder, options.threads, options.peer_python) for side in names)
        return compare(opened, workload, differing, report)


def open_side(name: str, folder: Path, threads: int, peer_python: Path) -> Side:
    python = str(peer_python) if name == "trl" else sys.executable
    return Side(
        name,
        folder / "workload.json",
        threads,
        folder / f"{name}.log",
        module=f"ppo.{name}_side",
        report=PPOStep,
        python=python,
    )


def differing(side: str, step: int, done: PPOStep, workload: Workload) -> list[str]:
    """One line for everything that is not as the workload says."""
    count, prompt_tokens = len(workload.prompts), len(workload.prompt_token_ids[0])
    positions = count * (prompt_tokens + workload.response_tokens)
    lines = []
    for what, own, wanted in (
        ("prompt lengths", done.prompt_lengths, [prompt_tokens] * count),
        ("response lengths", done.response_lengths, [workload.response_tokens] * count),
        ("prompts of digest", done.prompt_digest, workload.prompt_digest),
        ("optimizer steps", done.optimizer_steps, NUM_TRAINED * EPOCHS * MINI_BATCHES),
        ("positions trained", done.trained_tokens, NUM_TRAINED * EPOCHS * positions),
    ):
        if own != wanted:
            lines.append(f"{side}, step {step}: expected {what} {wanted}, found {own}")
    # More is allowed: a flow may ask the policy itself for the log-probs that the ratio begins at.
    if done.scored_tokens < NUM_SCORED * positions:
        lines.append(
            f"{side}, step {step}: expected {NUM_SCORED * positions} positions scored or more, "
            f"found {done.scored_tokens}"
        )
    return lines


def report(sides: Sequence[Side], workload: Workload) -> str:
    """The table: medians over the counted steps, and the ratio of the second side to the first."""
    count, prompt_tokens = len(workload.prompts), len(workload.prompt_token_ids[0])
    lines = [
        f"PPO step, policy, reference, value and reward model: {workload.title}; threads: {workload.threads}",
        f"plait: {workload.dtype}; TRL: {workload.peer_precision}",
        f"{count} prompts of {prompt_tokens} tokens, {workload.response_tokens} response tokens each, {EPOCHS} epoch, "
        f"{MINI_BATCHES} mini-batch; medians of {workload.num_steps - 1} steps after a warm-up step",
        "",
        row("seconds: wall (CPU)", [side.name for side in sides], "ratio"),
    ]
    for phase in (*PHASES, None):
        cells = [median_seconds(side.steps[1:], phase) for side in sides]
        ratio = f"{cells[1].wall / cells[0].wall:.2f} ({cells[1].cpu / cells[0].cpu:.2f})" if len(cells) > 1 else ""
        lines.append(row(phase or "whole step", [f"{cell.wall:.2f} ({cell.cpu:.2f})" for cell in cells], ratio))
    wholes = [median_seconds(side.steps[1:]).wall for side in sides]
    lines.append(row("samples per second", [f"{count / whole:.1f}" for whole in wholes]))
    lines += ["", row("work and memory", [side.name for side in sides])]
    for what, name in (
        ("prompt tokens", "prompt_lengths"),
        ("response tokens", "response_lengths"),
        ("positions scored", "scored_tokens"),
        ("positions trained", "trained_tokens"),
        ("optimizer steps", "optimizer_steps"),
    ):
        values = [getattr(side.steps[-1], name) for side in sides]
        lines.append(row(what, [str(sum(value) if isinstance(value, list) else value) for value in values]))
    lines += memory_rows(sides) + warning_of_load(sides, workload.threads)
    return "\n".join(lines)


def peer_python() -> Path:
    """Where setup_peer.sh puts the peer unless told otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "plait" / "trl-1.10" / "bin" / "python"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="smaller models and texts: checks the benchmark")
    parser.add_argument("--repeats", type=positive, default=5, help="counted steps of each side")
    parser.add_argument("--prompts", type=positive, default=32)
    parser.add_argument("--threads", type=positive, default=1, help="of each side; one side runs at a time")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sides", default=",".join(SIDES), help="comma-separated; the ratio is second to first")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="that plait computes in")
    parser.add_argument(
        "--peer-precision", choices=PEER_PRECISIONS, default=PEER_PRECISIONS[0], help="TRL's; README.md"
    )
    parser.add_argument("--peer-python", type=Path, default=peer_python(), help="has TRL 1.10; see setup_peer.sh")
    return parser


if __name__ == "__main__":
    sys.exit(main())
