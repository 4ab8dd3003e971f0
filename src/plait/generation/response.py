"""A request in an engine, and each of its samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from plait.data.experts import Experts
from plait.data.records import FinishReason, Reply, Sample, drawn_of, logprobs_with, turn_start, with_replies
from plait.data.supports import WHOLE
from plait.errors import RunError
from plait.generation.request import Request
from plait.generation.stopping import completes_stop
from plait.kernels import noise
from plait.policy.step import Key


@dataclass
class PendingPrompt:
    """A request with samples that have not started."""

    request: Request
    limits: tuple[int, ...]
    num_pending: int
    logits_V: Tensor | None = None
    """Logits of the last prompt token, once it is computed and while samples have not started."""
    logits_version: int = 0
    """Version of the weights that computed them."""


@dataclass
class Response:
    """A sample that has started."""

    request: Request
    index: int
    limit: int
    noise_key: int
    """`NoiseKey.sample_key` as int64."""
    stop_token_ids: frozenset[int]
    version_starts: list[tuple[int, int]]
    """(first token, policy version) of each stretch of tokens, ascending."""
    stop_at: int | None = None
    """Number of tokens at which it stops, unfinished (`GoingOn.stops`)."""
    replies: tuple[Reply, ...] = ()
    """What was said between its turns, which is among its tokens."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """One per token; that of a reply's token stands for none."""
    supports: list[bytes] = field(default_factory=list)
    """One per token likewise, as `Sample.supports`, where the sample keeps them; else none."""
    finish_reason: FinishReason | None = None
    """None: it goes on."""

    @classmethod
    def begun(
        cls, pending: PendingPrompt, index: int, eos_token_ids: tuple[int, ...], versions: tuple[int, int]
    ) -> Response:
        """A sample before its first token.

        Args:
            versions: of the weights that its first token is drawn from, and its next ones.
        """
        first, then = versions
        starts = [(0, first)] if first == then else [(0, first), (1, then)]
        return cls.of(pending.request, index, pending.limits[index], eos_token_ids, starts)

    @classmethod
    def of(
        cls,
        request: Request,
        index: int,
        limit: int,
        eos_token_ids: tuple[int, ...],
        version_starts: Iterable[tuple[int, int]],
    ) -> Response:
        """What its request says of a sample, whose tokens are yet to come.

        Args:
            version_starts: (first token, policy version) of each stretch of tokens that it has or begins.
        """
        stop = request.sampling.stop_token_ids
        replies = next((begun.replies for begun in request.going_on.begun if begun.index == index), ())
        return cls(
            request,
            index,
            limit=limit,
            noise_key=noise.signed(request.noise.sample_key(request.prompt.uid, index)),
            stop_token_ids=frozenset(eos_token_ids if stop is None else stop),
            version_starts=list(version_starts),
            stop_at=request.going_on.stops.get(index),
            replies=replies,
        )

    @classmethod
    def resumed(
        cls, request: Request, sample: Sample, limit: int, eos_token_ids: tuple[int, ...], version: int
    ) -> Response:
        """A sample that was begun before and goes on, its next token drawn from weights of `version`."""
        drawn, replies = sample.versions, sample.replies
        versions = with_replies(drawn, replies, lambda reply: [drawn[reply.at - 1]] * len(reply.token_ids))
        logprobs = logprobs_with(sample.replies, sample.logprobs)
        drawn_from = sample.supports or (WHOLE,) * len(sample.token_ids)
        supports = with_replies(drawn_from, replies, lambda reply: [WHOLE] * len(reply.token_ids))
        starts = [at for at, policy_version in enumerate(versions) if at == 0 or policy_version != versions[at - 1]]
        response = cls.of(request, sample.index, limit, eos_token_ids, [(at, versions[at]) for at in starts])
        response.go_on(sample.all_ids, logprobs, version, supports)
        return response

    def go_on(
        self, token_ids: Sequence[int], logprobs: Sequence[float], version: int, supports: Sequence[bytes] = ()
    ) -> None:
        """Have what was said elsewhere or before, and draw the next token from weights of `version`."""
        self.token_ids, self.logprobs = list(token_ids), list(logprobs)
        if self.request.sampling.keeps:
            self.supports = list(supports)
            assert len(supports) == len(token_ids), f"{len(supports)} sets of {len(token_ids)} tokens"
        if self.version_starts[-1][1] != version:
            self.new_version(version)

    @cached_property
    def key(self) -> Key:
        return self.request.prompt.uid, self.index

    @property
    def is_parked(self) -> bool:
        """Whether it has stopped, and its keys and values are wanted when it goes on."""
        return self.finish_reason is FinishReason.OPEN and self.request.going_on.parks

    @property
    def tokens(self) -> list[int]:
        """Token ids of prompt and response."""
        return [*self.request.prompt.token_ids, *self.token_ids]

    @cached_property
    def _turn_start(self) -> int:
        """The first token of the turn that it is in."""
        return turn_start(self.replies)

    @property
    def num_left(self) -> int:
        """Tokens that it may still get."""
        most = self.limit if self.stop_at is None else min(self.limit, self.stop_at)
        return most - len(self.token_ids)

    def extend(
        self, token_ids: Sequence[int], logprobs: Sequence[float], tokenizer: Any, supports: Sequence[bytes] = ()
    ) -> int:
        """Add tokens, up to the one that ends the sample.

        Args:
            supports: what each was drawn from; none: the whole vocabulary.

        Returns:
            How many of them it got.

        Raises:
            RunError: a log-prob is not finite.
        """
        drawn = zip(token_ids, logprobs, supports or (WHOLE,) * len(token_ids), strict=True)
        for count, (token_id, logprob, support) in enumerate(drawn, 1):
            self.append(token_id, logprob, tokenizer, support)
            if self.finish_reason is not None:
                return count
        return len(token_ids)

    def append(self, token_id: int, logprob: float, tokenizer: Any, support: bytes = WHOLE) -> None:
        """Add one token; see `extend`.

        Raises:
            RunError: the log-prob is not finite.
        """
        if not math.isfinite(logprob):
            raise RunError(
                f"{self.request.prompt.title(self.index)}: expected finite logits at response token "
                f"{len(self.token_ids)}, found NaN or infinity: the weights are broken (a learning rate that is "
                "too high?) or overflow in this dtype"
            )
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if self.request.sampling.keeps:
            self.supports.append(support)
        self.finish_reason = self._end(tokenizer)

    def _end(self, tokenizer: Any) -> FinishReason | None:
        """Whether and why the newest token is the last one."""
        request = self.request
        if request.lengths is None:
            if self.token_ids[-1] in self.stop_token_ids:
                return FinishReason.STOP
            stop = request.sampling.stop
            if stop and completes_stop(tokenizer, self.token_ids, stop, self._turn_start):
                return FinishReason.STOP
        if len(self.token_ids) == self.limit:
            return FinishReason.LENGTH
        return FinishReason.OPEN if len(self.token_ids) == self.stop_at else None

    def new_version(self, version: int) -> None:
        """Stamp later tokens with the version of the new weights."""
        self.version_starts.append((len(self.token_ids), version))

    def sample(self, tokenizer: Any, reason: FinishReason | None = None, *, experts: Experts | None = None) -> Sample:
        """The sample as it is delivered; `reason` if something else than its last token ended it."""
        reason = reason or self.finish_reason
        assert reason is not None, f"sample {self.key} has not ended"
        return Sample(
            prompt=self.request.prompt,
            index=self.index,
            token_ids=drawn_of(self.token_ids, self.replies),
            logprobs=drawn_of(self.logprobs, self.replies),
            text=tokenizer.decode(self.token_ids, skip_special_tokens=True),
            finish_reason=reason,
            replies=self.replies,
            supports=drawn_of(self.supports, self.replies) if self.request.sampling.keeps else None,
            experts=experts,
            **self._versions(),
        )

    def _versions(self) -> dict[str, Any]:
        count = len(self.token_ids)
        starts = [start for start in self.version_starts if start[0] < count] or self.version_starts[-1:]
        versions: list[int] = []
        for (first, version), (stop, _) in zip(starts, [*starts[1:], (count, 0)], strict=True):
            versions += [version] * (stop - first)
        newest = starts[-1][1]
        mixed = any(version != newest for version in versions)
        return {"policy_version": newest, "token_versions": drawn_of(versions, self.replies) if mixed else None}
