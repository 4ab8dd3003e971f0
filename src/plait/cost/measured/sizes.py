"""What a machine is measured at: tokens of rows, samples and their contexts. Imports no torch.

A layer of a row of few tokens takes a GPU what launches take, however many tokens there are; so its rows reach to those
of a micro-batch, which keep it busy, and its steps to as many samples as it decodes at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

Decoded = tuple[tuple[int, int], ...]
"""Samples, tokens of context of each."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of each family of measurements, from the least on.

    rows, back:  tokens of rows that pass layers forward, and backward; the rows are those that pass the head, too
    prompts:     tokens of prompts in generation
    products:    rows of a product with a layer's largest matrix
    decoded:     steps of decoding
    by_layers:   the same, of layers that are packed and not compiled, as those that ranks share on a CPU
    held_out_rows, held_out_decoded: measured to be predicted
    """

    rows: tuple[int, ...]
    back: tuple[int, ...]
    prompts: tuple[int, ...]
    products: tuple[int, ...]
    decoded: Decoded
    by_layers: Decoded = ()
    held_out_rows: tuple[int, ...] = ()
    held_out_decoded: Decoded = ()

    @property
    def most_tokens(self) -> int:
        """Whose keys and values the largest step of decoding has."""
        return max(samples * context for samples, context in self.decoded)


CPU = Sizes(
    rows=(16, 64, 512),
    back=(64, 512),
    prompts=(64, 512),
    products=(16, 64, 256, 1024),
    decoded=((1, 64), (1, 512), (8, 64), (8, 512), (32, 64), (32, 512)),
    by_layers=((1, 64), (8, 64), (8, 512), (32, 64), (32, 512)),
    held_out_rows=(128, 256),
    held_out_decoded=((4, 256), (16, 128)),
)
CPU_QUICK = Sizes(
    rows=(16, 256),
    back=(16, 256),
    prompts=(64, 512),
    products=(16, 64, 256, 1024),
    decoded=((1, 64), (16, 64), (16, 512)),
    by_layers=((1, 64), (16, 64)),
)
GPU = Sizes(
    rows=(64, 512, 4096, 16384),
    back=(512, 4096, 16384),
    prompts=(64, 512, 4096),
    products=(16, 256, 1024, 4096, 16384),
    decoded=((1, 64), (1, 1024), (16, 64), (16, 1024), (64, 64), (64, 1024), (256, 64), (256, 1024)),
    held_out_rows=(1024, 8192),
    held_out_decoded=((4, 512), (128, 256)),
)
GPU_QUICK = Sizes(
    rows=(512, 16384),
    back=(512, 16384),
    prompts=(64, 4096),
    products=(16, 1024, 16384),
    decoded=((1, 64), (64, 64), (64, 1024)),
)


def sizes_of(device: str, *, quick: bool) -> Sizes:
    """
    Args:
        device: cpu or cuda.
        quick: few, and none to tell the error by.
    """
    if device == "cpu":
        return CPU_QUICK if quick else CPU
    return GPU_QUICK if quick else GPU
