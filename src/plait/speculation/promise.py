"""What drafts promise, in numbers that recipes know without loading anything."""

from __future__ import annotations

WINDOW = 32
"""Steps of which none may be slower together."""
MAY_LOSE = 0.02
"""Share of their time that they may lose unless another is asked for."""
