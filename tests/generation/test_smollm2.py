"""The engine on the real model: greedy against Transformers, log-probs in both precisions, exact mode at real sizes.

Minutes of CPU: slow. docs/generation.md states the figures that these tests print (`-s`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from plait.data.packed import pack
from plait.data.records import Prompt, Sample
from plait.generation.compiled_forward import CompiledForward
from plait.generation.engine import Engine, drain
from plait.generation.joint import Alone
from plait.generation.request import Request
from plait.generation.sampler import sample as draw
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import DrawNoise, NoiseKey
from plait.models.files import hub
from plait.models.language_loading import load_model
from plait.models.language_model import LanguageModel
from tests.generation.requests import is_packed
from tests.models.test_smollm2 import if_cached
from tests.models.tiny_gguf import ALIAS

pytestmark = [pytest.mark.slow, if_cached]

DOCS = Path(__file__).parents[2] / "docs"
LENGTHS = (12, 20, 33, 60)
PROMPTS_PER_LENGTH = 16
MAX_TOKENS = 256
ROUNDING = 1e-4
"""What two orders of summing may differ by: float32 logits of size 20 after 30 layers."""


def texts(model: LanguageModel, count: int, num_tokens: int) -> list[tuple[int, ...]]:
    """The first tokens of so many paragraphs of plait's documentation that have as many."""
    pages = [page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md"))]
    paragraphs = [part.strip() for page in pages for part in page.split("\n\n")]
    encoded = [tuple(model.tokenizer.encode(part)) for part in paragraphs if part[:1].isalpha()]
    found = list(dict.fromkeys(ids[:num_tokens] for ids in encoded if len(ids) >= num_tokens))
    assert len(found) >= count, f"the documentation has {len(found)} paragraphs of {num_tokens} tokens"
    return found[:count]


def reference(dtype: torch.dtype) -> Any:
    """Transformers' own model, with the attention that its users get."""
    return AutoModelForCausalLM.from_pretrained(hub.resolve(ALIAS), dtype=dtype).eval()


# -- greedy


@pytest.fixture(scope="module")
def greedy() -> dict[tuple[int, ...], Sample]:
    """By prompt: 64 distinct ones of four lengths, mixed, of which half run at a time."""
    model = load_model(ALIAS, dtype="float32")
    prompts = {uid: ids for n in range(4) for uid, ids in enumerate(texts(model, 64, LENGTHS[n])) if uid % 4 == n}
    assert len(set(prompts.values())) == 4 * PROMPTS_PER_LENGTH
    engine = Engine(model, SamplingSettings(max_running=32))
    asked = Sampling(temperature=0.0, max_tokens=MAX_TOKENS)
    for uid in sorted(prompts):
        engine.add(Request(Prompt(uid, "", prompts[uid]), 1, asked, NoiseKey(0)))
    found = list(engine.step())
    assert is_packed(engine)
    found += drain(engine)
    return {sample.prompt.token_ids: sample for sample in found}


@torch.no_grad()
@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_equals_transformers(length: int, greedy: dict[tuple[int, ...], Sample]) -> None:
    """Token for token. Where the two part, the logits of both tokens are equal up to rounding, in one forward."""
    module = reference(torch.float32)
    prompts = [ids for ids in greedy if len(ids) == length]
    assert len(prompts) == PROMPTS_PER_LENGTH
    whole = torch.tensor(prompts)
    out = module.generate(
        whole, attention_mask=torch.ones_like(whole), max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=2
    )
    num_tokens, parted = 0, 0
    for prompt, row in zip(prompts, out[:, length:].tolist(), strict=True):
        expected = row[: row.index(2) + 1] if 2 in row else row
        found = list(greedy[prompt].token_ids)
        at = next((i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), None)
        num_tokens += len(found) if at is None else at
        if at is None:
            assert len(found) == len(expected)
            continue
        parted += 1
        logits_V = module(torch.tensor([[*prompt, *found[:at]]])).logits[0, -1]
        tie = float(logits_V[found[at]] - logits_V[expected[at]])
        print(f"token {at}: {found[at]} for {expected[at]}, logits {tie:+.1g} apart")
        assert abs(tie) < ROUNDING
        assert float(logits_V.max() - logits_V[found[at]]) < ROUNDING
    print(f"prompts of {length} tokens: {num_tokens} tokens equal, {parted} of {len(prompts)} part at a tie")
    assert num_tokens > 16 * PROMPTS_PER_LENGTH


# -- log-probs


PROMPT_TOKENS, NUM_TOKENS, NUM_SAMPLES = 24, 48, 2


def drawn(model: LanguageModel, prompts: Sequence[tuple[int, ...]]) -> list[Sample]:
    """Samples of the engine, by prompt and index."""
    engine = Engine(model, SamplingSettings())
    for uid, ids in enumerate(prompts):
        engine.add(Request(Prompt(uid, "", ids), NUM_SAMPLES, Sampling(), NoiseKey(3), (NUM_TOKENS,) * NUM_SAMPLES))
    first = engine.step()
    assert isinstance(engine.state.forward.backends[0], CompiledForward)
    assert is_packed(engine)
    return sorted([*first, *drain(engine)], key=lambda sample: (sample.prompt.uid, sample.index))


def of_tokens(logits_SNV: Tensor, rows_SN: Tensor) -> Tensor:
    """Log-probs [S, n] of the last n tokens by logits of the places before them."""
    tokens_Sn = rows_SN[:, PROMPT_TOKENS:]
    wide = logits_SNV.to(torch.promote_types(logits_SNV.dtype, torch.float32))
    return wide.log_softmax(-1).gather(2, tokens_Sn[:, :, None])[:, :, 0]


@torch.no_grad()
def in_one_forward(module: Any, rows_SN: Tensor) -> Tensor:
    parts = [module(row_1N).logits[:, PROMPT_TOKENS - 1 : -1] for row_1N in rows_SN.split(4)]
    return of_tokens(torch.cat(parts), rows_SN)


@torch.no_grad()
def with_a_cache(module: Any, rows_SN: Tensor) -> Tensor:
    """As Transformers' `generate` computes: the prompt, then a token at a time."""
    cache = DynamicCache()
    parts = [module(rows_SN[:, :PROMPT_TOKENS], past_key_values=cache).logits[:, -1:]]
    for at in range(PROMPT_TOKENS, rows_SN.shape[1] - 1):
        parts.append(module(rows_SN[:, at : at + 1], past_key_values=cache).logits)
    return of_tokens(torch.cat(parts, dim=1), rows_SN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logprobs_equal_a_teacher_forced_forward_as_nearly_as_transformers_do(dtype: torch.dtype) -> None:
    """What is stored while drawing, against the trainer's forward over the same tokens; beside it the same difference
    of Transformers (its cached decode, its one forward), and the error of each against float64."""
    model = load_model(ALIAS, dtype=str(dtype).removeprefix("torch."))
    samples = drawn(model, texts(model, 8, PROMPT_TOKENS))
    rows_SN = torch.tensor([[*sample.prompt.token_ids, *sample.token_ids] for sample in samples])
    stored = torch.tensor([sample.logprobs for sample in samples])
    pairs = [samples[at : at + NUM_SAMPLES] for at in range(0, len(samples), NUM_SAMPLES)]
    with torch.no_grad():
        trained = model.logprobs(pack([(pair[0].prompt.token_ids, [s.token_ids for s in pair]) for pair in pairs]), 1.0)
    trainers = trained[0].float().view_as(stored)
    module = reference(dtype)
    theirs, whole = with_a_cache(module, rows_SN), in_one_forward(module, rows_SN)
    exact = in_one_forward(module.double(), rows_SN)  # of the weights as they are in `dtype`
    print(f"\n{dtype}, {stored.numel()} tokens")

    def mean_of(name: str, difference: Tensor) -> float:
        mean, top = float(difference.abs().mean()), float(difference.abs().max())
        print(f"{name}: mean {mean:.2g}, max {top:.2g}")
        return mean

    ours = mean_of("plait, drawn against the trainer's", stored - trainers)
    yardstick = mean_of("Transformers, cached against one forward", theirs - whole)
    error = mean_of("plait, drawn against float64", stored - exact)
    mean_of("plait, the trainer's against float64", trainers - exact)
    their_error = mean_of("Transformers, cached against float64", theirs - exact)
    mean_of("Transformers, one forward against float64", whole - exact)
    if dtype == torch.float32:
        assert ours < 1e-5
        assert (stored - trainers).abs().max() < ROUNDING
        assert error <= 1.5 * their_error
    else:
        assert ours <= 1.25 * yardstick
        assert error <= 1.25 * their_error


# -- exact mode


def kept_logits(
    model: LanguageModel, prompts: dict[int, tuple[int, ...]], **changes: object
) -> tuple[dict[int, Tensor], list[Sample], int]:
    """By draw key the logits that every token was drawn from; the samples; how often one was preempted."""
    kept: dict[int, Tensor] = {}

    def choose(logits_BV: Tensor, noise_B: DrawNoise, rows: Any) -> tuple[Tensor, Tensor]:
        for key, logits_V in zip(noise_B.keys.tolist(), logits_BV, strict=True):
            assert key not in kept, "a token is drawn twice"
            kept[key] = logits_V.clone()
        return draw(logits_BV, noise_B, rows)

    settings = SamplingSettings(exact=True, speculation="off", **changes)  # type: ignore[arg-type]
    engine = Engine(model, settings, joint=Alone(choose))
    for uid, ids in prompts.items():
        engine.add(Request(Prompt(uid, "", ids), 2, Sampling(temperature=0.9), NoiseKey(3), lengths=(6, 4)))
    samples, num_preempted = [], 0
    while engine.has_work:
        samples += engine.step()
        assert engine.last_step is not None
        num_preempted += engine.last_step.num_preempted
    return kept, samples, num_preempted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_logits_are_the_same_to_the_bit_at_real_sizes(dtype: str) -> None:
    """All logits of every token, not the drawn ones alone: each prompt by itself, and all together in chunks, in
    another order, with a pool so small that samples are preempted. Widths of 576 and 1536 are where oneDNN's choice of
    a kernel follows the number of rows."""
    model = load_model(ALIAS, dtype=dtype)
    prompts = dict(enumerate(texts(model, 8, length)[uid] for uid, length in enumerate((12, 14, 31))))
    alone: dict[int, Tensor] = {}
    for uid, ids in prompts.items():
        alone |= kept_logits(model, {uid: ids}, max_running=1)[0]
    backwards = dict(reversed(prompts.items()))
    together, samples, num_preempted = kept_logits(model, backwards, max_running=5, max_prefill_tokens=5, kv_tokens=64)
    assert num_preempted > 0
    assert len(samples) == 6
    assert together.keys() == alone.keys()
    assert len(alone) == 3 * (6 + 4)
    for key, logits_V in alone.items():
        assert torch.equal(logits_V, together[key])
