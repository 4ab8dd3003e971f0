"""The engine's forward: new tokens of a step in, logits of those that are read out, the pool filled on the way.

Backends compute the same up to rounding: the first of `BACKENDS` that a model has, where its copy of the weights will
pay, the Transformers module else. Exact mode has a forward of its own.

Shapes: R rows whose logits are read, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from plait.data.host_device import uploaded
from plait.generation.backend import Backend, unserved
from plait.generation.compiled_forward import CompiledForward
from plait.generation.decode_batch import DecodeBatch, Drafts
from plait.generation.exact import ExactForward
from plait.generation.link import NO_LINK, Link, unread
from plait.generation.module_forward import ModuleForward
from plait.generation.pool import KVPool
from plait.generation.ragged import NewTokens, RaggedBatch, ragged, with_chunks
from plait.generation.refused import LAYERS_ROUND, Refusals, Refused
from plait.generation.settings import DRAFT_MODEL_TOKENS
from plait.models.language_model import LanguageModel

BACKENDS: tuple[type[Backend], ...] = (CompiledForward,)
"""Faster than the module, the best first; those that serve other devices or dtypes are refused."""

PACK_STEPS = 16
"""Tokens that a response may have, from which on the weights are packed when work begins: packing costs about what so
many steps gain by it."""


@dataclass(frozen=True)
class ChunkTokens:
    """A chunk of the step; the logits of its last token are read where it completes its sequence."""

    new: NewTokens
    completes: bool


class Forward:
    """Forwards of one model over one pool.

    Args:
        exact: the bits of a token do not depend on what else is computed (`generation.exact`).
        link: to the ranks that have other layers.
    """

    def __init__(self, model: LanguageModel, pool: KVPool, *, exact: bool, link: Link = NO_LINK) -> None:
        self.model = model
        self._pool, self._link = pool, link
        self._exact = ExactForward(model, pool, link) if exact else None
        self.module = ModuleForward(model, pool.block_tokens, notes_experts=pool.keeps_experts)
        """The Transformers module as a backend."""
        self.backends: tuple[Backend, ...] = (self.module,)
        """Those that there are, the best first. A faster one than the module joins when it is first asked for, and
        computes when it is prepared."""
        self._refused: str | None = None
        """Why there is no faster one; None: there is, or none was asked for yet."""
        self.is_decided = False
        """Whether it is known that preparing pays, or does not."""

    @property
    def is_steady(self) -> bool:
        """Whether the next step gives each row the bits that it would have beside any others. As long as weights and
        work stay, a step that is steady is followed by steady ones alone."""
        return self._exact is not None or (self.model.part is None and self._prepared.is_steady)

    @property
    def may_be_steady(self) -> bool:
        """Whether such steps may come at all, and with drafts, as far as that is known without making a backend: it is
        also where ranks of an instance have to agree. States of layers are not taken back where draft tokens are
        rejected."""
        served = any(unserved(kind, self.model) is None for kind in BACKENDS)
        is_exact = self._exact is not None and self._pool.states is None
        return is_exact or (served and self.model.part is None)

    @property
    def capturing_s(self) -> float:
        """Seconds in which steps were captured to be replayed, so far: a step in which one is takes as much longer."""
        return 0.0 if self.module.captured is None else self.module.captured.seconds

    @property
    def _prepared(self) -> Backend:
        """What computes the next step."""
        return next((backend for backend in self.backends if backend.is_prepared), self.module)

    @property
    def refusals(self) -> Refusals:
        """Why the Transformers module computes, and why no step is steady; None where a faster backend does, and where
        its steps are, once there are steps enough.

        The first question makes and proves it; of a stage, that is before its first step, and nothing is known earlier.
        """
        if self._exact is not None:
            return Refusals(compiled="exact mode has a forward of its own")
        if self.model.team.pp.size == 1:
            self._ask()
        if self.model.part is not None:
            return Refusals(self._refused, "several ranks compute a step together")
        if self._refused is None and not self.backends[0].is_steady:
            return Refusals(steady="the model's own head may round by the number of rows")
        return Refusals(self._refused, self._refused and LAYERS_ROUND)

    def _ask(self) -> Backend:
        """The best backend that there is: those beside the module are made and proven when this is called first. Stages
        have the same one, as each has its own order of a step's rows."""
        if self._refused is None and len(self.backends) == 1:
            best: Backend = self.module
            try:
                best = _first_of(BACKENDS, self.model, self._pool.block_tokens)
            except Refused as refused:
                self._refused = str(refused)
            if self._link.agree(best is not self.module):
                self.backends = (best, self.module)
            else:
                self._refused = self._refused or "the layers of another stage are not compiled"
        return self.backends[0]

    def logits(self, rows: DecodeBatch, drafts: Drafts, chunks: Sequence[ChunkTokens]) -> Tensor | None:
        """Logits [R, V]: of each new token of each row, then of the chunks that complete a sequence, in their order;
        None if R is 0."""
        if self._exact is not None:
            new = rows.new_tokens(drafts)
            read = [len(tokens.token_ids) for tokens in new] + [int(chunk.completes) for chunk in chunks]
            return self._exact.logits([*new, *(chunk.new for chunk in chunks)], read)
        batch = rows.batch(drafts) if len(rows) else None
        if not chunks:
            return None if batch is None else self._logits(batch)
        return self._logits(self.batch_of(batch, chunks))

    def fill(self, new: Sequence[NewTokens]) -> None:
        """Put keys and values of these samples' tokens into the pool; no logits are read."""
        self._logits(self.batch_of(None, [ChunkTokens(tokens, completes=False) for tokens in new]))

    def batch_of(self, rows: RaggedBatch | None, chunks: Sequence[ChunkTokens]) -> RaggedBatch:
        """One batch of both."""
        order = list(range(len(chunks)))
        if self._prepared.by_rank:
            order.sort(key=lambda i: chunks[i].new.rank)
        more = ragged([chunks[i].new for i in order], self._pool.block_tokens, device=self.model.device)
        ends = dict(zip(order, accumulate(more.num_new), strict=True))
        read = [ends[i] - 1 for i, chunk in enumerate(chunks) if chunk.completes]
        return with_chunks(rows, more, read)

    def last_logits(self, rows: DecodeBatch, behind: Drafts) -> Tensor:
        """Logits [B, V] behind the last new token of each of B rows, as a draft model needs them.

        Args:
            behind: row → known tokens behind its newest one. Where they are few (DRAFT_MODEL_TOKENS) those behind all
                tokens are computed, as in a step of decoding, which may be replayed.
        """
        batch, last_B = rows.batch(behind), None
        if batch.num_tokens > len(rows):
            last_B = uploaded([end - 1 for end in accumulate(batch.num_new)], torch.int64, self.model.device)
        if last_B is not None and max(batch.num_new) > DRAFT_MODEL_TOKENS:
            batch, last_B = replace(batch, read_R=last_B, is_replayed=False), None
        logits = self._logits(batch)
        assert logits is not None, "each row is read"
        return logits if last_B is None else logits[last_B]

    def _logits(self, batch: RaggedBatch) -> Tensor | None:
        """Logits [R, V], None if R is 0; of a stage that is not the last they say nothing."""
        inputs_TH = self._link.receive(batch.num_tokens)
        out = self._prepared.compute(batch if inputs_TH is None else replace(batch, inputs_TH=inputs_TH), self._pool)
        if self.model.team.is_last_stage:
            return out
        assert out is not None, "all hidden states go on"
        self._link.send(out.clone())  # the next replay writes to the same memory
        num_read = batch.num_tokens if batch.read_R is None else len(batch.read_R)
        return unread(out, num_read, self.model.config.get_text_config().vocab_size) if num_read else None

    def prepare(self, longest: Callable[[], int]) -> None:
        """Before a step: pack the weights, if it is not decided yet and there will be steps enough.

        Args:
            longest: says how many tokens a response may still have.
        """
        if self.is_decided or self._exact is not None:
            return
        self.is_decided = True
        if longest() < PACK_STEPS:
            return
        self._ask().prepare()

    def work_added(self) -> None:
        """There is more to compute than was known: weights that were not worth packing may be now. They, and the pool,
        may have moved since there was nothing."""
        if self.module.captured is not None:
            self.module.captured.look()
        self.is_decided = any(backend.is_prepared for backend in self.backends)

    def drop_steps(self) -> None:
        """Give back what steps are replayed from; the pool has moved."""
        if self.module.captured is not None:
            self.module.captured.drop()

    def drop(self, *, keep_memory: bool = False) -> None:
        """Give the packed copy back; before the weights change. Its memory may stay for the next one."""
        for backend in self.backends:
            backend.drop(keep_memory=keep_memory)
        self.is_decided = False


def _first_of(kinds: Sequence[type[Backend]], model: LanguageModel, block_tokens: int) -> Backend:
    """The first that can be had. Raises Refused, with why the last one cannot, where there is none."""
    reason = "there is no other way to compute"
    for kind in kinds:
        try:
            return kind.of(model, block_tokens)
        except Refused as refused:
            reason = str(refused)
    raise Refused(reason)
