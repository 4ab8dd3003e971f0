"""The models of random weights that a machine is measured with: pairs of them, of which one has more layers, so that
the difference has nothing of what is beside layers. Imports torch.

Steps of decoding are measured otherwise on a GPU. There the host asks for a step's draw while the device still computes
layers, so those of a shallow model take no time that anybody sees; what counts is a model deep enough to keep the
device busy, best as deep as those that are run. So the deeper model of that pair has all layers, as far as there is
room, and its steps are what the profile says of them, exactly (`of_steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch

from plait.cost.measured.stopwatch import Seconds, Size
from plait.cost.measured.work import Forward, layers_alone, mix_of, random_model
from plait.cost.model_work import ModelWork
from plait.cost.profile import Points, Steps
from plait.models.language_model import LanguageModel
from plait.models.shape import ModelShape

FEW, MANY, MOST = 1, 3, 9
"""Layers of the two models that rows pass: FEW, and MANY to MOST, as fit into MANY_BYTES. Where some layers keep a
state and some attend, both have whole numbers of `work.least_mix`."""
MANY_BYTES = 1 << 30
DEEP_SHARE = 0.4
"""The share of a GPU's free memory that the layers of the deepest model take, with the keys and values of the largest
step."""
MOST_PACKED = 1e12
"""Bytes per second that nothing packs: what takes less did not."""

Layers = dict[Size, tuple[float, float]]
"""Size → seconds of a layer, of everything else."""


class OfRow(Protocol):
    """Measures the seconds of what passes T tokens of one packed row through a model."""

    def __call__(self, model: LanguageModel, tokens: int, run: Forward = ...) -> float: ...


@dataclass(frozen=True)
class Pair:
    """Two models of one shape, of so many layers."""

    few: LanguageModel
    few_layers: int
    many: LanguageModel
    layers: int

    def row(self, run_s: OfRow, tokens: int) -> Seconds:
        """(a layer's, those of the few layers and all beside them)."""
        layer = self._layer(*(run_s(model, tokens, layers_alone) for model in (self.few, self.many)))
        return layer, run_s(self.few, tokens)

    def step(self, run_s: Callable[..., float], *size: int) -> Seconds:
        """Seconds of (a layer, the whole model with few layers, the whole model with many layers)."""
        short, long = (run_s(model, *size) for model in (self.few, self.many))
        return self._layer(short, long), short, long

    def _layer(self, short: float, long: float) -> float:
        return (long - short) / (self.layers - self.few_layers)


@dataclass(frozen=True)
class Models:
    """rows: of few layers and some more; steps: of the steps of decoding, on a CPU the same"""

    shape: ModelShape
    rows: Pair
    steps: Pair

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any], dtype: str, device: str, most_tokens: int) -> Self:
        """
        Args:
            name: of the model; config: its configuration, as `config.json` has it, of which layers are left away.
            most_tokens: whose keys and values the largest step of decoding has.
        """
        shape = ModelShape.from_config(config, name)
        work = ModelWork(shape, dtype, 1)
        model = lambda layers: random_model(config, layers, dtype, device)
        few = FEW * mix_of(config)
        layers = max(2, max(MANY, min(MOST, int(MANY_BYTES / work.read(shape.experts)))) // few) * few
        rows = Pair(model(few), few, model(layers), layers)
        if device == "cpu":
            return cls(shape, rows, rows)
        whole = lambda layers: layers // few * few
        deep = whole(deep_layers(work, most_tokens, torch.cuda.mem_get_info()[0]))
        if deep <= layers:
            return cls(shape, rows, rows)
        return cls(shape, rows, Pair(model(whole(deep // 2)), whole(deep // 2), model(deep), deep))

    def packing_rate(self, seconds: float) -> float | None:
        """Bytes of weights that a new engine packs in a second; None where they are not packed."""
        weights = self.rows.many.weights
        num_bytes = weights.numel() * weights.element_size()
        return num_bytes / seconds if seconds > num_bytes / MOST_PACKED else None


def deep_layers(work: ModelWork, most_tokens: int, free_bytes: int) -> int:
    """Layers of the deepest model: all of the shape's, as far as they fit with keys and values of so many tokens."""
    each = work.read(work.shape.experts) + work.kept(most_tokens, 1)
    return min(work.shape.layers, int(DEEP_SHARE * free_bytes / each))


def by_layer(measured: Mapping[Size, Seconds], least_s: float, few: int) -> Layers:
    """
    Args:
        measured: (a layer's seconds, those of few layers and all beside them) of each size.
        least_s: what reading a layer's weights takes, and so a layer at least: those of few layers stay in caches,
            those of a whole model do not; and on a busy machine a difference of two times may be anything.
        few: how many they are.
    """
    layers = {size: (max(least_s, layer), whole) for size, (layer, whole, *_) in measured.items()}
    return {size: (layer, max(0.0, whole - few * layer)) for size, (layer, whole) in layers.items()}


def of_steps(measured: Mapping[Size, Seconds], layers: int, least_s: float) -> tuple[Steps, Points]:
    """Seconds of a layer, and of all beside layers, in steps of decoding on a GPU: such that so many layers take
    together what they were measured to.

    Beside layers is the least that a number of samples leaves, whatever their context: what is drawn, and all that the
    host does while the device waits. It is a cost of its own, as layers of one model say nothing of it.

    Args:
        measured: (samples, context) → (a layer's seconds by the difference, a shallow model's, those of the `layers`).
        layers: of the deeper model.
        least_s: as of `by_layer`.
    """
    rests: dict[int, float] = {}
    for (samples, _), (layer, _, whole) in measured.items():
        rest = max(0.0, whole - layers * max(least_s, layer))
        rests[samples] = min(rest, rests.get(samples, rest))
    steps = tuple(
        (samples, context, (whole - rests[samples]) / layers) for (samples, context), (_, _, whole) in measured.items()
    )
    return steps, tuple((samples, max(1e-9, rest)) for samples, rest in sorted(rests.items()))


def layers_of(measured: Layers) -> Points:
    return tuple((size[0], layer) for size, (layer, _) in measured.items())


def rests_of(measured: Layers) -> Points:
    return tuple((size[0], max(1e-9, rest)) for size, (_, rest) in measured.items())


def steps_of(measured: Layers) -> Steps:
    return tuple((samples, context, layer) for (samples, context), (layer, _) in measured.items())


def drawing_of(measured: Layers) -> Points:
    """The shortest of each number of samples, whatever their context."""
    rests: dict[int, list[float]] = {}
    for (samples, _), (_, rest) in measured.items():
        rests.setdefault(samples, []).append(rest)
    return tuple((samples, min(taken)) for samples, taken in sorted(rests.items()))


def no_faster(backward: Layers, forward: Layers) -> Points:
    """Backwards of a layer take no less than its forwards: they compute twice as much."""
    return tuple((size[0], max(layer, forward.get(size, (0.0,))[0])) for size, (layer, _) in backward.items())
