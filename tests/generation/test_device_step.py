"""A step on a GPU, without one: on tensors that hold nothing, of the device `meta`. Whatever waits for the device, to
ask it for a number, raises; but for the one place where a step reads what it has drawn."""

from __future__ import annotations

import copy
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from plait import kernels
from plait.cost.step_room import LargestStep, step_bytes
from plait.data import host_device
from plait.data.host_device import Moment
from plait.generation import draft_seconds, draft_steps, joint, module_forward, parking
from plait.generation.captured_step import Size, Step
from plait.generation.engine import Engine
from plait.generation.forward import ChunkTokens
from plait.generation.moves import SampleMoves
from plait.generation.ragged import NewTokens
from plait.generation.request import GoingOn, Request
from plait.generation.sampler import SamplingRows, sample_plain
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.generation.speculates import Speculates
from plait.generation.speculator import Speculator, model_drafter
from plait.kernels import device_draw, noise
from plait.kernels.paged_call import PagedCall
from plait.layout.mesh import Parallelism
from plait.models.backbone import Backbone
from plait.models.head import Head
from plait.models.language_model import LanguageModel
from plait.models.shape import ModelShape
from tests.cases import slow_but
from tests.generation.scripted_drafter import ScriptedDrafter
from tests.generation.test_engine import request_of
from tests.launches import GPU, Launches
from tests.models.tiny import VOCAB_SIZE, tiny_model
from tests.reallocation.live_memory import LiveMemory

DRAWN = 37
"""The token that every draw gives."""

OPS_OF_A_LAYER = 70
"""As Transformers' llama has them: norms, rotary places, projections, the MLP."""
OPS_OF_A_STEP = 30
"""Beside the layers: rows, places, embedding, head, draw."""
OPS_OF_A_RECURRENT_LAYER = 115
"""As its norms, its convolution and its rule are, one token each, by torch's operators."""
RECURRENT = ["qwen3_5_text", "olmo_hybrid", "lfm2", "bamba", "falcon_h1"]
"""Families without mixtures of experts, which ask for numbers."""


def attention(call: PagedCall) -> Tensor:
    """Something of the right shape: Triton's kernels take no such tensors."""
    assert call.lengths is not None, "the host says how long they are"
    return call.query.new_empty(*call.query.shape[:2], call.value_pool.shape[3])


class Kernels:
    """In the place of a module of Triton's programs: each launch counts."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def __getattr__(self, name: str) -> dict[Any, Any]:
        def launch(*arguments: Any, **constants: Any) -> None:
            self._counts[name] += 1

        return defaultdict(lambda: launch)


class Device:
    """An engine on tensors of a GPU that hold nothing."""

    def __init__(
        self,
        family: str,
        counts: Counter[str],
        speculates: Callable[[LanguageModel], Speculates] | None = None,
        sizes: Mapping[str, Any] = {},  # nobody changes it
        **settings: Any,
    ) -> None:
        self.drawn = self.downloads = 0
        """How often tokens were drawn, and waited for."""
        self.counts = counts
        """Launches of Triton's programs."""
        model = tiny_model(family, dtype=torch.bfloat16, **sizes)
        module = copy.deepcopy(model.module)
        for owner in module.modules():
            for name, param in list(owner.named_parameters(recurse=False)):
                fake = torch.empty(param.shape, dtype=param.dtype, device=GPU)
                setattr(owner, name, torch.nn.Parameter(fake, requires_grad=False))
            for name, buffer in list(owner.named_buffers(recurse=False)):
                setattr(owner, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=GPU))
        head = module.get_output_embeddings()
        self.model = type(model)(
            module=module,
            tokenizer=model.tokenizer,
            layout=model.layout,
            weights=torch.empty(0, dtype=torch.bfloat16, device=GPU),
            head=Head(head, tuple(head.parameters())),
            max_positions=model.max_positions,
            eos_token_ids=(),
            backbone=Backbone(module.base_model),
        )
        own = None if speculates is None else speculates(self.model)
        self.engine = Engine(self.model, SamplingSettings(**settings), speculates=own)

    def add(self, request: Request) -> None:
        self.engine.add(request)

    def step(self, drafts: Any = ()) -> Launches:
        launches = Launches()
        self.counts.clear()
        with launches:
            self.engine.step(dict(drafts))
        launches.counts.update(self.counts)
        return launches

    def downloading(self, token_ids_D: Tensor, logprobs_D: Tensor) -> Callable[[], tuple[list[int], list[float]]]:
        assert token_ids_D.device == logprobs_D.device == GPU
        self.drawn += 1

        def wait() -> tuple[list[int], list[float]]:
            self.downloads += 1
            return [DRAWN] * len(token_ids_D), [-1.0] * len(logprobs_D)

        return wait

    def downloading_bits(self, bits_DW: Tensor) -> Callable[[], np.ndarray[Any, Any]]:
        assert bits_DW.device == GPU
        return lambda: np.full(bits_DW.shape, 3, np.uint8)  # two of each eight tokens are left


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(module_forward, "attention_for", lambda *of: attention)
    monkeypatch.setattr(module_forward.device_attention, "paged_attention", attention)
    monkeypatch.setattr(device_draw, "takes", lambda logits: logits.device == GPU)

    def make(family: str = "llama", **settings: Any) -> Device:
        counts = Counter[str]()
        monkeypatch.setattr(kernels, "device_draw_kernels", Kernels(counts), raising=False)
        device = Device(family, counts, **{"max_running": 8, "kv_tokens": 4096} | settings)
        monkeypatch.setattr(joint, "downloading", device.downloading)
        monkeypatch.setattr(joint, "downloading_bits", device.downloading_bits)
        return device

    return make


