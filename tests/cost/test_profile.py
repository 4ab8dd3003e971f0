"""Profiles: what is measured is what is predicted, between sizes and for other shapes; files are read strictly."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from plait.cli import main
from plait.cost.captures import num_captured
from plait.cost.decoding import SteadySteps
from plait.cost.decoding import profile as decode_pieces
from plait.cost.drafts import Drafts
from plait.cost.hardware import Link
from plait.cost.kept_profiles import keep_profile, kept_profiles, load_profile, profile_path, save_profile
from plait.cost.layer_times import LayerTimes
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.measured import stopwatch
from plait.cost.measured import work as work_of_profile
from plait.cost.measured.links import Pair
from plait.cost.measured.measuring import measure, measure_host
from plait.cost.measured.models import by_layer
from plait.cost.measured.sizes import sizes_of
from plait.cost.measured.stopwatch import in_rounds
from plait.cost.model_costs import ModelCosts
from plait.cost.model_work import ModelWork
from plait.cost.profile import KindRecord, LinkRecord, Profile, RunRecord, interpolated
from plait.cost.workload import Workload
from plait.errors import DataError
from plait.launch.local import LocalProcesses
from plait.layout.mesh import Layout
from plait.models.files.known_shapes import KNOWN
from plait.models.shape import ModelShape
from plait.schedule.plan import Mode
from tests.cost.test_model_costs import HEAD, SHAPE, a_flow, elements
from tests.models.tiny import tiny_model

PROFILE = Profile(
    machine="a machine, 2 cores",
    device="cpu",
    threads=1,
    dtype="bfloat16",
    model="mine",
    shape=SHAPE,
    memory_gib=8.0,
    forward=((10, 1.0), (20, 2.0)),
    backward=((10, 2.0), (20, 5.0)),
    decode=((1, 10, 1.0), (1, 20, 2.0), (4, 10, 3.0), (4, 20, 4.0)),
    head=((1, 0.5), (11, 1.5)),
    products=((16, 1e9), (64, 2e9)),
    copy_bytes_per_s=1e9,
    packing_bytes_per_s=1e6,
    send=LinkRecord(bytes_per_s=1e8, latency_s=1e-4),
    all_reduce=LinkRecord(bytes_per_s=5e7, latency_s=2e-4),
    error=0.05,
)


def test_between_points_are_straight_lines() -> None:
    points = [(10, 1.0), (20, 3.0), (40, 4.0)]
    assert [interpolated(points, at) for at in (1, 10, 15, 30, 60)] == [1.0, 1.0, 2.0, 3.5, 5.0]


def test_decoding_is_between_samples_and_contexts() -> None:
    assert PROFILE.decode_s(1, 15) == 1.5
    assert PROFILE.decode_s(2.5, 2.5 * 15) == 2.5
    assert PROFILE.decode_s(4, 80) == 4.0


def test_parts_of_a_model_decode_by_their_layers() -> None:
    """At least as long as their other forwards, which take a second for a row of up to ten tokens."""
    assert PROFILE.decode_s(1, 10, is_part=True) == 1.0
    slow = PROFILE.model_copy(update={"decode_by_layers": ((1, 10, 5.0), (1, 20, 6.0), (4, 10, 9.0), (4, 20, 9.0))})
    assert slow.decode_s(1, 15, is_part=True) == 5.5
    assert slow.decode_s(1, 15) == 1.5
    fast = PROFILE.model_copy(update={"decode_by_layers": ((1, 10, 0.5), (4, 10, 0.5))})
    assert fast.decode_s(1, 10, is_part=True) == 1.0


def test_steps_of_more_samples_than_a_gpu_replays_are_launched_layer_by_layer() -> None:
    """From 256 samples to 512 as much more as from 1 to 256; and no less than a prompt of as many tokens, of 0.01 s a
    token or 0.001. On a CPU nothing is replayed."""
    steps = {"decode": ((1, 10, 1.0), (256, 10, 2.0)), "decode_by_layers": ((1, 10, 50.0), (256, 10, 60.0))}
    slow, fast = ({"prompts": ((100, 100 * each), (200, 200 * each))} for each in (0.01, 0.001))
    gpu, of_fast = (PROFILE.model_copy(update=steps | of | {"device": "cuda"}) for of in (slow, fast))
    assert gpu.decode_s(256, 2560) == of_fast.decode_s(256, 2560) == 2.0
    assert gpu.decode_s(512, 5120) == pytest.approx(5.12)
    assert of_fast.decode_s(511, 5110) == pytest.approx(3.0)
    assert gpu.model_copy(update={"device": "cpu"}).decode_s(511, 5110) == pytest.approx(3.0)
    assert gpu.decode_s(256, 2560, is_part=True) == 2.0, "parts are replayed as whole models are"
    rows = {"forward": ((10, 1.0), (500, 50.0), (1000, 100.0))}
    assert gpu.model_copy(update=rows).decode_s(511, 5110, is_part=True) == pytest.approx(51.1), "by their own layers"


def test_what_the_host_takes_for_a_draw_does_not_go_with_the_head() -> None:
    """A step takes 0.6 s beside layers for two samples. At 1e6 bytes per second, reading the head of H numbers in
    bfloat16, and two rows of logits twice, takes a part of that, and twice that for a model of twice as
    many words; the rest is the host's. On a CPU all of it is of the head."""
    of_head = (2 * HEAD + 2 * 2 * 2 * SHAPE.vocabulary) / 1e6
    wide = replace(SHAPE, vocabulary=2 * SHAPE.vocabulary)
    step = {"drawing": ((2, 0.6),), "copy_bytes_per_s": 1e6}
    found = {}
    for device in ("cuda", "cpu"):
        profile = PROFILE.model_copy(update={**step, "device": device})
        for shape in (SHAPE, wide):
            work = ModelWork(shape, "bfloat16", shape.vocabulary)
            times = LayerTimes(profile.cluster(1), work, Layout.on(range(1)), profile)
            found[device, shape is wide] = times.drawing(2)
    assert found["cuda", False] == found["cpu", False] == pytest.approx(0.6)
    assert found["cuda", True] == pytest.approx(0.6 + of_head)
    assert found["cpu", True] == pytest.approx(1.2)


