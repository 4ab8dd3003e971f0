"""Work of one model, and how long it takes: forwards, backwards, steps of decoding, optimizer steps. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.cost.measured.stopwatch import clock, now, repeats, seconds_of, typical, typical_behind
from plait.data.packed import PackedBatch, pack
from plait.data.records import Prompt
from plait.generation.engine import Engine
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.models.files.pretrained import new_module
from plait.models.language_loading import from_module
from plait.models.language_model import LanguageModel
from plait.models.layer_types import MLP_LAYERS, RECURRENT_LAYERS, kinds_of_layers, stating_kinds
from plait.policy.blocks import BLOCK_TOKENS, num_blocks_for
from plait.training.optimizer import MasterOptimizer
from plait.training.settings import OptimizerSettings

SAMPLE_TOKENS = 64
"""Tokens of prompt and response in the rows of forwards."""
PACKED_TIMES = 3
CAPTURED = (16, 64)
"""Samples and context of a step that is captured: how large it is says little of how long that takes."""
PREFILL_TOKENS = 16_384
"""Tokens of prompts that are computed in one step, before steps are measured."""


def random_model(config: Mapping[str, Any], layers: int, dtype: str, device: str) -> LanguageModel:
    """With random weights, and so many layers in place of the configuration's."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    read = {**config, "num_hidden_layers": layers}
    again = lambda kinds: [kinds[layer % len(kinds)] for layer in range(layers)]
    if mix := least_mix(config):
        read |= stating_kinds(str(config["model_type"]), again(mix))
    if kinds := config.get("mlp_layer_types"):
        read["mlp_layer_types"] = again(kinds)
    # On the device itself, where drawing billions of numbers takes no time.
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        module = new_module(CONFIG_MAPPING[read["model_type"]].from_dict(read), decoder_only=False)
    model = from_module(module, None, dtype, device, name=f"{layers} layers")
    model.tokenizer = _NoTexts()
    return model


