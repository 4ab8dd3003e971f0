"""What rows pass through the leader: each rank is sent those of its dp share, once, and of others the stub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from plait.data.records import FinishReason, Prompt, Reply, Sample
from plait.data.rows import Rows, sizes_of
from plait.dataflow import CallKind, Column, Grain, Level, Node, Score, Top, TrainOptions
from plait.engines import LossOver
from plait.layout.mesh import Layout
from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.schedule.placements import RolePlacement
from plait.training.micro_batches import shares_of
from plait.workers.commands import command_of
from plait.workers.messages import Message
from plait.workers.row_stubs import pack_shares, unpack_share
from plait.workers.score_call import ScoreCall
from plait.workers.train_calls import EvaluateCall, TrainCall
from tests.runs.plan_files import write_plan
from tests.runs.plans import tokens_of

WEIGHTS, SCORE, MASK = (
    Column(n, lv, 0, i)
    for i, (n, lv) in enumerate([("weights", Level.TOKEN), ("score", Level.SAMPLE), ("mask", Level.TOKEN)])
)
PAIR = Column("pair", Level.TOKEN, 0, 3, width=2)
PROMPT_TOKENS = 24
"""At most, of a prompt of these runs."""
HEADS = 7 * 8
"""Bytes of a row within it beside its tokens and columns."""


def train_node(number: int, call: str, inputs: dict[str, Column]) -> Node:
    return Node(number, call, CallKind.TRAIN, Grain.BATCH, "actor", 0, inputs, options=TrainOptions())


def rows_of() -> Rows:
    """Two prompts of 2 and 1 tokens; responses of 3 and 2, 4 and 0 tokens. Not in order."""
    one, two = Prompt(4, "a", (11, 12)), Prompt(9, "b", (13,))
    samples = (
        Sample(two, 0, (1, 2, 3, 4), (-0.1, -0.2, -0.3, -0.4), "", FinishReason.STOP),
        Sample(one, 1, (5, 6), (-0.5, -0.6), "", FinishReason.LENGTH),
        Sample(two, 1, (), (), "", FinishReason.ABORTED),
        Sample(one, 0, (7, 8, 9), (-0.7, -0.8, -0.9), "", FinishReason.STOP),
    )
    mask = np.array([1.0, 0, 1, 0, 1, 1, 1, 1, 0])
    pairs = np.arange(18.0).reshape(9, 2)
    return Rows(samples, {WEIGHTS: np.arange(9.0), SCORE: np.array([0.5, 1.5, 2.5, 3.5]), MASK: mask, PAIR: pairs})


def travelled(rows: Rows, share: tuple[int, ...]) -> Rows:
    columns = [WEIGHTS, SCORE, MASK, PAIR]
    body = Message({}, pack_shares(rows, columns, [share], MASK)[0]).to_bytes()
    return unpack_share(Message.from_bytes(np.frombuffer(body, np.uint8)).arrays, columns, MASK)


def test_of_other_shares_only_the_stub_travels() -> None:
    rows = rows_of()
    found = travelled(rows, (1, 3))
    for i in (1, 3):
        mine, theirs = found.samples[i], rows.samples[i]
        assert (mine.prompt.token_ids, mine.token_ids) == (theirs.prompt.token_ids, theirs.token_ids)
        assert (mine.logprobs, mine.uid) == (theirs.logprobs, theirs.uid)
    assert found.samples[0].token_ids == (-1, -1, 3, -1), "its last trained token, which may end it"
    assert found.samples[0].prompt.token_ids == (-1,)
    assert (found.samples[2].token_ids, found.samples[2].finish_reason) == ((), FinishReason.ABORTED)
    assert [s.uid for s in found.samples] == [s.uid for s in rows.samples]
    assert np.isnan(found.columns[WEIGHTS][:4]).all()
    assert found.columns[WEIGHTS][4:].tolist() == [4, 5, 6, 7, 8]
    assert found.columns[SCORE].tolist()[1::2] == [1.5, 3.5]
    assert np.isnan(found.columns[SCORE][::2]).all()
    assert np.isnan(found.columns[PAIR][:4]).all()
    assert found.columns[PAIR][4:].tolist() == rows.columns[PAIR][4:].tolist(), "several numbers of each token"
    assert found.columns[MASK].tolist() == rows.columns[MASK].tolist(), "denominators are those of all rows"
    assert np.isnan(found.sampling_logprobs[:4]).all()


def test_what_all_prompts_begin_with_is_told_to_ranks_that_have_none_of_them() -> None:
    rows = replace(rows_of(), root_tokens=1)
    spoken = replace(rows.samples[0], replies=(Reply(1, (21, 22)), Reply(3, (23,))))
    rows = replace(rows, samples=(spoken, *rows.samples[1:]))
    assert travelled(rows, (1, 3)).root_tokens == travelled(rows, ()).root_tokens == 1
    assert sizes_of(travelled(rows, ())) == sizes_of(rows), "all ranks divide alike"


@pytest.mark.parametrize("share", [(), (0, 1, 2, 3)])
def test_a_rank_of_no_rows_and_of_all(share: tuple[int, ...]) -> None:
    rows = rows_of()
    found = travelled(rows, share)
    assert [len(s.token_ids) for s in found.samples] == [4, 2, 0, 3]
    assert found.columns[MASK].tolist() == rows.columns[MASK].tolist()
    assert np.isfinite(found.columns[WEIGHTS]).all() == bool(share)


def test_shares_of_several_batches() -> None:
    """Each mini-batch is divided for itself; an epoch more may give a row to another rank too."""
    rows = rows_of().ordered()
    assert shares_of(rows, [range(4)], 1) == ((0, 1, 2, 3),)
    assert shares_of(rows, [range(4)], 2) == ((0, 1), (2, 3)), "a prompt stays on one rank: 7 and 5 tokens"
    assert shares_of(rows, [(0,), (1,), (2,), (3,)], 2) == ((0, 1, 2, 3), ()), "each alone: the first takes it"
    # A prompt of 2 with 3 and 2 tokens is cut into 5 and 4; one of 1 with 4 and 0 is not worth it; 5 and 5 are two.
    assert shares_of(rows, [(0, 1), (2, 3), (0, 2)], 2) == ((0, 2, 3), (1, 2))


def test_each_rank_gets_its_share_of_a_call() -> None:
    """dp 2 and tp 2 on ranks 0 to 3: 1 is of the leader's share, 2 and 3 of the other."""
    rows = rows_of()
    layout = Layout.on((0, 1, 2, 3), dp=2, tp=2)
    place = RolePlacement("actor", train=layout, score=layout)
    recipe, pairs = SimpleNamespace(seed=0), {"actor": 0.0}
    parts: Any = SimpleNamespace(places={"actor": place}, recipe=recipe, pair_tokens=pairs)
    score = ScoreCall("actor", Score.LOGPROBS, "actor.logprobs", rows).messages(parts)
    assert sorted(score) == [1, 2, 3]
    whole = {
        rank: [i for i, sample in enumerate(ScoreCall.of(message).rows.samples) if -1 not in sample.token_ids]
        for rank, message in score.items()
    }
    assert whole == {1: [1, 2, 3], 2: [0, 2], 3: [0, 2]}, "row 2 has no tokens at all"
    # Rank 2: 4 tokens of responses and 1 of their prompt, which has a uid and a length; places of 2 rows; 2 numbers of
    # how many there are; the root. The stubs are those of all rows, the same for every rank.
    stubs = score[2].arrays[2]
    assert score[2].num_array_bytes == 8 * (4 + 1 + 2 + 2 + 2 + 1) + 2 * HEADS + stubs.nbytes
    assert stubs is score[1].arrays[2]
    top = ScoreCall("actor", Top(4, among=50), "actor.top_logprobs", rows).messages(parts)
    assert ScoreCall.of(top[2]).what == Top(4, among=50)
    node = train_node(3, "actor.train", {"advantages": WEIGHTS, "mask": MASK})
    train = TrainCall((LossOver(node, rows),), 1).messages(parts)
    flow: Any = SimpleNamespace(nodes={3: node})
    for rank, own in ((1, [0, 1]), (2, [2, 3]), (3, [2, 3])):
        found, ordered = TrainCall.of(train[rank], flow).overs[0].rows, rows.ordered()
        there = np.isfinite(found.columns[WEIGHTS])
        assert there.tolist() == np.isin(np.arange(9), ordered.token_places(own)).tolist()
    evaluation = EvaluateCall(LossOver(node, rows, 0.5)).messages(parts)
    for rank, own in whole.items():  # all rows at once, as they are scored
        found = EvaluateCall.of(evaluation[rank], flow).over.rows
        ordered = [i for i, sample in enumerate(found.samples) if -1 not in sample.token_ids]
        assert sorted(rows.order[i] for i in ordered) == own
    # As above, with log-probs and two columns of 4 tokens; the mask of all tokens is with the stubs.
    packed = train[2].arrays[2]
    assert train[2].num_array_bytes - packed.nbytes == score[2].num_array_bytes - stubs.nbytes + 8 * (4 + 4 + 4)