def test_a_gpu_captures_a_graph_for_each_power_of_two_of_samples_and_of_tokens() -> None:
    """Two samples of 12 tokens after prompts of 10 have 16 on average. Three samples go into a graph of four, two into
    one for up to 16 tokens and one for up to 32. Each layer of four takes half a second to be captured."""
    assert num_captured(decode_pieces((12, 12), 2), 10) == 1
    assert num_captured([SteadySteps(3, 3, 6.0), SteadySteps(4, 2, 10.0), SteadySteps(4, 2, 18.0)], 10) == 3
    assert num_captured([SteadySteps(9, 257, 257.0)], 10) == 0, "so many are not replayed"
    gpu = PROFILE.model_copy(update={"device": "cuda", "capture_s": 0.5})
    terms = costs(gpu).call("actor.generate", "decode", Layout.on(range(1))).terms
    assert terms["capturing"] == pytest.approx(4 * 0.5)
    for ways, layers in (({"tp": 2}, 4), ({"pp": 2}, 2)):
        parts = costs(gpu).call("actor.generate", "decode", Layout.on(range(2), **ways)).terms
        assert parts["capturing"] == pytest.approx(layers * 0.5), "ranks capture at the same time"
    stay = costs(gpu, pools_stay=True).call("actor.generate", "decode", Layout.on(range(1))).terms
    assert stay == {name: seconds for name, seconds in terms.items() if name != "capturing"}
    assert "capturing" not in costs().call("actor.generate", "decode", Layout.on(range(1))).terms


def test_a_draft_models_steps_are_captured_too() -> None:
    """Two layers beside the four, on one device of an instance in parts as well."""
    gpu = PROFILE.model_copy(update={"device": "cuda", "capture_s": 0.5})
    drafts = {"drafts": Drafts(2.0, 3.0, 2.0), "draft_model": replace(SHAPE, layers=2)}
    for tp in (1, 2):
        layout = Layout.on(range(tp), tp=tp)
        terms = costs(gpu, **drafts).call("actor.generate", "decode", layout).terms
        assert terms["capturing"] == pytest.approx((4 + 2) * 0.5)
        assert "capturing" not in costs(gpu, **drafts, pools_stay=True).call("actor.generate", "decode", layout).terms


