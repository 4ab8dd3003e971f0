"""What is asked of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from plait.data.records import Prompt, Sample
from plait.errors import DataError
from plait.generation.sampling import Sampling
from plait.kernels.noise import NoiseKey


@dataclass(frozen=True)
class GoingOn:
    """What is asked of samples that have begun before, by weights of other versions perhaps."""

    begun: tuple[Sample, ...] = ()
    """Samples of the prompt that go on behind the tokens that they have."""
    left_out: frozenset[int] = frozenset()
    """Indices of which nothing is drawn: they have ended, or stay as they are."""
    stops: Mapping[int, int] = field(default_factory=dict)
    """Index → tokens of the response at which it stops, unfinished."""
    keeps: frozenset[int] = frozenset()
    """Indices of `begun` that go on with the keys and values that lie parked in the engine; those of others are
    computed again."""
    parks: bool = False
    """Keys and values of those that stop are parked."""


@dataclass(frozen=True)
class Request:
    """Draw samples of one prompt.

    Raises:
        DataError: no samples, or lengths that are not one for each.
    """

    prompt: Prompt
    num_samples: int
    sampling: Sampling
    noise: NoiseKey
    lengths: tuple[int, ...] | None = None
    """Recorded lengths to replay: sample i has exactly lengths[i] tokens, whatever it says. None: it ends by itself."""
    going_on: GoingOn = GoingOn()
    """Which samples continue from tokens that were drawn before, and which are to stop before they end."""
    in_turns: bool = False
    """Its samples may go on when they have ended: what the engine holds for them stays until
    `GenerationEngine.end_turns`."""
    one_turn: bool = False
    """Nobody replies to its samples, whatever the run has others do."""
    rollout: str = ""
    """The call that asks, where the flow has several (`Dataflow.rollout_name`)."""

    def __post_init__(self) -> None:
        name = self.prompt.title()
        if self.num_samples < 1:
            raise DataError(f"{name}: expected num_samples of at least 1, found {self.num_samples}")
        if self.lengths is not None and len(self.lengths) != self.num_samples:
            raise DataError(
                f"{name}: expected a length for each of {self.num_samples} samples, found {len(self.lengths)}"
            )
        if self.lengths is not None and min(self.lengths) < 1:
            raise DataError(f"{name}: expected lengths of at least 1 token, found {min(self.lengths)}")

    @property
    def indices(self) -> tuple[int, ...]:
        """Samples that are drawn, or go on."""
        return tuple(index for index in range(self.num_samples) if index not in self.going_on.left_out)

    @property
    def fresh(self) -> Iterator[int]:
        """Those of them that have not begun."""
        begun = {sample.index for sample in self.going_on.begun}
        return (index for index in self.indices if index not in begun)

    def limit(self, index: int, max_positions: int) -> int:
        """Tokens of response `index` at most, in a model of so many positions.

        Raises:
            DataError: the prompt is empty or leaves no room, or a recorded length does not fit.
        """
        num_tokens = len(self.prompt.token_ids)
        if num_tokens == 0:
            raise DataError(f"{self.prompt.title()}: expected at least one token, found none; change the data set")
        room = max_positions - num_tokens
        if room < 1:
            raise DataError(
                f"{self.prompt.title()}: expected fewer than {max_positions} tokens, the positions of the model, "
                f"found {num_tokens}: no room for a response; shorten or filter the prompts, or change `model`"
            )
        if self.lengths is None:
            return min(self.sampling.max_tokens, room)
        if self.lengths[index] > room:
            raise DataError(
                f"{self.prompt.title()}: expected recorded lengths of at most {room} tokens (the model has "
                f"{max_positions} positions), found {self.lengths[index]}; change the lengths or `model`"
            )
        return self.lengths[index]
