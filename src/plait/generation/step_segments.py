"""How the recurrent layers of a step compute: rows that decode all at once, prompts from nothing, chunks that go on.

Shapes: T new tokens of the step, S samples, B of them, L places of the longest, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from plait.data.host_device import uploaded
from plait.errors import ModelError
from plait.generation.pool import KVPool
from plait.generation.ragged import RaggedBatch
from plait.models.compute.recurrent import Mixer
from plait.models.compute.segments import padded_places, together


@dataclass(frozen=True)
class _Together:
    """Samples of the step that go through a mixer together."""

    places_BL: Tensor
    """int64, of the step's tokens; T for padding, which stands in front."""
    real_BL: Tensor | None
    """bool; None: no padding."""
    before_B: Tensor | None
    """int64: slots of the states that they go on from; None: they are from nothing."""
    behind_B: Tensor
    """int64: slots of the states that they end with."""


class StepSegments:
    """What every recurrent layer does in one step.

    Raises:
        ModelError: the pool holds no states, as that of a draft model.
    """

    def __init__(self, pool: KVPool, batch: RaggedBatch) -> None:
        if pool.states is None:
            raise ModelError(
                "sampling.draft_model: some of its layers are recurrent, and states cannot be rolled back; set it to "
                "another"
            )
        self._states = pool.states
        self._before_S, self._behind_S = pool.states.slots_before(batch), pool.states.slots_behind(batch)
        self._starts = [0, *accumulate(batch.num_new)]
        samples = range(len(batch.num_new))
        fresh = [s for s in samples if batch.num_held[s] == 0]
        rows = [s for s in samples if batch.num_held[s] and batch.num_new[s] == 1]
        others = [[s] for s in samples if batch.num_held[s] and batch.num_new[s] > 1]
        from_nothing = [[fresh[n] for n in part] for part in together([batch.num_new[s] for s in fresh])]
        self._calls = [self._call(part, goes_on=False) for part in from_nothing]
        self._calls += [self._call(part, goes_on=True) for part in ([rows] if rows else []) + others]

    def _call(self, samples: Sequence[int], *, goes_on: bool) -> _Together:
        starts, padding = self._starts, self._starts[-1]
        rows = padded_places([np.arange(starts[s], starts[s + 1]) for s in samples], padding, in_front=True)
        device = self._before_S.device
        which_B = uploaded(samples, torch.int64, device)
        is_real = rows < padding
        return _Together(
            uploaded(rows, torch.int64, device),
            None if is_real.all() else uploaded(is_real, torch.bool, device),
            self._before_S[which_B] if goes_on else None,
            self._behind_S[which_B],
        )

    def mix(self, layer: int, hidden_TH: Tensor, mixer: Mixer) -> Tensor:
        """[T, H] → [T, H]; the pool holds the states behind the new tokens then."""
        padded = torch.cat([hidden_TH, hidden_TH.new_zeros(1, hidden_TH.shape[1])])
        out = torch.empty_like(padded)
        for call in self._calls:
            before = {} if call.before_B is None else self._states.read(layer, call.before_B)
            out_BLH, states = mixer(padded[call.places_BL], before, call.real_BL)
            out[call.places_BL] = out_BLH
            self._states.write(layer, call.behind_B, states)
        return out[:-1]
