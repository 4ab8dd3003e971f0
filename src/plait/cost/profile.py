"""What a machine was measured to do with a model: the file that `plait profile` writes, and its answers in between.

Seconds are of one layer, so a profile of few layers says what many take. Between measured sizes they are on straight
lines; below the least they are that one's, above the largest they go on as steeply as at the end. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal, Self

from pydantic import AliasChoices, Field, model_validator
from pydantic_core import PydanticCustomError

from plait.cost.cluster import ClusterSpec
from plait.cost.drafts import Drafts
from plait.cost.hardware import GIB, Device, Link, Software
from plait.cost.model_work import ModelWork, weighted
from plait.generation.settings import MOST_REPLAYED
from plait.models.shape import ModelShape
from plait.settings import Settings

Points = tuple[tuple[int, float], ...]
"""(size, seconds), sizes ascending."""
Steps = tuple[tuple[int, int, float], ...]
"""(samples, tokens of context of each, seconds)."""
_PREDICTED = AliasChoices("predicted_s", "foretold_s")  # in files; the second is that of earlier versions


class LinkRecord(Settings):
    bytes_per_s: float = Field(gt=0)
    latency_s: float = Field(ge=0)

    @property
    def link(self) -> Link:
        return Link(self.bytes_per_s, self.latency_s)


class KindRecord(Settings):
    """Seconds in a step of all calls of a kind: as the profile alone says them, as they were predicted (corrected by
    the runs before), and measured."""

    profile_s: float = Field(gt=0)
    predicted_s: float = Field(gt=0, validation_alias=_PREDICTED)
    measured_s: float = Field(gt=0)


class DraftRecord(Settings):
    """What drafting next tokens came to in the steps of a run: tokens that a sample got in one, rows that were computed
    for it, and forwards of a draft model."""

    tokens: float = Field(ge=1)
    rows: float = Field(ge=1)
    passes: float = Field(default=0.0, ge=0)


class RunRecord(Settings):
    """A run of so many devices, after its end: predicted from its plan and the lengths that it had, and measured.

    kinds:     `decode`, `score` or `train` on so many ranks (`kind_on`), `move`
    functions: names of reward functions → their seconds for a sample, in one process
    drafts:    with `sampling.speculation`
    steps:     that were measured
    """

    devices: int = Field(ge=1)
    predicted_s: float = Field(gt=0, validation_alias=_PREDICTED)
    measured_s: float = Field(gt=0)
    kinds: Mapping[str, KindRecord] = Field(default_factory=dict)
    functions: Mapping[str, float] = Field(default_factory=dict)
    drafts: DraftRecord | None = None
    steps: int = Field(default=1, ge=1)

    @property
    def error(self) -> float:
        """Error of the seconds of a step, as a share of those measured."""
        return abs(self.predicted_s / self.measured_s - 1.0)

    @property
    def errors(self) -> dict[str, float]:
        """By the kind."""
        return {kind: abs(record.predicted_s / record.measured_s - 1.0) for kind, record in self.kinds.items()}


@dataclass(frozen=True)
class Ratio:
    """What runs took for what the profile alone predicts as 1: their median, of so many runs with so many measured
    steps."""

    value: float
    runs: int
    steps: int


MOVE = "move"
"""The kind of moves of weights."""
KEPT_RUNS = 20
"""That a profile keeps, the newest: machines, and what runs on them, change."""


class Profile(Settings):
    """
    forward, backward: (tokens of a row, seconds of a layer); a backward adds its gradients up
    cut_forward:       (tokens of a row, seconds of a layer) that two processes have a half of each, with their sums and
                       waits for each other; cut_backward as well; empty: not measured
    prompts:           (tokens of a row, seconds of a layer) of prompts in generation; empty: as in other forwards
    decode:            (samples, tokens of context of each, seconds of a layer)
    decode_by_layers:  on a CPU the same of layers that are not compiled, as those that ranks share (tp); empty: not
                       measured
    head:              (rows, seconds of the head's forward)
    head_backward:     (rows, seconds of the head's and the embedding's backward); empty: not measured
    drawing:           (samples, seconds of a step of generation beside its layers); empty: not measured. On a GPU with
                       all that its host does while it waits
    capture_s:         on a GPU, seconds of a layer in which a step is captured again, to be replayed
    products:          (rows, floating point operations per second of a product with a layer's largest matrix)
    widens:            whether products of bfloat16 are computed in float32 (`models.compute.widened`)
    optimizer_s:       seconds of an optimizer step, of each number that is trained
    links_over:        by what two processes were to send each other: gloo, or on GPUs nccl
    send, all_reduce:  messages and sums of theirs; None, of GPUs alone: not measured
    between:           on a CPU sums between which both compute
    moves_by:          by what moves of weights were predicted in `runs`
    host:              copies between a device and its host's memory, in the slower direction; None: as `send`
    error:             mean of |predicted / measured - 1| over whole steps of sizes that were not among the points
    runs:              what runs measured since, the newest last
    """

    machine: str
    device: str
    threads: int = Field(ge=1)
    dtype: str = Field(pattern="^(bfloat16|float32|float64)$")
    model: str
    shape: ModelShape
    memory_gib: float = Field(gt=0)
    forward: Points = Field(min_length=2)
    backward: Points = Field(min_length=2)
    cut_forward: Points = ()
    cut_backward: Points = ()
    prompts: Points = ()
    decode: Steps = Field(min_length=2)
    decode_by_layers: Steps = ()
    head: Points = Field(min_length=2)
    head_backward: Points = ()
    drawing: Points = ()
    capture_s: float | None = Field(default=None, ge=0)
    products: Points = Field(min_length=1)
    copy_bytes_per_s: float = Field(gt=0)
    packing_bytes_per_s: float | None = Field(default=None, gt=0)
    widens: bool = False
    optimizer_s: float | None = Field(default=None, gt=0)
    links_over: Literal["gloo", "nccl"] = "gloo"
    send: LinkRecord | None = None
    all_reduce: LinkRecord | None = None
    between: LinkRecord | None = None
    moves_by: Literal["messages"] = "messages"
    host: LinkRecord | None = None
    contention: float = Field(default=1.0, ge=1)
    error: float = Field(ge=0)
    runs: tuple[RunRecord, ...] = ()

    @model_validator(mode="after")
    def _has_links(self) -> Self:
        if self.device == "cpu" and (self.send is None or self.all_reduce is None):
            raise PydanticCustomError("missing", "expected `send` and `all_reduce` in a profile of a CPU")
        if self.host is None and self.send is None:
            raise PydanticCustomError("missing", "expected `host` in a profile of a GPU")
        return self

    def layer_s(self, tokens: float, of: Literal["forward", "backward", "frozen", "prompts"] = "forward") -> float:
        """Seconds of a layer over a row of so many tokens.

        Args:
            of: "prompts": in generation, which compiles the layers of a whole model; "frozen": a backward whose weights
                get no gradients, without one product with each of them, and no less than a forward.
        """
        if of == "frozen":
            gradients = weighted(ModelWork(self.shape, self.dtype, 1), tokens) / interpolated(self.products, tokens)
            return max(self.layer_s(tokens), self.layer_s(tokens, "backward") - gradients)
        points = {"forward": self.forward, "backward": self.backward, "prompts": self.prompts or self.forward}
        return interpolated(points[of], tokens)

    @property
    def fixed_s(self) -> float:
        """Seconds of a layer that do not go with its weights, and stay where it is cut over tp: what its least row
        takes beyond its products."""
        rows, seconds = self.forward[0]
        computing = ModelWork(self.shape, self.dtype, 1).products(rows) / interpolated(self.products, rows)
        return max(0.0, seconds - computing)

    @property
    def replayed_fixed_s(self) -> float:
        """`fixed_s` of a layer of a step of decoding that is replayed: what its least step takes beyond its weights."""
        samples, _, seconds = self.decode[0]
        return max(0.0, seconds - ModelWork(self.shape, self.dtype, 1).read(samples) / self.copy_bytes_per_s)

    def decode_s(self, samples: float, context: float, *, is_part: bool = False) -> float:
        """Seconds of a layer for one token more of each sample.

        Args:
            context: tokens of all samples together.
            is_part: by ranks that share layers, which are not compiled: on a GPU in steps of more samples than are
                replayed. They take at least what they take in other forwards. (In such steps others take at least what
                prompts do, whose layers are compiled and launched one by one.)
        """
        of_parts = self.decode_by_layers if is_part and self.device == "cpu" else ()
        step_s = _interpolated_steps(of_parts or self.decode, samples, context / samples)
        is_plain = is_part if self.device == "cpu" else samples > MOST_REPLAYED
        return max(step_s, self.layer_s(samples, "forward" if is_part else "prompts")) if is_plain else step_s

    def head_s(self, rows: float, *, backward: bool = False) -> float:
        """Seconds of the head over so many rows; a backward that was not measured takes two forwards."""
        if not backward:
            return interpolated(self.head, rows)
        return interpolated(self.head_backward, rows) if self.head_backward else 2 * interpolated(self.head, rows)

    def drawing_s(self, samples: float) -> float:
        """Seconds of a step of generation beside its layers: the head, and drawing."""
        return interpolated(self.drawing, samples) if self.drawing else self.head_s(samples)

    def past(self, devices: int) -> tuple[RunRecord, ...]:
        """Runs on so many devices; all where there are none, as how processes slow each other down differs."""
        return tuple(run for run in self.runs if run.devices == devices) or self.runs

    def ratios(self, devices: int) -> dict[str, Ratio]:
        """The ratio of each kind of call: from runs on `devices` devices, else from all runs."""
        return {kind: _ratio(kind, had) for runs in (self.runs, self.past(devices)) for kind, had in _by_kind(runs)}

    def function_s(self, names: str) -> float | None:
        """Seconds of these reward functions for a sample, in the newest run that had them."""
        return next((run.functions[names] for run in reversed(self.runs) if names in run.functions), None)

    def drafts(self, *, by_model: bool) -> Drafts | None:
        """What drafts came to in the newest run that made them; None where none did.

        Args:
            by_model: in runs with a draft model, else in runs without.
        """
        kept = (run.drafts for run in reversed(self.runs) if run.drafts is not None)
        record = next((record for record in kept if (record.passes > 0) == by_model), None)
        return None if record is None else Drafts(record.tokens, record.rows, record.passes)

    def with_run(self, record: RunRecord) -> Profile:
        return self.model_copy(update={"runs": (*self.runs, record)[-KEPT_RUNS:]})

    def cluster(self, devices: int = 1, link: Link | None = None) -> ClusterSpec:
        """So many processes of this machine, which share its memory; links are as two of them had them.

        Args:
            link: between GPUs that were not measured.
        """
        flops = max(rate for _, rate in self.products)
        memory = int(self.memory_gib * GIB) // (devices if self.device == "cpu" else 1)
        device = Device(self.machine, flops, memory, self.copy_bytes_per_s, 0.0, flops)
        link = link if self.all_reduce is None else self.all_reduce.link
        assert link is not None, "links that were not measured are given"
        send = link if self.send is None else self.send.link
        host = send if self.host is None else self.host.link
        exact = Software(1.0, 1.0, 1.0, 0.0, 0.0)
        name, messages = f"{devices}x{self.machine}", None if self.send is None else send
        return ClusterSpec(1, devices, device, link, send, host, None, name, exact, messages=messages)


def kind_on(mode: str, ranks: int) -> str:
    """The kind of a call that keeps so many ranks busy: they wait for each other, and share what a machine has."""
    return f"{mode} on {ranks}"


def _by_kind(runs: Sequence[RunRecord]) -> Iterable[tuple[str, list[RunRecord]]]:
    """Kind → the runs that had it."""
    having: dict[str, list[RunRecord]] = {}
    for run in runs:
        for kind in run.kinds:
            having.setdefault(kind, []).append(run)
    return having.items()


def _ratio(kind: str, runs: Sequence[RunRecord]) -> Ratio:
    values = [run.kinds[kind].measured_s / run.kinds[kind].profile_s for run in runs]
    return Ratio(median(values), len(runs), sum(run.steps for run in runs))


def interpolated(points: Sequence[tuple[int, float]], at: float) -> float:
    """On straight lines between points; see the module."""
    if at <= points[0][0] or len(points) == 1:
        return points[0][1]
    for (low, left), (high, right) in pairwise(points):
        if at <= high:
            return left + (right - left) * (at - low) / (high - low)
    (low, left), (high, right) = points[-2:]
    return right + max(0.0, right - left) / (high - low) * (at - high)


def _interpolated_steps(steps: Steps, samples: float, per_sample: float) -> float:
    """By the number of samples, and by the context of each."""
    rows: dict[int, list[tuple[int, float]]] = {}
    for count, tokens, seconds in steps:
        rows.setdefault(count, []).append((tokens, seconds))
    return interpolated([(count, interpolated(points, per_sample)) for count, points in sorted(rows.items())], samples)