def costs(profile: Profile = PROFILE, shape: ModelShape = SHAPE, prompts: int = 1, **keys: Any) -> ModelCosts:
    """Of a sample of 10 and 2 tokens for each prompt, on two devices; `keys` are of the workload."""
    flow, lengths = a_flow(), SampleLengths(Lengths.fixed(10), Lengths.fixed(2))
    workload = Workload(prompts, 1, lengths, micro_batch_tokens=100, **keys)
    return ModelCosts(workload, dict.fromkeys(flow.roles, shape), flow, profile.cluster(2), profile=profile)


def test_measured_times_take_the_place_of_tables() -> None:
    """A row of 12 tokens: four layers of 1.2 s, two rows through the head."""
    scored = costs().call("ref.logprobs", "score", Layout.on(range(1)))
    assert scored.terms == pytest.approx({"layers": 4 * 1.2, "head": 0.6})
    trained = costs().call("actor.train", "train", Layout.on(range(1)))
    assert trained.terms["layers"] == pytest.approx(4 * (1.2 + 2.6))
    assert trained.terms["head"] == pytest.approx(3 * 0.6)


def test_the_first_score_in_parts_is_a_forward_more_and_the_last_two() -> None:
    """Four prompts: a layer takes as long for 48 tokens as for twice 24 or 3 times 16, the head 1.2 s for 8 rows, 0.8 s
    for 4, 2/3 s for 8/3."""
    flow, lengths = a_flow(), SampleLengths(Lengths.fixed(10), Lengths.fixed(2))
    workload = Workload(4, 1, lengths, micro_batch_tokens=100, gathers=True)
    made = ModelCosts(workload, dict.fromkeys(flow.roles, SHAPE), flow, PROFILE.cluster(2), profile=PROFILE)
    assert made.call("ref.logprobs", "score", Layout.on(range(1))).in_parts_s == 0.0, "one scores before it, one behind"
    first = made.call("reward.score", "score", Layout.on(range(1)))
    assert first.in_parts_s == pytest.approx((2 * 0.8 - 1.2) / SHAPE.vocabulary), "one output in place of a vocabulary"
    scored = made.call("critic.values", "score", Layout.on(range(1)))
    assert scored.in_parts_s == pytest.approx((3 * 2 / 3 - 1.2) / SHAPE.vocabulary)
    assert scored.times(2.0).in_parts_s == pytest.approx(2 * scored.in_parts_s)


def test_what_two_halves_of_a_layer_take_beyond_their_share_is_as_measured() -> None:
    """Half a second beyond what halves and sums are predicted to take, in each of four layers; nothing where they were
    measured to take less. On four devices the same comes on top."""
    flow, lengths = a_flow(), SampleLengths(Lengths.fixed(10), Lengths.fixed(2))
    workload = Workload(1, 1, lengths, micro_batch_tokens=100)

    def terms(call: str, mode: Mode, devices: int = 2, **cut: float) -> Mapping[str, float]:
        profile = PROFILE.model_copy(update={f"cut_{which}": ((12, seconds),) for which, seconds in cut.items()})
        cluster = profile.cluster(4)
        costs = ModelCosts(workload, dict.fromkeys(flow.roles, SHAPE), flow, cluster, profile=profile)
        return costs.call(call, mode, Layout.on(range(devices), tp=devices)).terms

    scored, trained = terms("ref.logprobs", "score"), terms("actor.train", "train")
    forward, both = ((seconds["layers"] + seconds["tensor parallel"]) / 4 for seconds in (scored, trained))
    measured = terms("ref.logprobs", "score", forward=forward + 0.5)
    assert measured == pytest.approx({**scored, "tensor parallel": scored["tensor parallel"] + 4 * 0.5})
    assert terms("ref.logprobs", "score", forward=forward - 0.5) == pytest.approx(scored)
    measured = terms("actor.train", "train", forward=forward + 0.5, backward=both - forward + 0.75)
    assert measured["tensor parallel"] == pytest.approx(trained["tensor parallel"] + 4 * (0.5 + 0.75))
    on_four = terms("ref.logprobs", "score", 4)["tensor parallel"]
    assert terms("ref.logprobs", "score", 4, forward=forward + 0.5)["tensor parallel"] == pytest.approx(on_four + 2.0)


