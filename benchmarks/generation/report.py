"""Tables of the benchmark, and the bars that plait has to pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from generation.fit import StepTime, fit, mean_error, r_squared, typical
from generation.memory import generation_rows
from generation.processes import Timed
from generation.serving import Outcome
from generation.workload import Case, Workload
from plait.cost.limit import IdealStep, MachineRates, ideal_steps, limit_seconds
from plait.models.shape import ModelShape
from plait.policy.blocks import BLOCK_TOKENS
from plait.training.memory import BYTES

BARS = {
    # peer: times as fast as it, by case; of bfloat16, cap 128, one thread
    "transformers": {"8": 2.5, "32": 3.0, "8x8": 4.0},
    "vllm": {"8": 1.0, "32": 1.0, "8x8": 1.3},
    "llama": {"8": 1.5, "32": 1.5, "8x8": 1.5},
}
LIMIT_BARS = {"8": 0.65, "32": 0.70}
BAR_SETTING = ("bfloat16", 1, 128)
MEMORY_SHARE, MEMORY_BYTES = 0.15, 100e6
"""The prediction of the peak may be off by the larger of the two."""
FIT_BAR = 0.98
LOWERED_ROWS = 256
"""That the compiled forward computes at a time."""


@dataclass
class Entry:
    """Counted runs of one engine on one case."""

    timed: list[Timed] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        return median(timed.wall_s for timed in self.timed)

    @property
    def cpu_s(self) -> float:
        return median(timed.cpu_s for timed in self.timed)

    @property
    def peak_bytes(self) -> int:
        return max(timed.peak_bytes for timed in self.timed)

    @property
    def outcomes(self) -> list[Outcome]:
        return [Outcome.of(timed.outcome) for timed in self.timed]


@dataclass
class Fitted:
    step_time: StepTime
    r_squared: float
    decode_r_squared: float
    """Of the steps without prompts, which are many and short beside the others."""
    mean_error: float
    """Of all steps, relative."""
    num_steps: int


@dataclass
class Results:
    """Of one dtype and one number of threads."""

    workload: Workload
    shape: ModelShape
    entries: dict[str, dict[str, Entry]] = field(default_factory=dict)
    """Case → engine → its runs."""
    rates: list[MachineRates] = field(default_factory=list)
    imported_bytes: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def machine(self) -> MachineRates:
        return MachineRates(
            median(rates.bytes_per_s for rates in self.rates), median(rates.flops_per_s for rates in self.rates)
        )

    def steps(self, case: Case) -> Iterator[IdealStep]:
        groups = [(len(prompt), lengths) for prompt, lengths in zip(case.prompts, case.lengths, strict=True)]
        return ideal_steps(groups, self.workload.max_samples)

    def limit_s(self, case: Case) -> float:
        return limit_seconds(self.shape, self.workload.dtype, self.steps(case), self.machine)

    def step_time(self) -> Fitted | None:
        """The fit of plait's step times over all cases; None where it did not run."""
        steps = [
            step
            for entries in self.entries.values()
            if "plait" in entries
            for step in typical([outcome.steps for outcome in entries["plait"].outcomes])
        ]
        if not steps:
            return None
        model = fit(steps)
        decodes = [step for step in steps if step.tokens == step.batch]
        return Fitted(model, r_squared(model, steps), r_squared(model, decodes), mean_error(model, steps), len(steps))

    def packing_s(self) -> float:
        """Median over plait's runs of what laying the weights out anew took."""
        ran = [entries["plait"] for entries in self.entries.values() if "plait" in entries]
        return median(outcome.packing_s for entry in ran for outcome in entry.outcomes)

    def predicted_bytes(self, case: Case) -> int:
        """Of plait above its imports."""
        samples = len(case.flat_lengths)
        rows = generation_rows(
            self.shape,
            self.workload.dtype,
            kv_tokens=max(step.context for step in self.steps(case)) + samples * BLOCK_TOKENS // 2,
            prefill_tokens=min(LOWERED_ROWS, sum(map(len, case.prompts))),
            running=samples,
            packed=True,
        )
        return self.shape.parameters * BYTES[self.workload.dtype] + sum(size for _, size in rows)


def tables(results: Results) -> str:
    work, machine = results.workload, results.machine
    threads = f"{work.threads} thread{'s' if work.threads > 1 else ''}"
    lines = [
        f"{work.title}, {work.dtype}, {threads}",
        f"copies {machine.bytes_per_s / 1e9:.1f} GB/s, products {machine.flops_per_s / 1e9:.0f} GFLOP/s "
        f"(medians of {len(results.rates)})",
        *(f"{name}: {version}" for name, version in results.versions.items()),
    ]
    for key, entries in results.entries.items():
        lines += ["", *_table(results, work.cases[key], entries)]
    if "plait" in results.imported_bytes:
        lines += ["", *memory_lines(results)]
    if (fitted := results.step_time()) is not None:
        model = fitted.step_time
        beyond = "".join(f" + {1e6 * w:.1f} max(0, tokens - {knot})" for knot, w in model.beyond.items() if w)
        lines += [
            "",
            f"step in us: {1e6 * model.constant:.0f} + {1e6 * model.batch:.1f} batch + {1e6 * model.context:.3f} "
            f"context + {1e6 * model.tokens:.1f} tokens{beyond}",
            f"R2 {fitted.r_squared:.4f} over {fitted.num_steps} steps, {fitted.decode_r_squared:.4f} over those that "
            f"compute no prompts; off by {fitted.mean_error:.1%} in the mean",
            f"packing the weights, in no step's time: {1e3 * results.packing_s():.0f} ms (median)",
        ]
    return "\n".join(lines)


