"""RLHFuse's four pairs of models, simulated: what fusion between stages and inside training gain by the cost model.

    python benchmarks/fusion_pairs.py            a table in Markdown, as docs/predictions.md has it; a minute
    python benchmarks/fusion_pairs.py --pairs 33B/13B --lengths 1024 --seconds 5
    python benchmarks/fusion_pairs.py --kept         what it saves to tune how many instances are kept
    python benchmarks/fusion_pairs.py --streaming    what scoring of unfinished samples could save at most

SIMULATED: no number here was measured. 256 H100 in nodes of eight, batches of 512, mini-batches of 64, tensor parallel
in a node. Generation and scoring: 32 instances. Training: pipelines of 4, 8 and 16 stages for 13B, 33B and 65B, so that
an actor and a critic share devices in opposite directions; micro-batches of one sample. Responses are log-normal with a
median of 200 tokens, truncated at the limit. Layers are launched as captured graphs, as of a tuned engine.

    base     one stage after the other, one role after the other by 1F1B, weights brought to generation
    between  the last samples gathered at the threshold, and on the number of instances, that `policy.tuning` finds
             together; freed instances score. The critic trains in another layout than it scores in, so a run brings it
             its new weights first: all its scoring is behind the rollout
    inside   actor and critic in one schedule, found by the search of `plait schedule`
    both

Behind each gain is the most that it could be: all that may be beside generation hidden, and training as short as the
bound of schedules. Beside it are two other rules for the instances that are kept: up to the knee of its step time
(`knee`) an instance takes samples, as RLHFuse's do; or as few are kept as hold them (`max_running` 512). Rows without a
critic are GRPO's: nothing is left to train together.

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
from plait.policy.tuning import bootstrap, spread, tune
from plait.policy.unfinished import finish_times
from plait.recipes.recipe_file import load_recipe
from plait.runtime.prepare import outline
from plait.schedule.pipeline import fused_workload
from plait.simulator.joint_orders import STEP_TERMS

RECIPE = Path(__file__).parents[1] / "recipes/published/rlhfuse.yaml"
DEVICES, TP, BATCH = 256, 8, 512
INSTANCES = DEVICES // TP
STAGES = {"13B": 4, "33B": 8, "65B": 16}
NO_CRITIC = ", no critic"
"""Ends the name of a pair whose second model gives rewards alone."""
PAIRS = ("13B/33B", "33B/13B", "33B/65B", "65B/33B", f"33B/13B{NO_CRITIC}")
MEDIAN, SIGMA, PROMPT = 200.0, 1.0, 128
DRAWS = 4
RATIOS = (0.05, 0.2, 0.4, 0.6, 1.0)
SIZES = ((2, 16), (4, 32), (8, 16), (32, 16))
RESPONSES = Lengths.lognormal(512 / 5, SIGMA, 512)
KNEE = 0.2
"""As for serving: with so small a share of a single sample's speed a further one is not taken."""
CURVES = {"one core, 135M: 13.4 + 2.0 n ms": (0.0134, 0.0020), "one GPU, 8B: 4.35 + 0.047 n ms": (0.00435, 0.000047)}
BANDS = {"generation and scoring": (1.1, 1.6), "training": (1.15, 1.5), "step": (1.2, 1.4)}


class _Ended(NamedTuple):
    """Seconds of generation and scoring, in the mean; streamed_s: were all to be scored there from the beginning; with
    the last samples gathered at this threshold, on so many instances"""

    total_s: float
    streamed_s: float
    threshold: int
    kept: int


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
    between_at_least: float
    inside_at_least: float
    """Of the same, no less than these."""
    threshold: int
    kept: int
    streaming: float
    """That scoring unfinished samples would save at most."""
    between_by_knee: float
    between_by_room: float
    """With as many instances kept as by the knee of a step, and as few as hold the samples."""

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

    @property
    def most(self) -> dict[str, float]:
        """What the gains could be at most."""
        return replace(self, between=self.between_at_least, inside=self.inside_at_least).gains


