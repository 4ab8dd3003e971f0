"""Pipelined decoding: several groups of samples go round the stages of a model, so that no stage waits.

With one batch, decoding on P stages keeps one stage in P busy, for the next token needs the last one. G groups in
flight fill the ring. Reconstructed from Pipe-RLHF (paper notes D2, D3): the names *intra-batch* (one batch cut into
groups) and *inter-batch* (several full batches) are the literature's.

t is the time of one stage on one group, c the time of one hop between stages, the last one back to the first included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from plait.errors import ConfigError
from plait.schedule.action import Action, Kind, action_id
from plait.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Ring:
    """num_stages P, num_groups G, stage_s t, hop_s c; its closed forms."""

    num_stages: int
    num_groups: int
    stage_s: float
    hop_s: float = 0.0

    def __post_init__(self) -> None:
        if self.num_stages < 1 or self.num_groups < 1 or self.stage_s <= 0 or self.hop_s < 0:
            raise ConfigError(f"decode ring: expected stages, groups and stage time above zero, found {self}")

    @property
    def round_s(self) -> float:
        """Seconds in which every group gets one token: max(P (t + c), G t)."""
        return max(self.num_stages * (self.stage_s + self.hop_s), self.num_groups * self.stage_s)

    @property
    def utilisation(self) -> float:
        """Share of time in which a stage is busy: min(1, G t / (P (t + c)))."""
        return self.num_groups * self.stage_s / self.round_s

    @property
    def feedback_slots(self) -> int:
        """Slots of t between the sampling of a group's token and its next use on stage 0: G − P + 1 when positive.

        All but the last of them may hide the way back and the bookkeeping of ended samples.
        """
        return max(0, self.num_groups - self.num_stages + 1)

    def released_s(self, group: int, prefilled_s: float = 0.0) -> float:
        """When the group's first decode step may start: groups march at equal spacing t once all are prefilled."""
        return prefilled_s + group * self.stage_s


def groups_to_fill(num_stages: int, stage_s: float, hop_s: float) -> int:
    """The least G that keeps every stage busy: ceil(P (t + c) / t); P + 1 for any hop up to t / P."""
    return max(1, ceil(num_stages * (stage_s + hop_s) / stage_s - 1e-9))


def intra_batch_gain(step_s: Callable[[int], float], batch: int, num_stages: int, hop_s: float) -> float:
    """Speed-up of cutting a batch into P groups: (t(B) + c) / (t(B / P) + c). P when compute-bound, 1 when the time of
    a stage does not depend on the size of its batch.
    """
    return (step_s(batch) + hop_s) / (step_s(ceil(batch / num_stages)) + hop_s)


def groups_of_batch(step_s: Callable[[int], float], batch: int, num_stages: int, hop_s: float) -> Ring:
    """Cut one batch into the number of groups with the shortest round; the fewest groups among equals.

    step_s: seconds of one stage on a group of n samples
    """
    rings = (
        Ring(num_stages, groups, step_s(ceil(batch / groups)), hop_s)
        for groups in range(1, min(batch, 2 * num_stages + 1) + 1)
    )
    return min(rings, key=lambda ring: (ring.round_s * (1 + 1e-12), ring.num_groups))


def groups_in_flight(
    step_s: Callable[[int], float], batch: int, num_stages: int, hop_s: float, max_groups: int
) -> Ring:
    """Full batches in flight, each of `batch` samples: as many as fill the ring, at most what the KV cache holds."""
    if max_groups < 1:
        raise ConfigError(f"max_groups: expected room for at least one batch, found {max_groups}")
    stage_s = step_s(batch)
    return Ring(num_stages, min(max_groups, groups_to_fill(num_stages, stage_s, hop_s)), stage_s, hop_s)


def may_start(batch: int, newest_trained: int, max_staleness: int) -> bool:
    """Consumption delay, generator's side: batch b may start once version b − η exists (versions count from 0).

    max_staleness: η; 0 is synchronous
    """
    return batch - newest_trained <= max_staleness


def may_consume(batch: int, open_groups: dict[int, int], staleness: int, max_staleness: int) -> bool:
    """Consumption delay, trainer's side: all groups of the batch are done and its weights are fresh enough.

    open_groups: batch → groups of it still decoding
    staleness:   updates since the weights that sampled the batch
    """
    return open_groups.get(batch, 0) == 0 and staleness <= max_staleness


def ring_schedule(
    num_stages: int, num_groups: int, num_rounds: int, *, model: str = "", prefill: bool = False
) -> Schedule:
    """The static order of a ring: rank s runs stage s of groups 0 … G−1, round after round.

    Stage s of a round waits for stage s−1; stage 0 of the next round waits for the last stage of this one. With
    `prefill` all prefills go first (the start delay).
    """
    rows: list[list[Action]] = [[] for _ in range(num_stages)]
    last = num_stages - 1
    for round in range(-1 if prefill else 0, num_rounds):
        kind = Kind.PREFILL if round < 0 else Kind.DECODE
        mark = None if round < 0 else round
        for group in range(num_groups):
            for stage in range(num_stages):
                if stage:
                    waits: tuple[str, ...] = (action_id(kind, model, 0, stage - 1, group, mark),)
                elif round > 0:
                    waits = (action_id(Kind.DECODE, model, 0, last, group, round - 1),)
                elif round == 0 and prefill:
                    waits = (action_id(Kind.PREFILL, model, 0, last, group),)
                else:
                    waits = ()
                rows[stage].append(Action(kind, model, 0, stage, group, mark, rank=stage, waits=waits))
    return Schedule(tuple(tuple(row) for row in rows), "decode ring")
