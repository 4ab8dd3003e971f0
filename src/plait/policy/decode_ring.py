"""Pipelined decoding: several groups of samples go round the stages of a model, so that no stage waits.

With one group, decoding on P stages keeps one stage in P busy, for the next token needs the last one. G groups in
flight fill the ring. Reconstructed from Pipe-RLHF, of which no source says how many groups there are.

t is the time of one stage on one group, c the time of one hop between stages, the last one back to the first included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil

from plait.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ring:
    """num_stages P, num_groups G, stage_s t, hop_s c; its closed forms. Raises ConfigError where there is no ring."""

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


@dataclass(frozen=True, slots=True)
class StageCost:
    """What a stage takes on n samples, fixed_s + n · sample_s, and a hop. In any unit: ratios decide."""

    fixed_s: float
    sample_s: float
    hop_s: float = 0.0

    def stage_s(self, num_samples: int) -> float:
        return self.fixed_s + num_samples * self.sample_s

    def ring(self, num_stages: int, num_groups: int, num_samples: int) -> Ring:
        """With the samples cut into so many groups, as equal as they can be."""
        return Ring(num_stages, num_groups, self.stage_s(ceil(num_samples / num_groups)), self.hop_s)


COSTS = {"cpu": StageCost(6.0, 1.0, 0.5), "cuda": StageCost(160.0, 1.0, 3.0)}
"""By type of device, in the time that one more sample takes. On a CPU core a stage is bound by its products from some
six samples on, and a hop over gloo takes half a sample. A data-centre GPU reads its weights in the time of products of
some 160 samples."""


@cache
def num_groups(cost: StageCost, num_stages: int, num_samples: int) -> int:
    """The number of groups with the shortest round, the fewest among equals; never more than samples.

    P where hops cost nothing; P + 1 where the hops of a round take longer than what a group costs however small it is
    (P c > fixed_s), for that is what one group more costs; fewer where reading the weights is all that takes time.
    """
    counts = range(1, max(1, min(num_samples, num_stages + 1)) + 1) if num_stages > 1 else (1,)
    rounds = {count: cost.ring(num_stages, count, max(1, num_samples)).round_s for count in counts}
    return min(counts, key=lambda count: (rounds[count] * (1 + 1e-12 * count), count))


@dataclass(frozen=True, slots=True)
class GroupRule:
    """How many groups of samples go round the stages of an instance at the same time.

    cost:   of a stage, by which an open number is decided
    stated: so many, as far as there are samples; None: as many as fill the stages
    """

    num_stages: int
    cost: StageCost
    stated: int | None

    @property
    def most(self) -> int:
        """Groups that there are of any number of samples, at most."""
        if self.num_stages == 1:
            return 1
        return self.num_stages + 1 if self.stated is None else self.stated

    def groups(self, num_samples: int) -> int:
        """How many groups so many samples make; at least one."""
        if self.stated is None or self.num_stages == 1:
            return num_groups(self.cost, self.num_stages, num_samples)
        return max(1, min(self.stated, num_samples))


@dataclass(slots=True)
class StageUse:
    """What a rank did in steps that decode: its stage of how many, seconds, those of them in which it waited for other
    ranks, steps, and groups that were in flight, added up over the steps."""

    stage: int
    num_stages: int
    seconds: float = 0.0
    waited_s: float = 0.0
    steps: int = 0
    groups: int = 0

    def add(self, seconds: float, waited_s: float, groups: int) -> None:
        """One step more."""
        self.seconds += seconds
        self.waited_s += waited_s
        self.steps += 1
        self.groups += groups


def busy_shares(uses: Iterable[StageUse]) -> dict[str, float]:
    """How busy the ranks of one run are that decode in stages: `stage_N`, the share of its decoding in which a rank of
    the stage was busy, in the mean over ranks; `closed_form`, that of a ring with hops that cost nothing and stages
    that take equal time. Empty where nothing was decoded in stages.
    """
    staged = [use for use in uses if use.num_stages > 1 and use.steps and use.seconds > 0]
    if not staged:
        return {}
    stages: dict[int, list[float]] = {}
    for use in staged:
        stages.setdefault(use.stage, []).append(1 - use.waited_s / use.seconds)
    steps = sum(use.steps for use in staged)
    ideal = sum(min(1.0, use.groups / use.steps / use.num_stages) * use.steps for use in staged) / steps
    shares = {f"stage_{stage}": _mean(stages[stage]) for stage in sorted(stages)}
    return shares | {"closed_form": ideal}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
