"""vLLM itself, where its environment is: tokens, log-probs, new weights, and a run that learns on it as on ours."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.data.records import FinishReason, Prompt, Reply, Sample
from plait.errors import RunError
from plait.generation.engine import Engine, drain
from plait.generation.request import GoingOn, Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.models.language_model import LanguageModel
from plait.models.loading import load_model
from plait.runtime.api import run
from plait.vllm.engine import VllmEngine
from plait.vllm.environment import install_text, look, vllm_python
from plait.vllm.messages import Loading
from plait.vllm.process import start_vllm
from tests.generation.test_turns import asked as turns
from tests.generation.test_turns import rounds
from tests.models.tiny import save_tiny
from tests.runs.conftest import make_recipe  # noqa: F401
from tests.runs.test_turns import keys_of
from tests.runs.written import samples_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        (found := look("cpu")) is None or bool(found.fault("cpu")),
        reason=f"no tested vLLM at {vllm_python('cpu')}; it is installed by\n{install_text('cpu')}",
    ),
]

Samples = dict[tuple[int, int], Sample]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 32 elements, which vLLM has kernels for."""
    sizes = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2}
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", **sizes)


@pytest.fixture(scope="module")
def pair(tiny_folder: Path) -> Iterator[tuple[VllmEngine, LanguageModel]]:
    """vLLM, and the model whose weights it draws with."""
    model = load_model(str(tiny_folder), dtype="float32")
    loading = Loading(str(tiny_folder), "float32", 128, 16, 256, 1 << 24, "cpu")
    engine = VllmEngine("actor", model, lambda: model.export(torch.float32).state, loading, start_vllm("cpu", 1, 60.0))
    yield engine, model
    engine.close()


def asked(count: int = 6, samples: int = 3, **keys: Any) -> list[Request]:
    sampling = Sampling(**{"max_tokens": 24} | keys)
    return [
        Request(Prompt(uid, "", tuple(range(5 + uid, 12 + 2 * uid))), samples, sampling, NoiseKey(3))
        for uid in range(count)
    ]


def by_vllm(engine: VllmEngine, requests: list[Request]) -> Samples:
    samples: Samples = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        samples |= {(one.prompt.uid, one.index): one for one in engine.advance("actor.generate")[1]}
    return samples


def by_plait(model: LanguageModel, requests: list[Request]) -> Samples:
    engine = Engine(model, SamplingSettings(max_running=16))
    for request in requests:
        engine.add(request)
    return {(one.prompt.uid, one.index): one for one in drain(engine)}


def agree(ours: Mapping[Any, Sample], theirs: Mapping[Any, Sample]) -> None:
    assert ours.keys() == theirs.keys()
    for key, one in ours.items():
        assert theirs[key].token_ids == one.token_ids, key
        assert theirs[key].finish_reason == one.finish_reason
        assert theirs[key].text == one.text
        assert theirs[key].replies == one.replies
        assert theirs[key].logprobs == pytest.approx(one.logprobs, abs=2e-4)


@pytest.mark.parametrize(
    "keys",
    [
        {"temperature": 0.0},
        {},
        {"temperature": 0.6, "top_k": 12, "top_p": 0.9},
        {"stop": ("7", "an")},
        {"stop_token_ids": tuple(range(40, 60))},
    ],
    ids=["greedy", "sampled", "truncated", "stop strings", "stop tokens"],
)
def test_samples_are_those_of_our_own_engine(pair: tuple[VllmEngine, LanguageModel], keys: dict[str, Any]) -> None:
    engine, model = pair
    agree(by_plait(model, asked(**keys)), by_vllm(engine, asked(**keys)))


def test_turns_are_those_of_our_own_engine(pair: tuple[VllmEngine, LanguageModel]) -> None:
    engine, model = pair
    ours = rounds(lambda requests: by_plait(model, requests).values(), turns(whole=True))
    assert max(len(sample.replies) for sample in ours.values()) == 2
    agree(ours, rounds(lambda requests: by_vllm(engine, requests).values(), turns(whole=True)))


def test_a_sample_goes_on_up_to_the_last_token_that_there_is_room_for(pair: tuple[VllmEngine, LanguageModel]) -> None:
    engine, model = pair
    prompt = Prompt(0, "", (5, 6, 7))
    begun = Sample(prompt, 1, (8,), (-1.0,), "", FinishReason.OPEN, replies=(Reply(1, tuple(range(20, 143))),))
    request = Request(prompt, 2, Sampling(max_tokens=125), NoiseKey(3), going_on=GoingOn((begun,), frozenset({0})))
    samples = by_vllm(engine, [request])
    assert len(samples[0, 1].all_ids) == 125
    agree(by_plait(model, [request]), samples)


