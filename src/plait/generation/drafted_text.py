"""What a draft model has of a sample: its tokens, and for how many of them keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field

from plait.policy.blocks import BLOCK_TOKENS, prefix_keys


@dataclass(slots=True)
class DraftedText:
    """A sample, and how much of it the draft model holds keys and values of."""

    token_ids: list[int]
    """Those of the prompt, then those of the response."""
    names: tuple[bytes, ...]
    """Prefix keys of the whole blocks of the prompt, by which others find them."""
    num_held: int = 0
    ahead: list[int] = field(default_factory=list)
    """Draft tokens whose keys and values stand behind those; only where all that was said is held."""
    table: list[int] = field(default_factory=list)
    is_known: bool = True
    """Whether the draft model has all of these tokens."""

    @classmethod
    def begun(cls, prompt_ids: tuple[int, ...], vocabulary: int) -> DraftedText:
        """A sample that has said nothing; `vocabulary`: tokens that the draft model has."""
        return cls(list(prompt_ids), prefix_keys(prompt_ids), is_known=max(prompt_ids) < vocabulary)

    @property
    def num_shared(self) -> int:
        """Tokens of the prompt in whole blocks, which others may hold, too."""
        return len(self.names) * BLOCK_TOKENS

    @property
    def num_behind(self) -> int:
        """Tokens to compute before the newest one, which is computed in any case."""
        return max(0, len(self.token_ids) - 1 - self.num_held)

    def say(self, token_id: int) -> None:
        """Its next token; where that was drafted, it may be held already."""
        self.token_ids.append(token_id)
        if not self.ahead:
            return
        if self.ahead.pop(0) == token_id:
            self.num_held += 1
        else:
            self.ahead.clear()

    def rewind(self) -> None:
        """Have the newest token computed next, and nothing drafted."""
        self.ahead.clear()
        self.num_held = min(self.num_held, len(self.token_ids) - 1)
