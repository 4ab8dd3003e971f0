"""Reward after equal samples, with batches generated ahead: n = 0, 1 and 2, with and without correction.

    python benchmarks/staleness_rewards.py                        # some minutes of one core; load changes no number
    python benchmarks/staleness_rewards.py --tiny --repeats 1     # does the benchmark itself work?

GRPO on one process and a random model of two layers, which learns to say words that end in a 7: the reward is their
share. Every kind is trained on as many samples, with `--repeats` seeds:

    n = 0                 synchronous
    n = 1, 2              `max_staleness`, `partial_rollout: off`, with `correction` off and tis
    n = 1, 2 recompute    the same where samples go on with new weights; fewer places than a step has samples

Printed per kind: the reward of the last eighth of the steps for each seed, their mean, and the mean over all steps; the
effective sample size and the KL between the weights that drew and those that train, at their worst step.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo.workload import tiny
from sides import positive, row

from plait.observe.run_log import read_rows
from plait.recipes.recipe_file import load_recipe
from plait.runtime.api import run

REWARD = '''
def sevens(completions, **columns):
    """The share of words that end in a 7, at first one in ten."""
    return [sum(word[-1] == "7" for word in text.split()) / max(1, len(text.split())) for text in completions]
'''
TIS, OFF = {"options.correction": "tis"}, {"options.correction": "off"}
GOES_ON: dict[str, Any] = {"partial_rollout": "recompute"}
KINDS: dict[str, dict[str, Any]] = {
    "n = 0": {},
    **{
        f"n = {n}{name}, {how}": {"max_staleness": n, **keys, **correction}
        for name, keys in (("", {}), (" recompute", GOES_ON))
        for n in (1, 2)
        for how, correction in (("off", OFF), ("tis", TIS))
    },
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    print(row("", [*(f"seed {seed}" for seed in range(options.repeats)), "mean", "all steps", "least ESS", "most KL"]))
    with tempfile.TemporaryDirectory(prefix="plait-rewards-") as name:
        recipe = the_recipe(Path(name), options)
        for place, (kind, keys) in enumerate(KINDS.items()):
            runs = []
            for seed in range(options.repeats):
                tree = recipe | keys | {"seed": seed, "run_dir": f"{name}/{place}-{seed}"}
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    run(load_recipe(None, list(tree.items())))
                runs.append(read_rows(Path(f"{name}/{place}-{seed}/metrics.jsonl")))
            report(kind, runs)
    return 0


def the_recipe(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Keys of a recipe; its files are written to `folder`. Responses are of unequal lengths."""
    steps, prompts, samples = (4, 2, 4) if options.tiny else (options.steps, 8, 8)
    work = tiny(folder / "model", num_prompts=64, samples_per_prompt=samples, threads=1, num_steps=steps)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in work.prompts))
    (folder / "reward.py").write_text(REWARD)
    return {
        "model": work.model,
        "steps": steps,
        "prompts_per_step": prompts,
        "samples_per_prompt": samples,
        "data.source": str(folder / "prompts.jsonl"),
        "data.chat_template": False,
        "reward.functions": [f"{folder}/reward.py:sevens"],
        "reward.workers": 1,
        "sampling.max_response_tokens": 24,
        "sampling.max_running": prompts * samples // 2,
        # One word in twenty ends a response, so that lengths are unequal.
        "sampling.stop_token_ids": list(range(0, 512, 20)),
        "optimizer.learning_rate": options.learning_rate,
        "checkpoint.every": 0,
        "doctor.enabled": False,
        "dtype": "float32",
        "threads": 1,
    }


def report(kind: str, runs: Sequence[Sequence[dict[str, float]]]) -> None:
    """One row of the table."""
    last = [fmean(step_row["reward"] for step_row in rows[-max(1, len(rows) // 8) :]) for rows in runs]
    whole = fmean(step_row["reward"] for rows in runs for step_row in rows)
    ess = min(step_row.get("training/rollout_ess", 1.0) for rows in runs for step_row in rows)
    kl = max(step_row.get("training/rollout_kl", 0.0) for rows in runs for step_row in rows)
    numbers = [*(f"{reward:.3f}" for reward in last), f"{fmean(last):.3f}", f"{whole:.3f}", f"{ess:.2f}", f"{kl:.3f}"]
    print(row(kind, numbers), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="four steps of eight samples")
    parser.add_argument("--steps", type=positive, default=64, help="of each run, of 64 samples each")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--repeats", type=positive, default=3, help="seeds")
    return parser


if __name__ == "__main__":
    sys.exit(main())
