"""Pipelines: models cut into stages on ranks, with the time and memory of every forward and backward.

A `Workload` is what a pipeline schedule is made for: the pipelines that run together on the same ranks. Training an
actor and a critic in one fused schedule (RLHFuse, intra-stage fusion) is a workload of the actor's pipeline on ranks
0 … N−1 and of the critic's in the opposite direction. A model with fewer stages than there are ranks runs as several
copies side by side, and each copy has its own micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from plait.errors import ConfigError
from plait.schedule.action import Action, Kind, action_id
from plait.schedule.schedule import Schedule

Table = tuple[tuple[float, ...], ...]

MOST_RANKS = 512
MOST_ACTIONS = 20_000
"""The most actions of a fused schedule: simple ones of so many take seconds, and no search gains anything there."""
MICRO_BATCHES_OF_A_STAGE = 4
"""With at least so many for each stage, at most a fifth of a pipeline's time is spent filling and draining it."""


def micro_batches_of(num_stages: int) -> int:
    """Micro-batches that suit a model in so many stages, for each copy of it; 1 for a model that is not cut."""
    return MICRO_BATCHES_OF_A_STAGE * num_stages if num_stages > 1 else 1


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One copy of one model, cut into stages.

    ranks:      ranks[stage] is where the stage runs
    forward_s, backward_s: seconds (or any unit of time) of [stage][micro-batch]
    activation: memory (any unit) of [stage][micro-batch], held from the start of the forward to the end of the backward

    Raises:
        ConfigError: stages share a rank, a table has another shape, or a time is not above 0.
    """

    model: str
    copy: int
    ranks: tuple[int, ...]
    forward_s: Table
    backward_s: Table
    activation: Table

    def __post_init__(self) -> None:
        if len(set(self.ranks)) != len(self.ranks):
            raise ConfigError(f"{self.label}: expected one stage per rank, found ranks {self.ranks}")
        for name in ("forward_s", "backward_s", "activation"):
            table: Table = getattr(self, name)
            if [len(row) for row in table] != [self.num_microbatches] * self.num_stages:
                shape = f"{self.num_stages} stages x {self.num_microbatches} micro-batches"
                raise ConfigError(f"{self.label}: expected {name} for {shape}")
            smallest = min((value for row in table for value in row), default=inf)
            if smallest < 0 or (name != "activation" and smallest == 0):
                raise ConfigError(f"{self.label}: expected {name} above zero, found {smallest}")

    @property
    def label(self) -> str:
        return f"{self.model or 'model'}/{self.copy}"

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @property
    def num_microbatches(self) -> int:
        return len(self.forward_s[0]) if self.forward_s else 0

    def action(self, kind: Kind, stage: int, microbatch: int) -> Action:
        """The forward or backward of one micro-batch on one stage, with what it waits for."""
        name = lambda kind, stage: action_id(kind, self.model, self.copy, stage, microbatch)
        if kind is Kind.FORWARD:
            waits = (name(Kind.FORWARD, stage - 1),) if stage else ()
        elif stage + 1 < self.num_stages:
            waits = (name(Kind.BACKWARD, stage + 1),)
        else:
            waits = (name(Kind.FORWARD, stage),)
        return Action(kind, self.model, self.copy, stage, microbatch, rank=self.ranks[stage], waits=waits)


@dataclass(frozen=True, slots=True)
class Workload:
    """Pipelines that share ranks 0 … num_ranks−1, and the most activation memory that each rank may hold.

    Raises:
        ConfigError: pipelines or caps do not fit the ranks, or each other.
    """

    pipelines: tuple[Pipeline, ...]
    num_ranks: int
    caps: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.caps:
            object.__setattr__(self, "caps", (inf,) * self.num_ranks)
        if len(self.caps) != self.num_ranks:
            raise ConfigError(f"cap: expected one value or {self.num_ranks}, one per rank, found {len(self.caps)}")
        labels = [pipeline.label for pipeline in self.pipelines]
        if len(set(labels)) != len(labels):
            raise ConfigError(f"expected pipelines with names of their own, found {labels}")
        for pipeline in self.pipelines:
            for stage, rank in enumerate(pipeline.ranks):
                if not 0 <= rank < self.num_ranks:
                    raise ConfigError(f"{pipeline.label}: stage {stage} is on rank {rank} of {self.num_ranks}")
                largest = max(pipeline.activation[stage], default=0.0)
                if largest > self.caps[rank] * (1 + 1e-12):
                    raise ConfigError(
                        f"cap: rank {rank} may hold {self.caps[rank]:g}, but one micro-batch of "
                        f"{pipeline.label} alone needs {largest:g}; raise the cap or use smaller micro-batches"
                    )

    def actions(self) -> Iterator[Action]:
        """Every forward and backward, in no particular order."""
        for pipeline in self.pipelines:
            for stage in range(pipeline.num_stages):
                for microbatch in range(pipeline.num_microbatches):
                    yield pipeline.action(Kind.FORWARD, stage, microbatch)
                    yield pipeline.action(Kind.BACKWARD, stage, microbatch)

    def duration_s(self) -> dict[str, float]:
        """Action id → seconds."""
        return {
            action_id(kind, p.model, p.copy, stage, i): table[stage][i]
            for p in self.pipelines
            for kind, table in ((Kind.FORWARD, p.forward_s), (Kind.BACKWARD, p.backward_s))
            for stage in range(p.num_stages)
            for i in range(p.num_microbatches)
        }

    def holds(self) -> dict[str, float]:
        """Action id → change of the memory ledger: a forward takes its activation, a backward gives it back."""
        return {
            action_id(kind, p.model, p.copy, stage, i): sign * p.activation[stage][i]
            for p in self.pipelines
            for kind, sign in ((Kind.FORWARD, 1.0), (Kind.BACKWARD, -1.0))
            for stage in range(p.num_stages)
            for i in range(p.num_microbatches)
        }

    def work_s(self) -> tuple[float, ...]:
        """Seconds of work of each rank."""
        work = [0.0] * self.num_ranks
        for p in self.pipelines:
            for stage, rank in enumerate(p.ranks):
                work[rank] += sum(p.forward_s[stage]) + sum(p.backward_s[stage])
        return tuple(work)

    def models(self) -> tuple[str, ...]:
        """Names of the models, in the order of their first pipeline."""
        return tuple(dict.fromkeys(pipeline.model for pipeline in self.pipelines))

    def only(self, model: str) -> Workload:
        """The workload of one model alone."""
        return Workload(tuple(p for p in self.pipelines if p.model == model), self.num_ranks, self.caps)


def fused_workload(
    stages: Sequence[int],
    microbatches: Sequence[int],
    forward_s: Sequence[float | Sequence[float]],
    backward_s: Sequence[float | Sequence[float]] | None = None,
    activation: Sequence[float | Sequence[float]] | None = None,
    cap: float | Sequence[float] = inf,
    models: Sequence[str] = ("a", "b"),
) -> Workload:
    """One or two models on the same ranks, the second in the opposite direction (RLHFuse A3).

    stages:       pipeline stages of each model; the larger number is the number of ranks N
    microbatches: micro-batches of each copy of the model
    forward_s, backward_s, activation: for each model one value, or one per stage; None is twice the forward for the
                  backward, and 1 for the activation
    cap:          the most activation memory a rank may hold, for all ranks or for each

    A model with S stages runs as N/S copies: copy j of the first model owns ranks j·S … (j+1)·S−1 in this order, and
    of the second model in reverse. Raises `ConfigError`, naming the option, when N/S is not whole or counts differ.
    """
    num_models = len(stages)
    if not 1 <= num_models <= 2 or len(models) < num_models:
        raise ConfigError(f"stages: expected one or two models, found {num_models}")
    backward = backward_s if backward_s is not None else [_scaled(value, 2.0) for value in forward_s]
    memory = activation if activation is not None else [1.0] * num_models
    options = (("microbatches", microbatches), ("forward", forward_s), ("backward", backward), ("memory", memory))
    for option, values in options:
        if len(values) != num_models:
            raise ConfigError(
                f"{option}: expected {num_models} values, one per model as in stages, found {len(values)}"
            )
    for option, counts in (("stages", stages), ("microbatches", microbatches)):
        for count in counts:
            if count < 1:
                raise ConfigError(f"{option}: expected whole numbers from 1, found {count}")
    num_ranks = max(stages)
    actions = sum(2 * num_ranks * count for count in microbatches)
    if num_ranks > MOST_RANKS or actions > MOST_ACTIONS:
        raise ConfigError(
            f"stages: expected at most {MOST_RANKS} ranks and {MOST_ACTIONS:,} forwards and backwards together, found "
            f"{shown(num_ranks)} ranks and {shown(actions)} of these; give fewer stages or micro-batches"
        )
    pipelines = []
    for k in range(num_models):
        if num_ranks % stages[k]:
            raise ConfigError(
                f"stages: expected {num_ranks}/{stages[k]} to be a whole number of copies of model {k + 1}, found "
                f"{num_ranks / stages[k]:.3g}; choose numbers of stages of which one divides the other"
            )
        tables = [
            _table(option, values[k], stages[k], microbatches[k])
            for option, values in (("forward", forward_s), ("backward", backward), ("memory", memory))
        ]
        for copy in range(num_ranks // stages[k]):
            ranks = tuple(range(copy * stages[k], (copy + 1) * stages[k]))
            pipelines.append(Pipeline(models[k], copy, ranks if k == 0 else ranks[::-1], *tables))
    caps = tuple(cap) if isinstance(cap, Sequence) else (float(cap),) * num_ranks
    return Workload(tuple(pipelines), num_ranks, caps)


def shown(count: int) -> str:
    """A count of any size, in few characters."""
    return f"{count:,}" if count < 10**15 else "more than 10^15"


def schedule_of(workload: Workload, rows: Sequence[Sequence[tuple[int, Kind, int, int]]], name: str) -> Schedule:
    """The schedule whose rows name (pipeline, kind, stage, micro-batch) of each action."""
    return Schedule(
        tuple(tuple(workload.pipelines[p].action(kind, stage, i) for p, kind, stage, i in row) for row in rows), name
    )


def _scaled(value: float | Sequence[float], factor: float) -> float | list[float]:
    return [factor * v for v in value] if isinstance(value, Sequence) else factor * value


def _table(option: str, value: float | Sequence[float], num_stages: int, num_microbatches: int) -> Table:
    per_stage = list(value) if isinstance(value, Sequence) else [value] * num_stages
    if len(per_stage) != num_stages:
        raise ConfigError(f"{option}: expected one value or {num_stages}, one per stage, found {len(per_stage)}")
    return tuple((float(v),) * num_microbatches for v in per_stage)
