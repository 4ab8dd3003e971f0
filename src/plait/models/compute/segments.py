"""How the recurrent layers of a packed row compute: which of its tokens go through a mixer together, from which states.

A prompt goes through from nothing, with what all prompts begin with in front of it and with its response behind it
where it has one alone. Of several responses each goes on from the state behind their prompt, and gradients flow back
through that. What all prompts begin with is computed with each of them again, in these layers alone: sequences that
begin with a state and whose last state is read cannot be padded at either end.

Sequences that go through together are padded to one length: in front with zeros, which leave no state, those whose last
state is read; those of nearly one length are put together, so that padding stays a small part. Those that go on from a
state have two places at least: of one, families' code takes a state that it writes over.

Shapes: T tokens of the row, H hidden size, B sequences of L places, S states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.data.host_device import uploaded
from plait.data.packed import PackedBatch, Span
from plait.models.compute.recurrent import Mixer

PADDED_SHARE = 0.25
"""The most padding of sequences that go through together, over their tokens."""
PADDED_TOKENS = 256
"""Or so many places: calls of a mixer cost more than these."""

Places = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class MixerCall:
    """Sequences that go through a mixer together."""

    places_BL: Tensor
    """int64, of the row; T for padding."""
    real_BL: Tensor | None
    """bool; None: no padding in front."""
    begins_B: Tensor | None
    """int64: which of the states behind the calls from nothing, counted through, each goes on from; None: these are
    from nothing."""


@dataclass(frozen=True)
class SegmentPlan:
    """What every recurrent layer does with a row."""

    calls: tuple[MixerCall, ...]
    """Those from nothing first."""
    sources_T: Tensor
    """int64: the place of each token among the outputs of all calls, one behind another."""

    def mix(self, hidden_TH: Tensor, mixer: Mixer) -> Tensor:
        """[T, H] → [T, H]; differentiable."""
        padded = torch.cat([hidden_TH, hidden_TH.new_zeros(1, hidden_TH.shape[1])])
        outputs, ends = [], []
        behind: dict[tuple[str, int], Tensor] | None = None
        for call in self.calls:
            inputs_BLH = padded.index_select(0, call.places_BL.flatten()).view(*call.places_BL.shape, -1)
            if call.begins_B is None:
                out_BLH, states = mixer(inputs_BLH, {}, call.real_BL)
                ends.append(states)
            else:
                if behind is None:
                    behind = {key: torch.cat([states[key] for states in ends]) for key in ends[0]}
                before = {key: state.index_select(0, call.begins_B) for key, state in behind.items()}
                out_BLH, _ = mixer(inputs_BLH, before, None)
            outputs.append(out_BLH.flatten(0, 1))
        return torch.cat(outputs).index_select(0, self.sources_T)


def segment_plan(batch: PackedBatch) -> SegmentPlan:
    """That of a packed row."""
    first, later, begins = [], [], []
    root = _places(batch.root)
    for number, group in enumerate(batch.groups):
        responses = [_places(span) for span in group.responses if span.length]
        alone = responses if len(responses) == 1 else []
        first.append(np.concatenate([root, _places(group.prompt), *alone]))
        if not alone:
            later += responses
            begins += [number] * len(responses)
    chosen = [*together([len(places) for places in first])]
    order = {number: at for at, number in enumerate(number for numbers in chosen for number in numbers)}
    calls, sources = [], np.zeros(batch.num_tokens, dtype=np.int64)
    at, device = 0, batch.token_ids_T.device
    for sequences, begin, parts in ((first, None, chosen), (later, begins, [*together([len(p) for p in later])])):
        for numbers in parts:
            places = [sequences[number] for number in numbers]
            rows = padded_places(places, batch.num_tokens, in_front=begin is None, least=1 if begin is None else 2)
            is_real = rows < batch.num_tokens
            sources[rows[is_real]] = at + np.flatnonzero(is_real)  # of a root, which is there often, the last one
            at += rows.size
            calls.append(
                MixerCall(
                    uploaded(rows, torch.int64, device),
                    uploaded(is_real, torch.bool, device) if begin is None and not is_real.all() else None,
                    None if begin is None else uploaded([order[begin[n]] for n in numbers], torch.int64, device),
                )
            )
    return SegmentPlan(tuple(calls), uploaded(sources, torch.int64, device))


def _places(span: Span) -> Places:
    return np.arange(span.start, span.stop, dtype=np.int64)


def together(lengths: Sequence[int]) -> list[list[int]]:
    """Numbers of sequences that go through together, the longest first."""
    chosen: list[list[int]] = []
    longest, tokens = 0, 0
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        padding = longest * (len(chosen[-1]) + 1) - tokens - lengths[number] if chosen else 0
        if not chosen or padding > max(PADDED_TOKENS, PADDED_SHARE * (tokens + lengths[number])):
            chosen.append([])
            longest, tokens = lengths[number], 0
        chosen[-1].append(number)
        tokens += lengths[number]
    return chosen


def padded_places(sequences: Sequence[Places], padding: int, *, in_front: bool, least: int = 1) -> Places:
    """Places of sequences that go through together, int64 [B, L], with this one for padding; L is `least` or more."""
    longest = max(least, *map(len, sequences))
    rows = np.full((len(sequences), longest), padding, dtype=np.int64)
    for row, places in zip(rows, sequences, strict=True):
        start = longest - len(places) if in_front else 0
        row[start : start + len(places)] = places
    return rows
