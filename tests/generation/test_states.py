"""States of recurrent layers: what a sample says does not depend on its siblings, on chunks, or on who gives way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data.records import Prompt, Sample
from plait.errors import CallError, ConfigError, ModelError
from plait.generation.engine import Engine, drain
from plait.generation.moves import SampleMoves
from plait.generation.request import Request
from plait.generation.sampler import NUM_CANDIDATES
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.generation.speculates import NoSpeculation
from plait.generation.states import StatePool
from plait.kernels.noise import NoiseKey
from plait.models.language_model import LanguageModel
from plait.models.shape import ModelShape
from tests.cases import examples, slow_but
from tests.generation import oracle
from tests.generation.requests import FREE, request
from tests.models.oracle import wide_softmax
from tests.models.tiny import save_tiny, shared_model, tiny, tiny_model

FAMILY = "qwen3_5_text"
STATED = ("qwen3_next", "olmo_hybrid", "lfm2", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h")


def said(samples: list[Sample]) -> Mapping[tuple[int, int], Sample]:
    return {(sample.prompt.uid, sample.index): sample for sample in samples}


def same(got: Sample, expected: Sample, atol: float = 1e-9) -> None:
    assert got.token_ids == expected.token_ids
    torch.testing.assert_close(torch.tensor(got.logprobs), torch.tensor(expected.logprobs), rtol=0, atol=atol)


@pytest.mark.parametrize("family", slow_but([FAMILY, "bamba"], [FAMILY, *STATED]))
def test_samples_of_groups_are_those_of_whole_forwards(family: str) -> None:
    """Prompts that end in the midst of a block, and at the end of one; some of their samples begin later."""
    judge_groups(shared_model(family), tiny(family))


LIMITED: dict[str, dict[str, Any]] = {
    "bamba": {"time_step_limit": (0.4, 0.6)},
    "nemotron_h": {"time_step_min": 0.05},
    "falcon_h1": {"time_step_limit": (0.4, 0.6)},
}


@pytest.mark.parametrize("family", slow_but(["nemotron_h"], LIMITED))
def test_limits_of_time_steps_hold_while_samples_are_drawn(family: str) -> None:
    """`generate` of Transformers has them for prompts alone."""
    judge_groups(tiny_model(family, **LIMITED[family]), tiny(family, **LIMITED[family]))


def judge_groups(model: LanguageModel, module: Any) -> None:
    engine = Engine(model, SamplingSettings(max_running=4, max_prefill_tokens=12))
    asked = [request(uid, num_tokens, num_samples=3, max_tokens=7) for uid, num_tokens in enumerate((5, 16, 33, 1))]
    for one in asked:
        engine.add(one)
    got = said(list(drain(engine)))
    assert len(got) == 12
    with wide_softmax():
        for one in asked:
            for expected in oracle.generate(
                module, model.tokenizer, one, max_positions=256, num_candidates=NUM_CANDIDATES
            ):
                same(got[one.prompt.uid, expected.index], expected, atol=1e-6)


def alone(one: Request) -> Mapping[tuple[int, int], Sample]:
    engine = Engine(shared_model(FAMILY), SamplingSettings(max_running=1))
    engine.add(one)
    return said(list(drain(engine)))


@settings(max_examples=examples(8, 30), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.integers(1, 24), min_size=1, max_size=3)), min_size=1, max_size=4
    ),
    st.integers(1, 6),
    st.integers(1, 48),
    st.integers(5, 12),
    st.sets(st.integers(1, 30), max_size=2),
)
def test_what_a_sample_says_is_its_own(shape: list, running: int, chunk: int, blocks: int, updates: set[int]) -> None:
    """In chunks of any length and pools that make samples give way, and where all is computed again."""
    keys = {"max_running": running, "max_prefill_tokens": chunk, "kv_tokens": 16 * blocks}
    engine = Engine(shared_model(FAMILY), SamplingSettings.model_validate(keys))
    asked = [request(uid, num_tokens, lengths) for uid, (num_tokens, lengths) in enumerate(shape)]
    for one in asked:
        engine.add(one)
    got: list[Sample] = []
    step = 0
    while engine.has_work:
        got += engine.step()
        step += 1
        if step in updates and engine.has_work:
            engine.update_weights(step)
    expected = {key: sample for one in asked for key, sample in alone(one).items()}
    assert said(got).keys() == expected.keys()
    for key, sample in said(got).items():
        same(sample, expected[key])


def test_slots_are_as_many_as_sequences_not_as_blocks() -> None:
    engine = Engine(shared_model(FAMILY), SamplingSettings(max_running=3))
    for uid in range(6):
        engine.add(request(uid, 40, [60, 60]))
    most, num_bytes, states = 0, 0, engine.state.pool.states
    assert states is not None
    while engine.has_work:
        engine.step()
        most, num_bytes = max((most, num_bytes), (states.num_slots, states.num_bytes))
    assert 3 <= most <= 12
    shape = ModelShape.from_config(engine.model.config.to_dict())
    assert num_bytes == most * 2 * shape.mixer.state_bytes(8)
    assert states.num_slots == states.num_bytes == 0, "they are given back with the pool"


def test_a_block_that_is_copied_takes_its_state_along() -> None:
    states = StatePool(16, torch.device("cpu"))
    states.expect([([7], 0, 5), ([2, 9], 16, 4)], (), lambda: ())
    slots_S = torch.tensor([states.slot_of(7), states.slot_of(9)])
    states.write(0, slots_S, {("recurrent", 0): torch.tensor([[1.0], [2.0]])})
    states.expect([([3], 5, 1), ([2, 9], 20, 1)], [(7, 3)], lambda: (3, 9))
    at = torch.tensor([states.slot_of(block) for block in (3, 7, 9)])
    assert states.read(0, at)["recurrent", 0][:, 0].tolist() == [1.0, 1.0, 2.0]


def test_a_sample_that_moves_is_computed_again() -> None:
    one = request(0, 20, [30])
    (expected,) = alone(one).values()
    source, target = (Engine(shared_model(FAMILY), SamplingSettings()) for _ in range(2))
    source.add(one)
    for _ in range(9):
        source.step()
    SampleMoves(target.state).import_sample(SampleMoves(source.state).export_sample(0, 0))
    assert not source.has_work
    (moved,) = drain(target)
    same(moved, expected)


def test_nothing_is_drafted() -> None:
    model = tiny_model(FAMILY, dtype=torch.float32)
    for exact in (False, True):
        assert isinstance(Engine(model, SamplingSettings(exact=exact)).speculates, NoSpeculation)
    with pytest.raises(ConfigError, match=r"^`sampling\.speculation` is 3, but some layers .* set it to auto or off"):
        Engine(model, SamplingSettings(speculation=3))
    engine = Engine(model, SamplingSettings())
    engine.add(Request(Prompt(0, "", (5, 6, 7)), 1, FREE, NoiseKey(0)))
    engine.step()
    with pytest.raises(CallError, match="drafts: the states of the model's layers cannot be taken back; give none"):
        engine.step({(0, 0): [4, 5]})


def test_a_draft_model_that_keeps_states_is_refused(tmp_path: Path) -> None:
    drafts = save_tiny(tmp_path / "drafts", family=FAMILY, weight_scale=0.05)
    asked = SamplingSettings(speculation="adaptive", draft_model=str(drafts))
    with pytest.raises(ModelError, match=r"^sampling\.draft_model: some of its layers are recurrent"):
        Engine(tiny_model("llama", dtype=torch.float32), asked)


def test_beginnings_of_prompts_are_not_shared() -> None:
    """Of the states at the end of a prompt's full blocks there is none."""
    model = shared_model(FAMILY)
    engine = Engine(model, SamplingSettings(prefix_cache_tokens=160))
    asked = Sampling(max_tokens=5, stop_token_ids=())
    prompts = [Prompt(uid, "", (*range(3, 39), 40 + uid)) for uid in range(2)]
    for prompt in prompts:
        engine.add(Request(prompt, 1, asked, NoiseKey(1)))
    got = said(list(drain(engine)))
    for prompt in prompts:
        (expected,) = alone(Request(prompt, 1, asked, NoiseKey(1))).values()
        same(got[prompt.uid, 0], expected)
