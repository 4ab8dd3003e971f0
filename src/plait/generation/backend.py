"""What computes a step: the interface, and what a backend declares.

`Forward` takes the first backend of `forward.BACKENDS` that can be had for its model, and the Transformers module
(which serves every model) until that one is prepared, or where there is none. All compute the same up to rounding.

Shapes: T tokens of a step, R rows that are read, N of any, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from plait.generation.pool import KVPool
from plait.generation.ragged import RaggedBatch
from plait.models.compute.recurrent import recurrent_layers_of
from plait.models.language_model import LanguageModel
from plait.models.mixer_shape import KEEPS_STATE
from plait.policy.blocks import BLOCK_TOKENS


class Backend(Protocol):
    """Forwards of one model, on the device where its weights lie."""

    devices: ClassVar[frozenset[str]]
    """Types of devices that it serves."""
    dtypes: ClassVar[frozenset[torch.dtype]]
    """Compute dtypes that it serves."""

    by_rank: ClassVar[bool]
    """Whether chunks of a step come in the order of their rank (`NewTokens.rank`): then all rows pass a layer before
    any passes the next. Else they come in the step's own order, in which who reads what another one computes in the
    step stands behind it, and some rows may pass all layers before others."""

    is_steady: bool
    """Whether a row has the same bits whatever other rows are computed beside it, however many: then a draft may be
    computed, or not, without a bit of any sample changing."""

    @classmethod
    def of(cls, model: LanguageModel, block_tokens: int = BLOCK_TOKENS) -> Self:
        """One for this model and pools of such blocks, proven to compute what the model's module computes. It holds no
        copies yet.

        Raises:
            Refused: it cannot be had.
        """
        ...

    @property
    def is_prepared(self) -> bool:
        """Whether `prepare` was called since the last `drop`."""
        ...

    def prepare(self) -> None:
        """Make of the weights, as they are now, what fast steps read; nothing to do where it is there."""
        ...

    def compute(self, batch: RaggedBatch, pool: KVPool) -> Tensor | None:
        """Logits [R, V] in the compute dtype of the rows that are read, None if R is 0. The pool holds keys and values
        of all new tokens then.

        Args:
            batch: with hidden states of the stage before, which may be overwritten, on a stage that is not the first.
                One that is not the last gives what it makes of them, [T, H].
        """
        ...

    def drop(self, *, keep_memory: bool = False) -> None:
        """Give the copies back, before weights change; nothing to do where there are none. Their memory may stay for
        the next ones."""
        ...


def unserved(kind: type[Backend], model: LanguageModel) -> str | None:
    """Why a kind of backend does not serve a model's device, dtype and layers; None where it does."""
    if recurrent_layers_of(model.config):
        return KEEPS_STATE
    if model.device.type not in kind.devices:
        return f"it lies on {model.device.type}"
    if model.dtype not in kind.dtypes:
        return f"there are no vector instructions or no numba for {model.dtype}"
    return None
