"""Decode steps that are captured once and replayed: one launch in place of some thousand (CUDA graphs).

A replay computes what was captured, at the addresses where it was: so rows are copied into tensors that stay, batches
are filled up to powers of two (the rows behind are of a block that no sample has), and a graph is kept as long as
weights and pool lie where they lay. `offload` and `drop` move them; then it is captured again.

A sample has its newest token and perhaps a draft behind it. Rows stand without gaps, as they are given: a graph is of
so many samples, rows and rows of a sample at most, and where the rows of each sample begin is read anew by each replay.
What fills a graph up are samples of nobody, which hold nothing.

What is captured is shown to be right before it is used: its first replay is held against the step computed plainly; and
where a rollout begins with steps that are too large for a graph, the first of these is. Of several ways to compute a
step the first is taken that can be computed and says the same. Captured again, because addresses have changed, it is
the same computation, and is not held against anything.

Shapes: S samples, T rows (new tokens) of all of them, B rows of a graph, M columns of the block tables, V vocabulary.
"""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.errors import first_line
from plait.generation.pool import KVPool
from plait.generation.ragged import SHORT_ROWS, RaggedBatch
from plait.kernels.on_devices import power_of_two
from plait.observe.screen import say
from plait.policy.blocks import num_blocks_for

MOST_ROWS = 256
"""Larger batches keep the device busy without."""

LEAST_COLUMNS = 8
"""Columns of the narrowest block tables: contexts of up to so many blocks have the same graphs."""

CLOSE = {torch.float32: 1e-3, torch.bfloat16: 0.03}
"""Dtype → how far a replay may be from the plain step, relative to its size: products of more rows round otherwise."""


class Graph(Protocol):
    """What was captured."""

    def replay(self) -> None:
        """Compute it again, from what its inputs hold now."""
        ...

    def pool(self) -> Any:
        """Names the memory that it computes in."""
        ...


Compute = Callable[[RaggedBatch, KVPool], Tensor | None]
"""Logits [T, V] of a batch."""


class Capture(Protocol):
    """Captures a computation: the graph, and the tensor that each replay writes its result to."""

    def __call__(self, compute: Callable[[], Tensor], beside: Graph | None, *, again: bool) -> tuple[Graph, Tensor]:
        """
        Args:
            compute: gives the result, of any shape.
            beside: a graph that is never replayed at the same time: both may compute in one memory, but for results.
            again: it has been captured before, at other addresses.
        """
        ...


def by_cuda(compute: Callable[[], Tensor], beside: Graph | None, *, again: bool) -> tuple[Graph, Tensor]:
    """Capture on the current CUDA device; with the graph the logits [T, V] that it writes to. The first time it is
    computed before: once, so that kernels are compiled and memory is there, and once more, so that what waits for the
    device is found before a capture begins, which it would break: what torch allocates for a broken capture is not
    always given back.

    `torch.cuda.graph` would give back all memory that the process keeps for later before each capture, the pinned
    memory of uploads, too. Here that of the device is given back before the first one.

    Raises:
        RuntimeError: the computation asks the device for a number, or does something else that no graph can.
    """
    stream, aside, graph = torch.cuda.current_stream(), capture_stream(), torch.cuda.CUDAGraph()
    if beside is None:
        torch.cuda.empty_cache()
    aside.wait_stream(stream)
    try:
        with torch.cuda.stream(aside):
            if not again:
                compute()
                with _no_waits():
                    compute()
            # Other threads may go on meanwhile: one that looks after NCCL asks the device whenever it likes.
            graph.capture_begin(pool=beside and beside.pool(), capture_error_mode="thread_local")
            try:
                out = compute()
            finally:
                graph.capture_end()
    finally:
        stream.wait_stream(aside)  # also of what has failed: it reads memory that the next step takes
    return graph, out


