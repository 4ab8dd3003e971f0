"""What `plait plan` and `plait simulate` print of a plan: tables and a picture that fit the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from plait.cli.placement_text import cut_text
from plait.cli.plan_following import Following
from plait.cli.plan_report import Report, carried_in, draft_forecast_of
from plait.cli.ranks_text import few_ranks_text
from plait.cost.call_lengths import lengths_by_call
from plait.cost.corrections import with_carried
from plait.cost.estimate import human_bytes
from plait.cost.lengths import SampleLengths
from plait.cost.spent_memory import is_open, spent_text
from plait.dataflow import CallKind
from plait.models.files.known_shapes import is_shape
from plait.recipes.engine_checks import said_of_no_drafts, said_of_program
from plait.recipes.turn_checks import said_of_made, said_of_rounds
from plait.runtime.prediction.draft_forecast import UNKNOWN
from plait.runtime.prediction.planning import Planning
from plait.schedule.gantt import ascii_gantt, letter_of
from plait.schedule.plan import Placement
from plait.schedule.timeline import Span, Timeline
from plait.simulator.step_memory import RankMemory
from plait.simulator.steps import CallRecord

GANTT_RANKS = 16
"""Rows of the picture in a terminal; ranks that do the same share one, and of more rows every so-manieth is shown."""
MEMORY_ROWS = 8
"""Rows of the table of memory; of more, ranks that do the same share one, that of the fullest."""
LEAST_COLUMNS, MOST_COLUMNS = 40, 120
LABEL = 14
"""Characters of the words that the first lines begin with."""


def plan_text(report: Report, following: Following | None = None) -> str:
    """As wide as the terminal, within bounds.

    Args:
        following: how a run follows the plan; None: nothing is said of it.
    """
    width = max(LEAST_COLUMNS, min(MOST_COLUMNS, shutil.get_terminal_size().columns))
    lines = [
        *_facts(report, width),
        "",
        *_calls(report, width),
        "",
        *_memory(report, width),
        "",
        *_gantt(report, width),
        *_others(report, width),
        *(["", *_line("to follow it", following.beside, width), following.command] if following else []),
    ]
    return "\n".join(lines) + "\n"


def _facts(report: Report, width: int) -> Iterator[str]:
    prediction, planning, choice = report.prediction, report.planning, report.choice
    cluster, sizes = planning.cluster, planning.lengths
    yield from _line(
        "plan", f"{report.plan.name} on {cluster.name} ({_devices(report.plan.num_ranks)}), predicted", width
    )
    yield from _line("step", f"{prediction.seconds_per_step:.4g} s", width)
    yield from _line("tokens", f"{report.tokens_per_s:,.0f} a second, of prompts and responses", width)
    if (price := report.price_of_1000_steps) is not None:
        hourly = cluster.price_per_device_hour
        rate = f"{cluster.price_per_hour:g} for an hour of all" if hourly is None else f"{hourly:g} for a device's hour"
        text = f"{price:,.2f}, at {rate}"
        yield from _line("1,000 steps", text, width)
    lengths = _lengths(sizes)
    generates = bool(planning.flow.of_kind(CallKind.GENERATE))
    most, name = planning.recipe.sampling.max_response_tokens, planning.recipe.model
    is_longest = sizes.responses.mean >= most if generates else is_shape(name)
    if is_longest and not report.states_lengths:
        lengths += ", as long as they may be: `--lengths` states others"
    yield from _line("lengths", lengths, width)
    for text in _made(planning):
        yield from _line("made", text, width)
    yield from _line("numbers", f"{_numbers(report)}; nothing of this was run", width)
    if planning.recipe.device == "cuda":
        found = ", as they fit" if is_open(planning.recipe) else ""
        yield from _line("training", f"{spent_text(planning.followed(report.plan).recipe)}{found}", width)
    if cluster.num_devices > 1:
        yield from _line("fusion", _fusion(report), width)
    if generates and (program := said_of_program(planning.recipe)) is not None:
        yield from _line("engine", program, width)
    if (rounds := said_of_rounds(planning.flow, planning.recipe)) is not None:
        yield from _line("rounds", rounds, width)
    if (forecast := draft_forecast_of(planning)) is not None:
        drafts = forecast.drafts
        passes = f" and {drafts.passes:.3g} forwards of the draft model" if drafts.passes else ""
        text = f"{drafts.tokens:.3g} tokens of a sample in a decode step, for {drafts.rows:.3g} rows{passes}"
        yield from _line("speculation", forecast.source if forecast == UNKNOWN else f"{text}, {forecast.source}", width)
    elif generates and (why := said_of_no_drafts(planning.recipe)) is not None:
        yield from _line("speculation", why, width)
    if planning.recipe.max_staleness:
        yield from _line("staleness", "a step draws the batch behind the one that it trains on", width)
    if choice.stopped_by is not None:
        how = "no other can be better" if choice.stopped_by == "exhaustive" else f"in {choice.seconds:.1f} s"
        yield from _line("tried", f"{choice.evaluations:,} plans, {how}", width)
    if not prediction.feasible:
        worst = max(prediction.memory, key=lambda rank: rank.peak_bytes / rank.limit_bytes)
        text = f"rank {worst.rank} would hold {human_bytes(worst.peak_bytes)} of {human_bytes(worst.limit_bytes)}"
        yield from _line("does not fit", text, width)


def _lengths(sizes: SampleLengths) -> str:
    return (
        f"prompts of {sizes.prompts.mean:,.0f} tokens (at most {sizes.prompts.longest:,}), responses of "
        f"{sizes.responses.mean:,.0f} ({sizes.responses.longest:,})"
    )


def _made(planning: Planning) -> Iterator[str]:
    """How long samples of prompts that functions write are counted, and by which rule."""
    flow, known = planning.flow, planning.lengths
    of_calls = lengths_by_call(flow, known, planning.recipe.samples_per_prompt)
    for node in flow.of_kind(CallKind.GENERATE):
        if node.prompts is not None:
            yield f"{node.call}: {_lengths(of_calls[node.id])}"
    if (rule := said_of_made(flow, known.beside)) is not None:
        yield f"{rule}: `--lengths` takes the lengths of a run, if you give its folder"


def _fusion(report: Report) -> str:
    """Whether scoring begins beside generation."""
    if hidden := report.planning.nothing_to_hide(report.plan):
        return f"nothing to hide: {hidden}"
    if report.plan.fuses(report.planning.recipe.fusion_rule):
        return "scoring may begin beside generation"
    return "scoring could begin beside generation, but neither recipe nor plan lets it (`fusion`)"


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _numbers(report: Report) -> str:
    """Where seconds come from, and how far off they have been."""
    calibration = report.planning.calibration
    source = with_carried(calibration.source, carried_in(report.planning, report.plan))
    if calibration.error is None:
        return f"{source}; how far off they are is not known"
    error_text = (
        f"off by {calibration.error:.0%} in the mean"
        if calibration.runs
        else f"expected to be off by {calibration.error:.0%}"
    )
    kinds = ", ".join(f"{kind} {error:.0%}" for kind, error in calibration.kinds.items())
    return f"{source}; {error_text}{f' ({kinds})' if kinds else ''}"


def _calls(report: Report, width: int) -> Iterator[str]:
    records = report.prediction.calls
    names = {
        id(record): record.call if record.placements else f"{record.call} ({record.kind.lower()})" for record in records
    }
    rows: list[tuple[str, str, str, CallRecord]] = []
    for record in records:
        if not record.placements:
            rows.append((names[id(record)], "", "", record))
        rows += [(names[id(record)], few_ranks_text(p.ranks), _how(p), record) for p in record.placements]
    ranks = max(len("ranks"), *(len(row[1]) for row in rows))
    layout = max(len("layout"), *(len(row[2]) for row in rows))
    wide = min(max(len("call"), *map(len, names.values())), max(12, width - ranks - layout - 22))
    most = width - (wide + ranks + layout + 22) - 2 >= 12
    yield f"{'call':<{wide}}  {'ranks':<{ranks}}  {'layout':<{layout}}{'start':>8}{'seconds':>10}" + (
        "  most of it" if most else ""
    )
    for name, where, how, record in rows:
        largest = max(record.terms.items(), key=lambda item: item[1], default=("", 0.0))[0]
        largest = "prompts" if how.endswith("prefill") else largest
        start = start_text(record.start_s)
        line = f"{_short(name, wide):<{wide}}  {where:<{ranks}}  {how:<{layout}}{start:>8}{record.seconds:>10.4g}"
        yield f"{line}  {largest}".rstrip() if most else line


def start_text(start_s: float) -> str:
    """Seconds in three digits, or as many as leave a place between columns of eight."""
    start_s = round(start_s, 9) + 0.0  # without what floats of a few steps are off, and its sign
    if start_s >= 1000:
        return f"{start_s:.0f}"
    return f"{start_s:.3g}" if start_s >= 0.001 else f"{start_s:.1g}"


def _memory(report: Report, width: int) -> Iterator[str]:
    cluster, memory = report.planning.cluster, report.prediction.memory
    devices = [cluster.device_of(m.rank).name for m in memory]
    groups = _alike(memory, devices)
    if len(groups) > MEMORY_ROWS:
        groups = fullest(memory, devices, [span for span in report.prediction.timeline.spans if span.step == 1])
    names = [
        f"rank {ranks} ({cluster.device_of(rank_memory.rank).name})" if cluster.kinds else f"rank {ranks}"
        for ranks, rank_memory in groups
    ]
    wide = max(len("memory"), *map(len, names))
    yield f"{'memory':<{wide}}{'at most':>11}{'of':>11}  largest"
    for name, (_, rank_memory) in zip(names, groups, strict=True):
        largest = sorted(rank_memory.terms.items(), key=lambda item: -item[1])[:3]
        terms = ", ".join(f"{what} {human_bytes(count)}" for what, count in largest)
        head = f"{name:<{wide}}{human_bytes(rank_memory.peak_bytes):>11}{human_bytes(rank_memory.limit_bytes):>11}  "
        yield from _hung(head, terms, width)


def _gantt(report: Report, width: int) -> Iterator[str]:
    timeline = report.prediction.timeline
    spans = [span for span in timeline.spans if span.step == 1]
    groups = busy_alike(spans)
    groups = groups[:: -(-len(groups) // GANTT_RANKS)]
    titles = {ranks[0]: f"rank {few_ranks_text(ranks)}" for ranks in groups}
    wide = max(map(len, titles.values())) + len(" link")
    slices = min(80, width - wide - len(" ||"))
    picture = ascii_gantt(Timeline(tuple(span for span in spans if span.rank in titles)), slices)
    *rows, scale = picture.rstrip().splitlines()
    for row in rows:
        name, cells = row.split("|", 1)
        _, rank, *lane = name.split()
        if not lane or cells.strip("|."):
            yield f"{' '.join([titles[int(rank)], *lane]):>{wide}} |{cells}"
    yield f"{'':>{wide}}  {scale.lstrip().rjust(slices)}"
    words = [f"{letter_of(kind)} {kind.lower()}" for kind in dict.fromkeys(span.kind for span in spans)]
    yield from _hung("", ", ".join(words), width)


def busy_alike(spans: Sequence[Span]) -> list[list[int]]:
    """Ranks that do the same of the same calls at the same time, together."""
    does: dict[int, list[tuple[object, ...]]] = {}
    for span in spans:
        does.setdefault(span.rank, []).append((span.lane, span.whole, span.kind, span.start_s, span.end_s))
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank in sorted(does):
        groups.setdefault(tuple(sorted(does[rank], key=repr)), []).append(rank)
    return list(groups.values())


def _others(report: Report, width: int) -> Iterator[str]:
    yield from _beside("other plans", "why not", [*report.alternatives(), *report.baseline_rows()], width)
    yield from _beside("other keys", "why", report.variant_rows(), width)


def _beside(title: str, reason: str, rows: Sequence[Mapping[str, Any]], width: int) -> Iterator[str]:
    if not rows:
        return
    wide = max(len(title), *(len(row["name"]) for row in rows))
    yield ""
    yield f"{title:<{wide}}{'seconds':>10}  {reason}"
    for row in rows:
        yield from _hung(f"{row['name']:<{wide}}{row['seconds_per_step']:>10.4g}  ", row["why"], width)


def _line(label: str, text: str, width: int) -> list[str]:
    return _hung(f"{label:<{LABEL}}", text, width)


def _hung(head: str, text: str, width: int) -> list[str]:
    """A text behind a head; what does not fit stands below it, under the text, or where that has little room
    indented."""
    indent = " " * (len(head) if width - len(head) >= 24 else 4)
    return textwrap.wrap(
        head + text, width, subsequent_indent=indent, drop_whitespace=True, break_on_hyphens=False
    ) or [head]


def _how(p: Placement) -> str:
    return f"{cut_text(p)} {p.mode}".lstrip() if p.mode == "prefill" else cut_text(p)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _alike(memory: Sequence[RankMemory], devices: Sequence[str]) -> list[tuple[str, RankMemory]]:
    """Ranks whose devices are of one name, and that hold as much of everything, together."""
    groups: dict[tuple[object, ...], list[RankMemory]] = {}
    for rank_memory, device in zip(memory, devices, strict=True):
        key = (device, rank_memory.peak_bytes, *sorted(rank_memory.terms.items()))
        groups.setdefault(key, []).append(rank_memory)
    groups_of_ranks = []
    for same in groups.values():
        ranks = [rank_memory.rank for rank_memory in same]
        groups_of_ranks.append((few_ranks_text(ranks), same[0]))
    return groups_of_ranks


def fullest(
    memory: Sequence[RankMemory], devices: Sequence[str], spans: Sequence[Span]
) -> list[tuple[str, RankMemory]]:
    """The fullest of ranks whose devices are of one name, and that do the same of the same calls."""
    does = {rank: number for number, ranks in enumerate(busy_alike(spans)) for rank in ranks}
    groups: dict[tuple[object, ...], list[RankMemory]] = {}
    for rank_memory, device in zip(memory, devices, strict=True):
        groups.setdefault((device, does.get(rank_memory.rank)), []).append(rank_memory)
    return [
        (few_ranks_text([one.rank for one in same]), max(same, key=lambda one: one.peak_bytes / one.limit_bytes))
        for same in groups.values()
    ]
