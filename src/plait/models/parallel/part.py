"""What a rank's part of a model knows of the whole, and what the parts of a gradient need to become one.

Gradients are flat buffers by the layout of the rank's own weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from plait.layout.caches import CacheShape
from plait.layout.params import FlatLayout, Parameters
from plait.layout.shards import has_two_holders
from plait.models.parallel.partial_sums import Partials, sharers, sum_partials
from plait.models.parallel.team import Team
from plait.models.shape import config_fields


@dataclass(frozen=True, eq=False)
class Part:
    """A model's place in its team."""

    team: Team
    parameters: Parameters
    """Parameters of the whole model."""
    partials: tuple[Partials, ...] = ()
    cache: CacheShape | None = None
    """What the whole model keeps of a token, and how ranks divide it; None for a part that is the whole, or where that
    cannot be said."""

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all of the model (dp alone)."""
        return self.team.tp.size == self.team.pp.size == 1

    def sum_partial_gradients(self, layout: FlatLayout, gradients: Tensor) -> None:
        """See `TrainedWeights.sum_partial_gradients`; gradients are flat [layout.num_elements], summed in place."""
        self.sum_over_tp({block.param.name: gradients[start:stop] for block, start, stop in layout.entries})
        doubled = [entry for entry in layout.entries if has_two_holders(entry[0].param)]
        self.sum_over_ends([gradients[start:stop] for _, start, stop in doubled])

    def sum_over_ends(self, gradients: Sequence[Tensor]) -> None:
        """See `TrainedWeights.sum_over_ends`; each is [elements], summed in place."""
        for gradient in gradients if self.team.ends.size > 1 else ():
            self.team.ends.all_reduce(gradient)

    def sum_over_tp(self, gradients: Mapping[str, Tensor]) -> None:
        """See `TrainedWeights.sum_over_tp`; gradients are name → [elements], summed in place."""
        for partial in self.partials:
            if names := tuple(name for name in partial.names if name in gradients):
                sum_partials([replace(partial, names=names)], gradients, self.team.tp)

    def counted_ranges(self, layout: FlatLayout) -> Iterator[tuple[int, int]]:
        """See `TrainedWeights.counted_ranges`."""
        team = self.team
        for block, start, stop in layout.entries:
            param = block.param
            first = 0 if param.cut is None else sharers(param, team.tp.index, team.tp.size)[0]
            twice = has_two_holders(param) and team.pp.index > 0
            if first == team.tp.index and not twice:
                yield start, stop


def parameters_of(layout: FlatLayout, config: Any) -> Parameters:
    """The parameters of a whole model, with the heads that its configuration states where they fit its shapes.

    Args:
        config: of Transformers.
    """
    fields = config_fields(config.get_text_config())
    return Parameters.of(layout, fields.get("num_attention_heads"), fields.get("num_key_value_heads"))