def test_tokens_are_a_function_of_the_seed(pair: tuple[VllmEngine, LanguageModel]) -> None:
    engine, _ = pair
    together = by_vllm(engine, asked())
    assert by_vllm(engine, asked()) == together
    backwards = by_vllm(engine, asked()[::-1])
    assert {key: one.token_ids for key, one in backwards.items()} == {
        key: one.token_ids for key, one in together.items()
    }


def test_recorded_lengths_are_replayed(pair: tuple[VllmEngine, LanguageModel]) -> None:
    engine, _ = pair
    request = Request(
        Prompt(0, "", (5, 6, 7)), 3, Sampling(stop_token_ids=tuple(range(300))), NoiseKey(3), lengths=(1, 9, 4)
    )
    samples = by_vllm(engine, [request])
    assert [len(samples[0, index].token_ids) for index in range(3)] == [1, 9, 4]
    assert {one.finish_reason for one in samples.values()} == {FinishReason.LENGTH}


def test_new_weights_are_the_ones_that_it_draws_with(pair: tuple[VllmEngine, LanguageModel]) -> None:
    engine, model = pair
    before = by_vllm(engine, asked())
    for version in (1, 2):
        with torch.no_grad():
            model.weights += 0.05 * torch.randn(model.weights.shape, generator=torch.Generator().manual_seed(version))
        engine.update_weights(version)
        now = by_vllm(engine, asked())
        assert {one.policy_version for one in now.values()} == {version}
        agree(by_plait(model, asked()), now)
    assert {key: one.token_ids for key, one in before.items()} != {key: one.token_ids for key, one in now.items()}


def test_what_nobody_waits_for_is_forgotten(pair: tuple[VllmEngine, LanguageModel]) -> None:
    engine, _ = pair
    expected = by_vllm(engine, asked())
    for request in asked(max_tokens=100):
        engine.add(request)
    engine.advance("actor.generate")
    engine.give_up()
    assert not engine.has_work
    assert by_vllm(engine, asked()) == expected


@pytest.mark.parametrize("how", ["whole", "lora", "turns"])
def test_grpo_learns_on_it_as_on_ours(make_recipe: Any, tmp_path: Path, how: str) -> None:  # noqa: F811
    keys = {"whole": {}, "lora": {"lora.rank": 4}, "turns": keys_of(tmp_path)}[how]
    rewards, tokens = {}, {}
    for name in ("plait", "vllm"):
        recipe = make_recipe(
            **keys | {"sampling.engine": name, "optimizer.learning_rate": 0.03, "steps": 6},
            prompts_per_step=6,
            samples_per_prompt=8,
            run_dir=str(tmp_path / name),
        )
        outcome = run(recipe)
        assert outcome.doctor == "" or "disagree" not in outcome.doctor
        rows = [json.loads(line) for line in (recipe.run_dir / "metrics.jsonl").read_text().splitlines()]
        assert max(row["training/rollout_probs_diff_mean"] for row in rows) < 1e-4
        rewards[name] = [row["reward"] for row in rows]
        first = samples_of(recipe, 1)
        tokens[name] = [(row["token_ids"], row.get("replies")) for row in first]
    assert any(replies for _, replies in tokens["vllm"]) is (how == "turns")
    assert tokens["vllm"] == tokens["plait"], "with the same noise and the same weights"
    assert sum(rewards["vllm"][-2:]) > sum(rewards["vllm"][:2])
    assert rewards["vllm"] == pytest.approx(rewards["plait"], abs=0.25)


def test_its_death_is_told(tiny_folder: Path, pair: tuple[VllmEngine, LanguageModel]) -> None:
    _, model = pair
    loading = Loading(str(tiny_folder), "float32", 128, 16, 256, 1 << 24, "cpu")
    engine = VllmEngine("actor", model, lambda: model.export(torch.float32).state, loading, start_vllm("cpu", 1, 60.0))
    engine.add(asked(max_tokens=100)[0])
    engine.advance("actor.generate")
    engine.group.signal(0, 9)
    with pytest.raises(RunError, match=r"vLLM's process for `actor` was killed by SIGKILL"):
        by_vllm(engine, [])
    engine.close()
