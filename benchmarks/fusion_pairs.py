"""RLHFuse's four pairs of models, simulated: what fusion between stages and inside training gain by the cost model.

    python benchmarks/fusion_pairs.py            a table in Markdown, as docs/predictions.md has it; a minute
    python benchmarks/fusion_pairs.py --pairs 33B/13B --lengths 1024 --seconds 5
    python benchmarks/fusion_pairs.py --streaming    what scoring of unfinished samples could save at most

SIMULATED: no number here was measured. 256 H100 in nodes of eight, batches of 512, mini-batches of 64, tensor parallel
in a node. Generation and scoring: 32 instances. Training: pipelines of 4, 8 and 16 stages for 13B, 33B and 65B, so that
an actor and a critic share devices in opposite directions; micro-batches of one sample. Responses are log-normal with a
median of 200 tokens, truncated at the limit. Layers are launched as captured graphs, as of a tuned engine.

    base     one stage after the other, one role after the other by 1F1B, weights brought to generation
    between  the last samples gathered by the threshold that `policy.threshold` tunes; freed instances score. One that
             is kept takes samples up to the knee of its step time (`knee`), as RLHFuse's do; in a run of plait it takes
             up to `sampling.max_running`, whatever its steps take then
    inside   actor and critic in one schedule, found by the search of `plait schedule`
    both

`streaming at most` is the share of a step with both that scoring parts of unfinished samples could save, if all that
scoring has to read were there from the beginning and could be cut at will: a bound, above what any program can do.

What lies outside of the bands that RLHFuse's own gains and closed forms let expect is marked: 1.1 to 1.6 of generation
and scoring, 1.15 to 1.5 of training, 1.2 to 1.4 of a step.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

from plait.cost.cluster_file import read_cluster
from plait.cost.decoding import Decoding
from plait.cost.generation_memory import kv_bytes_per_token
from plait.cost.layer_times import LayerTimes, total
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.model_costs import ModelCosts
from plait.cost.model_work import ModelWork
from plait.cost.passes import Passes
from plait.cost.workload import Workload
from plait.dataflow import CallKind
from plait.layout.mesh import Layout
from plait.planner.search import search
from plait.policy.early_scores import SPLITS
from plait.policy.threshold import Outcome, Rollout, outcome
from plait.policy.tuning import spread, tune
from plait.policy.unfinished import finish_times
from plait.recipes.recipe_file import load_recipe
from plait.runtime.prepare import outline
from plait.schedule.pipeline import fused_workload

RECIPE = Path(__file__).parents[1] / "recipes/published/rlhfuse.yaml"
DEVICES, TP, BATCH = 256, 8, 512
INSTANCES = DEVICES // TP
STAGES = {"13B": 4, "33B": 8, "65B": 16}
PAIRS = ("13B/33B", "33B/13B", "33B/65B", "65B/33B")
MEDIAN, SIGMA, PROMPT = 200.0, 1.0, 128
DRAWS = 4
KNEE = 0.2
"""As for serving: with so small a share of a single sample's speed a further one is not taken."""
CURVES = {"one core, 135M: 13.4 + 2.0 n ms": (0.0134, 0.0020), "one GPU, 8B: 4.35 + 0.047 n ms": (0.00435, 0.000047)}
BANDS = {"generation and scoring": (1.1, 1.6), "training": (1.15, 1.5), "step": (1.2, 1.4)}


@dataclass(frozen=True)
class Row:
    """Seconds of one setting: of the stages as they are, and with fusion."""

    generation: float
    scoring: float
    training: float
    other: float
    between: float
    """Generation and scoring."""
    inside: float
    """Training."""
    threshold: int
    kept: int
    streaming: float
    """That scoring unfinished samples would save at most."""

    @property
    def fused(self) -> float:
        return self.between + self.inside + self.other

    @property
    def base(self) -> float:
        return self.generation + self.scoring + self.training + self.other

    @property
    def gains(self) -> dict[str, float]:
        stages = self.generation + self.scoring
        return {
            "generation and scoring": stages / self.between,
            "training": self.training / self.inside,
            "+between": self.base / (self.base - stages + self.between),
            "+inside": self.base / (self.base - self.training + self.inside),
            "step": self.base / self.fused,
        }


