"""Plans: what a run is told to do, as one value that can be written by hand.

A plan places every (call, mode) on ranks, lists the static schedules, sets the policies, and may carry the timeline
that was predicted for it, which the run's measured timeline is held against.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal

from plait.dataflow.call_name import CallName
from plait.errors import DataError
from plait.file_form import FileForm
from plait.layout.mesh import Cluster, Layout, Mesh, Parallelism
from plait.output import Filed
from plait.schedule.fusion_rule import FusionRule
from plait.schedule.schedule import Schedule
from plait.schedule.timeline import Timeline

MOST_RANKS = 4096
"""The most ranks of a plan: more than any run has devices."""

Mode = Literal["prefill", "decode", "score", "train"]
After = Literal["keep", "drop", "offload"]

FUSION = "fusion"
"""Policy of a plan: models may score in parts on ranks that generate, as these have no samples left (`fusion: auto`).
Its settings are what things take (`fusion_times.FusionTimes`), by which each step has parts or has none."""
SHARES = "shares"
"""Policy of a plan: samples are divided over dp by predicted time. Its settings are roles, and what a pair of a query
and a key takes in their models, in tokens; without it samples are divided by their tokens."""
POOL = "pool"
"""Policy of a plan: pools of keys and values, and CUDA graphs, stay on GPUs while nothing is generated."""

SEVERAL: tuple[Mode, ...] = ("prefill", "decode")
"""Modes that instances of different size may serve: a call then has several placements, on devices of their own."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a mode of a call runs.

    call:     as the flow names it (`actor.generate`)
    ranks:    in the order dp, pp, tp (tp varies fastest); dp counts the instances of generation and scoring
    after:    whether its parameters are kept, dropped or offloaded to host memory when the call is done
    stages:   layers of each pipeline stage; empty: for equal work, as a run divides them
    micro_batch_tokens: of a forward in training and scoring; None: the recipe's
    schedule: of the pipeline, one of `training_order.SCHEDULES` or of the plan's schedules by name; empty: 1F1B
    shards_weights: ranks of dp share the weights (`completion.with_shares`); follows from the recipe, and is no part of
                    the file form
    """

    call: str
    mode: Mode
    ranks: tuple[int, ...]
    dp: int = 1
    tp: int = 1
    pp: int = 1
    after: After = "keep"
    stages: tuple[int, ...] = ()
    micro_batch_tokens: int | None = None
    schedule: str = ""
    shards_weights: bool = False

    @property
    def role(self) -> str:
        """Whose call it is."""
        return CallName.of(self.call).role

    @property
    def layout(self) -> Layout:
        """The layout of a placement that a plan has checked."""
        return Layout(Mesh(self.ranks), Parallelism(self.dp, self.tp, self.pp, self.stages), self.shards_weights)


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """FUSION, SHARES or POOL with its settings (`shares`: actor 0.0003)."""

    name: str
    settings: tuple[tuple[str, int | float | str | bool], ...] = ()


@dataclass(frozen=True, slots=True)
class Plan(Filed):
    """placements, schedules by their names, policies, and the predicted timeline or None where nobody predicted.

    nodes: machines that the ranks are on, equally many on each, in order (`cluster`)

    Raises `DataError`, naming the part, when it contradicts itself.
    """

    name: str
    num_ranks: int
    placements: tuple[Placement, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    policies: tuple[PolicyChoice, ...] = ()
    predicted: Timeline | None = None
    nodes: int = 1

    form: ClassVar = FileForm("plan")

    @property
    def cluster(self) -> Cluster:
        """Which ranks share a node."""
        return Cluster(self.nodes, self.num_ranks // self.nodes)

    def fuses(self, rule: FusionRule) -> bool:
        """Whether models score in parts where samples are generated, and samples may be gathered: by recipe and plan
        alone, as it decides what is scored together; when samples move, which changes no number, an open rule leaves to
        the clock. Ranks that share weights score together, so an open rule leaves them."""
        apart = not any(p.mode == "score" and p.shards_weights for p in self.placements)
        return rule.is_stated or (rule.is_open and apart and any(policy.name == FUSION for policy in self.policies))

    @property
    def keeps_pools(self) -> bool:
        """Whether pools of GPUs stay beside what else its ranks do."""
        return any(policy.name == POOL for policy in self.policies)

    def pair_tokens(self, role: str) -> float:
        """What a pair of a query and a key counts in a role's model where samples are divided, in tokens."""
        settings = next((policy.settings for policy in self.policies if policy.name == SHARES), ())
        return float(dict(settings).get(role, 0.0))

    def __post_init__(self) -> None:
        if not 1 <= self.num_ranks <= MOST_RANKS:
            raise DataError(f"plan {self.name}: expected num_ranks from 1 to {MOST_RANKS}, found {self.num_ranks}")
        if not 1 <= self.nodes <= self.num_ranks or self.num_ranks % self.nodes:
            raise DataError(
                f"plan {self.name}: expected nodes that the {self.num_ranks} ranks can be divided among equally, found "
                f"{self.nodes}"
            )
        several = [p for p in self.placements if p.mode in SEVERAL]
        for what, names in (
            ("placement", [f"{p.call} {p.mode}" for p in self.placements if p.mode not in SEVERAL]),
            ("schedule", [s.name for s in self.schedules]),
            ("policy", [p.name for p in self.policies]),
        ):
            twice = next((name for name, count in Counter(names).items() if count > 1), None)
            if twice is not None:
                raise DataError(f"plan {self.name}: expected one {what} {twice!r}, found several")
        for p in self.placements:
            self._check(p, f"plan {self.name}: {p.call} {p.mode}")
        for p in several:
            ranks = [rank for other in self.placements_of(p.call, p.mode) for rank in other.ranks]
            if len(set(ranks)) != len(ranks):
                shared = next(rank for rank in ranks if ranks.count(rank) > 1)
                raise DataError(
                    f"plan {self.name}: {p.call} {p.mode}: expected instances on ranks of their own, found {shared} "
                    "in several"
                )
        for schedule in self.schedules:
            if schedule.num_ranks > self.num_ranks:
                raise DataError(
                    f"plan {self.name}: schedule {schedule.name!r} needs {schedule.num_ranks} ranks of {self.num_ranks}"
                )

    def _check(self, p: Placement, label: str) -> None:
        if p.mode not in ("prefill", "decode", "score", "train"):
            raise DataError(f"{label}: expected mode prefill, decode, score or train, found {p.mode!r}")
        if p.after not in ("keep", "drop", "offload"):
            raise DataError(f"{label}: expected after keep, drop or offload, found {p.after!r}")
        if p.micro_batch_tokens is not None and not 1 <= p.micro_batch_tokens < 2**31:
            raise DataError(f"{label}: expected micro_batch_tokens from 1 to 2^31 - 1, found {p.micro_batch_tokens}")
        if min(p.dp, p.tp, p.pp) < 1 or p.dp * p.tp * p.pp != len(p.ranks):
            raise DataError(f"{label}: expected dp x tp x pp = {p.dp} x {p.tp} x {p.pp} ranks, found {len(p.ranks)}")
        if len(set(p.ranks)) != len(p.ranks) or not all(0 <= rank < self.num_ranks for rank in p.ranks):
            raise DataError(
                f"{label}: expected different ranks below num_ranks {self.num_ranks}, found {p.ranks!r:.80}"
            )
        if p.stages and (len(p.stages) != p.pp or min(p.stages) < 1):
            raise DataError(f"{label}: expected the layers of each of {p.pp} stages, found {list(p.stages)!r:.80}")

    def placements_of(self, call: str, mode: Mode) -> tuple[Placement, ...]:
        """Every placement of a mode of a call; more than one only of prefill and decode."""
        return tuple(p for p in self.placements if (p.call, p.mode) == (call, mode))

    def schedule(self, name: str) -> Schedule | None:
        return next((s for s in self.schedules if s.name == name), None)

    def to_json(self) -> str:
        """The file form, with a version; schedules and the timeline keep their own forms inside."""
        record = {
            **self.form.head,
            "name": self.name,
            "num_ranks": self.num_ranks,
            **({"nodes": self.nodes} if self.nodes > 1 else {}),
            "placements": [_placement_record(p) for p in self.placements],
            "policies": [{"name": p.name, "settings": dict(p.settings)} for p in self.policies],
            "schedules": [json.loads(s.to_json()) for s in self.schedules],
            "predicted": None if self.predicted is None else json.loads(self.predicted.to_json()),
        }
        return json.dumps(record, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, name: str = "plan") -> Plan:
        """Read the file form; `name` is for messages. Raises `DataError`."""
        record = cls.form.parse(text, name)
        keys = {"format", "version", "predicted", *_PARTS}
        unknown = sorted(record.keys() - keys)
        if unknown:
            raise DataError(f"{name}: unknown key {unknown[0]!r}; expected {', '.join(sorted(keys))}")
        _check_values(record, _PARTS, ("name", "num_ranks"), name)
        try:
            predicted = record.get("predicted")
            return cls(
                record["name"],
                record["num_ranks"],
                tuple(_placement(p, number, name) for number, p in enumerate(record.get("placements", []))),
                tuple(Schedule.from_json(json.dumps(s), name) for s in record.get("schedules", [])),
                tuple(PolicyChoice(p["name"], tuple(p["settings"].items())) for p in record.get("policies", [])),
                None if predicted is None else Timeline.from_json(json.dumps(predicted), name),
                record.get("nodes", 1),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{name}: a part of the plan is missing or does not fit: {error}") from error
        except DataError as error:  # a plan tells its faults by its name, and a file is known by its path
            own = f"plan {record['name']}: "
            if not str(error).startswith(own):
                raise
            raise DataError(f"{name}: {str(error).removeprefix(own)}") from None


def _placement_record(p: Placement) -> dict[str, Any]:
    """What is not as it is by default, beside what every placement states."""
    always = ("call", "mode", "ranks", "dp", "tp", "pp", "after")
    defaults = {f.name: f.default for f in fields(Placement)}
    return {
        key: value for key, value in asdict(p).items() if key in always or (key in _KINDS and value != defaults[key])
    }


def _placement(record: Mapping[str, Any], number: int, name: str) -> Placement:
    label = f"{name}: placements[{number}]"
    if not isinstance(record, Mapping):
        raise DataError(f"{label}: expected a mapping of keys, found {record!r:.80}")
    keys = list(_KINDS)
    for key in record:
        if key not in keys:
            close = difflib.get_close_matches(key, keys, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; expected {', '.join(keys)}"
            raise DataError(f"{label}: unknown key {key!r}{hint}")
    _check_values(record, _KINDS, ("call", "mode", "ranks"), label)
    lists = {key: tuple(record[key]) for key in ("ranks", "stages") if key in record}
    return Placement(**{**record, **lists})


def _check_values(record: Mapping[str, Any], kinds: _Kinds, required: tuple[str, ...], label: str) -> None:
    """Raises DataError where one that is required is missing, or a value is of another kind."""
    for key in required:
        if key not in record:
            raise DataError(f"{label}: the key {key!r} is missing")
    for key, (what, fits) in kinds.items():
        if key in record and not fits(record[key]):
            raise DataError(f"{label}: expected {what} for {key!r}, found {record[key]!r:.80}")


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_Kinds = Mapping[str, tuple[str, Callable[[object], bool]]]
"""Key → what it holds, in words, and whether a value is that."""
_NUMBER = ("a whole number", _is_number)
_NUMBERS = ("a list of whole numbers", lambda value: isinstance(value, list) and all(map(_is_number, value)))
_TEXT = ("a text", lambda value: isinstance(value, str))
_KINDS: _Kinds = {
    "call": _TEXT,
    "mode": _TEXT,
    "ranks": _NUMBERS,
    "dp": _NUMBER,
    "tp": _NUMBER,
    "pp": _NUMBER,
    "after": _TEXT,
    "stages": _NUMBERS,
    "micro_batch_tokens": _NUMBER,
    "schedule": _TEXT,
}
"""The keys of a placement."""
_LIST = ("a list", lambda value: isinstance(value, list))
_PARTS: _Kinds = {
    "name": _TEXT,
    "num_ranks": _NUMBER,
    "nodes": _NUMBER,
    "placements": _LIST,
    "policies": _LIST,
    "schedules": _LIST,
}
"""The keys of a plan itself."""
