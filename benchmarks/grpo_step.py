"""One full GRPO step of plait against TRL's: same model, prompts and per-sample response lengths, in one run.

    python benchmarks/grpo_step.py [--tiny] [--repeats 3] [--prompts 8] [--samples-per-prompt 4] [--threads 1]
                                   [--sides plait,trl]

Each side runs in its own process, which loads once, does a warm-up step that does not count, and then a step at a
time in turns with the other side. Printed are medians over the repeats, each side's tokens and its peak memory.
Exit code 1: a side's tokens differ from the list that both were given. README.md says what each side does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from grpo.measure import PHASES, StepReport
from grpo.workload import Workload, full, tiny
from sides import Side, compare, median_seconds, memory_rows, positive, row, warning_of_load

SIDES = ("plait", "trl")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 when a side's tokens are not those of the list, 2 when a side failed."""
    options = _parser().parse_args(arguments)
    names = options.sides.split(",")
    if not names or not set(names) <= set(SIDES):
        print(f"--sides: expected some of {','.join(SIDES)}, found {options.sides}", file=sys.stderr)
        return 2
    sizes = {
        "num_prompts": options.prompts,
        "samples_per_prompt": options.samples_per_prompt,
        "threads": options.threads,
        "num_steps": 1 + options.repeats,
        "device": options.device,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workload = tiny(folder / "model", **sizes) if options.tiny else full(options.model, **sizes)
        workload.save(folder / "workload.json")
        opened = (open_side(side, folder, options.threads) for side in names)
        return compare(opened, workload, differing, report)


def open_side(name: str, folder: Path, threads: int) -> Side:
    return Side(name, folder / "workload.json", threads, folder / f"{name}.log", module=f"grpo.{name}_side")


def differing(side: str, step: int, done: StepReport, workload: Workload) -> list[str]:
    """One line for each list of lengths that is not the workload's."""
    lines = []
    for what, own, wanted in (
        ("prompt", done.prompt_lengths, workload.wanted_prompt_lengths),
        ("response", done.response_lengths, workload.wanted_response_lengths),
    ):
        if own != wanted:
            lines.append(f"{side}, step {step}: expected {what} lengths {wanted}, found {own}")
    return lines


def report(sides: Sequence[Side], workload: Workload) -> str:
    """The table: medians over the counted steps, and the ratio of the second side to the first."""
    counted = {side.name: side.steps[1:] for side in sides}
    seconds = {name: [median_seconds(steps, phase) for phase in (*PHASES, None)] for name, steps in counted.items()}
    lines = [
        f"GRPO step, {workload.title}, threads: {workload.threads}",
        f"{len(workload.prompts)} prompts x {workload.samples_per_prompt} samples, "
        f"{sum(map(len, workload.prompt_token_ids))} prompt tokens, {sum(workload.wanted_response_lengths)} response "
        f"tokens (longest {max(workload.wanted_response_lengths)}); medians of {workload.num_steps - 1} steps after a "
        "warm-up step",
        "",
        row("seconds: wall (CPU)", [side.name for side in sides], "ratio"),
    ]
    for i, phase in enumerate((*PHASES, "whole step")):
        cells = [seconds[side.name][i] for side in sides]
        ratio = f"{cells[1].wall / cells[0].wall:.2f} ({cells[1].cpu / cells[0].cpu:.2f})" if len(cells) > 1 else ""
        lines.append(row(phase, [f"{cell.wall:.2f} ({cell.cpu:.2f})" for cell in cells], ratio))
    lines += ["", row("tokens and memory", [side.name for side in sides])]
    last = [side.steps[-1] for side in sides]
    lines.append(row("prompt tokens", [str(sum(step.prompt_lengths)) for step in last]))
    lines.append(row("response tokens", [str(sum(step.response_lengths)) for step in last]))
    lines.append(row("positions scored", [str(step.scored_tokens) for step in last]))
    lines.append(row("positions trained", [str(step.trained_tokens) for step in last]))
    lines += memory_rows(sides) + warning_of_load(sides, workload.threads)
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny random model: checks the benchmark, not the speed")
    parser.add_argument("--repeats", type=positive, default=3, help="counted steps of each side")
    parser.add_argument("--prompts", type=positive, default=8)
    parser.add_argument("--samples-per-prompt", type=positive, default=4)
    parser.add_argument("--threads", type=positive, default=1, help="of each side; one side runs at a time")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a name or a checkpoint folder")
    parser.add_argument("--sides", default=",".join(SIDES), help="comma-separated; the ratio is second to first")
    return parser


if __name__ == "__main__":
    sys.exit(main())
