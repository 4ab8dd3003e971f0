"""Attention over a packed row by torch's own FlashAttention operator, forward and backward.

The operator (Dao 2023, arXiv 2307.08691) computes sequences that lie one behind another. The last query of a sequence
sees all of its keys, the one before it all but one, and so on. The queries of the row lie so already: its segments
follow one another. Keys and values are laid out for them: for each segment those of the root, of its prompt and its
own. What segments share is there once for each of them, with as many heads as keys have; its gradients are added up.

The operator's backward adds to the gradients of queries in any order, unless torch is told to be deterministic. Then
one program computes a sequence and head, or a few do, where there are fewer of these than multiprocessors. So that none
of them has much more to do than others, a sequence that is longer than its share is cut: later queries become a
sequence of their own, with the keys of all before them.

Shapes: T tokens of the row, S sequences, K their keys, Hq query heads, Hkv key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, sqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from plait.data.host_device import uploaded
from plait.data.packed import PackedBatch, Span
from plait.kernels import device_gather
from plait.kernels.device_gather import GatherTable
from plait.kernels.on_devices import multiprocessors_of
from plait.models.compute.attention_form import AttentionForm

LARGEST_HEAD, HEAD_STEP = 256, 8
"""Sizes of heads that the operator takes: multiples up to the largest."""
DTYPES = (torch.bfloat16, torch.float16)

BLOCK = 128
"""Queries of a block of the operator: sequences are cut at multiples."""

MOST_COPIES = 9
"""Keys for each token of a row at most, of which groups of eight samples have fewer: beyond it the row is left to
another way. In its backward the operator writes the gradients of all keys once for each query head."""
MOST_PARTS = (8, 4, 2)
"""Sequences that a longer one is cut into at most: the first of these that does not go beyond `MOST_COPIES`."""

Operator = Callable[..., Any]


class Operators(NamedTuple):
    """What computes."""

    forward: Operator = torch.ops.aten._flash_attention_forward
    backward: Operator = torch.ops.aten._flash_attention_backward
    gathered: Callable[[Tensor, Tensor, GatherTable], tuple[Tensor, Tensor]] = device_gather.gathered
    folded: Callable[[Tensor, Tensor, GatherTable], tuple[Tensor, Tensor]] = device_gather.folded


OPERATORS = Operators()


class Queries(NamedTuple):
    """A sequence: adjacent tokens of the row, and what the last of them sees, where each one before sees one less."""

    rows: Span
    keys: tuple[Span, ...]
    """Spans of keys. The last one ends where the rows end; unless the rows are a part of a sample, it is the rows."""

    @property
    def num_keys(self) -> int:
        return sum(span.length for span in self.keys)

    @property
    def num_scores(self) -> float:
        """Pairs of a query and a key that it sees, nearly."""
        return self.rows.length * (self.num_keys - self.rows.length / 2)


def sequences(batch: PackedBatch) -> list[Queries]:
    """The segments of the row, each with the keys that it sees; a prompt with a single response is one segment with
    it."""
    root = (batch.root,) if batch.root.length else ()
    found = [Queries(span, (span,)) for span in root]
    for group in batch.groups:
        responses = [span for span in group.responses if span.length]
        if len(responses) == 1:
            whole = Span(group.prompt.start, group.prompt.length + responses[0].length)
            found.append(Queries(whole, (*root, whole)))
            continue
        found.append(Queries(group.prompt, (*root, group.prompt)))
        found += [Queries(span, (*root, group.prompt, span)) for span in responses]
    return found


def evened(found: Sequence[Queries], num_heads: int, multiprocessors: int) -> list[Queries]:
    """The same queries, those of a sequence that would keep a multiprocessor longer than its share cut into several,
    of about as many scores each. Uncut, if keys would become too many."""
    of_each = ceil(multiprocessors / (len(found) * num_heads))
    """Programs that the operator's backward has for a sequence and head."""
    most = of_each * num_heads / multiprocessors * sum(queries.num_scores for queries in found)
    for parts in MOST_PARTS:
        cut = [part for queries in found for part in _cut(queries, min(parts, ceil(queries.num_scores / most)))]
        if is_few(cut):
            return cut
    return list(found)


def is_few(found: Sequence[Queries]) -> bool:
    """Whether keys are not there too many times."""
    return sum(queries.num_keys for queries in found) <= MOST_COPIES * sum(queries.rows.length for queries in found)


def _cut(queries: Queries, count: int) -> list[Queries]:
    *above, own = queries.keys
    seen, length = queries.num_keys - queries.rows.length, queries.rows.length
    # The first x queries have x · seen + x² / 2 scores.
    shares = (number / count * queries.num_scores for number in range(1, count))
    ends = [round((sqrt(seen**2 + 2 * share) - seen) / BLOCK) * BLOCK for share in shares]
    at = sorted({0, *(end for end in ends if end < length), length})
    return [
        Queries(Span(own.start + start, stop - start), (*above, Span(own.start, stop))) for start, stop in pairwise(at)
    ]