def several(device: Device, sampling: Sampling) -> None:
    device.add(request_of(0, num_samples=3, sampling=sampling))
    device.add(request_of(1, text="0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20", sampling=sampling))


def test_what_asks_the_device_raises() -> None:
    x = torch.zeros(3, device=GPU)
    for asks in (lambda: x.sum().item(), lambda: bool(x[0] > 0), x.tolist, x.cpu, x.nonzero, lambda: x[x > 0]):
        with pytest.raises((RuntimeError, NotImplementedError)):
            asks()
    for copies in (lambda: torch.tensor([1, 2], device=GPU), lambda: x[torch.tensor([0, 2])]):
        with Launches() as launches:
            copies()
        assert launches.waited, "the host waits for such a copy"


@pytest.mark.parametrize("family", slow_but(["llama"], ["llama", "qwen3", "gemma2", "smollm3"]))
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=40),
        Sampling(temperature=0.0, max_tokens=40),
        Sampling(temperature=0.7, top_k=5, top_p=0.8, max_tokens=40),
        Sampling(temperature=0.7, top_k=5, top_p=0.8, min_p=0.1, max_tokens=40, keeps_support=True),
    ],
    ids=["plain", "greedy", "filters", "kept"],
)
def test_a_step_waits_for_the_device_once(made: Any, family: str, sampling: Sampling) -> None:
    """Prompts, chunks of them, first tokens, blocks that are full: each step, from the first on."""
    device = made(family, max_prefill_tokens=12)
    several(device, sampling)
    for _ in range(8):
        drawn, downloads = device.drawn, device.downloads
        launches = device.step()
        record = device.engine.last_step
        assert record is not None
        assert launches.waited == []
        starts = 1 if device.drawn - drawn > 1 else 0  # samples whose prompt was there draw a token of their own
        assert device.drawn - drawn <= 1 + starts
        assert device.downloads - downloads <= 1 + starts
        assert launches.counts["decide"] == device.drawn - drawn
    assert device.drawn - device.downloads == 1, "the newest step is in flight"


@pytest.mark.parametrize("family", slow_but(["qwen3_5_text", "bamba"], RECURRENT))
def test_layers_that_keep_states_wait_for_nothing(made: Any, family: str) -> None:
    """Prompts from nothing, chunks that go on, samples of one prompt whose states part, and rows that decode."""
    device = made(family, max_prefill_tokens=12)
    several(device, Sampling(max_tokens=40))
    for _ in range(8):
        launches = device.step()
        assert launches.waited == []
    layers = device.model.config.num_hidden_layers
    most = OPS_OF_A_STEP + layers * OPS_OF_A_RECURRENT_LAYER
    assert sum(launches.counts.values()) <= most, launches.counts.most_common(20)


