"""What one step of a generation engine does, in words that the engine, the simulator and the batching policy share.

A `StepPlan` names sequences by uid and index and their keys and values by blocks; no tensor, no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from plait.policy.blocks import BLOCK_TOKENS

Key = tuple[int, int]
"""Prompt uid and index of a sample."""

PROMPT = -1
"""In place of an index: the prompt, with all its samples."""


class StepKind(StrEnum):
    PREFILL = "prefill"
    """Prompts, or parts of them, are computed, beside further tokens of every running sample."""
    DECODE = "decode"
    """Nothing but further tokens of the running samples."""


@dataclass(frozen=True)
class Limits:
    max_running: int
    """Samples in the batch at most."""
    max_prefill_tokens: int
    """Prompt tokens of one step at most; what is longer is computed in chunks."""
    num_blocks: int | None = None
    """Blocks of the pool; None: as many as are asked for."""
    block_tokens: int = BLOCK_TOKENS
    cache_blocks: int = 0
    """Blocks that nobody holds any more which are kept for later prompts at most."""
    starts: bool = True
    """Whether samples begin. False: prompts are computed for other engines, and wait until they are taken out."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start … stop − 1 of a prompt (index None), or of a preempted or imported sample."""

    uid: int
    index: int | None
    start: int
    stop: int
    table: tuple[int, ...]
    """Blocks of the sequence."""
    completes: bool
    """With it all tokens are computed; the sample, or those of the prompt that start, draw a token."""


@dataclass(frozen=True, slots=True)
class Start:
    """Samples of a prompt that draw their first token at the end of the step."""

    uid: int
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """What a step computes where several are in flight."""

    rows: tuple[Key, ...]
    """Running samples whose last token is known; the others are in flight, or wait for their turn."""
    most: int
    """Samples of the step, those that it starts included."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does, in this order: preempt, copy blocks, compute rows and chunks, draw."""

    preempted: tuple[Key, ...]
    """Running samples that lose their blocks and their place."""
    copies: tuple[tuple[int, int], ...]
    """Blocks (source, target) to copy before anything is written; all sources are read first."""
    grown: tuple[Key, ...]
    """Running samples whose block table has changed."""
    joined: tuple[Key, ...]
    """Samples that come with what they hold, and run from now on."""
    rows: tuple[Key, ...]
    """Running samples, the joined ones among them: each computes its newest token and draws the next."""
    num_new: tuple[int, ...]
    """Tokens that each row computes: its newest, and what was drafted behind it. It draws so many at most."""
    num_row_context: int
    """Tokens of them that are computed before the step."""
    chunks: tuple[Chunk, ...]
    starts: tuple[Start, ...]
    brought: tuple[Key, ...] = ()
    """Samples that joined with keys and values that come into the pool, from where they were parked."""

    @property
    def kind(self) -> StepKind:
        return StepKind.PREFILL if self.chunks else StepKind.DECODE

    @property
    def drawn(self) -> list[Key]:
        """Samples that draw a token, in the order of its rows."""
        drawn = list(self.rows)
        drawn += [(chunk.uid, chunk.index) for chunk in self.chunks if chunk.completes and chunk.index is not None]
        drawn += [(start.uid, index) for start in self.starts for index in start.indices]
        return drawn

    @property
    def is_empty(self) -> bool:
        """Whether it neither computes nor draws anything."""
        return not (self.rows or self.chunks or self.starts)

    @property
    def num_drafted(self) -> int:
        """Tokens that rows compute behind their newest ones."""
        return sum(self.num_new) - len(self.rows)

    @property
    def num_chunk_tokens(self) -> int:
        return sum(chunk.stop - chunk.start for chunk in self.chunks)

    @property
    def num_sequences(self) -> int:
        """Samples and prompts of which tokens are computed."""
        return len(self.rows) + len(self.chunks)

    @property
    def num_tokens(self) -> int:
        """That go through the model."""
        return sum(self.num_new) + self.num_chunk_tokens

    @property
    def num_context_tokens(self) -> int:
        """Held before the step by the sequences that are computed."""
        return self.num_row_context + sum(chunk.start for chunk in self.chunks)