def takes(batch: PackedBatch, window: int | None) -> bool:
    """Whether every token of the row sees all before it within such a window, and few keys are there several times."""
    longest = max(
        batch.root.length + group.prompt.length + max((span.length for span in group.responses), default=0)
        for group in batch.groups
    )
    return (window is None or window >= longest) and is_few(sequences(batch))


@dataclass(frozen=True)
class FlashPlan:
    """What every layer does with the batch."""

    starts_Q: Tensor
    starts_K: Tensor
    """Where each sequence begins among queries and among keys, and where the last one ends; [S + 1] int32."""
    longest: tuple[int, int]
    """Queries, and keys, of the longest sequence."""
    table: GatherTable | None
    """Says whose keys there are; None: those of the row, as they lie."""
    unused: Tensor
    """In the place of the state of random numbers, of which the operator draws none."""
    operators: Operators

    @classmethod
    def of(cls, batch: PackedBatch, num_heads: int, operators: Operators | None = None) -> FlashPlan:
        """
        Args:
            num_heads: of queries.
            operators: `OPERATORS`, unless they are given.
        """
        device = batch.token_ids_T.device
        found = evened(sequences(batch), num_heads, multiprocessors_of(device))
        num_queries, num_keys = ([queries.rows.length for queries in found], [queries.num_keys for queries in found])
        starts = (np.concatenate([[0], np.cumsum(counts)]) for counts in (num_queries, num_keys))
        starts_Q, starts_K = (uploaded(counted, torch.int32, device) for counted in starts)
        return cls(
            starts_Q,
            starts_K,
            (max(2, *num_queries), max(num_keys)),  # of single queries of grouped heads it makes another shape
            None if all(queries.keys == (queries.rows,) for queries in found) else _table(found, batch),
            torch.empty(2, dtype=torch.uint64, device=device),
            operators or OPERATORS,
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """See `row_attention.RowPlan`: [Hq, T, D], [Hkv, T, D] and [Hkv, T, D] to [T, Hq, D]."""
        assert form.softcap is None, "the operator has none"
        assert form.sinks is None, "the operator has none"
        return _FlashAttention.apply(query, key, value, form.scale, self)  # type: ignore[no-any-return]

    def gathered(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """[Hkv, T, D] each, to those of the sequences, [K, Hkv, D] each."""
        key_THD, value_THD = _by_token(key), _by_token(value)
        if self.table is None:
            return key_THD, value_THD
        return self.operators.gathered(key_THD, value_THD, self.table)

    @property
    def said(self) -> tuple[Any, ...]:
        """What both operators are told of the sequences."""
        return self.starts_Q, self.starts_K, *self.longest, 0.0, True


def _table(found: Sequence[Queries], batch: PackedBatch) -> GatherTable:
    spans = [span for queries in found for span in queries.keys]
    token_K = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    starts_T1 = np.concatenate([[0], np.cumsum(np.bincount(token_K, minlength=batch.num_tokens))])
    tables = (token_K, starts_T1, np.argsort(token_K, kind="stable"))
    return GatherTable(*(uploaded(table, torch.int32, batch.token_ids_T.device) for table in tables))


def _by_token(tensor: Tensor) -> Tensor:
    """[H, T, D] → [T, H, D], the numbers of a head one behind another."""
    by_token = tensor.transpose(0, 1)
    return by_token if by_token.stride(2) == 1 else by_token.contiguous()


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, plan: FlashPlan) -> Tensor:
        given = _by_token(query), *plan.gathered(key, value), *plan.said
        out, sums, *_ = plan.operators.forward(*given, False, scale=scale)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.scale, ctx.plan = scale, plan
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        plan: FlashPlan = ctx.plan
        given = grad_out, _by_token(query), *plan.gathered(key, value), out, sums, *plan.said
        with deterministic():
            grads = plan.operators.backward(*given, plan.unused, plan.unused, scale=ctx.scale)
        grad_query, grad_keys, grad_values = grads
        if plan.table is not None:
            grad_keys, grad_values = plan.operators.folded(grad_keys, grad_values, plan.table)
        return grad_query.transpose(0, 1), grad_keys.transpose(0, 1), grad_values.transpose(0, 1), None, None


ERROR = 2
"""torch's mode for deterministic algorithms in which the operator adds in one order; with warnings alone it does
not."""


@contextmanager
def deterministic() -> Iterator[None]:
    """Torch is deterministic meanwhile, without filling what it allocates."""
    mode, fills = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    try:
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.set_deterministic_debug_mode(ERROR)
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = fills