@pytest.mark.process
def test_two_processes_measure_layers_that_they_share() -> None:
    """And nothing of a model whose heads cannot be divided by two."""
    config = {**KNOWN["smollm2-135m"], "hidden_size": 32, "intermediate_size": 64}
    with LocalProcesses().start(Pair, 2, arguments=("cpu",)) as group:
        for heads, sizes in ((4, [8, 32]), (1, [])):
            given = config | {"num_attention_heads": heads, "num_key_value_heads": heads}
            for sharded in group.submit([0, 1], "sharded_layer", given, "float32", (8, 32), 1).result(60.0):
                for points in (sharded.forward, sharded.backward):
                    assert [tokens for tokens, _ in points] == sizes
                    assert all(seconds > 0 for _, seconds in points)


def test_generation_packs_its_weights() -> None:
    found = costs().call("actor.generate", "decode", Layout.on(range(1)))
    assert found.terms["packing"] == pytest.approx(2 * elements() / 1e6)
    assert found.terms["layers"] == pytest.approx(4 * PROFILE.decode_s(1, 11))


@pytest.mark.parametrize(
    ("sample_s", "hop_s", "groups", "round_s"),
    [(0.1, 0.5, 2, 9.8), (0.1, 1.5, 3, 10.8), (0.0, 0.5, 1, 5.0)],
    ids=["hops cost less than a group", "hops cost more", "weights are all that takes time"],
)
def test_as_many_groups_go_round_stages_as_are_quickest_by_what_was_measured(
    sample_s: float, hop_s: float, groups: int, round_s: float
) -> None:
    """24 samples on two stages of two layers, each of 1 s and `sample_s` for every sample: of G groups a round takes
    2 (2 + 48 sample_s / G + hop_s), or what G groups take on one stage. G is 2 until two hops take the 2 s of one group
    more. Every sample says two tokens, the first of them with its prompt. A recipe may state another G."""
    link = LinkRecord(bytes_per_s=1e30, latency_s=hop_s)
    layers = {"forward": ((1, 0.0), (2, 0.0)), "head": ((1, 1e-9), (11, 1e-9))}
    profile = PROFILE.model_copy(
        update={**layers, "decode": ((1, 10, 1 + sample_s), (24, 10, 1 + 24 * sample_s)), "send": link}
        | {"all_reduce": link}
    )
    flow, lengths = a_flow(), SampleLengths(Lengths.fixed(10), Lengths.fixed(2))
    layout = Layout.on(range(2), pp=2)

    def with_groups(stated: int | None = None) -> ModelCosts:
        workload = Workload(4, 6, lengths, stated_groups=stated)
        return ModelCosts(workload, dict.fromkeys(flow.roles, SHAPE), flow, profile.cluster(2), profile=profile)

    assert with_groups().decode_groups("actor.generate", layout) == groups
    terms = with_groups().call("actor.generate", "decode", layout).terms
    assert terms["layers"] + terms.get("hops", 0.0) == pytest.approx(round_s, rel=1e-6)
    assert [with_groups(stated).decode_groups("actor.generate", layout) for stated in (1, 4, 99)] == [1, 4, 24]


def test_layers_that_ranks_share_decode_as_they_compute_otherwise() -> None:
    """What one process compiles takes 1.1 s for a layer, in a stage as in the whole; what two share at least a half of
    what a row of one token takes."""
    slow = PROFILE.model_copy(update={"forward": ((10, 3.0), (20, 4.0))})
    flow, lengths = a_flow(), SampleLengths(Lengths.fixed(10), Lengths.fixed(2))
    workload = Workload(1, 1, lengths, micro_batch_tokens=100)
    found = ModelCosts(workload, dict.fromkeys(flow.roles, SHAPE), flow, slow.cluster(2), profile=slow)
    whole = found.call("actor.generate", "decode", Layout.on(range(1)))
    staged = found.call("actor.generate", "decode", Layout.on(range(2), pp=2))
    assert whole.terms["layers"] == pytest.approx(4 * PROFILE.decode_s(1, 11))
    shared = found.call("actor.generate", "decode", Layout.on(range(2), tp=2))
    assert staged.terms["layers"] == pytest.approx(4 * PROFILE.decode_s(1, 11))
    assert shared.terms["layers"] >= 4 * 3.0 / 2


