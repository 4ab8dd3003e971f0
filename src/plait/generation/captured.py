"""Decode steps that are captured once and replayed: one launch in place of some thousand (CUDA graphs).

A replay computes what was captured, at the addresses where it was: so rows are copied into tensors that stay, batches
are filled up to the next power of two (the rows behind are of a block that no sample has), and a graph is kept as long
as weights and pool lie where they lay. `offload` and `drop` move them; then it is captured again.

What is captured is shown to be right before it is used: its first replay is held against the step computed plainly.

Shapes: S samples of one new token each, B of a graph, M columns of the block tables, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from plait.generation.pool import KVPool
from plait.generation.ragged import RaggedBatch

MOST_SAMPLES = 256
"""Larger batches keep the device busy without."""

CLOSE = {torch.float32: 1e-3, torch.bfloat16: 0.03}
"""Dtype → how far a replay may be from the plain step, relative to its size: products of more rows round otherwise."""


class Graph(Protocol):
    """What was captured."""

    def replay(self) -> None:
        """Compute it again, from what its inputs hold now."""
        ...


Capture = Callable[[Callable[[], Tensor]], tuple[Graph, Tensor]]
"""Captures a computation: the graph, and the tensor that each replay writes its result to."""


def by_cuda(compute: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
    """Capture on the current CUDA device. It is computed once before, so that kernels are compiled and memory is there.

    Raises:
        RuntimeError: the computation asks the device for a number, or does something else that no graph can.
    """
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        compute()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    return graph, out


class CapturedSteps:
    """The steps of one model over one pool at a time.

    Args:
        compute: logits [S, V] of a batch, plainly.
        addresses: of all that a step reads beside its batch and the pool.
        capture: makes graphs.
    """

    def __init__(
        self,
        compute: Callable[[RaggedBatch, KVPool], Tensor | None],
        addresses: Callable[[], tuple[int, ...]],
        capture: Capture = by_cuda,
    ) -> None:
        self._compute, self._addresses, self._capture = compute, addresses, capture
        self._steps: dict[tuple[int, int, int], _Step] = {}
        self._at: tuple[int, ...] = ()
        self.refusal: str | None = None
        """Why steps are computed plainly; None: they are replayed."""

    def logits(self, batch: RaggedBatch, pool: KVPool) -> Tensor | None:
        """Logits [S, V], valid until the next call; None where this step is none for a graph."""
        count = len(batch.num_new)
        if self.refusal is not None or not _is_plain(batch) or pool.spare is None:
            return None
        at = (*self._addresses(), *pool.addresses())
        if at != self._at:
            self.drop()
            self._at = at
        size, most_keys = _power(count), _power(max(batch.num_held) + 1)
        key = (size, most_keys, batch.tables_SM.shape[1])
        if key not in self._steps and not self._capture_step(key, batch, pool):
            return None
        step = self._steps[key]
        step.fill(batch, pool.spare, pool.block_tokens)
        step.graph.replay()
        return step.out_BV[:count]

    def drop(self) -> None:
        """Forget all graphs, with the memory that they hold."""
        self._steps.clear()

    def _capture_step(self, key: tuple[int, int, int], batch: RaggedBatch, pool: KVPool) -> bool:
        """Whether a graph for such batches is there and computes what the plain step computes."""
        expected_SV = self._compute(batch, pool)
        assert pool.spare is not None
        assert expected_SV is not None, "each row of a step of one token is read"
        inputs = _empty_batch(*key, batch.token_ids_T.device)
        step = _Step(inputs)
        step.fill(batch, pool.spare, pool.block_tokens)
        try:
            step.graph, step.out_BV = self._capture(lambda: _logits(self._compute(inputs, pool)))
        except RuntimeError as error:
            self.refusal = f"it cannot be captured: {str(error).splitlines()[0]}"
            return False
        step.graph.replay()
        off = (step.out_BV[: len(expected_SV)].float() - expected_SV.float()).norm() / expected_SV.float().norm()
        if not float(off) <= CLOSE[expected_SV.dtype]:
            self.drop()
            self.refusal = f"what was captured computes logits that are {float(off):.2g} of their size off"
            return False
        self._steps[key] = step
        return True


@dataclass(eq=False)
class _Step:
    """A graph, the tensors that it reads, and the one that it writes."""

    inputs: RaggedBatch
    graph: Graph = None  # type: ignore[assignment]  # until it is captured
    out_BV: Tensor = None  # type: ignore[assignment]

    def fill(self, batch: RaggedBatch, spare: int, block_tokens: int) -> None:
        """The rows of a batch, and behind them such as see the spare block alone."""
        count = len(batch.num_new)
        for own, given, rest in (
            (self.inputs.token_ids_T, batch.token_ids_T, 0),
            (self.inputs.position_ids_T, batch.position_ids_T, 0),
            (self.inputs.held_S, batch.held_S, 0),
            (self.inputs.tables_SM, batch.tables_SM, spare),
            (self.inputs.places_T, batch.places_T, spare * block_tokens),
        ):
            own[:count].copy_(given)
            own[count:].fill_(rest)


def _empty_batch(size: int, most_keys: int, width: int, device: torch.device) -> RaggedBatch:
    """A batch of samples with so many keys at most; what it says on the host holds for all batches of its graph."""

    def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return RaggedBatch(
        token_ids_T=zeros(torch.int64, size),
        position_ids_T=zeros(torch.int64, size),
        starts_S1=torch.arange(size + 1, dtype=torch.int32, device=device),
        held_S=zeros(torch.int32, size),
        tables_SM=zeros(torch.int32, size, width),
        places_T=zeros(torch.int64, size),
        num_new=(1,) * size,
        num_held=(most_keys - 1,) * size,
    )


def _is_plain(batch: RaggedBatch) -> bool:
    """Whether each sample has one new token, and each is read."""
    single = batch.num_tokens == len(batch.num_new) <= MOST_SAMPLES
    return single and batch.read_R is None and batch.ancestors is None


def _logits(logits: Tensor | None) -> Tensor:
    assert logits is not None, "each row is read"
    return logits


def _power(number: int) -> int:
    """The power of two that is as large, or the next larger one."""
    return 1 << max(0, number - 1).bit_length()