@contextmanager
def _no_waits() -> Iterator[None]:
    """Within it what waits for the device raises."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@cache
def capture_stream() -> torch.cuda.Stream:
    """Where all captures of this process are made: libraries of products keep a workspace for each stream, and graphs
    that compute in one memory have to be captured on one."""
    return torch.cuda.Stream()


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
        self._steps: dict[Size, Step] = {}
        self._shown: set[Size] = set()
        """That the first of the ways was shown to be right for."""
        self._lacked: set[Size] = set()
        """For which there was no memory to show it."""
        self._at: tuple[int, ...] = ()
        self.seconds = 0.0
        """That captures have taken so far, and showing that they are right."""
        self.refusals: dict[str, str] = {}
        """Ways that are not taken, and why; without any way left steps are computed plainly, and not replayed."""

    def compute(self, batch: RaggedBatch, pool: KVPool) -> Tensor | None:
        """Logits [R, V] of the rows that are read, valid until the next call; None: no row is. By a graph, or where
        this step is none for a graph by the way that graphs are captured of, as soon as it was shown to be right. The
        pool holds the keys and values of the same computation."""
        logits_TV = self._replayed(batch, pool)
        if logits_TV is not None:
            return logits_TV
        if not self._shown and self._may_show(batch, pool):
            began = time.perf_counter()
            self._show(batch, pool)
            self.seconds += time.perf_counter() - began
        if self._shown:
            is_done, logits_RV = self._by_first_way(batch, pool)
            if is_done:
                return logits_RV
        return self._plainly(batch, pool)

    def _may_show(self, batch: RaggedBatch, pool: KVPool) -> bool:
        """Whether a step that is too large for a graph may show that the first of the ways is right: a rollout may
        begin with such steps, and have no others for long. If that finds no memory, it is not tried again."""
        is_large = batch.num_tokens > MOST_ROWS and is_decoding(batch)
        return is_large and len(self._ways) > 1 and Size.of(batch, pool.block_tokens) not in self._lacked

    def _show(self, batch: RaggedBatch, pool: KVPool) -> None:
        """Hold the first of the ways against the plain one. The step itself is computed behind it: of a way that is
        refused no key may stay."""
        size, num_ways = Size.of(batch, pool.block_tokens), len(self._ways)
        expected_TV = _logits(self._plainly(batch, pool))
        is_done, logits_TV = self._by_first_way(batch, pool)
        if is_done:
            why = difference(_logits(logits_TV), expected_TV)
            if why is None:
                self._shown.add(size)
            else:
                self._refuse(why)
        elif len(self._ways) == num_ways:
            self._lacked.add(size)

    def _by_first_way(self, batch: RaggedBatch, pool: KVPool) -> tuple[bool, Tensor | None]:
        """Whether it could compute a step, and logits [R, V]; refused where it could not for another reason than a lack
        of memory."""
        try:
            return True, next(iter(self._ways.values()))(batch, pool)
        except torch.OutOfMemoryError:
            why = None
        except Exception as error:  # torch's compiler, and Triton's, may raise anything
            why = f"cannot compute a step of {batch.num_tokens} tokens: {first_line(error)}"
        # Behind the exception, which would keep what has failed in memory.
        if why is not None:
            self._refuse(why)
        return False, None

    def _replayed(self, batch: RaggedBatch, pool: KVPool) -> Tensor | None:
        """Logits [T, V]; None where this step is none for a graph."""
        if not self._ways or not is_plain(batch) or pool.spare is None:
            return None
        at = (*self._addresses(), *pool.addresses())
        if at != self._at:
            self.drop()
            self._at = at
        size = Size.of(batch, pool.block_tokens)
        if size not in self._steps and not self._capture_step(size, batch, pool):
            return None
        step = self._steps[size]
        step.fill(batch, pool.spare, pool.block_tokens)
        step.graph.replay()
        return step.out_BV[: batch.num_tokens]

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The sizes that there are graphs for."""
        return tuple(self._steps)

    def drop(self) -> None:
        """Forget all graphs, with the memory that they hold."""
        self._steps.clear()
        self._lacked.clear()

    def _capture_step(self, size: Size, batch: RaggedBatch, pool: KVPool) -> bool:
        """Whether a graph for such batches is there and computes what the plain step computes."""
        while self._ways:
            began, step = time.perf_counter(), Step.of(size, batch.token_ids_T.device)
            why = self._refusal(step, next(iter(self._ways.values())), batch, pool)
            self.seconds += time.perf_counter() - began
            if why is None:
                self._steps[size] = step
                self._shown.add(size)
                return True
            self._refuse(why)
        return False

    def _refuse(self, why: str) -> None:
        """Take the first of the ways no more, nor what was captured of it."""
        way = next(iter(self._ways))
        self.drop()
        self._shown.clear()
        del self._ways[way]
        self.refusals[way] = why
        others = f"they are computed {next(iter(self._ways))}" if self._ways else "nothing of them is captured"
        say(f"plait: steps of generation {way}: {why}; {others}, slower", file=sys.stderr)

    def _refusal(self, step: Step, compute: Compute, batch: RaggedBatch, pool: KVPool) -> str | None:
        """Capture a way to compute a step; why it is not taken, or None. What was shown to be right and cannot be
        captured again is shown once more: it may have to be compiled anew."""
        assert pool.spare is not None
        again = step.size in self._shown
        expected_TV = None if again else _logits(self._plainly(batch, pool))
        step.fill(batch, pool.spare, pool.block_tokens)
        try:
            beside = next(iter(self._steps.values()), None)
            step.graph, step.out_BV = self._capture(
                lambda: _logits(compute(step.inputs, pool)), beside and beside.graph, again=again
            )
        except Exception as error:  # torch's compiler, and Triton's, may raise anything
            why = f"cannot be captured: {first_line(error)}"
        else:
            why = None
        if why is not None:
            if not again:
                return why
            self._shown.discard(step.size)
            return self._refusal(step, compute, batch, pool)
        if expected_TV is None:
            return None
        step.graph.replay()
        return difference(step.out_BV[: len(expected_TV)], expected_TV)


