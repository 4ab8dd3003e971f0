"""Floating point operations that a model needs for given samples, by the numbers of tokens that a step has: useful work
alone, however it is cut, divided or computed again. Torch-free.

Shapes: N samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from plait.cost.layer_kinds import layer_kinds
from plait.cost.layer_times import Micro
from plait.cost.lengths import pairs_within
from plait.cost.model_work import ModelWork, weight_passes
from plait.cost.shape_parameters import adapter_products
from plait.models.shape import ModelShape

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class CountedSamples:
    """
    group:   [N] which samples share a prompt
    prompt:  [N] tokens of its prompt
    said:    [N] tokens behind the prompt that pass the layers
    headed:  [N] tokens that need logits, or values
    root:    tokens that all prompts begin with, where they are computed once
    """

    group: Counts
    prompt: Counts
    said: Counts
    headed: Counts
    root: int = 0

    def micro(self, shape: ModelShape, batches: Sequence[Sequence[int]] | None = None, head_forwards: int = 1) -> Micro:
        """What forwards over them pass, added up: each prompt once in a batch for the samples that share it, the root
        once in a batch.

        Args:
            batches: places of the samples of each, none of them empty; None: one of all.
            head_forwards: how often a forward passes the head.
        """
        batches = [range(len(self.group))] if batches is None else batches
        at = np.fromiter(chain.from_iterable(batches), dtype=np.int64)
        numbers = np.repeat(np.arange(len(batches)), np.fromiter(map(len, batches), dtype=np.int64))
        _, groups = np.unique(self.group, return_inverse=True)
        _, firsts = np.unique(numbers * len(self.group) + groups[at], return_index=True)
        prompts, before, said = self.prompt[at][firsts], self.prompt[at], self.said[at]
        spared = len(prompts) - len(batches)

        def pairs(window: int) -> float:
            of_prompts = pairs_within(prompts, window).sum() - spared * pairs_within(self.root, window)
            return float(of_prompts + (pairs_within(before + said, window) - pairs_within(before, window)).sum())

        tokens = float(prompts.sum() - spared * self.root + said.sum())
        near = tuple((window, pairs(window)) for window in sorted(set(shape.windows) - {0}))
        return Micro(tokens, pairs(0), float(self.headed[at].sum()), near, head_forwards)


def forward_flops(work: ModelWork, micro: Micro) -> float:
    """Operations of one forward: two for each weight that a token passes, and the pairs that attention sees."""
    return _flops(work, micro, backward=False)


def training_flops(work: ModelWork, micro: Micro) -> float:
    """Operations of a forward and its backward, which has twice as many; under an adapter the weights get no gradients,
    and their products have as many as in the forward."""
    return _flops(work, micro, backward=False) + _flops(work, micro, backward=True)


def _flops(work: ModelWork, micro: Micro, *, backward: bool) -> float:
    flops = 2 * micro.head_rows * work.head * (weight_passes(work, backward=True) if backward else micro.head_forwards)
    flops += (1 + backward) * 2 * micro.tokens * adapter_products(work.shape, work.lora)
    for kind in layer_kinds(work.shape):
        of_kind, pairs = replace(work, shape=kind.shape), micro.seen(kind.shape.window)
        products = of_kind.products(micro.tokens, backward=backward)
        flops += len(kind.layers) * (products + of_kind.attention(pairs, backward=backward))
    return flops
