"""The compiled forward of a dense model: the same layers as the Transformers module's, as one function for a CPU.

`CompiledForward.of` reads the weights and settings off a module whose layers are of the classic shape (norm, attention
with rope, norm, gated MLP; perhaps biases, head norms, windows, layers without rope, factors as granite has them, an
adapter on its projections), and proves the result against the module's own forward (`proof`). Whatever is not of that
shape, or computes something else, is refused with a reason, and the module itself computes.

Of a model in pipeline stages it is the function of one stage.

Both agree up to the order of sums; a row's numbers do not depend on the batch, on chunking, or on prompt and response
(`kernels.decoder`).

Shapes: T rows (new tokens), R rows that are read, L layers, H hidden size, O outputs, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from plait.generation.backend import unserved
from plait.generation.dense_layers import adapters_of, decoder_layers, parts_of
from plait.generation.dense_settings import DenseSettings
from plait.generation.kernel_threads import KernelThreads
from plait.generation.panels import Panels, aligned, padded
from plait.generation.pool import KVPool
from plait.generation.proof import prove
from plait.generation.ragged import RaggedBatch
from plait.generation.refused import require
from plait.kernels import decoder, paged_attention, products
from plait.kernels.decoder import CHUNK_ROWS
from plait.kernels.paged_attention import KEYS, array_of
from plait.models.language_model import LanguageModel
from plait.models.working_weights import adapter_name
from plait.policy.blocks import BLOCK_TOKENS


class CompiledForward:
    """A Backend, see there and the module's docstring; made by `of`.

    Prepared, it holds a copy of the weights as large as themselves. Several threads share a step. What lies under an
    adapter is frozen: while its memory is kept it is not copied again, and the adapter alone is.
    """

    devices: ClassVar[frozenset[str]] = frozenset(("cpu",))
    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset((torch.float32, torch.bfloat16))
    by_rank: ClassVar[bool] = False
    """CHUNK_ROWS pass all layers at a time."""

    def __init__(self, model: LanguageModel) -> None:
        reason = unserved(type(self), model)
        require(reason is None, reason or "")
        require(paged_attention.fast(model.dtype), f"there are no vector instructions or no numba for {model.dtype}")
        require(model.team.tp.size == 1, "ranks share its layers")
        self.model = model
        self.is_steady = model.head.linear
        """See Backend.is_steady: all products are the kernels' own, but for those of other heads."""
        self._module = model.module.base_model
        layers = decoder_layers(self._module)
        self._layers = [parts_of(layer, adapter_name(model.own)) for layer in layers.values()]
        self._numbers = tuple(layers)
        self.weights: decoder.Weights | None = None
        """Packed, with what the kernel reads beside them; None: not prepared."""
        self._head: Tensor | None = None
        self._panels, self._adapter_panels = Panels(), Panels()
        self.room: decoder.Room | None = None
        """Working space, as large as the largest step so far took; None: no step was."""
        self._threads = KernelThreads()
        self._state = np.zeros(2, np.int64)
        self.settings = DenseSettings.of(model, self._layers)

    @classmethod
    def of(cls, model: LanguageModel, block_tokens: int = BLOCK_TOKENS) -> Self:
        """See Backend.of."""
        require(block_tokens == KEYS, f"its kernels take blocks of {KEYS} tokens, the pool has {block_tokens}")
        forward = cls(model)
        prove(forward)
        forward.drop()
        return forward

    @property
    def is_prepared(self) -> bool:
        """See Backend.is_prepared."""
        return self.weights is not None

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weights and the working space."""
        packed = self._panels.num_bytes + self._adapter_panels.num_bytes
        return packed + sum(array.nbytes for array in self.room or ())

    def prepare(self) -> None:
        """See Backend.prepare."""
        if self.is_prepared:
            return
        products_of_all = [product for layer in self._layers for product in layer.products]
        wanted = [[(part.linear.weight, part.linear.bias) for part in product] for product in products_of_all]
        if self.model.head.linear:
            wanted.append([(self.model.head.weight, self.model.head.bias)])
        own = self.model.own
        laid_out = self._panels.of(wanted, None if own is None else own.base.weights_version)
        self._head = laid_out[-1] if self.model.head.linear else None
        packed = [out.data_ptr() for out in laid_out[: len(products_of_all)]]
        settings = self.settings
        norms = [torch.cat([*map(settings.norm_weight, layer.norms)]) for layer in self._layers]
        self.weights = decoder.Weights(
            np.array(packed, np.int64).reshape(-1, 4),
            self._lay_out_adapters().reshape(-1, 4, 3),
            np.float32(settings.adapter_scale),
            torch.stack(norms).numpy(),
            settings.norm_weight(settings.last_norm).numpy(),
            np.array([[layer.uses_rope, window] for layer, window in zip(self._layers, settings.windows, strict=True)]),
            np.array(settings.scales, np.float32),
            np.float32(settings.eps),
            np.float32(settings.residual),
            *settings.angles(0),
        )

    def drop(self, *, keep_memory: bool = False) -> None:
        """See Backend.drop.

        Args:
            keep_memory: for the next copy. New memory has to be found and zeroed, and where a virtual machine hands
                what is free back to its host, that takes several times as long as the copying.
        """
        self.weights, self._head = None, None
        if not keep_memory:
            self._panels.drop()
            self._adapter_panels.drop()

    def _lay_out_adapters(self) -> Any:
        """int64 [4 L, 3]: see `decoder.Weights.adapters_L43`."""
        table = np.zeros((4 * len(self._layers), 3), np.int64)
        wanted, owners = [], []
        for number, product in enumerate(product for layer in self._layers for product in layer.products):
            if any(part.adapter for part in product):
                low, high = adapters_of(product)
                wanted += [low, high]
                owners.append((number, high[0][0].shape[1]))
        addresses = [out.data_ptr() for out in self._adapter_panels.of(wanted)] if wanted else []
        for place, (number, num_low) in enumerate(owners):
            table[number] = *addresses[2 * place : 2 * place + 2], num_low
        return table

    def compute(self, batch: RaggedBatch, pool: KVPool) -> Tensor | None:
        """See `Backend.compute`: [R, V] or [T, H]."""
        if not self.model.team.is_last_stage:
            x_TH = self.entered(batch)
            self.decoded(x_TH, replace(batch, read_R=None), pool)
            return x_TH
        hidden_RH = self.hidden(batch, pool)
        return self.logits(hidden_RH) if len(hidden_RH) else None

    @torch.no_grad()
    def hidden(self, batch: RaggedBatch, pool: KVPool) -> Tensor:
        """Hidden states [R, H] after the final norm of the rows that are read; the pool holds the new tokens then."""
        return self.decoded(self.entered(batch), batch, pool)

    def entered(self, batch: RaggedBatch) -> Tensor:
        """What enters the first layer: [T, H], of a stage behind the first that of the batch itself."""
        return self.embedded(batch.token_ids_T) if batch.inputs_TH is None else batch.inputs_TH

    @torch.no_grad()
    def embedded(self, token_ids_T: Tensor) -> Tensor:
        """[T, H] of the first stage."""
        x_TH = F.embedding(token_ids_T, self._module.embed_tokens.weight)
        scale = self.settings.embedding_scale
        return x_TH if scale is None else x_TH * scale

    @torch.no_grad()
    def decoded(
        self, x_TH: Tensor, batch: RaggedBatch, pool: KVPool, layers: slice = slice(None), *, window: int | None = None
    ) -> Tensor:
        """Hidden states [R, H] after these layers and the final norm.

        Args:
            x_TH: what enters the first of them; where all rows are read, it holds what leaves the last one then.
            window: narrows those of layers that have one.
        """
        assert pool.block_tokens == KEYS, f"blocks of {KEYS} tokens"
        self.prepare()
        read_R, places_R = _ascending(batch)
        out_RH = x_TH.new_empty(len(read_R), x_TH.shape[1])
        weights = _narrowed(self._weights_for(int(batch.position_ids_T.max()) + 1), layers, window)
        parts = torch.get_num_threads()
        room = self._room_for(min(batch.num_tokens, CHUNK_ROWS), batch.tables_SM.shape[1] * KEYS, parts)
        seen_TK, depths_T = paged_attention.seen_rows(batch.starts_S1, batch.ancestors)
        step = decoder.Step(
            batch.position_ids_T.numpy(),
            batch.places_T.numpy(),
            batch.tables_SM.contiguous().numpy(),
            batch.starts_S1.numpy(),
            batch.held_S.numpy(),
            seen_TK,
            depths_T,
            read_R.numpy(),
        )
        addresses = self._pool_addresses(pool)[layers]
        x, out = array_of(x_TH), array_of(out_RH)

        def run(part: int) -> None:
            decoder.decoder(x, addresses, step, weights, self.settings.sizes, room, out, self._state, part, parts)

        self._threads.run(run, parts)
        return out_RH if places_R is None else out_RH[places_R]

    @torch.no_grad()
    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Logits [R, V] in the compute dtype, the family's final softcap and scale included."""
        self.prepare()
        if self._head is None:
            return self.model.logits(hidden_RH)
        num_tokens = self.model.head.weight.shape[0]
        out_RN = hidden_RH.new_empty(len(hidden_RH), padded(num_tokens, hidden_RH.dtype))
        x, out, parts = array_of(hidden_RH.contiguous()), array_of(out_RN), torch.get_num_threads()
        address, matrix = self._head.data_ptr(), self.settings.sizes.matrix == 1
        self._threads.run(lambda part: products.head(x, address, num_tokens, out, part, parts, matrix), parts)
        return out_RN[:, :num_tokens]

    def _weights_for(self, num_positions: int) -> decoder.Weights:
        assert self.weights is not None, "weights are packed"
        if len(self.weights.cos_PD) < num_positions:
            cos, sin = self.settings.angles(num_positions)
            self.weights = self.weights._replace(cos_PD=cos, sin_PD=sin)
        return self.weights

    def _room_for(self, num_rows: int, num_keys: int, parts: int) -> decoder.Room:
        room, sizes = self.room, self.settings.sizes
        if room is not None:
            enough = len(room.normed_CH) >= num_rows and room.scores_QGK.shape[2] >= num_keys
            if enough and len(room.scores_QGK) >= parts:
                return room
            num_rows = max(num_rows, len(room.normed_CH))
            num_keys = max(2 * num_keys, room.scores_QGK.shape[2])
        hidden, attended = self.settings.hidden, sizes.num_heads * sizes.head_size
        all_heads = (sizes.num_heads + 2 * sizes.num_key_heads) * sizes.head_size
        dtype = torch.uint16 if self.model.dtype == torch.bfloat16 else torch.float32

        def rows(width: int) -> Any:
            return aligned((num_rows, padded(width, dtype)), dtype).numpy()

        heads = (sizes.num_heads, sizes.num_key_heads, sizes.head_size, sizes.head_size)
        low = int(self.weights.adapters_L43[..., 2].max()) if self.weights is not None else 0
        added = max(all_heads, hidden, 2 * sizes.intermediate) if low else 0
        widths = (hidden, all_heads, attended, attended, hidden, 2 * sizes.intermediate, sizes.intermediate, low, added)
        like = np.empty(0, np.uint16 if self.model.dtype == torch.bfloat16 else np.float32)
        by_unit = sizes.matrix == 1 and sizes.vectors == 1
        self.room = decoder.Room(*map(rows, widths), *paged_attention.rooms(heads, num_keys, by_unit, like, parts))
        return self.room

    def _pool_addresses(self, pool: KVPool) -> Any:
        """int64 [L, 2]: where keys and values of each layer begin."""
        sizes = self.settings.sizes
        empty = torch.empty(sizes.num_key_heads, 0, sizes.head_size, dtype=self.model.dtype)
        layers = [pool.layer(number, empty, empty) for number in self._numbers]
        return np.array([[kv.key.data_ptr(), kv.value.data_ptr()] for kv in layers], np.int64)


def _narrowed(weights: decoder.Weights, layers: slice, window: int | None) -> decoder.Weights:
    """Those of some layers, with windows of at most `window`."""
    if layers == slice(None) and window is None:
        return weights
    settings_L2 = weights.settings_L2.copy()
    if window is not None:
        settings_L2[:, 1] = np.minimum(settings_L2[:, 1], window)
    return weights._replace(
        packed_L4=weights.packed_L4[layers],
        adapters_L43=weights.adapters_L43[layers],
        norms_LN=weights.norms_LN[layers],
        settings_L2=settings_L2[layers],
        scales_L=weights.scales_L[layers],
    )


def _ascending(batch: RaggedBatch) -> tuple[Tensor, Tensor | None]:
    """Rows that are read, ascending and none twice; and where the asked ones are among them, None for in order."""
    if batch.read_R is None:
        return torch.arange(batch.num_tokens), None
    if bool((batch.read_R[1:] > batch.read_R[:-1]).all()):
        return batch.read_R, None
    rows_R, places_R = torch.unique(batch.read_R, return_inverse=True)
    return rows_R, places_R
