"""Decoding in stages as a ring, against one group, data parallelism and one worker; emulated stages and the formula.

    python benchmarks/pipelined_decode.py                        # on two idle cores
    python benchmarks/pipelined_decode.py --tiny --repeats 1     # does the benchmark itself work?

Two workers of one thread each and a random model; B samples of equal lengths are decoded, in turns, `--repeats` times:

    one group     the model in two stages, all samples in one step: one stage works at a time
    ring 2, 3     the same, so many groups in flight
    two batches   2 B samples, in two groups of B: twice the keys and values, for full batches
    dp            the whole model on both workers, half of the samples each
    one worker    all of it on one

Speeds are tokens per second against one group. The ceiling of a ring of two groups is (t(B) + c) / (t(B / 2) + c),
with the time t of a stage and of a hop c as measured in the same run: t is what the slower stage takes for a step
without waiting, c what a round of one group takes beyond both stages, halved. That of two batches is 2. `dp` and `one
worker` say what one would do without stages.

Then 2, 4 and 8 workers whose stages sleep (`--sleep` ms, much longer than what they compute: they share the cores): the
milliseconds of a round with G = 1, P, P + 1 and 2 P groups against max(P (t + c), G t), and the (min(G, P) - 1) (t + c)
in which the ring fills, spread over all rounds. These are emulated.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from placed.decoding import VOCABULARY, Decoded, DecodeWorker
from random_llama import write_stages
from sides import positive, row

from plait.launch.group import Group
from plait.launch.local import LocalProcesses
from plait.policy.decode_ring import Ring

DEADLINE_S = 900.0
LAYERS = 8
Runs = dict[str, list[list[Decoded]]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="plait-decode-") as name:
        folder = Path(name)
        write_stages(folder / "model", VOCABULARY, 2 if options.tiny else LAYERS, is_tiny=options.tiny)
        with started(2, folder / "model", options.dtype) as group:
            for batch in options.batches:
                report(batch, real(group, batch, options))
        for stages in options.stages:
            write_stages(folder / f"{stages}", VOCABULARY, stages, is_tiny=True)
            with started(stages, folder / f"{stages}", "float32") as group:
                emulated(group, stages, options)
    return 0


def started(count: int, folder: Path, dtype: str) -> Group:
    return LocalProcesses(threads=1).start(DecodeWorker, count, arguments=(str(folder), dtype))


def real(group: Group, batch: int, options: argparse.Namespace) -> Runs:
    """Of each kind and repeat, what the workers measured; a first turn does not count."""
    tokens = options.tokens

    def staged(samples: int, groups: int) -> Callable[[], list[Decoded]]:
        return lambda: ask(group, "staged", samples, tokens, groups)

    kinds: dict[str, Callable[[], list[Decoded]]] = {
        "one group": staged(batch, 1),
        "half": staged(max(1, batch // 2), 1),
        "ring 2": staged(batch, 2),
        "ring 3": staged(batch, 3),
        "two batches": staged(2 * batch, 2),
        "dp": lambda: ask(group, "whole", batch, tokens, share=True),
        "one worker": lambda: ask(group, "whole", batch, tokens, share=False),
    }
    runs_by_kind: Runs = defaultdict(list)
    for number in range(options.repeats + 1):
        for kind, run in kinds.items():
            measured = run()
            if number:
                runs_by_kind[kind].append(measured)
    return runs_by_kind


def ask(group: Group, method: str, *arguments: int | float, **options: bool) -> list[Decoded]:
    results = group.submit(range(group.num_ranks), method, *arguments, **options).result(DEADLINE_S)
    return [answer for answer in results if answer is not None]


def report(batch: int, runs_by_kind: Runs) -> None:
    rate = {kind: median(rates(kind, runs)) for kind, runs in runs_by_kind.items()}
    whole_s, half_s = (
        median(max(rank.step_s for rank in ranks) for ranks in runs_by_kind[kind]) for kind in ("one group", "half")
    )
    both_s = median(sum(rank.step_s for rank in ranks) for ranks in runs_by_kind["one group"])
    hop_s = max(0.0, batch / rate["one group"] - both_s) / 2
    ceiling = (whole_s + hop_s) / (half_s + hop_s)
    print(row(f"B = {batch}", ["tokens/s", "speed", "ceiling", "of it", "busy 0", "busy 1"]))
    ceilings = {"one group": 1.0, "ring 2": ceiling, "two batches": 2.0}
    for kind in ("one group", "ring 2", "ring 3", "two batches", "dp", "one worker"):
        speed, most = rate[kind] / rate["one group"], ceilings.get(kind)
        shares = [f"{median(rank.busy for rank in ranks):.0%}" for ranks in zip(*runs_by_kind[kind], strict=True)]
        known = [f"{most:.3f}", f"{speed / most:.1%}"] if most else ["", ""]
        print(row(kind, [f"{rate[kind]:.1f}", f"{speed:.3f}", *known, *(shares if most or "ring" in kind else ())]))
    print(f"t({batch}) {1e3 * whole_s:.2f} ms, t({batch // 2}) {1e3 * half_s:.2f} ms, c {1e3 * hop_s:.2f} ms\n")


def rates(kind: str, runs: Sequence[Sequence[Decoded]]) -> list[float]:
    """Tokens per second of each repeat: whole models add theirs up, stages say the same ones."""
    tokens = [sum(rank.tokens for rank in ranks) if kind in ("dp", "one worker") else ranks[0].tokens for ranks in runs]
    return [count / max(rank.seconds for rank in ranks) for count, ranks in zip(tokens, runs, strict=True)]


def emulated(group: Group, stages: int, options: argparse.Namespace) -> None:
    """Every group has two samples; a round is a token of each of them."""
    rounds: dict[int, float] = {}
    shares: dict[int, float] = {}
    step_s = 0.0
    for groups in (1, stages, stages + 1, 2 * stages):
        samples, sleep_s = 2 * groups, options.sleep / 1e3
        runs = [ask(group, "staged", samples, options.rounds, groups, sleep_s) for _ in range(options.repeats)]
        rounds[groups] = median(max(rank.seconds for rank in ranks) / options.rounds for ranks in runs)
        shares[groups] = median(sum(rank.busy for rank in ranks) / stages for ranks in runs)
        if groups == 1:
            step_s = median(sum(rank.step_s for rank in ranks) / stages for ranks in runs)
    hop_s = max(0.0, rounds[1] / stages - step_s)
    print(row(f"emulated, P = {stages}", ["ms a round", "formula", "ratio", "busy", "formula"]))
    for groups, seconds in rounds.items():
        ring = Ring(stages, groups, step_s, hop_s)
        expected_s = ring.round_s + (min(groups, stages) - 1) * (step_s + hop_s) / options.rounds
        numbers = [f"{1e3 * seconds:.1f}", f"{1e3 * expected_s:.1f}", f"{seconds / expected_s:.3f}"]
        print(row(f"G = {groups}", [*numbers, f"{shares[groups]:.0%}", f"{groups * step_s / ring.round_s:.0%}"]))
    print()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    parser.add_argument("--batches", type=positive, nargs="+", default=[8, 16, 32, 64], help="B, some numbers")
    parser.add_argument("--tokens", type=positive, default=64, help="of a sample")
    parser.add_argument("--stages", type=positive, nargs="*", default=[2, 4, 8], help="workers that sleep")
    parser.add_argument("--sleep", type=float, default=100.0, help="milliseconds of a stage in each step")
    parser.add_argument("--rounds", type=positive, default=12, help="tokens of each emulated sample")
    parser.add_argument("--repeats", type=positive, default=7)
    return parser


if __name__ == "__main__":
    sys.exit(main())
