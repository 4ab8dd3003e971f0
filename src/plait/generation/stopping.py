"""Stop strings on decoded text, also where one spans several tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

EDGE_CHARACTERS = 8
"""How far a cut at the left of a window can reach into its text: a character of several bytes, a dropped space."""


def completes_stop(tokenizer: Any, token_ids: Sequence[int], stop: Sequence[str], begin: int = 0) -> bool:
    """Whether the text of a response, special tokens written out, contains a stop string.

    Meant to be asked after each token: looks at the end of the response only, as far as the newest token can matter.

    Args:
        begin: the first token that counts.
    """
    longest = max(map(len, stop), default=0)
    if not longest:
        return False
    width = longest + EDGE_CHARACTERS
    newest = len(tokenizer.decode([token_ids[-1]], skip_special_tokens=False))
    while True:
        text = tokenizer.decode(list(token_ids[max(begin, len(token_ids) - width) :]), skip_special_tokens=False)
        if width >= len(token_ids) - begin or len(text) >= longest + EDGE_CHARACTERS + newest:
            return any(string in text for string in stop)
        width *= 2
