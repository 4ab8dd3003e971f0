"""Steps that are replayed say what plain steps say, and are captured again when what they read has moved. A graph is
here its computation, done again: it reads and writes the same tensors, as a graph of CUDA does."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from plait.data.records import Prompt, Sample
from plait.errors import RunError
from plait.generation import captured_step, cuda_graphs, draft_steps, fused_layers, module_forward
from plait.generation import pool as pool_module
from plait.generation.captured import CapturedSteps
from plait.generation.captured_step import Compute, Size, Step, has_graph
from plait.generation.cuda_graphs import Capture, First, Graph, by_cuda
from plait.generation.draft_steps import DraftSteps
from plait.generation.engine import Engine, drain
from plait.generation.forward import Forward
from plait.generation.fused_layers import FusedLayers
from plait.generation.model_drafter import ModelDrafter
from plait.generation.module_forward import ModuleForward
from plait.generation.pool import KVPool
from plait.generation.ragged import NewTokens, RaggedBatch, ragged
from plait.generation.ragged_context import RaggedContext
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.settings import MOST_REPLAYED, SamplingSettings
from plait.generation.speculator import Speculator, speculator_of
from plait.generation.speculator import model_drafter as drafter_of
from plait.kernels import on_devices
from plait.kernels.noise import NoiseKey
from plait.models.language_model import LanguageModel
from plait.models.parallel import nccl
from plait.models.parallel.peers import Peers
from plait.models.parallel.team import Team
from tests.cases import slow_but
from tests.generation.replays import Again, capture
from tests.generation.scripted_drafter import ScriptedDrafter
from tests.generation.test_drafts import Oracle
from tests.generation.test_drafts import drained as drafted
from tests.generation.test_engine import engine_of, request_of, requests
from tests.models.tiny import VOCAB_SIZE, tiny_model

CAPTURE_S = 0.5


def slow_capture(compute: Callable[[], Tensor], beside: Graph | None, *, first: First | None) -> tuple[Again, Tensor]:
    """A capture that takes so long."""
    time.sleep(CAPTURE_S)
    return capture(compute, beside, first=first)


def as_on_a_gpu(family: str) -> LanguageModel:
    """A tiny model in float32 without the operations of a CPU."""
    model = tiny_model(family, dtype=torch.float32).copied()
    for module in model.module.modules():
        vars(module).pop("forward", None)
    return model


def captured_engine(
    monkeypatch: pytest.MonkeyPatch,
    family: str = "llama",
    *,
    by: Capture = capture,
    addresses: Callable[[], tuple[int, ...]] | None = None,
    fused: str | None = None,
    peers: Peers | None = None,
    **settings: Any,
) -> tuple[Any, CapturedSteps]:
    """An engine whose forward is the module's, with graphs, and its captured steps.

    Args:
        by: makes graphs.
        addresses: of what a step reads; None: as they are.
        fused: what compiles layers for the first way to compute a step; None: there is the plain way alone.
        peers: see `CapturedSteps`.
    """
    Again.made = []
    engine = engine_of(as_on_a_gpu(family), **settings)
    forward = engine.state.forward
    module = forward.module
    assert isinstance(module, ModuleForward)
    ways: dict[str, Compute] = {"plain": module.plainly}
    if fused is not None:
        monkeypatch.setattr(module, "layers", FusedLayers(module.model.module, fused))
        ways = {"fused": module.fused, **ways}
    monkeypatch.setattr(module, "takes_chunks", True)
    module.captured = CapturedSteps(ways, module.readout, addresses or module.addresses, by, peers)
    monkeypatch.setattr(forward, "prepare", lambda longest: None)
    return engine, module.captured


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_samples_are_those_of_plain_steps(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, steps = captured_engine(monkeypatch, family, max_running=6, max_prefill_tokens=20)
    plain = engine_of(tiny_model(family, dtype=torch.float32), max_running=6, max_prefill_tokens=20)
    monkeypatch.setattr(plain.state.forward, "prepare", lambda longest: None)
    for request in requests():
        engine.add(request)
        plain.add(request)
    found = {(s.prompt.uid, s.index): s for s in drain(engine)}
    expected = {(s.prompt.uid, s.index): s for s in drain(plain)}
    assert found.keys() == expected.keys()
    for key, sample in found.items():
        assert sample.token_ids == expected[key].token_ids
        torch.testing.assert_close(
            torch.tensor(sample.logprobs), torch.tensor(expected[key].logprobs), atol=1e-4, rtol=0
        )
    assert sum(graph.replays for graph in Again.made) > 10
    assert steps.refusals == {}


def drained(engine: Any) -> dict[tuple[int, int], Sample]:
    for request in requests():
        engine.add(request)
    return {(s.prompt.uid, s.index): s for s in drain(engine)}


@pytest.mark.parametrize(
    ("family", "by"),
    slow_but(
        [("gemma2", "eager")],  # layers with a window and without, norms behind attention, softcaps
        [(family, by) for by in ("eager", "inductor") for family in ("llama", "qwen3", "gemma2", "gpt_oss", "mixtral")],
    ),
)
def test_samples_by_fused_layers_are_those_of_plain_ones(family: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as a whole, by `eager`; and compiled."""
    engine, steps = captured_engine(monkeypatch, family, fused=by, max_running=6, max_prefill_tokens=20)
    plain = engine_of(as_on_a_gpu(family), max_running=6, max_prefill_tokens=20)
    monkeypatch.setattr(plain.state.forward, "prepare", lambda longest: None)
    found, expected = drained(engine), drained(plain)
    assert steps.refusals == {}
    assert {key: sample.token_ids for key, sample in found.items()} == {
        key: sample.token_ids for key, sample in expected.items()
    }
    for key, sample in found.items():
        torch.testing.assert_close(
            torch.tensor(sample.logprobs), torch.tensor(expected[key].logprobs), atol=1e-4, rtol=0
        )
    assert "forward" not in vars(engine.model.backbone.recomputed_layers()[0]), "the layers are their own again"