def simulated(pair: str, limit: int, seconds: float, layer_us: float) -> Row:
    actor, critic = pair.split("/")
    costs = costs_of(actor, critic, limit, layer_us)
    generation, scoring, between = stages_of(costs, limit)
    training, inside, updates = trainings_of(costs, actor, critic, seconds)
    home = Layout.on(range(DEVICES), dp=DEVICES // TP // STAGES[actor], tp=TP, pp=STAGES[actor])
    moved = costs.move("actor", home, instances()).seconds
    return Row(generation, scoring, training, moved + updates, between[0], inside, *between[1:])


def costs_of(actor: str, critic: str, limit: int, layer_us: float) -> ModelCosts:
    small = f"llama-{critic.lower()}"
    keys = (("model", f"llama-{actor.lower()}"), ("critic.model", small), ("reward.model", small))
    run = outline(load_recipe(RECIPE, (*keys, ("sampling.max_response_tokens", limit))))
    lengths = SampleLengths(Lengths.fixed(PROMPT), Lengths.lognormal(MEDIAN, SIGMA, limit, BATCH))
    shapes = {model.role: run.shapes[model.name] for model in run.models}
    cluster = read_cluster("256xH100")
    cluster = replace(cluster, software=replace(cluster.software, layer_s=layer_us / 1e6))
    return ModelCosts(Workload.of(run.recipe, run.flow, lengths), shapes, run.flow, cluster)


def knee(step_s: Callable[[int], float]) -> int:
    """Samples of an instance from which on a further one brings less than a share of the tokens per second of one."""
    per_second = [count / step_s(count) for count in range(1, BATCH + 1)]
    few = (at for at in range(1, BATCH) if per_second[at] - per_second[at - 1] < KNEE * per_second[0])
    return next(few, BATCH)


def instances() -> Layout:
    return Layout.on(range(DEVICES), dp=INSTANCES, tp=TP)


def stages_of(costs: ModelCosts, limit: int) -> tuple[float, float, tuple[float, int, int, float]]:
    """Seconds of generation and of scoring, one after the other; and with the tail gathered: (seconds of both, the
    threshold, instances that are kept, seconds that streaming would save at most). All over the same draws."""
    responses = costs.workload.lengths.responses
    shape, dtype = costs.shapes["actor"], costs.workload.dtype
    times = LayerTimes(costs.cluster, ModelWork(shape, dtype, shape.vocabulary), instances().instances()[0])
    decoding = Decoding(Passes(times), PROMPT, lambda running: 1)

    @cache
    def step_s(running: int) -> float:
        return total(decoding.step(running, running * responses.mean / 2))

    calls = costs.flow.of_kind(CallKind.SCORE)
    score_s = sum(costs.call(node.call, "score", instances()).seconds for node in calls) * INSTANCES / BATCH
    held = kv_bytes_per_token(shape, dtype) * (PROMPT + limit)
    moved_s = held / (costs.cluster.inter.bandwidth * costs.cluster.software.links)
    most = knee(step_s)
    prompts = costs.call(costs.flow.of_kind(CallKind.GENERATE)[0].call, "prefill", instances()).seconds
    serial = Rollout(INSTANCES, step_s, score_s, most)
    fused = Rollout(INSTANCES, step_s, score_s, most, moved_s, frees=True)
    draws = [random.Random(seed).choices(responses.values, k=BATCH) for seed in range(DRAWS)]
    rows = [spread([length - 1 for length in draw], INSTANCES) for draw in draws]
    ends = [outcome(serial, row, 0) for row in rows]
    generation = sum(end.generation_s for end in ends) / DRAWS
    whole = sum(end.total_s for end in ends) / DRAWS
    tuned = tune(fused, responses.values, BATCH, draws=DRAWS, seed=1)
    between = [outcome(fused, row, tuned.threshold) for row in rows]
    total_s = sum(end.total_s for end in between) / DRAWS
    bound_s = sum(streamed_s_of(fused, BATCH, end) for end in between) / DRAWS
    summary = prompts + total_s, tuned.threshold, between[0].kept, total_s - bound_s
    return prompts + generation, whole - generation, summary


def streamed_s_of(rollout: Rollout, batch: int, outcome: Outcome) -> float:
    """When all would be scored at the earliest, could every sample be scored from the beginning, in any pieces: no
    device is idle before then, but those that generate do nothing else."""
    left_s = max(0.0, batch * rollout.score_s - outcome.free_s)
    return outcome.generation_s + left_s / rollout.num_instances


def trainings_of(costs: ModelCosts, actor: str, critic: str, seconds: float) -> tuple[float, float, float]:
    """Seconds of all mini-batches by 1F1B one role after the other, by one schedule of both, and of the updates."""
    serial, updates, sizes = 0.0, 0.0, []
    for role, size in (("actor", actor), ("critic", critic)):
        stages = STAGES[size]
        copies = DEVICES // TP // stages
        micro_batches = BATCH // 8 // copies
        layout = Layout.on(range(DEVICES), dp=copies, tp=TP, pp=stages)
        cost = costs.call(f"{role}.train", "train", layout, micro_batch_tokens=1)
        updates += sum(cost.terms.get(name, 0.0) for name in ("optimizer", "gradients", "new weights"))
        passed = cost.seconds - sum(cost.terms.get(name, 0.0) for name in ("optimizer", "gradients", "new weights"))
        serial += passed
        # A forward takes a third of what a micro-batch keeps a stage busy for.
        sizes.append((stages, micro_batches, passed / 8 / 3 / (micro_batches + stages - 1)))
    sizes.sort(key=lambda pipeline: -pipeline[0])
    (n1, m1, f1), (n2, m2, f2) = sizes
    workload = fused_workload((n1, n2), (m1, m2), (1.0, f2 / f1))
    best = search(workload, seconds)
    return serial, 8 * best.score.makespan * f1, updates


def streaming_table() -> str:
    """The same bound over settings of any kind: by how long scoring takes beside generation, as a share of both. With
    several samples of a prompt there are two numbers: what it gains to score the samples that have ended without the
    last of their prompts (whose tokens are read again), and the bound of what is left then."""
    ratios = (0.05, 0.2, 0.4, 0.6, 1.0)
    lines = [
        f"| seconds of a decode step, instances x samples | {' | '.join(map(str, ratios))} |",
        "|---|" + "---|" * 5,
    ]
    responses = Lengths.lognormal(512 / 5, SIGMA, 512)
    sizes = ((2, 16), (4, 32), (8, 16), (32, 16))
    for (name, (fixed_s, each_s)), together, (count, samples) in product(CURVES.items(), (1, 8), sizes):
        step_s = lambda running, fixed_s=fixed_s, each_s=each_s: fixed_s + each_s * running
        batch = count * samples
        draws = [random.Random(seed).choices(responses.values, k=batch) for seed in range(DRAWS)]
        rows = [spread([length - 1 for length in draw], count) for draw in draws]
        generation = sum(max(max(finish_times(row, step_s)) for row in load) for load in rows) / DRAWS
        cells = []
        group = PROMPT + together * responses.mean
        for ratio in ratios:
            score_s = ratio * generation * count / batch
            rollout = Rollout(count, step_s, score_s, 64, 2 * step_s(1), frees=True, together=together)
            rollout = replace(rollout, again_s=score_s * together * PROMPT / group)
            whole = _tuned(rollout, rows, responses.values)
            split = [_tuned(replace(rollout, num_split=int(share * batch)), rows, responses.values) for share in SPLITS]
            best = min(whole, *split) if together > 1 else whole
            left = max(0.0, 1 - best.streamed_s / best.total_s)
            gain = 1 - best.total_s / whole.total_s
            cells.append(f"{left:.1%}" if together == 1 else f"{gain:.1%}, {left:.1%}")
        of_prompt = "" if together == 1 else f", {together} of a prompt"
        lines.append(f"| {name}, {count} x {samples}{of_prompt} | {' | '.join(cells)} |")
    return "\n".join(lines)


class _Ended(NamedTuple):
    """Seconds of generation and scoring, in the mean; streamed_s: were all to be scored there from the beginning"""

    total_s: float
    streamed_s: float


def _tuned(rollout: Rollout, rows: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int]) -> _Ended:
    """With samples gathered by the threshold that is tuned.

    Args:
        rows: steps of each sample of each instance of each rollout.
        lengths: of responses.
    """
    batch = sum(map(len, rows[0]))
    tried = range(0, batch // 2 + 1, max(1, batch // 32))
    tuned = tune(rollout, lengths, batch, draws=DRAWS, seed=1, thresholds=tried)
    ends = [outcome(rollout, load, tuned.threshold) for load in rows]
    streamed_s = sum(streamed_s_of(rollout, batch, end) for end in ends)
    return _Ended(sum(end.total_s for end in ends) / len(rows), streamed_s / len(rows))


def table(rows: dict[tuple[str, int], Row]) -> str:
    names = ("generation and scoring", "training", "+between", "+inside", "step")
    lines = [
        "| simulated: actor/critic, longest response | base (generation + scoring + training + other) | "
        f"{' | '.join(names)} | gathered at, kept | streaming at most |",
        "|" + "---|" * (len(names) + 4),
    ]
    for (pair, limit), row in rows.items():
        parts = (row.generation, row.scoring, row.training, row.other)
        base = f"{row.base:.1f} s ({' + '.join(f'{part:.1f}' for part in parts)})"
        gains = [f"{row.gains[name]:.2f}{'' if _expected(name, row.gains[name]) else ' *'}" for name in names]
        cells = [f"{pair}, {limit}", base, *gains, f"{row.threshold} of {BATCH}, {row.kept} of {INSTANCES}"]
        cells.append(f"{row.streaming / row.fused:.1%}")
        lines.append(f"| {' | '.join(cells)} |")
    bands = ", ".join(f"{name} {low:g} to {high:g}" for name, (low, high) in BANDS.items())
    return "\n".join([*lines, "", f"\\* outside of what is expected: {bands}."])


def _expected(name: str, gain: float) -> bool:
    low, high = BANDS.get(name, (0.0, 9.0))
    return low <= round(gain, 2) <= high


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=PAIRS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048])
    parser.add_argument("--seconds", type=float, default=20.0, help="of the search for a schedule")
    parser.add_argument("--layer-us", type=float, default=50.0, help="that a layer takes at least; 250 without graphs")
    parser.add_argument("--streaming", action="store_true", help="only what scoring unfinished samples would save")
    options = parser.parse_args(arguments)
    if options.streaming:
        print(streaming_table())
        return 0
    rows = {
        (pair, limit): simulated(pair, limit, options.seconds, options.layer_us)
        for pair in options.pairs
        for limit in options.lengths
    }
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
