"""The ranks that step one engine together, as the engine on one of them sees them.

A step begins with decisions, which all ranks make alike, and ends with tokens, which one rank draws. Where the model is
divided into stages, further steps begin in between (`policy.decode_ring`): each computes other samples.

Shapes: B rows, D tokens that are drawn, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

from torch import Tensor

from plait.generation.backend import Computes
from plait.generation.records import Choose
from plait.generation.sampler import sample
from plait.models.language_model import LanguageModel

Tokens = tuple[Tensor, Tensor]
"""token_ids [D] (int64), log-probs [D]."""


class Joint(Protocol):
    """What an engine asks of the ranks that it is stepped on."""

    @property
    def waited_s(self) -> float:
        """Seconds in which this rank has waited for others in steps, so far."""
        ...

    @property
    def draws(self) -> bool:
        """Whether this rank draws the tokens."""
        ...

    @property
    def choose(self) -> Choose:
        """How it does."""
        ...

    def computes(self, model: LanguageModel) -> Computes:
        """A step's forward of a model of which this rank has a part, or all."""
        ...

    @property
    def most_groups(self) -> int:
        """Steps that may be in flight at once, the one that begins among them."""
        ...

    def num_groups(self, num_samples: int) -> int:
        """Steps that are to be in flight at once while so many samples run: at most `most_groups`, and samples."""
        ...

    def expect(self, num_rows: int) -> None:
        """The forward that begins now is followed by one of so many rows, or fewer, or (with prompts) more: what that
        one needs of others can be asked for ahead."""
        ...

    def rest(self) -> None:
        """No step is in flight, and none may follow for now: nothing is expected any longer."""
        ...

    def tell(self, drawn: Tokens | None, num_drawn: int) -> Callable[[], Tokens]:
        """Have all ranks know what one has drawn.

        Args:
            drawn: on the rank that draws; None on the others.
            num_drawn: D.

        Returns:
            What waits for the tokens; they are equal on all ranks.
        """
        ...


class Alone:
    """One process, which has the whole model; see `Joint`."""

    waited_s: float = 0.0
    draws: ClassVar[bool] = True
    most_groups: ClassVar[int] = 1

    def __init__(self, choose: Choose = sample) -> None:
        self.choose = choose

    def computes(self, model: LanguageModel) -> Computes:
        """See Joint.computes."""
        return model

    def num_groups(self, num_samples: int) -> int:
        """See Joint.num_groups."""
        return 1

    def expect(self, num_rows: int) -> None:
        """See Joint.expect."""

    def rest(self) -> None:
        """See Joint.rest."""

    def tell(self, drawn: Tokens | None, num_drawn: int) -> Callable[[], Tokens]:
        """See Joint.tell."""
        assert drawn is not None, "a rank that is alone draws"
        return lambda: drawn