def least_mix(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Kinds of layers of which any number of times as many have the mix of the configuration's. Where some keep a state
    and some attend, those are one of the rarest kind with as many of the others as there are for each, rounded: none of
    these families is admitted with one kind alone. Empty: the configuration names none."""
    kinds = kinds_of_layers(config, int(config.get("num_hidden_layers") or 0))
    alike: dict[str, list[str]] = {}
    for kind in kinds:
        name = kind if kind in MLP_LAYERS else "recurrent" if kind in RECURRENT_LAYERS else "attending"
        alike.setdefault(name, []).append(kind)
    if "recurrent" not in alike or len(alike) == 1:
        return kinds
    *others, rarest = sorted(alike.values(), key=len, reverse=True)
    return (*(kind for other in others for kind in other[: round(len(other) / len(rarest))]), rarest[0])


def mix_of(config: Mapping[str, Any]) -> int:
    """Layers of `least_mix` where some keep a state; 1 where all attend."""
    mix = least_mix(config)
    return len(mix) if RECURRENT_LAYERS.intersection(mix) and len({*mix}) > 1 else 1


class _NoTexts:
    """A tokenizer where only numbers of tokens matter."""

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        return ""


def row(tokens: int, model: LanguageModel) -> PackedBatch:
    """Samples of SAMPLE_TOKENS, all but the first token responses."""
    sample_tokens = min(tokens, response_tokens(model.max_positions))
    groups = [([1], [[2] * (sample_tokens - 1)]) for _ in range(tokens // sample_tokens)]
    return pack(groups, model.device)


Forward = Callable[[LanguageModel, PackedBatch], Tensor]
"""A model's forward of a batch, of which the sum has a backward."""


def _logprobs(model: LanguageModel, batch: PackedBatch) -> Tensor:
    return model.logprobs(batch, 1.0)[0]


def forward_s(model: LanguageModel, tokens: int, run: Forward = _logprobs) -> float:
    """Seconds of a forward without gradients.

    Args:
        tokens: T, all of them in one packed row.
        run: the forward; by default to log-probs [R].
    """
    batch = row(tokens, model)
    with torch.no_grad():
        return seconds_of(lambda: run(model, batch), model.device.type)


def backward_s(model: LanguageModel, tokens: int, run: Forward = _logprobs) -> float:
    """Seconds of a backward whose gradients are added up as in training, after a forward that is not counted.

    Args:
        tokens: T, all of them in one packed row.
        run: the forward, whose sum has the backward; by default to log-probs [R].
    """
    batch, optimizer = row(tokens, model), optimizer_of(model)

    def once() -> float:
        with optimizer.collecting_gradients():
            total = run(model, batch).sum()
            started = now(model.device.type)
            total.backward()
            return now(model.device.type) - started

    once()  # the first gradients go into memory that nobody has touched: many times as long
    taken: list[float] = []
    for _ in repeats(taken):
        taken.append(once())
    return typical(taken)


def layers_alone(model: LanguageModel, batch: PackedBatch) -> Tensor:
    """Hidden states [T, H] in the compute dtype, which the head does not read."""
    return model.stage(batch)


def decode_s(model: LanguageModel, samples: int, context: int) -> float:
    """Seconds of a step in which each of `samples` draws a token, after prompts of so many tokens."""
    return _steps_s(model, samples, context, response_tokens(model.max_positions))


def decode_by_layers_s(model: LanguageModel, samples: int, context: int) -> float:
    """As `decode_s` on a CPU, by the model's own layers over packed weights, as where ranks share them."""
    return _steps_s(model, samples, context, response_tokens(model.max_positions), by_layers=True)


def capture_s(model: LanguageModel) -> float:
    """Seconds in which a step is captured again that was before, at other addresses, as in each rollout of a process
    that does more than generate; 0 where none is."""
    samples, context = CAPTURED
    tokens = response_tokens(model.max_positions)
    engine = engine_for(model, samples, context, tokens)
    if (captured := engine.state.forward.module.captured) is None:
        return 0.0
    begin(engine, samples, context, tokens)
    engine.step()
    captured.drop()
    before = captured.seconds
    engine.step()
    taken = captured.seconds - before
    end(engine)
    return taken


def _steps_s(model: LanguageModel, samples: int, context: int, tokens: int, *, by_layers: bool = False) -> float:
    engine = engine_for(model, samples, context, tokens)
    if by_layers:
        engine.state.forward.module.prepare()  # what is prepared computes, and nothing else is made
    begin(engine, samples, context, tokens)
    if model.device.type != "cpu":
        engine.step()  # captures the step that follows, which takes some ten times as long
    taken: list[float] = []
    for _ in repeats(taken):
        # A GPU's step waits for the one before it, while its own goes on: nothing else may be waited for in between.
        started = clock(model.device.type)
        engine.step()
        taken.append(clock(model.device.type) - started)
    end(engine)
    return typical(taken) if model.device.type == "cpu" else typical_behind(taken)


def response_tokens(positions: int) -> int:
    """Tokens of a response, of which some are drawn: more than steps are measured, where the model has room."""
    return min(SAMPLE_TOKENS, positions // 2)


def engine_for(model: LanguageModel, samples: int, context: int, tokens: int) -> Engine:
    """With room for these samples alone: a GPU's pool is taken as a whole, and models may have many positions."""
    longest = tokens + waits(model.device.type, samples, context)
    settings = {
        "max_running": samples,
        "kv_tokens": (samples + 1) * num_blocks_for(context + longest + 1) * BLOCK_TOKENS,
        "max_response_tokens": longest,
        "max_prefill_tokens": prefill_tokens(context),
        "speculation": "off",
    }
    return Engine(model, SamplingSettings.model_validate(settings))


def prefill_tokens(context: int) -> int:
    """Tokens of prompts that a step computes at most."""
    return max(context + 1, PREFILL_TOKENS)


def num_prompts(device: str, samples: int) -> int:
    """That samples are drawn of, see `begin`."""
    return 1 if device == "cpu" else samples


def prompt_tokens(number: int, context: int, vocabulary: int) -> tuple[int, ...]:
    """Token ids of a prompt that begins otherwise than those of other numbers: of one token, where the vocabulary has
    so many; else the first ones differ."""
    (rest, first), place = divmod(number, vocabulary), 1
    token_ids = [first] * context
    while rest:
        rest, digit = divmod(rest, vocabulary)
        token_ids[place] = (first + digit) % vocabulary
        place += 1
    return tuple(token_ids)


def waits(device: str, samples: int, context: int) -> int:
    """Steps that the first sample draws tokens in until the last one begins: it is to be there still."""
    return -(-num_prompts(device, samples) * context // prefill_tokens(context)) - 1


def begin(engine: Engine, samples: int, context: int, tokens: int, token_id: int = 1) -> None:
    """Step an engine until all samples have begun.

    On a CPU they are of one prompt. On a GPU each has its own, and no two begin alike: keys and values that all samples
    share stay in its cache, and are read in no time.

    Args:
        engine: with nothing in flight.
        samples: that are drawn at a time.
        context: tokens of each prompt; tokens: that each sample draws together with all others.
        token_id: number of the first prompt, see `prompt_tokens`.
    """
    device = engine.model.device.type
    prompts, longest = num_prompts(device, samples), tokens + waits(device, samples, context)
    sampling, each = Sampling(max_tokens=longest, stop_token_ids=()), samples // prompts
    vocabulary = engine.model.module.get_input_embeddings().num_embeddings
    for uid in range(prompts):
        prompt = Prompt(uid, "", prompt_tokens(token_id + uid, context, vocabulary))
        engine.add(Request(prompt, each, sampling, NoiseKey(0), (longest,) * each))
    engine.step()
    while len(engine.said) < samples:
        engine.step()


def end(engine: Engine) -> None:
    """Take all samples out, and give the memory of graphs and of keys and values back: the next engine may need it
    before this one is collected."""
    engine.halt(parks=False)
    engine.state.forward.drop()
    engine.state.pool.clear()


def prompt_s(model: LanguageModel, context: int) -> float:
    """Seconds of a prompt of so many tokens in generation, and of drawing a token; not those of packing weights."""
    tokens = response_tokens(model.max_positions)
    engine = engine_for(model, 1, context, tokens)
    taken: list[float] = []
    for number in repeats(taken):
        started = now(model.device.type)
        begin(engine, 1, context, tokens, 1 + number)  # no prompt begins as one before
        assert engine.last_step is not None
        taken.append(now(model.device.type) - started - engine.last_step.packing_s)
        engine.abort(0)
    return typical(taken)


def packing_s(model: LanguageModel) -> float:
    """Seconds in which an engine packs the model's weights again for the next responses; about zero where it does
    not."""
    tokens = response_tokens(model.max_positions)
    engine = engine_for(model, 1, 8, tokens)
    taken: list[float] = []
    for _ in range(PACKED_TIMES):
        begin(engine, 1, 8, tokens)
        assert engine.last_step is not None
        taken.append(engine.last_step.packing_s)
        engine.abort(0)  # nothing is in flight: the copy goes, its memory stays
    return typical(taken)


def optimizer_s(model: LanguageModel) -> float:
    """Seconds of an optimizer step for each number that it updates."""
    optimizer = optimizer_of(model)
    return seconds_of(lambda: optimizer.step(True), model.device.type) / optimizer.masters.numel()


def optimizer_of(model: LanguageModel) -> MasterOptimizer:
    return MasterOptimizer(model, OptimizerSettings.model_validate({}), 100)
