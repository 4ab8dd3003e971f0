"""The ranks that step one engine together, as the engine on one of them uses them.

A step begins with decisions, which all ranks make alike, and ends with tokens, which one rank draws. If the model is
divided into stages, further steps begin in between, each for other samples (`policy.decode_ring`).

Shapes: B rows, D tokens that are drawn, V vocabulary, W bytes that have a bit for each of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from torch import Tensor

from plait.data.host_device import Bits, HostTokens, downloading, downloading_bits
from plait.generation.link import NO_LINK, Link
from plait.generation.sampler import SamplingRows, sample
from plait.kernels.noise import DrawNoise
from plait.policy.step import Key

if TYPE_CHECKING:
    from plait.generation.decode_batch import Drafts

Tokens = tuple[Tensor, Tensor]
"""token_ids [D] (int64), log-probs [D], where they were drawn."""


class Choose(Protocol):
    """Draws one token per row; `sampler.sample`, or one rank of a group for all."""

    def __call__(self, logits_BV: Tensor, noise_B: DrawNoise, rows: SamplingRows, /) -> tuple[Tensor, Tensor]: ...


class Joint(Protocol):
    """The ranks on which an engine is stepped."""

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for others in steps so far."""
        ...

    @property
    def draws(self) -> bool:
        """Whether this rank draws the tokens."""
        ...

    @property
    def choose(self) -> Choose:
        """How this rank draws a token from each row of logits."""
        ...

    is_alone: ClassVar[bool]
    """Whether this rank needs to hear of no other one to compute the next step."""

    @property
    def link(self) -> Link:
        """The way to the ranks that have other layers."""
        ...

    @property
    def most_groups(self) -> int:
        """How many steps may be in flight at once, the one that begins included."""
        ...

    def num_groups(self, num_samples: int) -> int:
        """How many steps are to be in flight while this many samples run: at most `most_groups`, and `num_samples`."""
        ...

    def expect(self, num_rows: int) -> None:
        """Announce the rows of the step after the one that begins now, so that what it needs of other ranks can be
        received ahead. It may have fewer rows, or with prompts more."""
        ...

    def rest(self) -> None:
        """No step is in flight, and none may follow for now: receive nothing ahead."""
        ...

    def drafts(self, make: Callable[[], Drafts], running: Sequence[Key]) -> Drafts:
        """The drafts of the next step, which are equal on all ranks.

        Args:
            make: makes this rank's own.
            running: samples in the batch.
        """
        ...

    def tell(self, drawn: Tokens | None, num_drawn: int) -> Callable[[], HostTokens]:
        """Send the drawn tokens to the hosts of all ranks.

        Args:
            drawn: on the rank that draws; None on the others.
            num_drawn: D.

        Returns:
            Waits for the tokens and returns them; they are equal on all ranks.
        """
        ...

    def tell_bits(self, bits_DW: Tensor | None, num_drawn: int, num_bytes: int) -> Callable[[], Bits]:
        """Send the hosts of all ranks what was left to draw from (`supports.bits_of`), as `tell` does the tokens.

        Args:
            bits_DW: on the rank that draws; None on the others.
            num_drawn, num_bytes: D and W.
        """
        ...


class Alone:
    """`Joint` of one process, which has the whole model."""

    waited_s: float = 0.0
    draws: ClassVar[bool] = True
    is_alone: ClassVar[bool] = True
    most_groups: ClassVar[int] = 1
    link: ClassVar[Link] = NO_LINK

    def __init__(self, choose: Choose = sample) -> None:
        self.choose = choose

    def num_groups(self, num_samples: int) -> int:
        """See Joint.num_groups."""
        return 1

    def expect(self, num_rows: int) -> None:
        """See Joint.expect."""

    def rest(self) -> None:
        """See Joint.rest."""

    def drafts(self, make: Callable[[], Drafts], running: Sequence[Key]) -> Drafts:
        """See Joint.drafts."""
        return make()

    def tell(self, drawn: Tokens | None, num_drawn: int) -> Callable[[], HostTokens]:
        """See Joint.tell."""
        assert drawn is not None, "a rank that is alone draws"
        return downloading(*drawn)

    def tell_bits(self, bits_DW: Tensor | None, num_drawn: int, num_bytes: int) -> Callable[[], Bits]:
        """See Joint.tell_bits."""
        assert bits_DW is not None, "a rank that is alone draws"
        return downloading_bits(bits_DW)
