"""Exact mode: the logits of a token are the same to the bit whatever is computed beside it, in chunks or at once.

Two things make rows depend on their neighbours: products whose kernel is chosen by the number of rows, and attention
whose sums are split by the number of queries or keys. So every forward here has the same number of rows (the last ones
empty), and every row's attention is a call of its own whose shape follows from its position alone, as is what it does
in a recurrent layer. A mixture of experts
chooses its products by how many rows an expert gets; there a forward has one token, repeated.

It costs a forward of ROWS rows per up to ROWS tokens and one small product per row, layer and step: several times
the fast mode's time (docs/generation.md). It is there for tests.

Shapes: n rows of a forward, K places seen by a row, padded to whole blocks, Hq query heads, Hkv key heads, G = Hq by
Hkv, D and E head sizes of keys and of values, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.generation.kept_experts import NotedExperts
from plait.generation.link import NO_LINK, Link, unread
from plait.generation.pool import KVPool, Places, places_of
from plait.generation.ragged import NewTokens
from plait.models.compute.attention_form import AttentionForm
from plait.models.compute.recurrent import Mixer
from plait.models.language_model import LanguageModel
from plait.models.shape import config_fields

ROWS = 32
"""Rows of every forward: small enough for a decode batch, and whole vectors of every dtype whatever the hidden size."""
EXPERT_ROWS = 4
"""Copies of the one token in a mixture of experts; products of fewer rows take other kernels."""


@dataclass(frozen=True)
class _Row:
    """A token to compute."""

    token_id: int
    position: int
    places: tuple[int, ...]
    """Places of all tokens that it sees, in order of their positions, itself the last one."""
    read: bool
    slots: tuple[int, int] = (0, 0)
    """Those of the states before and behind it, where layers keep any."""


class ExactForward:
    """Forwards of one model over one pool.

    Args:
        link: to the ranks that have other layers.
    """

    def __init__(self, model: LanguageModel, pool: KVPool, link: Link = NO_LINK) -> None:
        self._model, self._device, self._pool, self._link = model, model.device, pool, link
        self._is_last, self._vocabulary = model.team.is_last_stage, model.config.get_text_config().vocab_size
        fields = config_fields(model.config.get_text_config())
        self._mixture = any(fields.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))

    def logits(self, samples: Sequence[NewTokens], read: Sequence[int]) -> Tensor | None:
        """Write keys and values of all tokens; logits [number read, V] of those that are read, sample by sample.

        Args:
            samples: in an order in which none shares blocks that a later one writes.
            read: how many of the last tokens of each sample.
        """
        rows = [row for sample, num_read in zip(samples, read, strict=True) for row in self._rows_of(sample, num_read)]
        at_once = 1 if self._mixture else ROWS
        hidden = []
        for start in range(0, len(rows), at_once):
            chunk = rows[start : start + at_once]
            hidden_nH = self._hidden(chunk)
            hidden += [hidden_nH[i] for i, row in enumerate(chunk) if row.read]
        logits = []
        for start in range(0, len(hidden), ROWS):
            part_nH = torch.stack(hidden[start : start + ROWS])
            padded = torch.cat([part_nH, part_nH.new_zeros(ROWS - len(part_nH), part_nH.shape[1])])
            logits_NV = self._model.logits(padded) if self._is_last else unread(padded, ROWS, self._vocabulary)
            logits.append(logits_NV[: len(part_nH)])
        return torch.cat(logits) if logits else None

    def _rows_of(self, sample: NewTokens, num_read: int) -> list[_Row]:
        size, table = self._pool.block_tokens, sample.table
        count, rows = len(sample.token_ids), []
        places = places_of(table, 0, sample.held + count, size).tolist()
        held = tuple(places[: sample.held])
        before, behind = self._slots_of(sample)
        for i, token_id in enumerate(sample.token_ids):
            if sample.ancestors is None:
                seen = tuple(places[: sample.held + i + 1])
            else:
                ancestors = sample.ancestors[i].nonzero()[:, 0].tolist()
                seen = held + tuple(places[sample.held + j] for j in ancestors)
            slots = (behind if i else before, behind)
            rows.append(_Row(token_id, len(seen) - 1, seen, read=i >= count - num_read, slots=slots))
        return rows

    def _slots_of(self, sample: NewTokens) -> tuple[int, int]:
        """Slots of the states before its new tokens, if there are any, and behind them."""
        if (states := self._pool.states) is None:
            return 0, 0
        size, end = self._pool.block_tokens, sample.held + len(sample.token_ids)
        behind = states.slot_of(sample.table[(end - 1) // size])
        return states.slot_of(sample.table[(sample.held - 1) // size]) if sample.held else behind, behind

    def _hidden(self, rows: Sequence[_Row]) -> Tensor:
        """[n, H] with `rows` first."""
        context = ExactContext(self._pool, rows, self._device, repeated=self._mixture)
        if self._mixture:
            ids, positions = [rows[0].token_id] * EXPERT_ROWS, [rows[0].position] * EXPERT_ROWS
        else:
            empty = [0] * (ROWS - len(rows))
            ids, positions = [row.token_id for row in rows] + empty, [row.position for row in rows] + empty
        inputs = torch.tensor([ids, positions], device=self._device)
        inputs_TH = self._link.receive(len(ids))
        hidden_TH = self._model.hidden(inputs[0], inputs[1], context, inputs_TH=inputs_TH, routing=self._noted(context))
        self._link.send(hidden_TH)
        return hidden_TH

    def _noted(self, context: ExactContext) -> NotedExperts | None:
        return NotedExperts(self._pool, context.places.places_T) if self._pool.keeps_experts else None


class ExactContext:
    """An AttentionContext (models.attention) whose first rows are real; the others attend to nothing.

    Args:
        repeated: the others are copies of the one real row.
    """

    def __init__(self, pool: KVPool, rows: Sequence[_Row], device: torch.device, *, repeated: bool) -> None:
        self._pool, self._rows, self._repeated = pool, rows, repeated
        size = pool.block_tokens
        self.places = Places(torch.tensor([row.places[-1] for row in rows], device=device), size)
        self._seen = []
        for row in rows:
            padding = -len(row.places) % size
            places_K = torch.tensor(row.places + row.places[-1:] * padding, device=device)
            self._seen.append((places_K // size, places_K % size))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """See `AttentionContext.attend`: [Hq, T, D], [Hkv, T, D] and [Hkv, T, E] to [T, Hq, E]."""
        count = len(self._rows)
        self._pool.write(layer, self.places, key[:, :count], value[:, :count])
        kv = self._pool.layers[layer]
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros(query.shape[1], query.shape[0], value.shape[2])
        for i, (row, (blocks_K, offsets_K)) in enumerate(zip(self._rows, self._seen, strict=True)):
            key_HKD = kv.key[blocks_K, :, offsets_K].to(wide).transpose(0, 1).contiguous()
            value_HKE = kv.value[blocks_K, :, offsets_K].to(wide).transpose(0, 1).contiguous()
            query_HGD = query[:, i].to(wide).unflatten(0, (len(key_HKD), -1)).contiguous()
            scores = torch.bmm(query_HGD, key_HKD.transpose(1, 2)) * form.scale
            if form.softcap is not None:
                scores = form.softcap * torch.tanh(scores / form.softcap)
            scores[..., row.position + 1 :] = -torch.inf
            if form.window is not None:
                scores[..., : max(0, row.position + 1 - form.window)] = -torch.inf
            if form.sinks is not None:
                column = form.sinks.to(wide).view(*scores.shape[:2], 1)
                scores = torch.cat([scores, column], dim=-1)
            probs = scores.softmax(-1)[..., : len(blocks_K)].contiguous()
            out[i] = torch.bmm(probs, value_HKE).flatten(0, 1)
        if self._repeated:
            out[1:] = out[0]
        return out

    def mix(self, layer: int, hidden_TH: Tensor, mixer: Mixer) -> Tensor:
        """See `RecurrentContext.mix`: [T, H] → [T, H], token by token."""
        states = self._pool.states
        assert states is not None, "the pool of a model whose layers are recurrent has room for them"
        out = torch.zeros_like(hidden_TH)
        for i, row in enumerate(self._rows):
            before_1, behind_1 = torch.tensor(row.slots, device=hidden_TH.device).split(1)
            before = states.read(layer, before_1) if row.position else {}
            out_11H, behind = mixer(hidden_TH[i].clone().view(1, 1, -1), before, None)
            out[i] = out_11H[0, 0]
            states.write(layer, behind_1, behind)
        if self._repeated:
            out[1:] = out[0]
        return out