def _table(results: Results, case: Case, entries: Mapping[str, Entry]) -> list[str]:
    limit = results.limit_s(case)
    groups = f"{len(case.prompts)} prompts x {len(case.lengths[0])}"
    lines = [
        f"{groups}, cap {case.cap}: {sum(map(len, case.prompts))} prompt tokens, {sum(case.flat_lengths)} response "
        f"tokens (longest {case.longest}); the machine's limit {limit:.2f} s",
        _row("", "wall s", "least-most", "CPU s", "tokens", "rows", "tok/s", "of limit", "plait is", "peak MB"),
    ]
    ours = entries["plait"].wall_s if "plait" in entries else None
    for name, entry in entries.items():
        walls = [timed.wall_s for timed in entry.timed]
        last = entry.outcomes[-1]
        delivered = sum(last.response_lengths)
        lines.append(
            _row(
                name,
                f"{entry.wall_s:.2f}",
                f"{min(walls):.2f}-{max(walls):.2f}",
                f"{entry.cpu_s:.2f}",
                str(delivered),
                str(last.row_steps + len(last.response_lengths)) if last.row_steps else "?",
                f"{delivered / entry.wall_s:.0f}",
                f"{limit / entry.wall_s:.1%}",
                f"{entry.wall_s / ours:.2f}x" if ours else "",
                f"{entry.peak_bytes / 1e6:.0f}",
            )
        )
    return lines


def _row(name: str, *cells: str) -> str:
    return (f"{name:<14}" + "".join(f"{cell:>12}" for cell in cells)).rstrip()


def memory_lines(results: Results) -> list[str]:
    """Of each case plait's peak above what its process held after its imports, and what was predicted."""
    lines = ["peak memory of plait above its imports: found, predicted"]
    for key, entries in results.entries.items():
        if "plait" not in entries:
            continue
        measured, predicted = memory_of(results, key)
        fits = "" if fits_memory(measured, predicted) else "   beyond 15 % and 100 MB"
        lines.append(f"  {key:<12}{measured / 1e6:>8.0f} MB{predicted / 1e6:>8.0f} MB{fits}")
    return lines


def memory_of(results: Results, key: str) -> tuple[int, int]:
    """(measured, predicted) bytes."""
    measured = results.entries[key]["plait"].peak_bytes - results.imported_bytes["plait"]
    return measured, results.predicted_bytes(results.workload.cases[key])


def fits_memory(measured: int, predicted: int) -> bool:
    return abs(measured - predicted) <= max(MEMORY_SHARE * predicted, MEMORY_BYTES)


def bars(results: Results) -> list[str]:
    """One line for every bar that this run can tell of."""
    lines = []
    if (results.workload.dtype, results.workload.threads) == BAR_SETTING[:2]:
        for key, entries in results.entries.items():
            case = results.workload.cases[key]
            if case.cap == BAR_SETTING[2] and "plait" in entries:
                lines += _speed_bars(results, case, entries)
    for key, entries in results.entries.items():
        if "plait" in entries:
            measured, predicted = memory_of(results, key)
            lines.append(
                _bar(f"memory, {key}", measured / predicted, fits_memory(measured, predicted), "within 15 %, 100 MB")
            )
    if (fitted := results.step_time()) is not None:
        for what, share in (("all steps", fitted.r_squared), ("steps without prompts", fitted.decode_r_squared)):
            lines.append(_bar(f"R2 of the times of {what}", share, share >= FIT_BAR, f"at least {FIT_BAR}"))
    return lines


def _speed_bars(results: Results, case: Case, entries: Mapping[str, Entry]) -> list[str]:
    ours = entries["plait"].wall_s
    lines = []
    for peer, wanted in BARS.items():
        if peer in entries and case.name in wanted:
            ratio, least = entries[peer].wall_s / ours, wanted[case.name]
            lines.append(_bar(f"{case.key} against {peer}", ratio, ratio >= least, f"at least {least}"))
    if case.name in LIMIT_BARS:
        share, least = results.limit_s(case) / ours, LIMIT_BARS[case.name]
        lines.append(_bar(f"{case.key} share of the limit", share, share >= least, f"at least {least}"))
    return lines


def _bar(what: str, value: float, passed: bool, wanted: str) -> str:
    return f"{'pass' if passed else 'MISS'}  {what}: {value:.3f} ({wanted})"


def differing(name: str, case: Case, outcome: Outcome) -> list[str]:
    """A line where an engine did other work than it was asked for."""
    if outcome.response_lengths == case.flat_lengths:
        return []
    return [f"{name}, {case.key}: expected response lengths {case.flat_lengths}, found {outcome.response_lengths}"]


def warning_of_load(results: Sequence[Results]) -> list[str]:
    """Lines that say that the machine was busy, if plait's times at one thread tell so."""
    lent = [
        entries["plait"].wall_s / entries["plait"].cpu_s
        for side in results
        if side.workload.threads == 1
        for entries in side.entries.values()
        if "plait" in entries and entries["plait"].cpu_s > 1
    ]
    if not lent or max(lent) <= 1.05:
        return []
    return [f"The machine was busy: wall time up to {max(lent):.2f} times CPU time. Not figures to publish."]