@pytest.mark.parametrize("samples", [8, 32])
def test_layers_are_compiled_once_however_many_samples_there_are(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a head has numbers, or the hidden size: torch would take these to be equal always, and compile anew
    for the prompts of the next rollout."""
    torch._dynamo.reset()
    fused_layers._compiled.cache_clear()
    engine, steps = captured_engine(monkeypatch, "llama", fused="eager", max_running=32)
    config = engine.model.config
    assert samples in (config.head_dim, config.hidden_size)
    counted = lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    before = counted()
    for _ in range(2):
        for uid in range(samples // 4):
            sampling = Sampling(max_tokens=4, stop_token_ids=())
            engine.add(Request(Prompt(uid, "", tuple(range(2, 13))), 4, sampling, NoiseKey(0, 0)))
        assert len(list(drain(engine))) == samples
        assert counted() - before == 1
    assert any(size.samples == samples for size in steps.steps)


@pytest.mark.slow
def test_a_fused_layer_is_four_products_and_five_kernels_beside_its_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted in what torch's compiler writes; the operations of plain layers are counted in `test_device_step`."""
    engine, steps = captured_engine(monkeypatch, "llama", fused="inductor", max_running=6)
    _, codes = run_and_get_code(lambda: drained(engine))
    assert steps.refusals == {}
    for code in codes:
        called = code[code.index("def call") :]
        assert called.count("extern_kernels.mm(") == 4
        assert len(re.findall(r"\bcpp_fused\w*\(", called)) <= 5
        assert called.count("= torch.ops.plait.attend.default(") == 1


FAMILIES = ["llama", "qwen3", "gemma2", "gpt_oss", "mixtral"]


@pytest.mark.parametrize(
    ("family", "fused"),
    slow_but([("llama", None), ("gemma2", "eager")], [(family, by) for family in FAMILIES for by in (None, "eager")]),
)
def test_samples_with_drafts_are_those_of_plain_steps(
    family: str, fused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of any lengths from 0 to 15 beside each other, right and wrong ones."""
    plain = engine_of(as_on_a_gpu(family), max_running=6, max_prefill_tokens=20)
    monkeypatch.setattr(plain.state.forward, "prepare", lambda longest: None)
    expected, plain_steps = drafted(plain, requests())
    engine, steps = captured_engine(monkeypatch, family, fused=fused, max_running=6, max_prefill_tokens=20)
    sizes = asked_sizes(monkeypatch)
    for seed in range(2):
        oracle = Oracle(expected, 0.5)
        oracle.random.seed(seed)
        found, num_steps = drafted(engine, requests(), oracle)
        assert num_steps < plain_steps
        assert_same(found, expected)
    assert {size.width for size in sizes} >= {8, 16}
    assert any(size.rows < size.samples * size.width for size in sizes), "no sample is filled up to the widest"
    assert steps.refusals == {}
    assert all(graph.beside is None or graph.beside in Again.made for graph in Again.made)


def asked_sizes(monkeypatch: pytest.MonkeyPatch) -> set[Size]:
    """The sizes of graphs that are asked for from now on."""
    sizes: set[Size] = set()
    of = Size.of

    def noted(batch: RaggedBatch, block_tokens: int) -> Size:
        sizes.add(of(batch, block_tokens))
        return of(batch, block_tokens)

    monkeypatch.setattr(Size, "of", noted)
    return sizes


def assert_same(found: Mapping[Any, Sample], expected: Mapping[Any, Sample]) -> None:
    assert found.keys() == expected.keys()
    for key, sample in found.items():
        assert (sample.token_ids, sample.finish_reason) == (expected[key].token_ids, expected[key].finish_reason)
        torch.testing.assert_close(
            torch.tensor(sample.logprobs), torch.tensor(expected[key].logprobs), atol=1e-4, rtol=0
        )


class Stream:
    """A stream of CUDA that does nothing, and knows which one it waited for last."""

    waited: Stream | None = None

    def wait_stream(self, other: Stream) -> None:
        self.waited = other


class Played:
    """Torch's own parts of CUDA, played: what they were asked, and the stream that is current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.own = self.now = Stream()
        self.aside = Stream()
        self.pools: list[Any] = []
        self.mode: int | str = 0
        self.is_capturing = False
        self.emptied = 0
        for name, fake in {
            "current_stream": lambda: self.now,
            "stream": self.on,
            "CUDAGraph": lambda: SimpleNamespace(capture_begin=self.begin, capture_end=self.end, replay=tuple),
            "empty_cache": lambda: setattr(self, "emptied", self.emptied + 1),
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": lambda mode: setattr(self, "mode", mode),
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(cuda_graphs, "capture_stream", lambda: self.aside)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def begin(self, *, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        assert self.now is self.aside, (
            "libraries have a workspace for each stream, and graphs of one memory share theirs"
        )
        self.pools.append(pool)
        self.is_capturing = True

    def end(self) -> None:
        self.is_capturing = False


def test_captures_share_a_stream_and_the_memory_of_the_graph_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, shared = Played(monkeypatch), object()
    beside = Again(lambda: torch.zeros(1), None, None)
    monkeypatch.setattr(beside, "pool", lambda: shared)
    streams: list[Stream] = []

    def compute() -> Tensor:
        streams.append(cuda.now)
        return torch.ones(2)

    assert by_cuda(compute, None, first=lambda no_waits: compute())[1].tolist() == [1.0, 1.0]
    by_cuda(compute, beside, first=lambda no_waits: compute())
    assert cuda.pools == [None, shared]
    assert streams == [cuda.aside] * 4
    by_cuda(compute, beside, first=None)
    assert streams == [cuda.aside] * 5, "what it waits for is known, and it is compiled"
    assert cuda.emptied == 1, "before the first of the graphs"
    assert cuda.now is cuda.own


def test_a_capture_that_fails_leaves_the_stream_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Played(monkeypatch)

    def fails_when_captured() -> Tensor:
        if cuda.is_capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.ones(1)

    with pytest.raises(RuntimeError, match="not permitted"):
        by_cuda(fails_when_captured, None, first=lambda no_waits: None)
    assert (cuda.now, cuda.is_capturing) == (cuda.own, False)
    assert cuda.own.waited is cuda.aside, "what has failed still reads memory that the next step may take"


@pytest.mark.parametrize("size", [1, 2])
def test_what_waits_for_the_device_is_found_before_a_capture(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time it may: kernels are compiled then. A rank finds it before it sends anything to others."""
    cuda, tried = Played(monkeypatch), []

    def waits(batch: RaggedBatch, pool: Any) -> Tensor:
        tried.append((peers.is_rehearsing, cuda.mode))
        assert not cuda.is_capturing
        if cuda.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return plain(batch, pool)

    peers = played_peers(size, monkeypatch, [])
    steps = CapturedSteps({"waits": waits, "plain": plain}, said, lambda: (), by_cuda, peers)
    assert steps.compute(one_batch([(1, 3)] * 4, 2), POOL) is not None
    assert tried == [(True, 0), (True, "error")]
    assert "synchronizing" in steps.refusals["waits"]
    assert (cuda.now, cuda.mode, cuda.pools) == (cuda.own, 0, [None])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RunError("rank 1 is gone")])
def test_a_rank_that_breaks_off_between_sums_ends_the_run(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no reason to take another way: the others would take its next sums for those that they wait for."""

    def breaks(batch: RaggedBatch, pool: Any) -> Tensor:
        if not peers.is_rehearsing:
            raise error
        return plain(batch, pool)

    peers = played_peers(2, monkeypatch, [])
    steps = CapturedSteps({"breaks": breaks, "plain": plain}, said, lambda: (), capture, peers)
    with pytest.raises(RunError, match=str(error)):
        steps.compute(one_batch([(1, 3)] * 4, 2), POOL)


def test_sums_that_cannot_be_captured_are_a_reason_to_capture_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL may be too old for it, or be told to wait in each sum. Nothing was sent, and no rank is gone."""

    def sums(batch: RaggedBatch, pool: Any) -> Tensor:
        if cuda.is_capturing:
            raise RunError("tp: rank 0 expected rank 1 to take part in all_reduce, found: not permitted in a capture")
        return plain(batch, pool)

    cuda = Played(monkeypatch)
    steps = CapturedSteps({"plain": sums}, said, lambda: (), by_cuda, played_peers(2, monkeypatch, []))
    assert steps.compute(one_batch([(1, 3)] * 4, 2), POOL) is not None
    assert "not permitted in a capture" in steps.refusals["plain"]


def plain(batch: RaggedBatch, pool: Any) -> Tensor:
    return torch.zeros(batch.num_tokens, 4)


def said(hidden_TH: Tensor, batch: RaggedBatch) -> Tensor:
    raise AssertionError("each row is read")


POOL: Any = SimpleNamespace(spare=9, block_tokens=16, addresses=tuple, keeps_experts=False)


def played_peers(size: int, monkeypatch: pytest.MonkeyPatch, asked: list[Any]) -> Peers:
    """The first of so many ranks, of which the others have nothing to say; `asked` has what it asks them."""
    monkeypatch.setattr(Peers, "all_reduce", lambda peers, tensor, op="sum": asked.append(tensor.tolist()) or tensor)
    return Peers(tuple(range(size)), 0, "tp")


def test_graphs_are_kept_for_the_next_time_where_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, steps = captured_engine(monkeypatch, max_running=4)
    module = engine.state.forward.module
    engine.add(request_of(0, num_samples=4, sampling=Sampling(max_tokens=6, stop_token_ids=())))
    list(drain(engine))
    assert steps.steps, "an engine that has the process to itself keeps its memory"
    module.drop(keep_memory=False)
    assert not steps.steps


@pytest.mark.parametrize("keeps", [True, False])
def test_graphs_that_stay_serve_the_next_rollout(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """New weights where the old ones were: neither they nor the pool move, and what lay in the pool is not read. Where
    something else needs the memory in between, each size is captured again."""
    monkeypatch.setattr(pool_module, "takes_pages", lambda device: False)
    engine, steps = captured_engine(monkeypatch, max_running=4)
    engine.state.keep_memory = keeps
    model, pool = engine.model, engine.state.pool
    asked = request_of(0, num_samples=4, sampling=Sampling(max_tokens=12, stop_token_ids=()))
    engine.add(asked)
    first = {s.index: s.token_ids for s in drain(engine)}
    made, at = len(Again.made), pool.addresses()
    assert made == len({graph.out.data_ptr() for graph in Again.made}) > 0
    assert bool(at) == bool(steps.steps) == keeps
    with torch.no_grad():
        for param in model.module.parameters():
            param.mul_(1.5)
    engine.update_weights(1)
    engine.add(asked)
    second = {s.index: s.token_ids for s in drain(engine)}
    assert (len(Again.made), pool.addresses()) == ((made, at) if keeps else (2 * made, ()))
    fresh = engine_of(model, max_running=4)
    monkeypatch.setattr(fresh.state.forward, "prepare", lambda longest: None)
    fresh.add(asked)
    assert second == {s.index: s.token_ids for s in drain(fresh)} != first


@pytest.mark.parametrize("how", [3, "adaptive"])
def test_samples_with_speculation_are_those_without(how: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of the same prompt again: what they said last time is drafted."""
    asked = [request_of(uid, num_samples=3, sampling=Sampling(temperature=0.0, max_tokens=30)) for uid in range(2)]
    plain = engine_of(as_on_a_gpu("llama"))
    monkeypatch.setattr(plain.state.forward, "prepare", lambda longest: None)
    expected, _ = drafted(plain, asked)
    engine, steps = captured_engine(monkeypatch)
    asked_for = SamplingSettings(speculation=how)  # type: ignore[arg-type]
    engine.speculates = speculator_of(asked_for, engine.state.forward, keep_memory=True)
    sizes = asked_sizes(monkeypatch)
    for _ in range(2):
        assert_same(drafted(engine, asked)[0], expected)
    counts = engine.speculation
    assert counts is not None
    if how == 3:
        assert counts.accepted > 0
        assert {size.width for size in sizes} == {1, 4}
    assert steps.refusals == {}


def drafter_by_graphs(
    monkeypatch: pytest.MonkeyPatch, by: Capture = capture, *, keep_memory: bool, model: LanguageModel | None = None
) -> ModelDrafter:
    """A draft model, by default the policy itself, whose steps are replayed on a CPU that is taken for a device that
    computes behind; its pool is taken whole."""
    monkeypatch.setattr(pool_module, "takes_pages", lambda device: False)
    monkeypatch.setattr(draft_steps, "computes_behind", lambda device: True)
    pool = KVPool()
    forward = Forward(model or as_on_a_gpu("llama"), pool, exact=False)
    module = forward.module
    monkeypatch.setattr(module, "takes_chunks", True)
    module.captured = CapturedSteps({"plain": module.plainly}, module.readout, module.addresses, by)
    steps = DraftSteps(forward, pool, vocabulary=VOCAB_SIZE, num_blocks=64, keep_memory=keep_memory)
    steps.measure()
    return ModelDrafter(steps, most_tokens=4096)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_draft_model_draws_by_graphs(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its steps but those that catch up: those of one token a sample, and of two, behind a draft that was
    accepted whole. All drafts are right. In the next rollout graphs and pool are those of the one before, or made
    again."""
    asked = [request_of(uid, num_samples=3, sampling=Sampling(max_tokens=24, stop_token_ids=())) for uid in range(2)]
    plain = engine_of(as_on_a_gpu("llama"))
    monkeypatch.setattr(plain.state.forward, "prepare", lambda longest: None)
    expected, _ = drafted(plain, asked)
    Again.made = []
    drafter = drafter_by_graphs(monkeypatch, keep_memory=keeps)
    made, steps = len(Again.made), drafter.steps.forward.module.captured
    assert made == 2, "of one row and of eight, to find out what they take"
    assert steps is not None
    assert (steps.steps, drafter.num_bytes) == ({}, 0), "what was taken for that is given back"
    sizes, counts = asked_sizes(monkeypatch), []
    for _ in range(2):
        speculator = Speculator(3, ScriptedDrafter(lambda said, most: []), drafter)
        engine = Engine(as_on_a_gpu("llama"), SamplingSettings(max_running=8), speculates=speculator)
        monkeypatch.setattr(engine.state.forward, "prepare", lambda longest: None)
        assert_same(drafted(engine, asked)[0], expected)
        assert engine.speculation is not None
        assert engine.speculation.accepted == engine.speculation.tried_at.sum() > 60
        counts.append(len(Again.made))
        assert bool(steps.steps) == (drafter.num_bytes > 0) == keeps
    assert {graph.again for graph in Again.made[:made]} == {False}
    assert (counts[1] == counts[0]) == keeps
    assert {size.width for size in sizes} == {1, 2}
    assert sum(graph.replays for graph in Again.made) > 40
    assert steps.refusals == {}


@pytest.mark.parametrize("zeros", [1, VOCAB_SIZE])
def test_tokens_whose_embedding_is_zero_refuse_no_graph(zeros: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of the token that fills up: a draft model is measured on tokens of no sample, behind which all logits may
    be 0."""
    model = as_on_a_gpu("llama")
    with torch.no_grad():
        model.module.get_input_embeddings().weight[:zeros] = 0.0
    drafter = drafter_by_graphs(monkeypatch, keep_memory=True, model=model)
    steps = drafter.steps.forward.module.captured
    assert steps is not None
    assert steps.refusals == {}


def test_a_draft_model_is_measured_on_different_tokens_at_places_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are shown to be right on them: rows of one token are alike whoever they see, and of rows that write to one
    place a GPU keeps any."""
    batches: list[tuple[list[int], list[int], int]] = []
    plainly = ModuleForward.plainly

    def noted(self: ModuleForward, batch: RaggedBatch, pool: KVPool) -> Tensor | None:
        if len(batch.num_new) > 1:
            batches.append((batch.token_ids_T.tolist(), batch.places_T.tolist(), max(batch.num_held)))
        return plainly(self, batch, pool)

    monkeypatch.setattr(ModuleForward, "plainly", noted)
    drafter_by_graphs(monkeypatch, keep_memory=True)
    assert batches
    for token_ids, places, most_held in batches:
        assert len(set(token_ids)) == len(set(places)) == len(places) == 8
        assert most_held == 7


def test_logits_are_far_where_they_are_to_be_zero() -> None:
    zeros = torch.zeros(2, 3)
    assert captured_step.difference(zeros, zeros) is None
    assert captured_step.difference(zeros + 1, zeros) is not None
    assert captured_step.difference(zeros / 0, zeros) is not None
    assert captured_step.difference(zeros, zeros + 1) is not None


def test_what_captures_of_a_draft_model_take_counts_for_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither as seconds of the steps in which it drafted nor as its own: else one would say that it never pays."""
    drafter = drafter_by_graphs(monkeypatch, slow_capture, keep_memory=True)
    speculator = Speculator(3, ScriptedDrafter(lambda said, most: []), drafter)
    engine = Engine(as_on_a_gpu("llama"), SamplingSettings(max_running=4), speculates=speculator)
    monkeypatch.setattr(engine.state.forward, "prepare", lambda longest: None)
    before_s, told = drafter.capturing_s, []
    monkeypatch.setattr(speculator, "done", lambda plan, num_drawn, seconds: told.append(seconds))
    engine.add(request_of(0, num_samples=4, sampling=Sampling(max_tokens=9, stop_token_ids=())))
    list(drain(engine))
    assert drafter.capturing_s - before_s > CAPTURE_S
    assert max(told) < CAPTURE_S
    assert speculator.counts.drafting_s < CAPTURE_S


def one_batch(rows: Sequence[tuple[int, int]], columns: int) -> RaggedBatch:
    """Of samples with so many rows over so many held tokens."""
    new = [NewTokens(range(count), held, range(1, columns + 1)) for count, held in rows]
    return ragged(new, 16)


@pytest.mark.parametrize(
    ("rows", "columns", "size"),
    [
        ([(1, 3)], 1, Size(1, 1, 1, 4, 8)),
        ([(1, 3)] * 5, 9, Size(8, 8, 1, 4, 8)),
        ([(1, 140)] * 3, 9, Size(4, 4, 1, 256, 16)),
        # 20 rows of 32, so 12 behind: of three samples, beside five
        ([(4, 30)] * 5, 4, Size(8, 32, 4, 64, 8)),
        # 17 + 1 rows of 32: one sample takes the 14 behind
        ([(2, 10), (15, 40), (1, 62)], 4, Size(4, 32, 16, 64, 8)),
        # full to the last row
        ([(16, 0), (16, 48)], 4, Size(2, 32, 16, 64, 8)),
        # as many rows as samples, and yet not one each
        ([(2, 1), (1, 1), (1, 1)], 1, Size(4, 4, 2, 4, 8)),
        # 46 rows of 64: two samples of 16 take those behind, so more than 32
        ([(1, 9)] * 31 + [(15, 1)], 1, Size(64, 64, 16, 16, 8)),
    ],
)
def test_a_batch_is_filled_up_with_samples_of_nobody(rows: list[tuple[int, int]], columns: int, size: Size) -> None:
    batch = one_batch(rows, columns)
    assert Size.of(batch, 16) == size
    own = Step.of(size, batch)
    if size.samples > 1 and size.width > 1:
        own.fill(one_batch([(size.width, 0)], 1), 99, 16)  # what stood there before
    own.fill(batch, 99, 16)
    count, total = len(rows), batch.num_tokens
    filled = own.inputs
    assert filled.starts_S1[: count + 1].tolist() == batch.starts_S1.tolist()
    lengths = filled.starts_S1.diff().tolist()
    assert sum(lengths) == size.rows, "each row is some sample's"
    assert max(lengths) <= size.width
    assert filled.starts_S1[-1] == size.rows
    columns = min(columns, size.columns)
    assert filled.tables_SM[:count, :columns].equal(batch.tables_SM[:, :columns])
    assert (filled.tables_SM[count:] == 99).all()
    assert (filled.places_T[total:] == 99 * 16).all()
    assert (filled.held_S[count:] == 0).all()
    assert max(filled.num_new) + max(filled.num_held) == size.keys


def test_what_no_graph_serves_is_computed_plainly() -> None:
    tree = torch.eye(2, dtype=torch.bool)
    assert has_graph(one_batch([(1, 3), (16, 3)], 2))
    assert not has_graph(one_batch([(17, 3)], 2)), "a chunk"
    assert not has_graph(one_batch([(16, 3)] * 17, 2)), "272 rows"
    assert not has_graph(ragged([NewTokens((1, 2), 0, (0,), tree)], 16)), "a tree"
    assert has_graph(ragged([NewTokens((1, 2), 0, (0,))], 16, read=[1])), "its head is computed behind it"
    assert not has_graph(ragged([NewTokens((1, 2), 0, (0,))], 16, read=[])), "none is read"


def test_layers_that_cannot_be_fused_are_computed_plainly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, steps = captured_engine(monkeypatch, fused="eager", max_running=6, max_prefill_tokens=20)
    kind = type(engine.model.backbone.recomputed_layers()[0])
    plainly = kind.forward

    def asks(self: Any, hidden_states: Tensor, **of: Any) -> Any:
        assert float(hidden_states.sum()) == float(hidden_states.sum()), "a compiler stops here"
        return plainly(self, hidden_states, **of)

    monkeypatch.setattr(kind, "forward", asks)
    assert len(drained(engine)) > 3
    assert list(steps.refusals) == ["fused"]
    assert steps.refusals["fused"].startswith("cannot be captured: ")
    assert sum(graph.replays for graph in Again.made) > 10, "by the plain way"
    assert "they are computed plain, slower" in capsys.readouterr().err


def test_one_graph_serves_all_batches_up_to_a_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = captured_engine(monkeypatch, max_running=8)
    engine.add(request_of(0, num_samples=5, sampling=Sampling(max_tokens=6, stop_token_ids=())))
    engine.add(request_of(1, num_samples=3, sampling=Sampling(max_tokens=4, stop_token_ids=())))
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    assert len(Again.made) == 1, "batches of 8 and of 5, of up to 32 keys"
    assert Again.made[0].replays >= 4


def test_it_is_captured_again_where_weights_or_pool_have_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    at: list[int] = [1]
    engine, _ = captured_engine(monkeypatch, max_running=4, addresses=lambda: tuple(at))
    engine.add(request_of(0, num_samples=4, sampling=Sampling(max_tokens=12, stop_token_ids=())))
    for _ in range(4):
        engine.step()
    assert len(Again.made) == 1
    for times in (2, 2, 3):
        at[0] = times
        engine.step()
        assert len(Again.made) == times, "as often as they have moved, and not with every step"


@pytest.mark.parametrize("what", ["work comes", "weights change"])
def test_ranks_tell_each_other_where_something_may_have_moved(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the steps between, in which it may not: a rank on which it had moved would ask alone."""
    at: list[int] = [1]
    asked: list[Any] = []
    peers = played_peers(2, monkeypatch, asked)
    engine, _ = captured_engine(monkeypatch, max_running=8, addresses=lambda: tuple(at), peers=peers)
    many = {"num_samples": 4, "sampling": Sampling(max_tokens=12, stop_token_ids=())}
    engine.add(request_of(0, **many))
    for _ in range(3):
        engine.step()
    asked.clear()
    engine.step()
    assert not asked
    at[0] = 2
    if what == "work comes":
        engine.add(request_of(1, **many))
    else:
        engine.update_weights(1, kv="keep")
    made = len(Again.made)
    for _ in range(2):
        engine.step()
    assert asked[0] == [1], "weights have moved"
    assert len(Again.made) > made
    asked.clear()
    at[0] = 3
    with pytest.raises(AssertionError, match="they were not told"):
        engine.step()
    assert not asked


def test_what_goes_to_the_next_stage_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be on its way while the next step is replayed, into the same memory."""
    sent: list[Tensor] = []
    link: Any = SimpleNamespace(receive=lambda num_tokens: None, send=sent.append)
    monkeypatch.setattr(Team, "is_last_stage", False)
    forward, out_TH = Forward(tiny_model("llama", dtype=torch.float32), POOL, exact=False, link=link), torch.zeros(4, 8)
    replayed: Any = SimpleNamespace(compute=lambda batch, pool: out_TH.add_(1))
    monkeypatch.setattr(forward.module, "captured", replayed)
    for _ in range(2):
        forward.fill([NewTokens([5, 6, 7, 8], 0, (0,))])
    assert [float(hidden_TH[0, 0]) for hidden_TH in sent] == [1, 2]


@pytest.mark.parametrize(("breaks", "computations"), [("never", 2), ("captured again", 6), ("always", 7)])
def test_what_was_shown_to_be_right_is_not_shown_again(
    breaks: str, computations: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless it cannot be captured again as it is (torch may have to compile it first), or another way is taken from
    then on. A step is computed as often as its context is made."""
    at: list[int] = [1]
    computed: list[RaggedBatch] = []

    def breaking(compute: Callable[[], Tensor], beside: Graph | None, *, first: First | None) -> tuple[Again, Tensor]:
        if at[0] == 2 and not steps.refusals and (breaks == "always" or (breaks == "captured again" and first is None)):
            raise RuntimeError("no room")
        return capture(compute, beside, first=first)

    def context(pool: Any, batch: RaggedBatch, *of: Any, **options: Any) -> RaggedContext:
        computed.append(batch)
        return RaggedContext(pool, batch, *of, **options)

    engine, steps = captured_engine(monkeypatch, max_running=4, by=breaking, addresses=lambda: tuple(at), fused="eager")
    monkeypatch.setattr(module_forward, "RaggedContext", context)
    engine.add(request_of(0, num_samples=4, sampling=Sampling(max_tokens=12, stop_token_ids=())))
    engine.step()
    computed.clear()
    engine.step()
    assert [graph.again for graph in Again.made] == [False]
    assert len(computed) == 6, "plainly, tried twice, when it is captured, when it is held against that, and as a step"
    for moved, times in ((2, computations), (3, 2)):
        at[0] = moved
        computed.clear()
        engine.step()
        assert len(computed) == times
    assert [graph.again for graph in Again.made] == [False, breaks == "never", True]
    assert list(steps.refusals) == (["fused"] if breaks == "always" else [])
    assert ("no room" in capsys.readouterr().err) == (breaks == "always")


def test_what_a_capture_takes_is_no_part_of_what_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are weighed by the seconds of steps: the first one of a size would say that they never pay."""

    engine, steps = captured_engine(monkeypatch, max_running=4, by=slow_capture)
    told: list[float] = []
    monkeypatch.setattr(engine.speculates, "done", lambda plan, num_drawn, seconds: told.append(seconds))
    engine.add(request_of(0, num_samples=4, sampling=Sampling(max_tokens=4, stop_token_ids=())))
    list(drain(engine))
    assert Again.made
    assert CAPTURE_S * len(Again.made) < steps.seconds == engine.state.forward.capturing_s
    assert max(told) < CAPTURE_S


def test_a_weight_that_changes_where_it_lies_needs_no_new_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = captured_engine(monkeypatch, max_running=4)
    engine.add(request_of(0, num_samples=4, sampling=Sampling(max_tokens=12, stop_token_ids=())))
    for _ in range(4):
        engine.step()
    module = engine.state.forward.module
    before = module.addresses()
    with torch.no_grad():
        engine.model.weights.mul_(1.5)
    assert module.addresses() == before


def test_what_computes_otherwise_is_refused_and_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(compute: Callable[[], Tensor], beside: Graph | None, *, first: First | None) -> tuple[Again, Tensor]:
        graph, out = capture(compute, beside, first=first)
        monkeypatch.setattr(graph, "replay", lambda: out.mul_(1.2))
        return graph, out

    engine, steps = captured_engine(monkeypatch, by=wrong, max_running=4)
    plain = engine_of(tiny_model("llama", dtype=torch.float32), max_running=4)
    monkeypatch.setattr(plain.state.forward, "prepare", lambda longest: None)
    for one in (engine, plain):
        one.add(request_of(0, num_samples=4, sampling=Sampling(max_tokens=8)))
    assert [s.token_ids for s in drain(engine)] == [s.token_ids for s in drain(plain)]
    assert "of their size off" in steps.refusals["plain"]


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RuntimeError("operation not permitted when stream is capturing\nmore"), "operation not permitted when stream"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_what_cannot_be_captured_is_computed_plainly(
    error: Exception, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler may raise anything, with a message or without."""

    def broken(compute: Callable[[], Tensor], beside: Graph | None, *, first: First | None) -> tuple[Again, Tensor]:
        raise error

    engine, steps = captured_engine(monkeypatch, by=broken, max_running=4)
    engine.add(request_of(0, num_samples=4, sampling=Sampling(max_tokens=8)))
    assert len(list(drain(engine))) == 4
    assert list(steps.refusals) == ["plain"]
    assert steps.refusals["plain"].startswith(f"cannot be captured: {cause}")
    assert "more" not in steps.refusals["plain"]


def test_large_batches_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    count = MOST_REPLAYED + 1
    engine, _ = captured_engine(monkeypatch, max_running=count)
    engine.add(request_of(0, num_samples=count, sampling=Sampling(max_tokens=3, stop_token_ids=())))
    assert len(list(drain(engine))) == count
    assert Again.made == []


LOGITS = torch.arange(1.0, 301.0).repeat(4, 1).T
"""[300, 4]"""
CANNOT = "cannot compute a step of 300 tokens: no such kernel"
REFUSED = ["plain", "plain", "fused", "plain"]
"""Prompts; a step, tried, and computed once more: keys of what is refused do not stay."""


@pytest.mark.parametrize(
    ("first", "refusal", "computed"),
    [
        ("right", None, ["plain", "plain", "fused", "fused", "fused", "fused"]),
        ("last row wrong", "compute numbers that are 0.65 of their size off", [*REFUSED, "plain"]),
        ("no such kernel", CANNOT, [*REFUSED, "plain"]),
        ("no memory", None, [*REFUSED, "plain"]),
    ],
)
def test_a_rollout_that_begins_with_many_samples_shows_that_fused_layers_are_right(
    first: str, refusal: str | None, computed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of 300 rows have no graph. Computed are a chunk of prompts, and two steps; then prompts again."""
    calls: list[str] = []

    def plain(batch: RaggedBatch, pool: Any) -> Tensor:
        calls.append("plain")
        return LOGITS

    def fused(batch: RaggedBatch, pool: Any) -> Tensor:
        calls.append("fused")
        match first:
            case "no such kernel":
                raise RuntimeError(first)
            case "no memory":
                raise torch.OutOfMemoryError(first)
            case "last row wrong":
                wrong = LOGITS.clone()
                wrong[-1] *= -3.0
                return wrong
        return LOGITS.clone()

    def never(*of: Any, **options: Any) -> Any:
        raise AssertionError("nothing is captured")

    steps = CapturedSteps({"fused": fused, "plain": plain}, said, lambda: (), never)
    pool: Any = SimpleNamespace(spare=9, block_tokens=16)
    prompts, decoding = one_batch([(17, 3)] * 20, 2), one_batch([(1, 3)] * 300, 2)
    for batch in (prompts, decoding, decoding, prompts)[: 4 if first == "right" else 3]:
        out = steps.compute(batch, pool)
        assert out is not None
        assert out.equal(LOGITS)
    assert calls == computed
    assert steps.refusals == ({} if refusal is None else {"fused": refusal})
    assert ("they are computed plain, slower" in capsys.readouterr().err) == (refusal is not None)
    assert steps.seconds > 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_replays_on_a_gpu_say_what_a_cpu_says(family: str) -> None:
    """The kernel of attention, fused layers and graphs, all of them real. Mixtures of experts ask the device, and are
    computed plainly. In a second rollout weights are others where they lay, and pool and graphs those of the first."""
    engines = [
        engine_of(tiny_model(family, dtype=torch.float32, device=device).copied(), max_running=6, max_prefill_tokens=20)
        for device in ("cuda", "cpu")
    ]
    steps, pool = engines[0].state.forward.module.captured, engines[0].state.pool
    assert steps is not None
    sizes, at = (), ()
    for version in (1, 2):
        found, expected = map(drained, engines)
        assert_same(found, expected)
        assert set(sizes) <= set(steps.steps)
        assert at in ((), pool.addresses())
        sizes, at = tuple(steps.steps), pool.addresses()
        for engine in engines:
            with torch.no_grad():
                for param in engine.model.module.parameters():
                    param.mul_(1.2)
            engine.update_weights(version)
    assert bool(steps.refusals) == (family == "gpt_oss"), steps.refusals
    assert (len(steps.steps) > 1) == (family != "gpt_oss")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_draft_model_on_a_gpu_changes_no_token(family: str) -> None:
    """The policy itself, which is right but where kernels round by the number of rows; by graphs of its own, with one
    wait for all tokens of a draft, and seconds of the device's own clock."""
    policy, drafts = (tiny_model(family, dtype=torch.float32, device="cuda") for _ in range(2))
    drafter = drafter_of(drafts, vocabulary=VOCAB_SIZE, num_blocks=256)
    speculator = Speculator(3, ScriptedDrafter(lambda said, most: []), drafter)
    settings = SamplingSettings(max_running=6, max_prefill_tokens=20)
    found = drained(Engine(policy, settings, speculates=speculator))
    plain = engine_of(tiny_model(family, dtype=torch.float32), max_running=6, max_prefill_tokens=20)
    assert_same(found, drained(plain))
    counts, steps = speculator.counts, drafter.steps.forward.module.captured
    assert counts.accepted > 0.95 * counts.tried_at.sum() > 30
    assert steps is not None
    assert steps.refusals == {}
    assert {size.width for size in steps.steps} == {1, 2}
    assert drafter.steps.seconds.of_step(1, 16) > 0
    assert drafter.steps.seconds.of_other(64, 64) > 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_what_ranks_send_in_a_step_is_captured(tmp_path: Path) -> None:
    """A sum, and the gathered columns of the head, begun and waited for as ranks do. Of one rank, as one device has no
    more: torch's part of it, as NCCL starts no kernel of its own where there is nobody else."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        x = torch.ones(3, device="cuda")

        def compute() -> Tensor:
            y = x * 2
            assert nccl.wait(dist.all_reduce(y, async_op=True), y, 60.0)
            parts = [torch.empty_like(y)]
            assert nccl.wait(dist.all_gather(parts, y, async_op=True), y, 60.0)
            return parts[0] + 1

        graph, out = by_cuda(compute, None, first=lambda no_waits: compute())
        x.fill_(3)
        graph.replay()
        assert out.tolist() == [7.0] * 3
    finally:
        dist.destroy_process_group()


def test_on_a_cpu_there_are_none() -> None:
    assert engine_of(tiny_model("llama", dtype=torch.float32)).state.forward.module.captured is None


@pytest.mark.parametrize(("dtype", "captures"), [(torch.bfloat16, True), (torch.float32, True), (torch.float64, False)])
def test_what_the_kernel_of_a_gpu_computes_is_captured(
    dtype: torch.dtype, captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64 attention asks for numbers: to find that out layers would be compiled for nothing."""
    monkeypatch.setattr(on_devices, "AVAILABLE", True)
    model = tiny_model("llama", dtype=dtype)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert (ModuleForward.of(model).captured is not None) == captures