def test_to_evaluate_is_another_call_than_to_train() -> None:
    rows, layout = rows_of(), Layout.on((0, 1), dp=2)
    place = RolePlacement("actor", train=layout)
    recipe, pairs = SimpleNamespace(seed=0), {"actor": 0.0}
    parts: Any = SimpleNamespace(places={"actor": place}, recipe=recipe, pair_tokens=pairs)
    node = train_node(0, "actor.train#2", {})
    flow: Any = SimpleNamespace(nodes=[node])
    over = LossOver(node, rows, 0.5)
    evaluates, trains = (
        command_of(call.messages(parts)[1], flow) for call in (EvaluateCall(over), TrainCall((over,), 7))
    )
    assert isinstance(evaluates, EvaluateCall)
    assert isinstance(trains, TrainCall)
    assert (evaluates.trained, evaluates.needs) == ((), (("actor", "home"),)), "it takes no optimizer"
    assert (trains.trained, trains.needs, trains.step) == (("actor",), (("actor", "train"),), 7)
    for told, heard in ((evaluates, evaluates.over), (trains, trains.overs[0])):
        assert (told.call, heard.node, heard.temperature) == ("actor.train#2", node, 0.5)
        assert len(heard.rows) == len(rows)


PLANS = {
    "shared": {"actor.generate": "0,1 dp2", "actor.train": "0,1 dp2", "ref.logprobs": "0,1 dp2"},
    "elsewhere": {"actor.generate": "0", "actor.train": "0", "ref.logprobs": "1"},
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["shared", pytest.param("elsewhere", marks=pytest.mark.slow)])
def test_bytes_of_rows_through_the_leader(make_recipe: Callable[..., Recipe], tmp_path: Path, plan: str) -> None:
    """Two ranks: each column of each sample goes to the other one once at most, and only where it is computed with."""
    recipe = make_recipe(
        plan=str(write_plan(tmp_path, plan, PLANS[plan])),
        **{"sampling.max_response_tokens": 40, "dtype": "float64"},
    )
    assert run(recipe).finished
    said = tokens_of(recipe.run_dir)
    metrics = read_rows(recipe.run_dir / "metrics.jsonl")
    assert len(said) == len(metrics) == 2
    for row, samples in zip(metrics, said.values(), strict=True):
        tokens = sum(len(token_ids) for _, token_ids, _ in samples)
        assert tokens > 300
        sent, received = row["perf/rows_sent_bytes"], row["perf/rows_received_bytes"]
        prompts = 8 * 3 * (2 + PROMPT_TOKENS)
        heads = len(samples) * (HEADS + 8) + prompts + 16 * len(samples)
        if plan == "elsewhere":
            assert received == 8 * tokens, "the log-probs of the reference"
            assert 8 * tokens < sent < 8 * tokens + heads
        else:
            share = 0.6 * tokens
            assert 0 < received < 16 * share + heads, "what the other rank said, with its log-probs"
            columns = 1 + 4  # ids to score; ids, log-probs of the sampler and of the reference, weights to train
            assert 0 < sent < 8 * columns * share + 2 * heads
