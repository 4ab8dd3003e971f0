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

Prompts that are computed beside such samples are a part of a graph, too, as soon as there are steps enough of their
size (`prompt_captures`). It ends behind the layers: the head computes those rows alone that are read.

Ranks that divide the layers (tp) replay alike: sums over them are a part of the graph. They capture the same at the
same time: what one of them cannot, none does, and where weights have moved on one of them, all capture again. Each
tries a way alone first (`Peers.rehearsing`): one that failed between sums would spoil those of the others.

Shapes: T rows (new tokens), B rows of a graph, R rows that are read, V vocabulary.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from plait.errors import RunError, first_line
from plait.generation.captured_step import Compute, Readout, Size, Step, computed, difference, has_graph, is_decoding
from plait.generation.cuda_graphs import Capture, by_cuda
from plait.generation.pool import KVPool
from plait.generation.prompt_captures import PromptCaptures
from plait.generation.ragged import RaggedBatch
from plait.generation.settings import MOST_REPLAYED
from plait.models.parallel.peers import Peers
from plait.observe.screen import say

OF_PROMPTS = "with prompts"  # as refusals call them


class CapturedSteps:
    """The steps of one model over one pool at a time.

    Args:
        ways: name → how a step is computed, the best first, the plain way last.
        readout: what all of them end with.
        addresses: of all that a step reads beside its batch and the pool.
        capture: makes graphs.
        peers: the ranks that compute each step together; None: this one alone.
    """

    def __init__(
        self,
        ways: Mapping[str, Compute],
        readout: Readout,
        addresses: Callable[[], tuple[int, ...]],
        capture: Capture = by_cuda,
        peers: Peers | None = None,
    ) -> None:
        self._ways = dict(ways)
        self._plainly = list(ways.values())[-1]
        self._readout, self._addresses, self._capture = readout, addresses, capture
        self._peers = Peers.alone() if peers is None else peers
        self._steps: dict[Size, Step] = {}
        self._prompts = PromptCaptures(lambda size: self._steps.pop(size, None))
        self._shown: set[Size] = set()
        """That the first of the ways was shown to be right for."""
        self._lacked: set[Size] = set()
        """For which there was no memory to show it."""
        self._at: tuple[int, ...] = ()
        self._may_have_moved = True
        """Whether something may lie elsewhere than when ranks asked each other last."""
        self.seconds = 0.0
        """That captures have taken so far, and showing that they are right."""
        self.refusals: dict[str, str] = {}
        """Ways that are not taken, and why; without any way left steps are computed plainly, and not replayed."""

    def compute(self, batch: RaggedBatch, pool: KVPool) -> Tensor | None:
        """What `ways` compute, [R, V] or [T, H], valid until the next call; None: no row is read. By a graph, or where
        this step is none for a graph by the way that graphs are captured of, as soon as it was shown to be right. The
        pool holds the keys and values of the same computation.

        Ranks that compute together compute a step plainly that is none for a graph: one that finds no memory for
        another way could not tell the others in the midst of it.
        """
        if (step := self._step_of(batch, pool)) is not None:
            assert pool.spare is not None
            step.fill(batch, pool.spare, pool.block_tokens)
            self._replay(step)
            return self._out(step, batch)
        if self._peers.size > 1:
            return self._plainly(batch, pool)
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
        is_large = batch.num_tokens > MOST_REPLAYED and is_decoding(batch)
        return is_large and len(self._ways) > 1 and Size.of(batch, pool.block_tokens) not in self._lacked

    def _show(self, batch: RaggedBatch, pool: KVPool) -> None:
        """Hold the first of the ways against the plain one. The step itself is computed behind it: of a way that is
        refused no key may stay."""
        size, num_ways = Size.of(batch, pool.block_tokens), len(self._ways)
        expected_TV = computed(self._plainly(batch, pool))
        is_done, logits_TV = self._by_first_way(batch, pool)
        if is_done:
            why = difference(computed(logits_TV), expected_TV)
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

    def _step_of(self, batch: RaggedBatch, pool: KVPool) -> Step | None:
        """The graph that computes this batch, captured if need be; None if it is computed without one."""
        if not self._ways or pool.spare is None or not has_graph(batch):
            return None
        self._follow(pool)
        size = Size.of(batch, pool.block_tokens)
        if not size.has_head and not (self._shown and self._prompts.comes(size)):
            return None
        return self._steps[size] if size in self._steps or self._captures(size, batch, pool) else None

    def _out(self, step: Step, batch: RaggedBatch) -> Tensor | None:
        """What the last replay of a step says of a batch: [R, V] or [T, H]."""
        out_TH = step.out(batch)
        return out_TH if step.size.has_head else self._readout(out_TH, batch)

    @property
    def steps(self) -> Mapping[Size, Step]:
        """Those that there are graphs for."""
        return self._steps

    def look(self) -> None:
        """Weights or pool may lie elsewhere from now on. Readout on all ranks that compute together, while no step is
        computed."""
        self._may_have_moved = True

    def drop(self) -> None:
        """Forget all graphs, with the memory that they hold; see `look`."""
        self._forget()
        self._at = ()
        self.look()

    def _forget(self) -> None:
        self._steps.clear()
        self._lacked.clear()

    def _follow(self, pool: KVPool) -> None:
        """Forget graphs that read where something lies no more, on this rank or on another one."""
        at = (*self._addresses(), *pool.addresses())
        moved = at != self._at
        if self._may_have_moved:
            moved = self._on_any(moved)
            self._may_have_moved = False
        else:
            assert not moved or self._peers.size == 1, "what ranks compute with has moved, and they were not told"
        if moved:
            self._forget()
            self._at = at

    def _captures(self, size: Size, batch: RaggedBatch, pool: KVPool) -> bool:
        """Whether a graph for such batches is there and says what the plain step says. One with prompts is made by a
        way that was shown to be right without any; if that fails, such steps go on as before."""
        while self._ways:
            began, step = time.perf_counter(), Step.of(size, batch)
            why = self._refusal(step, next(iter(self._ways.values())), batch, pool)
            self.seconds += time.perf_counter() - began
            if why is None:
                self._steps[size] = step
                self._shown.add(size)
                return True
            if not size.has_head:
                self._prompts.refuse()
                self._tell(OF_PROMPTS, why, "they are launched")
                return False
            self._refuse(why)
        return False

    def _refuse(self, why: str) -> None:
        """Take the first of the ways no more, nor what was captured of it."""
        way = next(iter(self._ways))
        self._forget()
        self._shown.clear()
        del self._ways[way]
        self._tell(way, why, f"they are computed {next(iter(self._ways))}" if self._ways else "nothing is captured")

    def _tell(self, of: str, why: str, instead: str) -> None:
        self.refusals[of] = why
        say(f"plait: steps of generation {of}: {why}; {instead}, slower", file=sys.stderr)

    def _refusal(self, step: Step, compute: Compute, batch: RaggedBatch, pool: KVPool) -> str | None:
        """Capture a way to compute a step; why it is not taken, or None. What was shown to be right and cannot be
        captured again is shown once more: it may have to be compiled anew."""
        assert pool.spare is not None
        again = step.size in self._shown
        expected_TV = None if again else computed(self._plainly(batch, pool))
        step.fill(batch, pool.spare, pool.block_tokens)
        why = self._agreed(self._captured(step, lambda: computed(compute(step.inputs, pool)), again=again))
        if why is not None:
            if not again:
                return why
            self._shown.discard(step.size)
            return self._refusal(step, compute, batch, pool)
        if expected_TV is None:
            return None
        self._replay(step)
        return self._agreed(difference(computed(self._out(step, batch)), expected_TV))

    def _captured(self, step: Step, compute: Callable[[], Tensor], *, again: bool) -> str | None:
        """Why a computation cannot be captured; None: it was."""
        traffic = self._peers.traffic
        beside = next(iter(self._steps.values()), None)

        def counted() -> Tensor:
            before = traffic.received_bytes
            try:
                out = compute()
            except RunError as error:  # in a capture nothing is sent, so nobody is gone: it is NCCL that cannot
                raise RuntimeError(first_line(error)) from error
            step.received_bytes = traffic.received_bytes - before
            return out

        try:
            first = None if again else partial(self._try, compute)
            step.graph, step.out_B = self._capture(counted, beside and beside.graph, first=first)
        except RunError:
            raise  # another rank is gone, or waits for this one
        except Exception as error:  # torch's compiler, and Triton's, may raise anything
            return f"cannot be captured: {first_line(error)}"
        traffic.received_bytes -= step.received_bytes  # what is captured is not sent
        return None

    def _try(self, compute: Callable[[], Tensor], no_waits: Callable[[], AbstractContextManager[None]]) -> None:
        """Compute it before it is captured: alone, as compilers may wait, alone without waits, and together, which
        connects what NCCL connects at a first use. Raises RunError where this rank fails then."""
        self._rehearse(compute)
        with no_waits():
            self._rehearse(compute)
        if self._peers.size > 1:
            try:
                compute()
            except Exception as error:
                raise RunError(f"a decode step broke off between sums over ranks: {first_line(error)}") from error

    def _rehearse(self, compute: Callable[[], Tensor]) -> None:
        """Have each rank compute by itself, without the others. Raises RuntimeError on all ranks if it fails on one."""
        why = None
        try:
            with self._peers.rehearsing():
                compute()
        except Exception as error:  # as above
            why = first_line(error)
        if (why := self._agreed(why)) is not None:
            raise RuntimeError(why)

    def _replay(self, step: Step) -> None:
        step.graph.replay()
        self._peers.traffic.received_bytes += step.received_bytes

    def _agreed(self, why: str | None) -> str | None:
        """Why this rank cannot do something, or that another one cannot; None: all can."""
        return (why or "another rank cannot") if self._on_any(why is not None) else None

    def _on_any(self, mine: bool) -> bool:
        """Whether `mine` is true on at least one rank."""
        return bool(self._peers.all_reduce(torch.tensor([mine], dtype=torch.uint8), "max").item())