@dataclass(frozen=True)
class Size:
    """What batches that one graph serves have at most: powers of two, so that there are few graphs."""

    samples: int
    """Those that fill it up included."""
    rows: int
    width: int
    """Rows of a sample."""
    keys: int
    """That a sample has, its new ones included."""
    columns: int
    """That its block tables have: those of so many keys, however wide the tables of batches are."""

    @classmethod
    def of(cls, batch: RaggedBatch, block_tokens: int) -> Size:
        """The least that this batch goes into."""
        rows, width = power_of_two(batch.num_tokens), power_of_two(max(batch.num_new))
        idle = -(-(rows - batch.num_tokens) // width)  # samples that take the rows behind
        keys = power_of_two(max(map(operator.add, batch.num_new, batch.num_held)))
        columns = max(LEAST_COLUMNS, power_of_two(num_blocks_for(keys, block_tokens)))
        return cls(power_of_two(len(batch.num_new) + idle), rows, width, keys, columns)


@dataclass(eq=False)
class Step:
    """A graph, the tensors that it reads, and the one that it writes."""

    size: Size
    inputs: RaggedBatch
    graph: Graph = None  # type: ignore[assignment]  # until it is captured
    out_BV: Tensor = None  # type: ignore[assignment]
    _rest: tuple[int, ...] = ()
    """What the rows behind were filled for: they stay as they are while batches stay as large."""

    @classmethod
    def of(cls, size: Size, device: torch.device) -> Step:
        """What is to be captured. What its batch says on the host holds for all batches of its graph: it counts no
        sample less than there may be of it."""

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        inputs = RaggedBatch(
            token_ids_T=zeros(torch.int64, size.rows),
            position_ids_T=zeros(torch.int64, size.rows),
            starts_S1=torch.arange(size.samples + 1, dtype=torch.int32, device=device),
            held_S=zeros(torch.int32, size.samples),
            tables_SM=zeros(torch.int32, size.samples, size.columns),
            places_T=zeros(torch.int64, size.rows),
            num_new=(size.width,) * size.samples,
            num_held=(size.keys - size.width,) * size.samples,
        )
        return cls(size, inputs)

    def fill(self, batch: RaggedBatch, spare: int, block_tokens: int) -> None:
        """The rows of a batch, and behind them such as see the spare block alone."""
        own, size, rows, count = self.inputs, self.size, batch.num_tokens, len(batch.tables_SM)
        columns = min(size.columns, batch.tables_SM.shape[1])
        inputs_T = own.token_ids_T, own.position_ids_T, own.places_T
        for tensor, given in zip(inputs_T, (batch.token_ids_T, batch.position_ids_T, batch.places_T), strict=True):
            tensor[:rows].copy_(given)
        own.held_S[:count].copy_(batch.held_S)
        own.tables_SM[:count, :columns].copy_(batch.tables_SM[:, :columns])
        rest = rows, count, columns, spare * block_tokens
        if rest != self._rest:
            self._rest = rest
            for tensor, behind in zip(inputs_T, (0, 0, spare * block_tokens), strict=True):
                tensor[rows:].fill_(behind)
            own.held_S[count:].fill_(0)
            own.tables_SM[:count, columns:].fill_(spare)
            own.tables_SM[count:].fill_(spare)
        if size.width == 1:
            return  # each sample begins where it did
        own.starts_S1[: count + 1].copy_(batch.starts_S1)
        behind = own.starts_S1[count + 1 :]
        torch.arange(1, len(behind) + 1, out=behind)
        behind.mul_(size.width).add_(batch.num_tokens).clamp_(max=size.rows)


def is_plain(batch: RaggedBatch) -> bool:
    """Whether a batch is what graphs are made for."""
    return batch.num_tokens <= MOST_ROWS and is_decoding(batch)


def is_decoding(batch: RaggedBatch) -> bool:
    """Whether each sample has a chain of few new tokens, and each is read."""
    return batch.ancestors is None and max(batch.num_new) <= SHORT_ROWS and batch.read_R is None


def difference(found_TV: Tensor, expected_TV: Tensor) -> str | None:
    """How logits differ by more than rounding; None: they do not."""
    for found, expected in zip(found_TV.split(MOST_ROWS), expected_TV.split(MOST_ROWS), strict=True):
        off_norm, norm = torch.stack([(found.float() - expected.float()).norm(), expected.float().norm()]).tolist()
        off = off_norm / norm if norm else off_norm  # all are 0 behind a token whose embedding is 0
        if not off <= CLOSE[expected.dtype]:
            return f"compute logits that are {off:.2g} of their size off"
    return None


def _logits(logits: Tensor | None) -> Tensor:
    assert logits is not None, "each row is read"
    return logits
