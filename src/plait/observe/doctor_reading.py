"""What the doctor's rules work on: the numbers of a step in, a sign of something that is off out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from plait.observe.doctor_settings import DoctorSettings


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


@dataclass(frozen=True)
class Sign:
    """What a rule sees in one step."""

    severity: Severity | None
    """None: noted, not yet worth a word."""
    value: float
    """The worse the larger, unless `badness` says how bad it is."""
    sentence: str = ""
    key: str = ""
    """The recipe key to look at."""
    badness: float | None = None
    name: str = ""
    """A name more precise than the rule's: the cause."""

    @property
    def how_bad(self) -> float:
        return self.value if self.badness is None else self.badness


@dataclass(frozen=True)
class Diagnosis:
    """The hypothesis that explains best why engine and trainer disagree."""

    cause: str
    sentence: str
    key: str


@dataclass(frozen=True)
class Limits:
    """How far engine and trainer may be apart in the dtype of the run."""

    probs_diff: float
    """Mean |p_trainer − p_engine|."""
    kl: float
    """k3 estimate, nats per token."""


LIMITS = {
    # verl's FAQ: below 0.005 is healthy, above 0.01 an alarm, in bfloat16. The others: a hundred times and more what
    # two orders of summation come to in that dtype.
    "bfloat16": Limits(0.01, 0.02),
    "float32": Limits(1e-3, 1e-4),
    "float64": Limits(1e-6, 1e-9),
}

_COLDEST = 0.2
"""Below this temperature most tokens are as good as certain, and what rounding does to probabilities grows no more
(SmolLM2-135M in bfloat16: 0.006 at 1, 0.019 at 0.5, 0.040 at 0.2, 0.039 at 0.1)."""


def limits_of(settings: DoctorSettings, dtype: str, temperature: float) -> Limits:
    """How far engine and trainer of a run may be apart, by its dtype unless the settings say it. Log-probs are logits
    over the temperature T, and so below 1 the rounding of logits weighs 1 / T as much in them, and 1 / T² in the KL."""
    limits = LIMITS[dtype]
    times = 1.0 / min(1.0, max(temperature, _COLDEST))
    probs_diff = settings.rollout_probs_diff or limits.probs_diff * times
    return Limits(probs_diff, limits.kl * times * probs_diff / limits.probs_diff)


DIFF = "training/rollout_probs_diff_mean"
ROLLOUT_KL = "training/rollout_kl"
FIRST_DIFF = f"first/{DIFF}"
FIRST_ENTROPY = "first/actor/entropy"
DEAD_GROUPS = "doctor/equal_groups"
"""Share of groups whose rewards, or grades, are equal."""
FIRST_DEAD_GROUPS = f"first/{DEAD_GROUPS}"
REWARD = "doctor/mean_compared"
"""Mean of these rewards or grades."""
FIRST_REWARD = f"first/{REWARD}"
BASELINES = {
    FIRST_DIFF: DIFF,
    FIRST_ENTROPY: "actor/entropy",
    FIRST_DEAD_GROUPS: DEAD_GROUPS,
    FIRST_REWARD: REWARD,
}
"""Name of a baseline → metric whose first value it is."""


@dataclass(frozen=True)
class Reading:
    """The numbers of one step."""

    step: int
    """Counted from 1."""
    values: Mapping[str, float]
    baseline: Mapping[str, float | str]
    """What the first step showed."""
    settings: DoctorSettings
    limits: Limits
    streaks: Mapping[str, int]
    """Rule → how many steps in a row it has seen its sign, this one included if it sees it."""
    before: Mapping[str, tuple[float, int]]
    """Rule → how bad its sign of the step before was, and in how many steps in a row up to that one it was so bad."""

    def get(self, name: str) -> float | None:
        """A finite number, or None."""
        value = self.values.get(name)
        return value if value is not None and math.isfinite(value) else None

    def is_set(self, fact: str) -> bool:
        return bool(self.values.get(f"doctor/{fact}"))

    @property
    def compared(self) -> str:
        """What the numbers are, in a word, by which samples of a prompt are weighed against each other."""
        return "grades" if self.is_set("compares_grades") else "rewards"

    @property
    def key_of_compared(self) -> str:
        """The key that says where these come from."""
        return "algorithm" if self.is_set("compares_grades") else "reward.functions"

    def first(self, name: str) -> float | None:
        value = self.baseline.get(name)
        return value if isinstance(value, int | float) else None

    @property
    def has_come_apart(self) -> bool:
        """Whether engine and trainer agreed before the first update and now differ by several times as much: not the
        noise of the dtype, which is there from the beginning."""
        first, now = self.first(FIRST_DIFF), self.get(DIFF)
        if first is None or now is None or self.step == 1:
            return False
        return first <= self.limits.probs_diff and now > 3 * first