def test_prompts_take_what_generation_compiles() -> None:
    """Half of what other forwards take; layers that ranks share are not compiled."""
    quick = PROFILE.model_copy(update={"prompts": ((10, 0.5), (20, 1.0))})
    flow, lengths = a_flow(), SampleLengths(Lengths.fixed(10), Lengths.fixed(2))
    workload = Workload(1, 1, lengths, micro_batch_tokens=100)
    prompts_s = {}
    for profile in (PROFILE, quick):
        found = ModelCosts(workload, dict.fromkeys(flow.roles, SHAPE), flow, profile.cluster(2), profile=profile)
        prompts_s[bool(profile.prompts)] = [
            found.call("actor.generate", "decode", layout).terms["prompts"]
            for layout in (Layout.on(range(1)), Layout.on(range(2), pp=2), Layout.on(range(2), tp=2))
        ]
    whole, staged, shared = (plain - compiled for plain, compiled in zip(*prompts_s.values(), strict=True))
    assert (whole, staged) == pytest.approx((4 * 0.5, 4 * 0.5))
    assert shared == 0


def test_a_layer_takes_at_least_the_reading_of_its_weights() -> None:
    faster_with_more = (-0.05, 1.0)  # something else ran meanwhile
    assert by_layer({(1,): faster_with_more, (2,): (0.5, 1.0)}, 0.25, few=1) == {(1,): (0.25, 0.75), (2,): (0.5, 0.5)}


def test_what_is_measured_is_measured_by_turns() -> None:
    """A first round warms up; of the others the middle one counts, of each number for itself."""
    order: list[str] = []

    def work(name: str, *rounds: tuple[float, float]) -> Callable[[], tuple[float, float]]:
        left = iter(rounds)
        return lambda: (order.append(name), next(left))[1]

    families = {
        "a": {(1,): work("a1", (9, 9), (1, 6), (2, 5), (3, 4)), (2,): work("a2", *[(1, 1)] * 4)},
        "b": {(1,): work("b1", *[(0, 0)] * 4)},
    }
    measured = in_rounds(families, 60.0)
    assert measured == {"a": {(1,): (2, 5), (2,): (1, 1)}, "b": {(1,): (0, 0)}}
    assert order == 4 * ["a1", "a2", "b1"]


def test_no_round_and_no_further_size_begins_after_the_time() -> None:
    calls: list[int] = []
    sizes = {(size,): lambda size=size: (calls.append(size), (float(len(calls)),))[1] for size in (1, 2, 3)}
    assert in_rounds({"a": sizes}, -1.0) == {"a": {(1,): (3,), (2,): (4,)}}, "two of each, once more"
    assert calls == [1, 2, 1, 2]


def test_what_is_compiled_at_the_first_call_is_not_measured() -> None:
    seconds = iter([5.0, 0.1])
    assert in_rounds({"a": {(1,): lambda: (next(seconds),)}}, 60.0, rounds=1) == {"a": {(1,): (0.1,)}}


