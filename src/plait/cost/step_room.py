"""What a step of generation takes of a GPU for a moment, beside keys, values and graphs. Torch-free.

Two moments of it, never at once: a layer of all its tokens, prompts among them; and the logits of its rows, while
tokens are drawn from them. What replayed steps compute in is not more. A draft model's steps come between those of the
policy, and are smaller. On a CPU neither is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.cost.experts import passing_elements
from plait.layout.mesh import Parallelism
from plait.models.shape import ModelShape
from plait.training.memory import BYTES

STEP = "temporary memory of a generation step"

FILTERED_BYTES = 56
"""What top-p takes for each number of the logits: over the temperature, exponentials, those that are kept, in order
(each 4), the places that these had (8), and what torch sorts by (32, by its source). Top-k alone takes less."""
COMPARED_BYTES, COMPARED_ROWS = 12, 256
"""When a step is captured for the first time its logits are held against those of the plain step, in float32: both, and
their difference, of so many rows at a time."""


@dataclass(frozen=True)
class LargestStep:
    """tokens: that it computes; rows: of them, whose logits are read; filters: whether top-k, top-p or min-p
    chooses"""

    tokens: int
    rows: int
    filters: bool

    @classmethod
    def of(cls, prompt_tokens: int, running: int, most_new_tokens: int, *, filters: bool) -> LargestStep:
        """
        Args:
            prompt_tokens: tokens of prompts in a step, at most.
            running: samples that decode at a time; 0: no sample is drawn, so no logits are computed.
            most_new_tokens: rows of a sample in a step, at most: its new token and its draft tokens.
        """
        rows = running * most_new_tokens
        return cls(prompt_tokens + rows, rows, filters)


def step_bytes(shape: ModelShape, dtype: str, step: LargestStep, sizes: Parallelism) -> tuple[int, ...]:
    """Bytes on a rank of each stage of an instance. Layers are counted as torch computes them, before they are
    compiled."""
    width, tp = BYTES[dtype], sizes.tp
    states = width * shape.hidden
    attention = 3 * shape.heads * shape.head_dim + 4 * shape.kv_heads * shape.head_dim
    # The embedding, the layer's input, the residual and its norm; gate, up, the activated gate and their product.
    within = max(width * max(4 * shape.active_intermediate, attention) // tp, _pairs_bytes(shape, width, tp))
    layer = step.tokens * (4 * states + within)
    # As they are computed, and once more beside those of samples that start, or against which they are held. With them
    # either what ranks of tp gather them from, or what draws, or what compares.
    gathered = (width + width // tp) * step.rows if tp > 1 else 0
    drawing = FILTERED_BYTES * step.rows if step.filters else 0
    compared = COMPARED_BYTES * min(step.rows, COMPARED_ROWS)
    numbers = 2 * width * step.rows + max(gathered, drawing, compared)
    head = step.tokens * states + shape.vocabulary * numbers
    return (*(layer,) * (sizes.pp - 1), max(layer, head))


def _pairs_bytes(shape: ModelShape, width: int, tp: int) -> int:
    """Bytes of all experts that a token goes to, in a layer of a mixture; 0 of other models."""
    pairs = shape.experts_per_token if shape.expert_layers else 0
    return round(width * pairs * passing_elements(shape, tp))
