"""Names of modules and parameters, as Transformers gives them."""

from __future__ import annotations

import re


def wildcard(name: str) -> str:
    """A name as the keys of a tp_plan have it: `*` for the numbers of layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
