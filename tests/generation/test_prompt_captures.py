"""Steps with prompts beside samples that decode are replayed once there are enough of them, and say what plain steps
say. A graph is here its computation, done again (`replays`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.generation import prompt_captures
from plait.generation.captured_step import Size, Step, has_graph
from plait.generation.cuda_graphs import First, Graph
from plait.generation.prompt_captures import PromptCaptures
from plait.generation.ragged import NewTokens, RaggedBatch, ragged, with_chunks
from plait.generation.settings import MOST_GRAPHS_OF_PROMPTS
from tests.cases import slow_but
from tests.generation.replays import Again, capture
from tests.generation.requests import request
from tests.generation.test_captured import (
    FAMILIES,
    as_on_a_gpu,
    asked_sizes,
    assert_same,
    captured_engine,
    one_batch,
)
from tests.generation.test_drafts import Oracle
from tests.generation.test_drafts import drained as drafted
from tests.generation.test_engine import engine_of

LENGTHS = [9, 40, 21, 100, 30, 12, 65, 24, 33, 18]
"""Of prompts: more samples than run at a time, so most of them are computed beside others that decode."""


def requests() -> list[Any]:
    return [request(uid, count, [3 + uid % 4, 9, 5 + uid % 3]) for uid, count in enumerate(LENGTHS)]


def plain_engine(monkeypatch: pytest.MonkeyPatch, family: str) -> Any:
    plain = engine_of(as_on_a_gpu(family), max_running=6, max_prefill_tokens=50)
    monkeypatch.setattr(plain.state.forward, "prepare", lambda longest: None)
    return plain


@pytest.mark.parametrize(
    ("family", "fused"),
    slow_but(
        [("llama", None), ("gemma2", "eager")],
        [(family, by) for family in FAMILIES for by in (None, "eager")] + [("llama", "inductor")],
    ),
)
def test_samples_are_those_of_plain_steps(family: str, fused: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_captures, "BEFORE", 1)
    engine, steps = captured_engine(monkeypatch, family, fused=fused, max_running=6, max_prefill_tokens=50)
    expected, _ = drafted(plain_engine(monkeypatch, family), requests())
    for _ in range(2):
        assert_same(drafted(engine, requests())[0], expected)
    assert steps.refusals == {}
    of_prompts = [size for size in steps.steps if not size.has_head]
    assert {size.chunk_rows for size in of_prompts} >= {0, 32, 64}, "chunks, and such as have few tokens left"
    assert sum(steps.steps[size].graph.replays for size in of_prompts) > 8  # type: ignore[attr-defined]


def test_drafts_beside_prompts_are_replayed_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_captures, "BEFORE", 0)
    expected, _ = drafted(plain_engine(monkeypatch, "llama"), requests())
    engine, steps = captured_engine(monkeypatch, max_running=6, max_prefill_tokens=50)
    for seed in range(2):
        oracle = Oracle(expected, 0.5)
        oracle.random.seed(seed)
        assert_same(drafted(engine, requests(), oracle)[0], expected)
    assert steps.refusals == {}
    assert any(size.chunk_rows and size.width > 1 for size in steps.steps)


def a_size(rows: int, keys: int = 64) -> Size:
    return Size(8, 8, 1, keys, 8, 2, rows, rows, has_head=False)


def test_a_step_is_captured_when_as_many_of_its_size_have_come() -> None:
    one, other = a_size(128), a_size(256)
    dropped: list[Size] = []
    captures = PromptCaptures(dropped.append)
    for _ in range(prompt_captures.BEFORE):
        assert not captures.comes(one)
        assert not captures.comes(other)
    assert captures.comes(one)
    assert captures.comes(one)
    captures.refuse()
    assert dropped == [one]
    assert not captures.comes(one)


def test_of_more_sizes_than_memory_is_counted_for_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_captures, "BEFORE", 1)
    dropped: list[Size] = []
    captures = PromptCaptures(dropped.append)
    sizes = [a_size(128, 1 << power) for power in range(MOST_GRAPHS_OF_PROMPTS + 1)]
    for size in sizes[:-1]:
        assert [captures.comes(size), captures.comes(size)] == [False, True]
    captures.comes(sizes[0])
    assert dropped == []
    assert [captures.comes(sizes[-1]), captures.comes(sizes[-1])] == [False, True]
    assert dropped == [sizes[1]], "the first has come since"
    assert [captures.comes(sizes[1]), captures.comes(sizes[1])] == [False, True], "it begins again"
    assert dropped == sizes[1:3]


def test_graphs_of_sizes_that_do_not_come_any_more_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_captures, "BEFORE", 0)
    monkeypatch.setattr(prompt_captures, "MOST_GRAPHS_OF_PROMPTS", 2)
    expected, _ = drafted(plain_engine(monkeypatch, "llama"), requests())
    engine, steps = captured_engine(monkeypatch, max_running=6, max_prefill_tokens=50)
    sizes = asked_sizes(monkeypatch)
    for _ in range(2):
        assert_same(drafted(engine, requests())[0], expected)
    assert len({size for size in sizes if not size.has_head}) > 2
    assert sum(not size.has_head for size in steps.steps) == 2


def mixed(rows: Sequence[tuple[int, int]], chunks: Sequence[tuple[int, int]]) -> RaggedBatch:
    """Samples that decode, of so many tokens over so many that they hold, and behind them chunks of prompts."""
    new = [NewTokens(range(100, 100 + count), held, range(40, 60)) for count, held in chunks]
    return with_chunks(one_batch(rows, 4), ragged(new, 16), [sum(count for count, _ in chunks) - 1])


@pytest.mark.parametrize(
    ("rows", "chunks", "size"),
    [
        # 28 of 128 rows are nobody's
        ([(1, 30)] * 3, [(100, 0)], Size(4, 4, 1, 128, 8, 2, 128, 128, has_head=False)),
        # of 256 rows 56 are nobody's, which is one more than four
        ([(1, 30)], [(50, 0)] * 4, Size(1, 1, 1, 64, 8, 8, 256, 64, has_head=False)),
        # filled to the last row
        ([(1, 3)] * 5, [(64, 0)] * 4, Size(8, 8, 1, 64, 8, 4, 256, 64, has_head=False)),
        # 17 rows are the fewest of a chunk
        ([(1, 3)], [(17, 0)], Size(1, 1, 1, 32, 8, 2, 32, 32, has_head=False)),
        # what is held is seen
        ([(1, 30)] * 2, [(128, 100)], Size(2, 2, 1, 256, 16, 1, 128, 128, has_head=False)),
        # drafts, and a prompt of few tokens among the first rows
        ([(4, 30), (1, 9), (9, 0)], [(20, 0)], Size(4, 16, 16, 64, 8, 2, 32, 32, has_head=False)),
        ([(1, 30), (9, 0)], [], Size(4, 16, 16, 32, 8, has_head=False)),
    ],
)
def test_both_parts_of_a_batch_are_filled_up(
    rows: list[tuple[int, int]], chunks: list[tuple[int, int]], size: Size
) -> None:
    batch = mixed(rows, chunks)
    assert has_graph(batch)
    assert Size.of(batch, 16) == size
    step = Step.of(size, batch)
    step.fill(mixed([(1, 9)], [(17, 3)] * bool(chunks)), 98, 16)  # what stood there before
    step.fill(batch, 99, 16)
    own = step.inputs
    assert own.num_short == size.samples
    for (own_rows, own_samples), (of_rows, of_samples) in zip(own.parts, batch.parts, strict=True):
        assert all(own.num_new[sample] + own.num_held[sample] == size.keys for sample in own_samples)
        for tensor, given, behind in (
            (own.token_ids_T, batch.token_ids_T, 0),
            (own.position_ids_T, batch.position_ids_T, 0),
            (own.places_T, batch.places_T, 99 * 16),
        ):
            lies = tensor[own_rows.start : own_rows.stop].tolist()
            rest = [behind] * (len(own_rows) - len(of_rows))
            assert lies == [*given[of_rows.start : of_rows.stop].tolist(), *rest]
        held = own.held_S[own_samples.start : own_samples.stop].tolist()
        assert held == [*batch.num_held[of_samples.start : of_samples.stop], *[0] * (len(held) - len(of_samples))]
        starts = own.starts_S1[own_samples.start : own_samples.stop + 1]
        assert (int(starts[0]), int(starts[-1])) == (own_rows.start, own_rows.stop), "each row is some sample's"
        lengths = starts.diff().tolist()
        assert tuple(lengths[: len(of_samples)]) == batch.num_new[of_samples.start : of_samples.stop]
        for number, (length, have) in enumerate(zip(lengths, held, strict=True)):
            assert length <= own.num_new[own_samples.start + number]
            assert length + have <= min(size.keys, 16 * size.columns), "its keys are in its block tables"
        idle = own.tables_SM[own_samples.start + len(of_samples) : own_samples.stop]
        assert (idle == 99).all()
        columns = min(size.columns, batch.tables_SM.shape[1])
        tables = own.tables_SM[own_samples.start :][: len(of_samples), :columns]
        assert tables.equal(batch.tables_SM[of_samples.start : of_samples.stop, :columns])
    step.out_B = own.token_ids_T[:, None].clone()
    assert step.out(batch)[:, 0].equal(batch.token_ids_T)


def test_what_no_graph_with_prompts_serves() -> None:
    assert has_graph(mixed([(1, 3)] * 500 + [(9, 0)], [(17, 0)])), "replies of few tokens, beside as many samples"
    assert not has_graph(mixed([(1, 3)] * 513, [(17, 0)])), "more samples than are replayed"
    assert not has_graph(mixed([(1, 3)], [(300, 0)] * 4)), "prompts that keep the device busy"
    unread = with_chunks(None, ragged([NewTokens(range(9), 0, (1,)), NewTokens(range(17), 0, (2, 3))], 16), [])
    assert not has_graph(unread), "nothing is read"
    assert not has_graph(with_chunks(None, ragged([NewTokens(range(17), 0, (2, 3))], 16), [16])), "nobody decodes"


@pytest.mark.parametrize("breaks", ["capture", "result"])
def test_prompts_that_cannot_be_replayed_are_launched_and_decoding_is_replayed(
    breaks: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prompt_captures, "BEFORE", 0)

    def by(compute: Callable[[], Tensor], beside: Graph | None, *, first: First | None) -> tuple[Again, Tensor]:
        if breaks == "capture" and compute_has_prompts():
            raise torch.OutOfMemoryError("no room")
        graph, out = capture(compute, beside, first=first)
        if compute_has_prompts():
            monkeypatch.setattr(graph, "replay", lambda: out.mul_(1.5).add_(1.0))
        return graph, out

    engine, steps = captured_engine(monkeypatch, by=by, max_running=6, max_prefill_tokens=50)
    sizes = asked_sizes(monkeypatch)
    asked: list[Size] = []
    step_of = Step.of.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        Step, "of", classmethod(lambda cls, size, batch: asked.append(size) or step_of(cls, size, batch))
    )
    compute_has_prompts = lambda: not asked[-1].has_head
    expected, _ = drafted(plain_engine(monkeypatch, "llama"), requests())
    assert_same(drafted(engine, requests())[0], expected)
    assert list(steps.refusals) == ["with prompts"]
    assert ("no room" if breaks == "capture" else "of their size off") in steps.refusals["with prompts"]
    assert [size for size in asked if not size.has_head] == [next(size for size in asked if not size.has_head)], "once"
    assert any(not size.has_head for size in sizes)
    assert {size.has_head for size in steps.steps} == {True}
    assert "steps of generation with prompts" in capsys.readouterr().err


def test_they_wait_until_steps_without_prompts_were_shown_to_be_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step has prompts beside the first samples."""
    monkeypatch.setattr(prompt_captures, "BEFORE", 0)
    engine, steps = captured_engine(monkeypatch, max_running=12, max_prefill_tokens=50)
    sizes = asked_sizes(monkeypatch)
    for one in requests():
        engine.add(one)
    seen = []
    while engine.has_work:
        engine.step()
        seen.append({size.has_head for size in steps.steps})
        assert len(seen) > 2 or {size.has_head for size in sizes} <= {False}
    first = next(index for index, kinds in enumerate(seen) if kinds)
    assert seen[first] == {True}
    assert seen[-1] == {True, False}
