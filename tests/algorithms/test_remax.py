"""ReMax: advantages by hand, and which calls its flow makes."""

from __future__ import annotations

import numpy as np

from plait.algorithms.remax import ReMaxOptions, over_greedy, remax
from tests.algorithms.flows import calls_of, graph_of


def calls(**options) -> list[str]:
    return calls_of(remax, ReMaxOptions(**options))


def test_over_greedy_by_hand():
    assert over_greedy(np.array([1.0, 0.0, 3.0]), np.array([2.0])).tolist() == [-1, -2, 1]
    assert over_greedy(np.array([1.0, 0.0]), np.array([])).tolist() == [0, 0], "no baseline, no lesson"


def test_calls_of_remax():
    head = ["actor.generate", "actor.generate#2", "reward.score", "reward.score#2", "score_over_greedy"]
    assert calls() == [*head, "actor.train"]
    assert calls(kl_coef=0.1) == [*head, "ref.logprobs", "actor.logprobs", "advantages", "actor.train"]
    graph = graph_of(remax, ReMaxOptions())
    greedy = graph.nodes[1]
    assert (greedy.generation.greedy, greedy.generation.samples_per_prompt) == (True, 1)
    assert [column.rows for column in graph.nodes[4].inputs.values()] == [0, greedy.id]
    assert graph.nodes[-1].rows == 0, "the greedy response is not trained on"
