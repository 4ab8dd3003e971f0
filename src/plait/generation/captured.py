"""Decode steps that are captured once and replayed: one launch in place of some thousand (CUDA graphs).

A replay computes what was captured, at the addresses where it was: so rows are copied into tensors that stay, batches
are filled up to the next power of two (the rows behind are of a block that no sample has), and a graph is kept as long
as weights and pool lie where they lay. `offload` and `drop` move them; then it is captured again.

What is captured is shown to be right before it is used: its first replay is held against the step computed plainly. Of
several ways to compute a step the first is taken that can be captured and says the same.

Shapes: S samples of one new token each, B of a graph, M columns of the block tables, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from plait.errors import ModelError
from plait.generation.pool import KVPool
from plait.generation.ragged import RaggedBatch
from plait.observe.screen import say

MOST_SAMPLES = 256
"""Larger batches keep the device busy without."""

CLOSE = {torch.float32: 1e-3, torch.bfloat16: 0.03}
"""Dtype → how far a replay may be from the plain step, relative to its size: products of more rows round otherwise."""


class Graph(Protocol):
    """What was captured."""

    def replay(self) -> None:
        """Compute it again, from what its inputs hold now."""
        ...


Compute = Callable[[RaggedBatch, KVPool], Tensor | None]
"""Logits [S, V] of a batch."""

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
        ways: name → how a step is computed, the best first, the plain way last.
        addresses: of all that a step reads beside its batch and the pool.
        capture: makes graphs.
    """

    def __init__(
        self, ways: Mapping[str, Compute], addresses: Callable[[], tuple[int, ...]], capture: Capture = by_cuda
    ) -> None:
        self._ways = dict(ways)
        self._plainly = list(ways.values())[-1]
        self._addresses, self._capture = addresses, capture
        self._steps: dict[tuple[int, int, int], _Step] = {}
        self._at: tuple[int, ...] = ()
        self.refusals: dict[str, str] = {}
        """Ways that are not taken, and why; without any way left steps are computed plainly, and not replayed."""

    def logits(self, batch: RaggedBatch, pool: KVPool) -> Tensor | None:
        """Logits [S, V], valid until the next call; None where this step is none for a graph."""
        count = len(batch.num_new)
        if not self._ways or not _is_plain(batch) or pool.spare is None:
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
        expected_SV = _logits(self._plainly(batch, pool))
        while self._ways:
            way, compute = next(iter(self._ways.items()))
            step = _Step(_empty_batch(*key, batch.token_ids_T.device))
            why = self._refusal(step, compute, batch, pool, expected_SV)
            if why is None:
                self._steps[key] = step
                return True
            self.drop()
            del self._ways[way]
            self.refusals[way] = why
            others = f"they are computed {next(iter(self._ways))}" if self._ways else "nothing of them is captured"
            say(f"plait: steps of generation {way}: {why}; {others}, slower", file=sys.stderr)
        return False

    def _refusal(
        self, step: _Step, compute: Compute, batch: RaggedBatch, pool: KVPool, expected_SV: Tensor
    ) -> str | None:
        """Capture a way to compute a step; why it is not taken, or None."""
        assert pool.spare is not None
        step.fill(batch, pool.spare, pool.block_tokens)
        try:
            step.graph, step.out_BV = self._capture(lambda: _logits(compute(step.inputs, pool)))
        except (RuntimeError, ModelError) as error:
            return f"cannot be captured: {str(error).strip().splitlines()[0]}"
        step.graph.replay()
        off = (step.out_BV[: len(expected_SV)].float() - expected_SV.float()).norm() / expected_SV.float().norm()
        if not float(off) <= CLOSE[expected_SV.dtype]:
            return f"compute logits that are {float(off):.2g} of their size off"
        return None


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
