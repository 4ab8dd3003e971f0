"""Passes over the head a chunk of rows at a time, so that the logits of a batch never exist together.

With a vocabulary of 49,152 to 262,144 they are its largest tensor by far. A forward keeps a few numbers of each row,
and the logits of as many chunks as there is to be memory for; those of the others the backward computes again. Buffers
of chunks that are not kept are made once per pass and written over: on CPU page faults of fresh ones take up to as long
as the matrix product, which one that is kept saves.

Shapes: R rows (response tokens), C rows of one chunk, K of them that have a support, n tokens of all supports, H hidden
size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from plait.data.host_device import uploaded
from plait.data.supports import Supports
from plait.kernels import fused_rows
from plait.models.compute import cpu_linear
from plait.models.head import Head
from plait.models.logits_room import head_chunk_rows

LEFT_OUT = -1e30
"""The logit of a token that could not be drawn. Its exponential is 0 in every dtype, and 0 times it is 0, whereas 0 ·
−∞ would be NaN."""


@dataclass(frozen=True)
class Way:
    """What a pass over the head computes by, apart from its rows."""

    head: Head
    rows: int
    """Rows of one chunk."""
    temperature: float

    @classmethod
    def of(cls, head: Head, hidden_RH: Tensor, temperature: float, rows: int | None, *, is_fused: bool) -> Way:
        """
        Args:
            rows: of one chunk; None: as many as suit the device.
            is_fused: one kernel does all with the logits.
        """
        assert temperature > 0, f"temperature must be positive, got {temperature}"
        if rows is None:
            vocabulary = max(len(param) for param in head.params) if head.params else 1
            rows = head_chunk_rows(vocabulary, hidden_RH.itemsize, hidden_RH.device.type, is_fused=is_fused)
        assert rows > 0, f"a chunk needs rows, got {rows}"
        return cls(head, rows, temperature)

    def chunks(self, num_rows: int) -> Iterator[slice]:
        """The rows of each chunk, in order."""
        return (slice(start, min(start + self.rows, num_rows)) for start in range(0, num_rows, self.rows))


class Buffers:
    """The tensors [C, V] of one chunk, made at the first chunk (the longest) and written over by the later ones.

    Args:
        kept_bytes: of logits that a forward leaves for its backward at most.
        supports: of the rows; None: the softmax is over the whole vocabulary.
    """

    def __init__(self, head: Head, kept_bytes: int = 0, supports: Supports | None = None) -> None:
        self.head = head
        self._supports = supports
        self._room: dict[str, Tensor] = {}
        self._left_bytes = kept_bytes
        self._kept: dict[int, Tensor] = {}
        """First row of a chunk → its logits."""

    def room(self, purpose: str, like_CV: Tensor, dtype: torch.dtype) -> Tensor:
        """An uninitialised [C, V]."""
        if purpose not in self._room:
            self._room[purpose] = torch.empty_like(like_CV, dtype=dtype, memory_format=torch.contiguous_format)
        return self._room[purpose][: len(like_CV)]

    def keep(self, at: slice, logits_CV: Tensor) -> None:
        """Keep the logits of these rows, which were just computed, if there is room for them, and for what else lies in
        the buffer that they are a part of."""
        num_bytes = logits_CV.untyped_storage().nbytes()
        if num_bytes <= self._left_bytes:
            self._left_bytes -= num_bytes
            self._kept[at.start] = logits_CV
            self._room.pop("logits", None)

    def rest(self) -> None:
        """A pass is done: hold nothing but what was kept."""
        self._room.clear()

    def logits_at(self, at: slice, hidden_CH: Tensor) -> Tensor:
        """As `logits`; those that were kept, the first time."""
        kept_CV = self._kept.pop(at.start, None)
        return self.logits(hidden_CH) if kept_CV is None else kept_CV

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """Logits [C, V] in the compute dtype; may be overwritten."""
        if not self.head.linear:
            return self.head.family(hidden_CH)
        weight_VH, bias_V = self.head.weight, self.head.bias
        if cpu_linear.pays(len(hidden_CH), weight_VH):
            return cpu_linear.linear(hidden_CH, weight_VH, bias_V)
        shape_CV = hidden_CH.new_empty(()).expand(len(hidden_CH), len(weight_VH))
        out_CV = self.room("logits", shape_CV, hidden_CH.dtype)
        if bias_V is None:
            return torch.mm(hidden_CH, weight_VH.t(), out=out_CV)
        return torch.addmm(bias_V, hidden_CH, weight_VH.t(), out=out_CV)

    def within_(self, at: slice, logits_CV: Tensor) -> Tensor:
        """The logits of these rows, scaled or not, written over by LEFT_OUT but for the tokens of their supports."""
        if self._supports is None:
            return logits_CV
        first, width = 0 if self.head.vocabulary is None else self.head.vocabulary.start, logits_CV.shape[1]
        rows, places = self._supports.within(at, first, first + width)
        if not len(rows):
            return logits_CV
        rows_K, places_n = (uploaded(numbers, torch.int64, logits_CV.device) for numbers in (rows, places))
        flat = logits_CV.view(-1)
        kept_n = flat[places_n]
        logits_CV.index_fill_(0, rows_K, LEFT_OUT)
        flat[places_n] = kept_n
        return logits_CV

    def scaled(self, logits_CV: Tensor, temperature: float) -> Tensor:
        """logits / temperature [C, V] in float32 or wider; may be overwritten."""
        if logits_CV.dtype == wide(logits_CV) and self.head.linear:
            scaled_CV = logits_CV
        else:
            scaled_CV = self.room("scaled", logits_CV, wide(logits_CV)).copy_(logits_CV)
        return scaled_CV if temperature == 1.0 else scaled_CV.div_(temperature)


class LogitsGrad(Protocol):
    """Turns the scaled logits of one chunk into the gradient of the unscaled ones."""

    @property
    def temperature(self) -> float: ...

    def __call__(self, scaled_CV: Tensor, out_CV: Tensor) -> Tensor:
        """[C, V] → `out_CV`; the argument is overwritten."""
        ...

    def compiled(self, logits_CV: Tensor, hidden_CH: Tensor) -> Tensor | None:
        """The same of logits [C, V] that are not scaled yet, written over them; None: no kernel computes it for a head
        and hidden states like these."""
        ...


def gradients(
    way: Way, buffers: Buffers, hidden_RH: Tensor, needed: Sequence[bool], grad_of: Callable[[slice], LogitsGrad]
) -> tuple[Tensor | None, ...]:
    """Gradients of the hidden states [R, H] and of the head's parameters, each where it is needed.

    Args:
        buffers: may have logits that the forward has kept.
        grad_of: the rows of a chunk → the gradient of its logits.
    """
    head, chunk_grads = way.head, _linear_grads if way.head.linear else _family_grads
    grad_hidden_RH = torch.zeros_like(hidden_RH) if needed[0] else None
    sums: list[Tensor | None] = [None] * len(head.params)
    for at in way.chunks(len(hidden_RH)):
        grad_CH, *grads = chunk_grads(buffers, at, hidden_RH[at], needed, grad_of(at))
        if grad_hidden_RH is not None and grad_CH is not None:
            grad_hidden_RH[at] = grad_CH
        for index, grad in enumerate(grads):
            sums[index] = _accumulate(sums[index], grad, last=at.stop == len(hidden_RH))
    buffers.rest()
    if head.vocabulary is not None and grad_hidden_RH is not None:
        head.vocabulary.peers.all_reduce(grad_hidden_RH)
    params = (None if total is None else total.to(p.dtype) for total, p in zip(sums, head.params, strict=True))
    return grad_hidden_RH, *params


def _linear_grads(
    buffers: Buffers, at: slice, hidden_CH: Tensor, needed: Sequence[bool], logits_grad: LogitsGrad
) -> list[Tensor | None]:
    """Gradients of the hidden states [C, H] and of (weight [V, H], bias [V]) where they are needed."""
    logits_CV = buffers.within_(at, buffers.logits_at(at, hidden_CH))
    if (grad_CV := logits_grad.compiled(logits_CV, hidden_CH)) is not None:
        narrow_CV = grad_CV
    else:
        scaled_CV = buffers.scaled(logits_CV, logits_grad.temperature)
        grad_CV = logits_grad(scaled_CV, buffers.room("grad", scaled_CV, scaled_CV.dtype))
        narrow_CV = grad_CV if grad_CV.dtype == logits_CV.dtype else logits_CV.copy_(grad_CV)
    weight_VH = buffers.head.weight
    grads = [
        cpu_linear.input_gradient(narrow_CV, weight_VH) if needed[0] else None,
        cpu_linear.weight_gradient(narrow_CV, hidden_CH, weight_VH) if needed[1] else None,
    ]
    if buffers.head.bias is not None:
        grads.append(grad_CV.sum(0) if needed[2] else None)
    return grads


def _family_grads(
    buffers: Buffers, at: slice, hidden_CH: Tensor, needed: Sequence[bool], logits_grad: LogitsGrad
) -> list[Tensor | None]:
    """The same through the family's own head, by automatic differentiation of one chunk."""
    hidden_CH = hidden_CH.detach().requires_grad_(needed[0])
    with torch.enable_grad():
        logits_CV = buffers.head.family(hidden_CH)
    scaled_CV = buffers.within_(at, buffers.scaled(logits_CV.detach(), logits_grad.temperature))
    grad_CV = logits_grad(scaled_CV, buffers.room("grad", scaled_CV, scaled_CV.dtype)).to(logits_CV.dtype)
    inputs = [tensor for tensor, need in zip((hidden_CH, *buffers.head.params), needed, strict=True) if need]
    grads = iter(torch.autograd.grad(logits_CV, inputs, grad_CV))
    return [next(grads) if need else None for need in needed]


def _accumulate(total: Tensor | None, grad: Tensor | None, *, last: bool) -> Tensor | None:
    """Sum over chunks, in float32 or wider as soon as there are several."""
    if grad is None:
        return total
    if total is not None and fused_rows.takes(grad) and total.dtype == torch.float32:
        fused_rows.add_widened(total, grad.contiguous())
        return total
    if total is not None:
        return total.add_(grad)
    return grad if last else grad.to(wide(grad), copy=True)


def wide(tensor: Tensor) -> torch.dtype:
    """Float32, or the dtype of a tensor (of any shape) where that is wider."""
    return torch.promote_types(tensor.dtype, torch.float32)