def test_experts_are_noted_without_a_wait_and_read_at_once(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends in a step is read by as many operations as a model has mixtures, however many samples that are."""
    reads, experts = Counter[str](), "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts.forward"
    monkeypatch.setattr(experts, lambda self, hidden_TH, *chosen: hidden_TH)  # those of Transformers ask for numbers

    def cpu(tensor: Tensor) -> Tensor:
        reads[str(tensor.dtype)] += 1
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    monkeypatch.setattr(Tensor, "cpu", cpu)
    device = made("qwen3_moe", router_replay=True)
    several(device, Sampling(max_tokens=7, keeps_experts=True))
    counts = []
    while device.engine.has_work:
        reads.clear()
        launches = device.step()
        assert launches.waited == []
        assert sum(reads.values()) <= 1
        counts.append((sum(reads.values()), launches.counts["aten.index_select.default"]))
    assert sum(read for read, _ in counts) >= 1
    [plain] = {selected for read, selected in counts[2:] if not read}
    assert {selected - plain for read, selected in counts if read} == {device.model.config.num_hidden_layers}


def test_samples_leave_and_go_on_elsewhere_without_a_wait(made: Any) -> None:
    source, target = made(), made()
    several(source, Sampling(max_tokens=40))
    for _ in range(4):
        source.step()
    source.engine.land()
    with Launches() as leaving:
        state = SampleMoves(source.engine.state).export_sample(0, 1)
    with Launches() as coming:
        SampleMoves(target.engine.state).import_sample(state)
    assert leaving.waited == coming.waited == []
    assert state.kv.device == GPU
    layers = source.model.config.num_hidden_layers
    assert sum(leaving.counts.values()) <= 15 + 4 * layers, leaving.counts
    assert target.step().waited == []


def test_samples_are_parked_and_come_back_without_a_wait(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five at a time: as many launches as for one."""
    stored: list[torch.device] = []

    def on_host(kv: Tensor) -> Tensor:
        stored.append(kv.device)
        return torch.zeros(kv.shape, dtype=kv.dtype)

    monkeypatch.setattr(parking, "stored", on_host)
    device, sampling = made(), Sampling(max_tokens=40)
    asked = [request_of(uid, num_samples=count, sampling=sampling) for uid, count in ((0, 3), (1, 2))]
    for each in asked:
        device.add(each)
    for _ in range(6):
        device.step()
    device.engine.land()
    with Launches() as leaving:
        samples = device.engine.halt(parks=True)
    assert (len(samples), stored, leaving.waited) == (5, [GPU], [])
    layers = device.model.config.num_hidden_layers
    del leaving.counts["aten.zero_.default"]  # the pool, which stays and is empty
    assert sum(leaving.counts.values()) <= 15 + 4 * layers, leaving.counts
    device.engine.update_weights(1)
    for each in asked:
        begun = tuple(sample for sample in samples if sample.prompt.uid == each.prompt.uid)
        kept = frozenset(sample.index for sample in begun)
        device.add(replace(each, going_on=GoingOn(begun, keeps=kept)))
    coming = device.step()
    assert coming.waited == []
    assert sum(coming.counts.values()) <= sum(device.step().counts.values()) + 15 + 4 * layers, coming.counts


def test_drafts_ask_for_nothing_either(made: Any) -> None:
    device = made()
    several(device, Sampling(max_tokens=40))
    device.step()
    for count in (1, 3, 15):
        keys = list(device.engine.state.rows.keys)
        assert device.step({keys[0]: [DRAWN] * count, keys[-1]: [DRAWN, 5]}).waited == []


def test_a_draft_model_is_waited_for_once(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It catches up with prompts, chunks of them and samples that joined, and draws four tokens, of which each is the
    input of the next where it lies; the step that computes them behind the samples waits a second time, for its own."""
    draft, downloads, clock = 4, Counter[int](), itertools.count(1.0)

    def downloading(token_ids_D: Tensor, logprobs_D: Tensor) -> Callable[[], tuple[list[int], list[float]]]:
        assert token_ids_D.device == logprobs_D.device == GPU
        downloads[len(token_ids_D)] += 1
        return lambda: ([DRAWN] * len(token_ids_D), [-0.5] * len(logprobs_D))

    monkeypatch.setattr(draft_steps, "downloading", downloading)
    monkeypatch.setattr(draft_seconds, "moment", lambda device: Moment(next(clock)))

    def speculates(model: LanguageModel) -> Speculator:
        drafter = model_drafter(model, vocabulary=VOCAB_SIZE, num_blocks=256, most_tokens=12)
        return Speculator(draft, ScriptedDrafter(lambda said, most: []), drafter)

    device = made(speculates=speculates, max_prefill_tokens=12)
    several(device, Sampling(max_tokens=80))
    layers, drafted = device.model.config.num_hidden_layers, 0
    for _ in range(8):
        downloads.clear()
        launches = device.step()
        assert launches.waited == []
        running = len(device.engine.state.rows.keys)
        assert sum(downloads.values()) <= 1
        if downloads and device.engine.last_step.num_prefill_tokens == 0:
            drafted += 1
            assert downloads == {draft * running: 1}
            assert launches.counts["decide"] == draft + 1
            if drafted > 2:  # it has caught up
                assert sum(launches.counts.values()) <= (draft + 1) * (OPS_OF_A_STEP + layers * OPS_OF_A_LAYER)
    assert drafted >= 4
    assert device.engine.said[0, 0] > draft * drafted, "all that was drafted was accepted"


def test_a_captured_step_is_filled_without_a_wait(made: Any) -> None:
    device = made()
    several(device, Sampling(max_tokens=40))
    for _ in range(2):
        device.step()
    state = device.engine.state
    rows, prompt = state.rows, ChunkTokens(NewTokens(range(40), 0, (9, 10, 11)), completes=True)
    batches = [(rows.batch(drafts), 16) for drafts in ({}, {rows.keys[0]: [DRAWN] * 5})]
    batches.append((state.forward.batch_of(batches[0][0], [prompt]), 30))
    for batch, most in batches:
        step = Step.of(Size.of(batch, 16), batch)
        launches = Launches()
        with launches:
            step.fill(batch, 256, 16)
        assert launches.waited == []
        assert sum(launches.counts.values()) <= most, launches.counts


def test_samples_come_and_go_without_a_wait(made: Any) -> None:
    device = made(max_running=2, kv_tokens=48)
    for uid in range(3):
        device.add(request_of(uid, sampling=Sampling(max_tokens=7 + uid)))
    steps = 0
    while device.engine.has_work:
        assert device.step().waited == []
        steps += 1
    assert 20 < steps < 80


def test_launches_of_a_decode_step_stay_within_their_budget(made: Any) -> None:
    device = made()
    several(device, Sampling(max_tokens=40))
    for _ in range(3):
        launches = device.step()
    layers = device.model.config.num_hidden_layers
    assert sum(launches.counts.values()) <= OPS_OF_A_STEP + layers * OPS_OF_A_LAYER, launches.counts.most_common(20)


def test_the_pool_and_the_rows_keep_their_addresses(made: Any) -> None:
    """What a captured step reads and writes is where it was."""
    device = made(max_running=4)
    several(device, Sampling(max_tokens=60))
    device.step()
    state = device.engine.state
    key, numbers = state.pool.layers[0].key, state.rows.numbers
    assert state.pool.layers[0].key.shape[0] == 4096 // 16 + 1, "all of them, and the spare one"
    for _ in range(18):
        device.step()
    assert state.pool.layers[0].key is key
    assert state.rows.numbers is numbers


def test_uploads_and_the_download_carry_the_numbers() -> None:
    numbers = host_device.uploaded([[1, 2], [3, 2**40]], torch.int64, "cpu")
    assert numbers.tolist() == [[1, 2], [3, 2**40]]
    ids, logprobs = torch.tensor([5, 151_935]), torch.tensor([-0.1, -11.0])
    assert host_device.downloading(ids, logprobs)() == (ids.tolist(), logprobs.tolist())
    both = torch.stack([ids.double(), logprobs.double()])
    assert host_device.numbers_of(both) == (ids.tolist(), logprobs.tolist()), (
        "as one tensor of float64 they are the same"
    )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_download_waits_for_what_was_asked_before_alone() -> None:
    ids, logprobs = torch.tensor([5, 151_935], device="cuda"), torch.tensor([-0.1, -11.0], device="cuda")
    wait = host_device.downloading(ids, logprobs)
    ids.add_(1)  # the next step writes where this one drew
    later = host_device.downloading(ids, logprobs)
    assert wait() == ([5, 151_935], logprobs.tolist())
    assert later() == ([6, 151_936], logprobs.tolist())


def test_filters_and_tails_of_a_device_are_those_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways that ask for nothing, on a CPU, against the ways that it takes."""
    from plait.generation import candidates, sampler

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 3_000, generator=generator, dtype=torch.float64) * 3
    keys = noise.draw_keys(torch.arange(64), torch.zeros(64, dtype=torch.int64))
    asked = [Sampling(top_k=k, top_p=p) for k in (0, 1, 700) for p in (1.0, 0.3, 0.97)]
    rows = SamplingRows.of([asked[i % len(asked)] for i in range(64)], 3_000, torch.device("cpu"))
    expected = sampler.sample_plain(logits, keys, rows, num_candidates=8)
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    bound = sampler.filter_threshold(logits, weights, rows)
    kept = rows.top_k_B
    assert kept is not None
    by_k = SamplingRows(None, None, kept, None, False, rows.most_top_k)
    of_k = sampler.filter_threshold(logits, weights, by_k)
    assert rows.top_p_B is not None
    torch.testing.assert_close(sampler.whole_top_p(logits, weights, rows.top_p_B, of_k), bound, rtol=0, atol=0)
    tail = torch.rand(64, 3_000, generator=generator)
    uniform = torch.rand(64, generator=generator, dtype=torch.float64)
    whole, some = candidates.tail_pick(tail, uniform), torch.arange(0, 64, 3)
    assert candidates.tail_pick(tail[some], uniform[some]).equal(whole[some])
    assert expected[0].shape == (64,)


def test_a_draw_by_operators_waits_for_nothing() -> None:
    """That of float64."""
    logits = torch.empty(4, 3_000, dtype=torch.float64, device=GPU)
    keys = torch.empty(4, dtype=torch.int64, device=GPU)
    for sampling in (Sampling(), Sampling(temperature=0.0), Sampling(temperature=0.7, top_k=5, top_p=0.8)):
        rows = SamplingRows.of([sampling] * 4, 3_000, GPU)
        with Launches() as launches:
            sample_plain(logits, keys, rows)
        assert launches.waited == []


WIDE = {"hidden_size": 128, "intermediate_size": 736, "head_dim": 32, "vocab_size": 4096}
"""A model of which a layer takes most for its MLP, as in models that are trained."""


@pytest.mark.parametrize(
    ("sampling", "bytes_of_number"),
    [(Sampling(max_tokens=40), 2), (Sampling(temperature=0.7, top_k=5, top_p=0.8, max_tokens=40), 2 + 28)],
    ids=["plain", "filters"],
)
def test_a_step_takes_what_is_predicted(made: Any, sampling: Sampling, bytes_of_number: int) -> None:
    """Of a device, for a moment: a layer of prompts beside samples that run; logits, while tokens are drawn. What torch
    takes to sort is no tensor, and a first capture is none of these steps: both are in the forecast alone."""
    device = made(sizes=WIDE, max_running=32, max_prefill_tokens=400)
    pool, text = device.engine.state.pool, "0 1 2 3 4 5 6 7 8 9 " * 6
    device.add(request_of(0, text=text, num_samples=4, sampling=sampling))
    device.step()  # with the pool
    for uid in range(1, 8):
        device.add(request_of(uid, text=f"{uid}{text}", num_samples=4, sampling=sampling))
    tensors = {f"{name} {at}": one for at, kv in pool.layers.items() for name, one in (("k", kv.key), ("v", kv.value))}
    shape = ModelShape.from_config(device.model.config.to_dict())
    predicted = lambda step: step_bytes(shape, "bfloat16", step, Parallelism())[0]
    num_prompt, peak = 1, 0
    for _ in range(3):
        with LiveMemory(tensors | device.model.module.state_dict()) as live:
            device.step()
        peak = live.peak_bytes
        num_prompt, rows = device.engine.last_step.num_prefill_tokens, len(device.engine.state.rows.keys)
        most = predicted(LargestStep.of(num_prompt, rows, 1, filters=sampling.top_k > 0))
        assert peak <= most
        if num_prompt:
            assert num_prompt > 150
            layer = LargestStep(num_prompt + 4, 0, filters=False)
            assert peak >= 0.98 * predicted(layer)
    assert not num_prompt
    assert peak == pytest.approx(bytes_of_number * 32 * 4096, rel=0.1)
