"""Model shapes and pairs of layouts."""

from __future__ import annotations

from dataclasses import dataclass

from plait.layout.decoder import decoder_parameters
from plait.layout.mesh import Cluster, Layout
from plait.layout.params import Parameters


def models() -> dict[str, Parameters]:
    """By name: SmolLM2-135M, a 7B Llama with grouped heads (Mistral-7B's numbers), Qwen3-30B-A3B's experts.

    The vocabulary is cut by tensor parallelism, as the systems compared with do.
    """
    return {
        "135M tied": decoder_parameters(
            layers=30,
            hidden=576,
            intermediate=1536,
            heads=9,
            kv_heads=3,
            head_dim=64,
            vocabulary=49152,
            tied=True,
            cut_vocabulary=True,
        ),
        "7B GQA": decoder_parameters(
            layers=32,
            hidden=4096,
            intermediate=14336,
            heads=32,
            kv_heads=8,
            head_dim=128,
            vocabulary=32000,
            cut_vocabulary=True,
        ),
        "30B MoE": decoder_parameters(
            layers=48,
            hidden=2048,
            intermediate=768,
            heads=32,
            kv_heads=4,
            head_dim=128,
            vocabulary=151936,
            experts=128,
            cut_vocabulary=True,
        ),
    }


@dataclass(frozen=True)
class Case:
    """A move on `cluster`; `zero`: from float32 masters under ZeRO-1, else from bfloat16 weights."""

    name: str
    cluster: Cluster
    before: Layout
    after: Layout
    zero: bool = False


TWO = Cluster(2, 8)
SIX = Cluster(6, 8)
CASES = [
    Case("tp 8 to tp 2", Cluster(1, 8), Layout.on(range(8), tp=8), Layout.on(range(8), dp=4, tp=2)),
    Case("stages to instances", TWO, Layout.on(range(16), tp=8, pp=2), Layout.on(range(16), dp=2, tp=8)),
    Case("all sizes change", TWO, Layout.on(range(16), dp=2, tp=2, pp=4), Layout.on(range(16), dp=4, tp=4)),
    Case("to one per device", TWO, Layout.on(range(16), dp=4, tp=2, pp=2), Layout.on(range(16), dp=16)),
    Case("onto half", TWO, Layout.on(range(16), dp=2, tp=4, pp=2), Layout.on(range(8, 16), dp=4, tp=2)),
    Case("disjoint halves", TWO, Layout.on(range(8), tp=4, pp=2), Layout.on(range(8, 16), dp=4, tp=2)),
    Case("2 nodes to 4 others", SIX, Layout.on(range(16), dp=2, tp=8), Layout.on(range(16, 48), dp=4, tp=8)),
    Case("tp 3 to tp 2", TWO, Layout.on(range(15), dp=5, tp=3), Layout.on(range(16), dp=8, tp=2)),
    Case("masters to weights", TWO, Layout.on(range(16), dp=4, tp=4), Layout.on(range(16), dp=8, tp=2), zero=True),
]

REAL_CASES = {
    2: [
        (Layout.on(range(2), tp=2), Layout.on(range(2), dp=2)),
        (Layout.on(range(2), tp=2), Layout.on(range(2), pp=2)),
        (Layout.on(range(2), pp=2), Layout.on(range(2), dp=2)),
        (Layout.on((0,)), Layout.on((1,))),
    ],
    4: [
        (Layout.on(range(4), tp=4), Layout.on(range(4), dp=2, tp=2)),
        (Layout.on(range(4), tp=4), Layout.on(range(4), dp=4)),
        (Layout.on(range(4), tp=2, pp=2), Layout.on(range(4), dp=4)),
        (Layout.on(range(4), dp=2, pp=2), Layout.on(range(4), dp=2, tp=2)),
        (Layout.on(range(2), tp=2), Layout.on(range(2, 4), dp=2)),
        (Layout.on((0,)), Layout.on(range(1, 4), dp=3)),
    ],
}
"""Number of processes → (layout before, layout after) of moves that are carried out."""
