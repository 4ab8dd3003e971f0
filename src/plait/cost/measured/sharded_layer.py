"""Seconds of a layer that two processes shard by tensor parallelism, its all-reduces included. Imports torch late."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.cost.profile import Points
    from plait.models.language_model import LanguageModel

FEW, MANY = 1, 3
"""Layers of the two models whose difference is measured, or as many times the mix of their kinds (`work.mix_of`)."""
VOCABULARY = 512
"""Tokens that these models know: their layers are those of any vocabulary."""
REPEATS = 5
"""Measurements of each size in a round, the first of which warms up."""


@dataclass(frozen=True)
class ShardedLayer:
    """(tokens of a row, seconds of a layer); empty: the model cannot be sharded in two."""

    forward: Points = ()
    backward: Points = ()


class ShardedLayers:
    """One of two ranks that shard a model of random weights by tensor parallelism.

    Args:
        rank: 0 or 1.
        config: of the model, as `config.json` has it; its layers are left away but for a few.

    Raises:
        LayoutError, ModelError: the model cannot be sharded in two.
    """

    def __init__(self, rank: int, config: Mapping[str, Any], dtype: str) -> None:
        from plait.cost.measured.work import mix_of, optimizer_of, random_model
        from plait.layout.mesh import Layout
        from plait.models.parallel.partial import part_of
        from plait.models.parallel.team import make_teams

        layout = Layout.on(range(2), tp=2)
        team = make_teams([layout], rank)[layout]
        assert team is not None, "a rank is of its own team"
        self._team = team
        small = {**config, "vocab_size": VOCABULARY, "pad_token_id": None}
        self._layers = tuple(count * mix_of(config) for count in (FEW, MANY))
        models = [part_of(random_model(small, layers, dtype, "cpu"), team) for layers in self._layers]
        self._models = [(model, optimizer_of(model)) for model in models]

    def measure(self, tokens: Sequence[int], rounds: int) -> ShardedLayer:
        """
        Args:
            tokens: of the rows.
            rounds: of all sizes in turn.
        """
        taken: dict[int, list[tuple[float, float]]] = {count: [] for count in tokens}
        for _ in range(rounds):
            for count, times in taken.items():
                repeats = [self._layer_s(count) for _ in range(REPEATS)]
                times += repeats[1:]
        middle = {count: tuple(map(median, zip(*times, strict=True))) for count, times in taken.items()}
        return ShardedLayer(
            *(tuple((count, max(1e-9, both[which])) for count, both in middle.items()) for which in (0, 1))
        )

    def _layer_s(self, tokens: int) -> tuple[float, float]:
        """Seconds of a layer's forward and backward, once."""
        few, many = (self._passes_s(model, optimizer, tokens) for model, optimizer in self._models)
        layers = self._layers[1] - self._layers[0]
        forward, backward = ((long - short) / layers for short, long in zip(few, many, strict=True))
        return forward, backward

    def _passes_s(self, model: LanguageModel, optimizer: Any, tokens: int) -> tuple[float, float]:
        """Seconds of the forward without gradients and of the backward, as the clock on the wall has them: a rank waits
        for the other in every layer."""
        import torch

        from plait.cost.measured.work import layers_alone, row

        batch = row(tokens, model)
        with torch.no_grad():
            forward = self._timed(lambda: layers_alone(model, batch))
        with optimizer.collecting_gradients():
            total = layers_alone(model, batch).sum()
            return forward, self._timed(total.backward)

    def _timed(self, work: Callable[[], object]) -> float:
        self._team.all.barrier()
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