def simulated(pair: str, limit: int, seconds: float, layer_us: float) -> Row:
    actor, critic = pair.removesuffix(NO_CRITIC).split("/")
    costs = costs_of(actor, critic, limit, layer_us)
    roles = (("actor", actor),) if pair.endswith(NO_CRITIC) else (("actor", actor), ("critic", critic))
    stages = stages_of(costs, limit, has_critic=len(roles) > 1)
    training, inside, inside_at_least, updates = trainings_of(costs, roles, seconds)
    home = Layout.on(range(DEVICES), dp=DEVICES // TP // STAGES[actor], tp=TP, pp=STAGES[actor])
    moved = costs.move("actor", home, instances()).seconds
    return Row(
        stages.generation,
        stages.scoring,
        training,
        moved + updates,
        stages.tuned.total_s,
        inside,
        stages.at_least,
        inside_at_least,
        stages.tuned.threshold,
        stages.tuned.kept,
        stages.tuned.total_s - stages.tuned.streamed_s,
        stages.by_knee.total_s,
        stages.by_room.total_s,
    )


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


@dataclass(frozen=True)
class Stages:
    """Seconds of generation and of scoring, one after the other; and with the tail gathered, by each rule for what is
    kept: seconds of both. All over the same draws."""

    generation: float
    scoring: float
    at_least: float
    tuned: _Ended
    by_knee: _Ended
    by_room: _Ended


def stages_of(costs: ModelCosts, limit: int, *, has_critic: bool) -> Stages:
    responses = costs.workload.lengths.responses
    shape, dtype = costs.shapes["actor"], costs.workload.dtype
    times = LayerTimes(costs.cluster, ModelWork(shape, dtype, shape.vocabulary), instances().instances()[0])
    decoding = Decoding(Passes(times), PROMPT, lambda running: 1)

    @cache
    def step_s(running: int) -> float:
        return total(decoding.step(running, running * responses.mean / 2))

    calls = costs.flow.of_kind(CallKind.SCORE)
    seconds = {node.role: costs.call(node.call, "score", instances()).seconds for node in calls}
    behind_s = seconds.pop("critic")  # its new weights have to come first
    behind_s *= has_critic
    score_s = sum(seconds.values()) * INSTANCES / BATCH
    held = kv_bytes_per_token(shape, dtype) * (PROMPT + limit)
    moved_s = held / (costs.cluster.inter.bandwidth * costs.cluster.software.links)
    prompts_s = costs.call(costs.flow.of_kind(CallKind.GENERATE)[0].call, "prefill", instances()).seconds
    serial = Rollout(INSTANCES, step_s, score_s, BATCH)
    fused = Rollout(INSTANCES, step_s, score_s, BATCH, moved_s, frees=True)
    draws = [random.Random(seed).choices(responses.values, k=BATCH) for seed in range(DRAWS)]
    rows = [spread([length - 1 for length in draw], INSTANCES) for draw in draws]
    ends = [outcome(serial, row, 0) for row in rows]
    generation = sum(end.generation_s for end in ends) / DRAWS
    whole = sum(end.total_s for end in ends) / DRAWS

    def gathered(rollout: Rollout, kept: Sequence[int] | None) -> _Ended:
        tried = range(0, BATCH + 1, BATCH // 64)
        ended = _tuned(rollout, rows, responses.values, kept, tried)
        more_s = prompts_s + behind_s
        return ended._replace(total_s=ended.total_s + more_s, streamed_s=ended.streamed_s + more_s)

    return Stages(
        prompts_s + generation,
        whole - generation + behind_s,
        prompts_s + generation + behind_s,
        gathered(fused, None),
        gathered(replace(fused, max_batch=knee(step_s)), [1]),
        gathered(fused, [1]),
    )


def streamed_s_of(rollout: Rollout, batch: int, outcome: Outcome) -> float:
    """When all would be scored at the earliest, could every sample be scored from the beginning, in any pieces: no
    device is idle before then, but those that generate do nothing else."""
    left_s = max(0.0, batch * rollout.score_s - outcome.free_s)
    return outcome.generation_s + left_s / rollout.num_instances


def trainings_of(
    costs: ModelCosts, roles: Sequence[tuple[str, str]], seconds: float
) -> tuple[float, float, float, float]:
    """Seconds of all mini-batches by 1F1B one role after the other, by one schedule of all roles, by none of these less
    than, and of the updates.

    Args:
        roles: and the sizes of their models.
    """
    serial, updates, sizes = 0.0, 0.0, []
    for role, size in roles:
        stages = STAGES[size]
        copies = DEVICES // TP // stages
        micro_batches = BATCH // 8 // copies
        layout = Layout.on(range(DEVICES), dp=copies, tp=TP, pp=stages)
        cost = costs.call(f"{role}.train", "train", layout, micro_batch_tokens=1)
        updates += sum(cost.terms.get(name, 0.0) for name in STEP_TERMS)
        passed = cost.seconds - sum(cost.terms.get(name, 0.0) for name in STEP_TERMS)
        serial += passed
        # A forward takes a third of what a micro-batch keeps a stage busy for.
        sizes.append((stages, micro_batches, passed / 8 / 3 / (micro_batches + stages - 1)))
    if len(sizes) == 1:
        return serial, serial, serial, updates
    sizes.sort(key=lambda pipeline: -pipeline[0])
    (n1, m1, f1), (n2, m2, f2) = sizes
    workload = fused_workload((n1, n2), (m1, m2), (1.0, f2 / f1))
    best = search(workload, seconds)
    return serial, 8 * best.score.makespan * f1, 8 * best.lower_bound * f1, updates


def kept_table() -> str:
    """What it saves to tune how many instances are kept, beside keeping as few as hold the samples, as a share of
    generation and scoring, in the settings of `streaming_table`; and the threshold and the number that are best."""
    lines = [
        f"| seconds of a decode step, instances x samples | {' | '.join(map(str, RATIOS))} |",
        "|---|" + "---|" * len(RATIOS),
    ]
    for (name, (fixed_s, each_s)), (count, samples) in product(CURVES.items(), SIZES):
        step_s = lambda running, fixed_s=fixed_s, each_s=each_s: fixed_s + each_s * running
        batch, cells = count * samples, []
        rows = _drawn(count, samples)
        generation = sum(max(max(finish_times(row, step_s)) for row in load) for load in rows) / DRAWS
        for ratio in RATIOS:
            rollout = Rollout(count, step_s, ratio * generation * count / batch, 512, 2 * step_s(1), frees=True)
            room, best = (_tuned(rollout, rows, RESPONSES.values, kept) for kept in ([1], None))
            cells.append(f"{1 - best.total_s / room.total_s:.1%}, {best.threshold}/{best.kept}")
        lines.append(f"| {name}, {count} x {samples} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _drawn(count: int, samples: int) -> list[list[list[int]]]:
    """Steps of each sample of each instance of each rollout."""
    draws = [random.Random(seed).choices(RESPONSES.values, k=count * samples) for seed in range(DRAWS)]
    return [spread([length - 1 for length in draw], count) for draw in draws]


def streaming_table() -> str:
    """The same bound over settings of any kind: by how long scoring takes beside generation, as a share of both. With
    several samples of a prompt there are two numbers: what it gains to score the samples that have ended without the
    last of their prompts (whose tokens are read again), and the bound of what is left then."""
    lines = [
        f"| seconds of a decode step, instances x samples | {' | '.join(map(str, RATIOS))} |",
        "|---|" + "---|" * len(RATIOS),
    ]
    for (name, (fixed_s, each_s)), together, (count, samples) in product(CURVES.items(), (1, 8), SIZES):
        step_s = lambda running, fixed_s=fixed_s, each_s=each_s: fixed_s + each_s * running
        batch = count * samples
        rows = _drawn(count, samples)
        generation = sum(max(max(finish_times(row, step_s)) for row in load) for load in rows) / DRAWS
        cells = []
        group = PROMPT + together * RESPONSES.mean
        for ratio in RATIOS:
            score_s = ratio * generation * count / batch
            rollout = Rollout(count, step_s, score_s, 64, 2 * step_s(1), frees=True, together=together)
            rollout = replace(rollout, again_s=score_s * together * PROMPT / group)
            whole = _tuned(rollout, rows, RESPONSES.values)
            split = [_tuned(replace(rollout, num_split=int(share * batch)), rows, RESPONSES.values) for share in SPLITS]
            best = min(whole, *split) if together > 1 else whole
            left = max(0.0, 1 - best.streamed_s / best.total_s)
            gain = 1 - best.total_s / whole.total_s
            cells.append(f"{left:.1%}" if together == 1 else f"{gain:.1%}, {left:.1%}")
        of_prompt = "" if together == 1 else f", {together} of a prompt"
        lines.append(f"| {name}, {count} x {samples}{of_prompt} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _tuned(
    rollout: Rollout,
    rows: Sequence[Sequence[Sequence[int]]],
    lengths: Sequence[int],
    kept: Sequence[int] | None = None,
    thresholds: Sequence[int] | None = None,
) -> _Ended:
    """With samples gathered as it is tuned.

    Args:
        rows: steps of each sample of each instance of each rollout.
        lengths: of responses.
        kept, thresholds: as of `tune`; of thresholds those up to half of the samples when None.
    """
    batch = sum(map(len, rows[0]))
    tried = thresholds if thresholds is not None else range(0, batch // 2 + 1, max(1, batch // 32))
    tuned = tune(rollout, bootstrap(lengths, batch, draws=DRAWS, seed=1), thresholds=tried, kept=kept)
    ends = [outcome(rollout, load, tuned.threshold, tuned.kept) for load in rows]
    streamed_s = sum(streamed_s_of(rollout, batch, end) for end in ends)
    total_s = sum(end.total_s for end in ends) / len(rows)
    return _Ended(total_s, streamed_s / len(rows), tuned.threshold, tuned.kept)


def table(rows: dict[tuple[str, int], Row]) -> str:
    names = ("generation and scoring", "training", "+between", "+inside", "step")
    lines = [
        "| simulated: actor/critic, longest response | base (generation + scoring + training + other) | "
        f"{' | '.join(names)} | gathered at, kept | by the knee, by room | streaming at most |",
        "|" + "---|" * (len(names) + 5),
    ]
    for (pair, limit), row in rows.items():
        parts = (row.generation, row.scoring, row.training, row.other)
        base = f"{row.base:.1f} s ({' + '.join(f'{part:.1f}' for part in parts)})"
        gains = [
            f"{row.gains[name]:.2f} of {row.most[name]:.2f}{'' if _expected(name, row.gains[name]) else ' *'}"
            for name in names
        ]
        cells = [f"{pair}, {limit}", base, *gains, f"{row.threshold} of {BATCH}, {row.kept} of {INSTANCES}"]
        stages = row.generation + row.scoring
        cells.append(f"{stages / row.between_by_knee:.3f}, {stages / row.between_by_room:.3f}")
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
    parser.add_argument("--kept", action="store_true", help="only what tuning the number of kept instances saves")
    options = parser.parse_args(arguments)
    if options.kept:
        print(kept_table())
        return 0
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