def test_where_first_calls_compile_for_long_the_time_begins_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first call of each of three sizes takes 30 s, later ones 1 s: all are measured, and in 2 s two rounds more."""
    now, calls = [0.0], []
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def work(size: int) -> tuple[float]:
        now[0] += 30.0 if size not in calls else 1.0
        calls.append(size)
        return (float(size),)

    sizes = {(size,): partial(work, size) for size in (1, 2, 3)}
    assert in_rounds({"a": sizes}, 2.0, compiles=True) == {"a": {(1,): (1,), (2,): (2,), (3,): (3,)}}
    assert calls == 2 * [1, 2, 3]


def test_a_size_that_has_no_room_is_left_out() -> None:
    def work(size: int) -> tuple[float]:
        if size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return (float(size),)

    sizes = {(size,): partial(work, size) for size in (1, 2, 3)}
    assert in_rounds({"a": sizes}, 60.0, rounds=1) == {"a": {(1,): (1,), (2,): (2,)}}


def test_rows_of_a_gpu_reach_to_those_of_a_micro_batch() -> None:
    for quick in (False, True):
        sizes = sizes_of("cuda", quick=quick)
        assert sizes.rows[-1] == sizes.back[-1] == 16_384, "what follows from fewer are launches"
        assert all(sizes.rows[0] < tokens < sizes.rows[-1] for tokens in sizes.held_out_rows)


def test_an_engine_that_is_measured_has_room_for_its_samples_alone() -> None:
    """8 samples of 20 tokens to come after a prompt of 100, and one more, in blocks of 16: a GPU takes it as a whole,
    however many positions the model has."""
    engine = work_of_profile.engine_for(tiny_model("llama", dtype=torch.float32), 8, 100, 20)
    assert engine.state.limits.num_blocks == 9 * 8


class Behind:
    """An engine on a GPU that takes 3 ms for a step, the host 1; but once the host is held up behind a launch for 5."""

    def __init__(self) -> None:
        self.now_s, self._done_s, self._steps = 0.0, 0.0, 0

    def step(self) -> None:
        self._steps += 1
        self.now_s += 1e-3
        before_s, self._done_s = self._done_s, max(self._done_s, self.now_s) + 3e-3
        self.now_s = max(self.now_s, before_s) + (5e-3 if self._steps == 5 else 0.0)


def test_a_step_of_a_gpu_that_was_ahead_of_the_host_is_not_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = Behind(), SimpleNamespace(device=SimpleNamespace(type="cuda"), max_positions=128)
    monkeypatch.setattr(work_of_profile, "engine_for", lambda *of: engine)
    for name in ("begin", "end"):
        monkeypatch.setattr(work_of_profile, name, lambda *of: None)
    monkeypatch.setattr(work_of_profile, "clock", lambda device: engine.now_s)
    assert work_of_profile.decode_s(cast(Any, model), 4, 8) == pytest.approx(3e-3)


def on_two(profile: Profile, layout: Layout, call: str = "ref.logprobs"):
    return costs(profile, prompts=2).call(call, "score", layout).terms


def test_what_does_not_go_with_weights_stays_where_these_are_cut() -> None:
    """In the least row, of ten tokens, products take 1/100 of a second: the rest of it stays."""
    rate = 100 * ModelWork(SHAPE, "bfloat16", 1).products(10)
    profile = PROFILE.model_copy(update={"products": ((16, rate),)})
    assert profile.fixed_s == pytest.approx(0.99)
    terms = on_two(profile, Layout.on(range(2), tp=2))
    assert terms["layers"] == pytest.approx(4 * (0.99 + (2.4 - 0.99) / 2))


def test_sums_between_products_take_what_they_were_measured_to() -> None:
    """Sums of 24 tokens of 64 numbers in bfloat16, twice a layer."""
    profile = PROFILE.model_copy(update={"between": LinkRecord(bytes_per_s=1e6, latency_s=1e-2)})
    terms = on_two(profile, Layout.on(range(2), tp=2))
    assert terms["tensor parallel"] == pytest.approx(4 * 2 * (1e-2 + 24 * 64 * 2 / 1e6))


def test_processes_that_compute_at_the_same_time_slow_each_other_down() -> None:
    busy = PROFILE.model_copy(update={"contention": 1.5})
    one, two = Layout.on(range(1)), Layout.on(range(2), dp=2)
    assert on_two(busy, one)["layers"] == pytest.approx(on_two(PROFILE, one)["layers"])
    assert on_two(busy, two)["layers"] == pytest.approx(1.5 * on_two(PROFILE, two)["layers"])


def test_other_shapes_take_as_long_as_their_weights() -> None:
    wide = replace(SHAPE, attention_parameters=2 * SHAPE.attention_parameters, intermediate=2 * SHAPE.intermediate)
    one, other = (costs(shape=shape).call("ref.logprobs", "score", Layout.on(range(1))) for shape in (SHAPE, wide))
    assert other.terms["layers"] == pytest.approx(2 * one.terms["layers"])
    assert SHAPE.vocabulary * SHAPE.hidden == HEAD


def test_processes_share_the_machine() -> None:
    found = PROFILE.cluster(2)
    assert (found.num_devices, found.device.memory_bytes) == (2, 4 << 30)
    assert found.intra.bandwidth == 5e7


def test_what_leaves_a_device_goes_over_its_own_link() -> None:
    """Where it was measured; else as processes send each other."""
    assert PROFILE.cluster(2).host == Link(1e8, 1e-4)
    own = PROFILE.model_copy(update={"host": LinkRecord(bytes_per_s=2e10, latency_s=1e-5)})
    assert own.cluster(2).host == Link(2e10, 1e-5)
    assert own.cluster(2).inter == Link(1e8, 1e-4)


def test_copies_to_a_devices_host_are_measured() -> None:
    found = measure_host("cpu")
    assert found.bytes_per_s > 1e7
    assert 0 < found.latency_s < 1


def test_a_file_is_what_was_saved(tmp_path: Path) -> None:
    save_profile(PROFILE, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == PROFILE


def test_what_older_runs_say_of_moves_is_left_away(tmp_path: Path) -> None:
    """They were predicted by the link of sums. All else that they say stays, and all of what newer ones say."""
    score, move = (KindRecord(profile_s=1.0, predicted_s=1.0, measured_s=2.0) for _ in range(2))
    run = RunRecord(devices=2, predicted_s=1.0, measured_s=1.0, kinds={"score on 2": score, "move": move})
    newer = PROFILE.with_run(run)
    save_profile(newer, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == newer
    record = json.loads((tmp_path / "p.json").read_text())
    del record["moves_by"]
    (tmp_path / "p.json").write_text(json.dumps(record))
    older = PROFILE.with_run(run.model_copy(update={"kinds": {"score on 2": score}}))
    assert load_profile(tmp_path / "p.json") == older


def test_messages_of_processes_are_as_they_were_measured() -> None:
    cluster = PROFILE.cluster(2)
    assert (cluster.near, cluster.intra) == (Link(1e8, 1e-4), Link(5e7, 2e-4))
    assert PROFILE.model_copy(update={"send": None}).cluster(2, Link(1.0, 2.0)).near == cluster.intra


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threads": 0}, "`threads`: .*greater than or equal to 1"),
        ({"copy_bytes_per_s": True}, "`copy_bytes_per_s`: expected a number"),
        ({"more": 1}, "`more`: extra inputs"),
        ({"version": 2}, "expected profile version 1, found 2"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    save_profile(PROFILE, tmp_path / "p.json")
    record = json.loads((tmp_path / "p.json").read_text())
    (tmp_path / "p.json").write_text(json.dumps(record | change))
    with pytest.raises(DataError, match=message):
        load_profile(tmp_path / "p.json")


def test_profiles_are_kept_by_what_they_depend_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))
    other = replace(SHAPE, layers=5)
    changes = ({}, {"machine": "b"}, {"threads": 2}, {"model": "n"}, {"dtype": "float32"}, {"shape": other})
    profiles = [PROFILE.model_copy(update=change) for change in changes]
    paths = {keep_profile(profile) for profile in profiles}
    assert len(paths) == 6
    assert {path.parent for path in paths} == {tmp_path / "profiles"}
    (tmp_path / "profiles" / "by-hand.json").write_text(profile_path(PROFILE).read_text())
    found = kept_profiles(PROFILE.machine, PROFILE.device)
    assert len(found) == 5
    assert {profile.shape for profile in found} == {SHAPE, other}


def test_a_kept_profile_that_cannot_be_read_is_named_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))
    path = keep_profile(PROFILE)
    path.write_text(path.read_text()[:100])
    assert kept_profiles(PROFILE.machine, PROFILE.device) == []
    assert kept_profiles(PROFILE.machine, PROFILE.device) == []
    said = capsys.readouterr().err
    assert said.count("a kept profile is ignored: ") == 1
    assert path.name in said.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", "0"], "--threads: expected 1 to 4096, found 0"),
        (["--model", "llama-13"], "Did you mean 'llama-13b'?"),
        (["--dtype", "half"], "half"),
        (["--out", "/nowhere/at/all.json"], "--out: expected a file in an existing folder, found /nowhere/at/all.json"),
    ],
)
def test_wrong_input(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["profile", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.slow
def test_this_machine(tmp_path: Path) -> None:
    config = {**KNOWN["smollm2-135m"], "hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    found = measure("tiny", config, "float32", "cpu", 1)
    save_profile(found, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == found
    assert [tokens for tokens, _ in found.forward][:2] == [16, 64]
    assert [tokens for tokens, _ in found.cut_forward] == [tokens for tokens, _ in found.cut_backward] == [64, 512]
    assert found.send.bytes_per_s > 1e6
    assert found.packing_bytes_per_s is None or found.packing_bytes_per_s > 1e6


def test_runs_that_an_earlier_version_kept_are_read() -> None:
    said = {"devices": 2, "foretold_s": 8.0, "measured_s": 10.0, "kinds": {}}
    said["kinds"] = {"move": {"profile_s": 1.0, "foretold_s": 2.0, "measured_s": 4.0}}
    run = RunRecord.model_validate(said)
    assert (run.predicted_s, run.kinds["move"].predicted_s) == (8.0, 2.0)
    assert "foretold_s" not in run.model_dump_json()
    assert RunRecord.model_validate_json(run.model_dump_json()) == run
