"""Bytes of what samples keep of how their tokens were drawn: the set of tokens that top-k, top-p or min-p left to draw
from (`data.supports`), and the experts that computed them (`data.experts`). Torch-free.

Top-k bounds the size of a set. What top-p and min-p leave depends on how sure a model is, so the size is an
expectation, by answers of SmolLM2-135M-Instruct (49,152 tokens in its vocabulary; 600 to 1,400 drawn tokens each):

    temperature            1.0                                                    0.7     1.2     1.5
    sampling     top_p 0.8  0.9    0.95   0.99    min_p 0.1  0.05   0.01      top_p 0.95          top_p 0.95  min_p 0.1
    tokens         19     159   231-293  1,201-1,630   4    8-9     29           11     2,876    16,637       10
    expected       74     147    295    1,475          4.5   9      45           15     2,179    43,770       11

Larger models are surer, so most keep less than this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, exp

from plait.data.experts import bytes_of
from plait.dataflow import CallKind, Dataflow, Node, Score
from plait.generation.settings import SamplingSettings
from plait.models.shape import ModelShape

TOP_P_SHARE, TOP_P_HEAT = 0.0003, 10.0
"""The share of the vocabulary that is left, times 1 − top_p, at temperature 1; and how often e times as much for each 1
of temperature more."""
MIN_P_TOKENS, MIN_P_HEAT = 0.45, 1.7
"""The tokens that are left, times min_p, likewise, whatever the vocabulary: it is a share of the most probable one."""
MOST_HEATED = 10.0
"""A temperature from which on the least that a filter can leave is all of the vocabulary, or what top-k leaves."""
FEW = 20
"""A set of so many tokens has as many gaps that take two bytes as one; of larger sets the share falls."""
OBJECT_BYTES = 48
"""What one set takes in a process beside its bytes: 33 of the object, 8 that refer to it, and 7 to the next 16."""
ID_BYTES = 8
"""Bytes that a token of a set takes in the form in which a micro-batch reads it."""
SETS, SETS_READ = "what samples were drawn from, and by", "what tokens of micro-batches were drawn from, and by"
"""Names of the terms of memory: of sets in samples that are held, and in micro-batches while they are computed."""
ROUTED = "experts that tokens of a micro-batch go to"
"""The term of a GPU's memory."""
SIZE_BYTES = 4
"""That say how long a set is, as it travels."""


@dataclass(frozen=True)
class KeptSets:
    """The set of one token. tokens: that it has; bytes: of it, as `data.supports` has it; experts: bytes of the token's
    experts, as `data.experts` has them, of prompts as of responses"""

    tokens: float = 0.0
    bytes: float = 0.0
    experts: int = 0

    @classmethod
    def expected(cls, sampling: SamplingSettings, vocabulary: int) -> KeptSets:
        """That of tokens which are drawn so; nothing where they are drawn from the whole vocabulary."""
        if not sampling.filters:
            return NO_SETS
        heat = min(sampling.temperature, MOST_HEATED) - 1.0
        tokens = float(min(sampling.top_k or vocabulary, vocabulary))
        most = float(most_bytes(int(tokens), vocabulary))
        if sampling.top_p < 1:
            tokens = min(tokens, vocabulary * TOP_P_SHARE / (1 - sampling.top_p) * exp(TOP_P_HEAT * heat))
        if sampling.min_p > 0:
            tokens = min(tokens, MIN_P_TOKENS / sampling.min_p * exp(MIN_P_HEAT * heat))
        if sampling.top_p < 1 or sampling.min_p > 0:
            tokens = max(1.0, tokens)
            return cls(tokens, min(most, 1 + tokens + tokens * FEW / (FEW + tokens)))
        return cls(tokens, most)

    @property
    def held_bytes(self) -> float:
        """What it takes in a process that has the sample."""
        return self.experts + (self.bytes + OBJECT_BYTES if self.tokens else 0.0)

    @property
    def sent_bytes(self) -> float:
        """What it takes of a message."""
        return self.experts + (self.bytes + SIZE_BYTES if self.tokens else 0.0)

    def read_bytes(self, tokens: int) -> int:
        """What a micro-batch of so many tokens holds of their sets on the host, until it is done, and of their experts
        where it computes: bytes, and indices."""
        return ceil(tokens * self.tokens * ID_BYTES) + self.routed_bytes(tokens)

    def routed_bytes(self, tokens: int) -> int:
        """Bytes of the experts of so many tokens alone, in the form in which a GPU has them."""
        return tokens * self.experts * (1 + ID_BYTES)

    def placed_bytes(self, rows: int, width: int) -> int:
        """What a GPU takes of the sets of so many rows of logits: places, and the logits that stand there."""
        return ceil(rows * self.tokens * (ID_BYTES + width))


NO_SETS = KeptSets()


def most_bytes(tokens: int, vocabulary: int) -> int:
    """The most bytes that a set of so many tokens takes: as many gaps as may be are of two bytes (128 and more), then
    of three (16,384 and more), or it is a bit for each token of the vocabulary."""
    in_bits = 1 + -(-vocabulary // 8)
    left, num_bytes, before = vocabulary - tokens, 1 + tokens, 0
    for least in (1 << 7, 1 << 14, 1 << 21):
        longer = min(tokens, max(0, left) // (least - before))
        num_bytes, left, before = num_bytes + longer, left - longer * (least - before), least
    return min(in_bits, num_bytes)


def sets_of(flow: Dataflow, node: Node, sampling: SamplingSettings, shape_of: Callable[[str], ModelShape]) -> KeptSets:
    """What is kept of the samples that a call makes or reads: nothing of given texts, and nothing where greedy.

    Args:
        shape_of: a role's model.
    """
    rows = flow.nodes[node.rows]
    if rows.kind is not CallKind.GENERATE or rows.generation.greedy:
        return NO_SETS
    shape = shape_of(str(rows.role))
    sets = KeptSets.expected(sampling, shape.vocabulary)
    replays = sampling.router_replay and node.role == rows.role
    return replace(sets, experts=expert_bytes(shape)) if replays else sets


def expert_bytes(shape: ModelShape) -> int:
    """What the experts of one token take."""
    return shape.expert_layers * shape.experts_per_token * bytes_of(shape.experts)


def held_set_bytes(sets: KeptSets, samples: int, longest: int, prompts: int = 0) -> int:
    """Bytes in a process that has so many samples of at most so many tokens.

    Args:
        prompts: their tokens, each prompt counted once.
    """
    return ceil(samples * longest * sets.held_bytes) + prompts * sets.experts


def reads_sets(node: Node) -> bool:
    """Whether it is a call that scores samples, and gets what they were drawn from."""
    return node.kind is CallKind.SCORE and node.scoring in (Score.LOGPROBS, Score.ENTROPIES)
