"""What a generation came to: its samples, and how fast they came."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from plait.cost.limit import MachineRates, ideal_steps, limit_seconds
from plait.data.records import Sample
from plait.generation.occupancy import Occupancy
from plait.generation.step_record import StepRecord
from plait.models.shape import ModelShape
from plait.policy.step import StepKind
from plait.speculation.counts import Counts

_RECENT_STEPS = 32
"""Over which the rate that a person watches is taken."""


@dataclass
class Meter:
    """Counts steps while they are done. Tokens are response tokens unless named."""

    tokens: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    """Seconds of the steps that compute prompts, whatever else they compute; less `packing_seconds`."""
    packing_seconds: float = 0.0
    """Packing the weights when work begins, and proving the compiled forward the first time."""
    decode_tokens: int = 0
    decode_step_s: list[float] = field(default_factory=list)
    kv_peak_bytes: int = 0
    is_kv_limited: bool = False
    """Whether somebody said how much the cache may hold; its share that is in use says nothing else."""
    _recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))

    def step(self, record: StepRecord, seconds: float, kv_bytes: int) -> None:
        self.tokens += record.num_drawn
        self.packing_seconds += record.packing_s
        self._recent.append((record.num_drawn, seconds))
        seconds -= record.packing_s
        if record.kind is StepKind.DECODE:
            self.decode_tokens += record.num_drawn
            if record.num_drawn:  # else it was launched ahead, and the next step waits for it
                self.decode_step_s.append(seconds)
        else:
            self.prefill_tokens += record.num_prefill_tokens
            self.prefill_seconds += seconds
        self.kv_peak_bytes = max(self.kv_peak_bytes, kv_bytes)

    def now(self, occupancy: Occupancy) -> str:
        """A line for the progress display."""
        tokens, seconds = (sum(column) for column in zip(*self._recent, strict=True))
        held_tokens, most_tokens = occupancy.kv_tokens
        use = f" ({held_tokens / most_tokens:.0%})" if self.is_kv_limited else ""
        return (
            f"{_rate(tokens, seconds):,.0f} tokens/s  "
            f"{occupancy.num_running} running, {occupancy.num_waiting} waiting  "
            f"cache {held_tokens:,} tokens{use} in {occupancy.kv_bytes / 2**20:,.1f} MiB"
        )

    def __add__(self, other: Meter) -> Meter:
        """What two processes side by side counted."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMS}
        return Meter(**sums, packing_seconds=max(self.packing_seconds, other.packing_seconds))


_SUMS = ("tokens", "prefill_tokens", "prefill_seconds", "decode_tokens", "decode_step_s", "kv_peak_bytes")


@dataclass(frozen=True)
class GenerationReport:
    """How many samples there are, and how fast they came."""

    num_samples: int
    """Those that ended."""
    num_asked: int
    """Samples; more than there are where the run was interrupted."""
    seconds: float
    meter: Meter
    limit_s: float | None = None
    """What the machine needs at least for these samples (`cost.limit`); None where not all were finished, or several
    processes drew them."""
    not_compiled: str | None = None
    """See `Refusals.compiled`."""
    speculation: Counts | None = None
    """See `Engine.speculation`."""
    processes: int = 1
    """That drew them side by side."""

    @classmethod
    def of_all(cls, parts: Sequence[GenerationReport]) -> GenerationReport:
        """What processes side by side report."""
        counts = [part.speculation for part in parts if part.speculation is not None]
        return cls(
            sum(part.num_samples for part in parts),
            sum(part.num_asked for part in parts),
            max(part.seconds for part in parts),
            reduce(add, (part.meter for part in parts)),
            not_compiled=parts[0].not_compiled,
            speculation=reduce(add, counts) if counts else None,
            processes=len(parts),
        )

    @property
    def is_whole(self) -> bool:
        return self.num_samples == self.num_asked

    def figures(self) -> dict[str, Any]:
        """For `--json`. `tokens` counts those of unfinished samples as well."""
        meter = self.meter
        steps_ms = [1000 * seconds for seconds in meter.decode_step_s] or [0.0]
        return {
            "samples": self.num_samples,
            "tokens": meter.tokens,
            "seconds": self.seconds,
            "tokens_per_s": _rate(meter.tokens, self.seconds),
            "packing_seconds": meter.packing_seconds,
            "prefill_tokens_per_s": self.processes * _rate(meter.prefill_tokens, meter.prefill_seconds),
            "decode_tokens_per_s": self.processes * _rate(meter.decode_tokens, sum(meter.decode_step_s)),
            "step_ms": {f"p{q}": float(np.percentile(steps_ms, q)) for q in (50, 90, 99)},
            "kv_peak_bytes": meter.kv_peak_bytes,
            "limit_share": None if self.limit_s is None else self.limit_s / self.seconds,
            "not_compiled": self.not_compiled,
            "speculation": None if self.speculation is None else self.speculation.figures(),
        }


OWN_COLUMNS = frozenset({"row", "sample", "response", "finish_reason", "token_ids", "logprobs"})
"""Our columns of a row; the others are those of the data."""


def row_of(sample: Sample) -> dict[str, Any]:
    """A record for a JSONL file: the data's row, which of them it was (from 0), and the response."""
    return {
        **sample.prompt.columns,
        "row": sample.prompt.uid,
        "sample": sample.index,
        "response": sample.text,
        "finish_reason": sample.finish_reason.value,
        "token_ids": list(sample.token_ids),
        "logprobs": list(sample.logprobs),
    }


def limit_of(samples: Sequence[Sample], shape: ModelShape, dtype: str, max_running: int, rates: MachineRates) -> float:
    """Seconds that these samples take at least."""
    groups: dict[int, tuple[int, list[int]]] = {}
    for sample in samples:
        _, lengths = groups.setdefault(sample.prompt.uid, (len(sample.prompt.token_ids), []))
        lengths.append(len(sample.token_ids))
    return limit_seconds(shape, dtype, ideal_steps([*groups.values()], max_running), rates)


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0
