"""How samples are drawn: the keys of a recipe. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from plait.errors import ConfigError
from plait.generation.sampling import Sampling, check_stop, check_temperature
from plait.paths import path_key
from plait.policy.blocks import BLOCK_TOKENS, num_blocks_for
from plait.policy.step import Limits
from plait.settings import Settings, word_or_number
from plait.speculation.promise import MAY_LOSE

MAX_DRAFT_TOKENS = 15
"""More rows of a sample would be computed as a chunk."""
DRAFT_MODEL_TOKENS = 2
"""New tokens of a sample up to which a step of a draft model is as a step of decoding: the newest one, and the one
before it where a whole draft was accepted, of which the last token was never computed."""
MIN_POOL_BYTES = 1 << 16
MIN_KV_BYTES = 1 << 20
GPU_SHARE = 0.3
"""What of a GPU's memory keys and values may take, where nothing is said."""
MOST_REPLAYED = 256
"""Rows of the largest step that a GPU replays as a graph; larger ones keep it busy without. So many samples it decodes
at a time, where nothing is said."""
MOST_REPLAYED_CHUNKS = 1024
"""Rows of prompts beside them. A graph is filled up to a power of two: beyond, that may take a GPU as long as the host
takes to launch the step (arithmetic for 7B parameters: 512 rows some 10 ms, launches 30 to 40)."""
MOST_GRAPHS_OF_PROMPTS = 16
"""Sizes of steps with prompts that have graphs: each keeps the hidden states that it computes."""


def _check_blocks(value: int) -> int:
    if 0 < value < BLOCK_TOKENS:
        raise ValueError(f"expected 0 or at least {BLOCK_TOKENS}, the tokens of a block, found {value}")
    return value


def _check_memory(value: float | None) -> float | None:
    if value is not None and not 0 < value < 1 and not (value >= MIN_KV_BYTES and value == int(value)):
        raise ValueError(
            f"expected a share of the device's memory between 0 and 1, or bytes from {MIN_KV_BYTES:,} on, found {value}"
        )
    return value


_SPECULATION = word_or_number(
    ("auto", "adaptive", "off"),
    int,
    lambda number: 1 <= number <= MAX_DRAFT_TOKENS,
    f"auto, adaptive, off or a number of tokens from 1 to {MAX_DRAFT_TOKENS}",
)
_GROUPS = word_or_number(("auto",), int, lambda number: number >= 1, "auto or a number of groups from 1 on")


class SamplingSettings(Settings):
    """Keys of the recipe's `sampling` section."""

    engine: Literal["plait", "vllm"] = Field(
        default="plait", description="who draws samples: plait, or vllm in an environment of its own (docs/engines.md)"
    )
    temperature: Annotated[float, AfterValidator(check_temperature)] = Field(
        default=1.0,
        ge=0,
        description="divides the logits before the softmax, in sampling and training alike",
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="sample from the fewest most probable tokens whose mass reaches it; 1: all"
    )
    top_k: int = Field(default=0, ge=0, description="sample from that many most probable tokens; 0: all")
    min_p: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="tokens whose probability is below this share of the most probable one's are not drawn; 0: all are",
    )
    router_replay: bool = Field(
        default=False,
        description="mixtures of experts: each token is trained by the experts that it had when it was drawn (R3)",
    )
    max_response_tokens: int = Field(
        default=256, ge=1, description="longest response, in tokens; longer ones are truncated"
    )
    stop: Annotated[tuple[str, ...], AfterValidator(check_stop)] = Field(
        default=(), description="strings that end a response, with the token that completes one"
    )
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None, description="tokens that end a response; by default the model's own"
    )
    max_running: int = Field(
        default=64,
        ge=1,
        description="samples decoded at a time, others wait; bounds the KV memory. On a GPU "
        f"{MOST_REPLAYED} unless it is set",
    )
    max_prefill_tokens: int = Field(
        default=4096, ge=1, description="prompt tokens computed in one step; what is longer is computed in chunks"
    )
    kv_tokens: int | None = Field(
        default=None,
        ge=BLOCK_TOKENS,
        description=f"tokens whose keys and values are held at most, in whole blocks of {BLOCK_TOKENS}; when they are "
        "more, the youngest samples wait and are computed again. By default max_running times the positions of the "
        "model; on a GPU times a sample of the recipe's lengths at most, within kv_memory",
    )
    kv_memory: Annotated[float | None, AfterValidator(_check_memory)] = Field(
        default=None,
        description="kv_tokens from memory: a share of each device's, such as 0.3, or bytes, such as 8e9, in which an "
        f"instance's keys and values have room. By default {GPU_SHARE} on a GPU, no bound on a CPU",
    )
    prefix_cache_tokens: Annotated[int, AfterValidator(_check_blocks)] = Field(
        default=0,
        ge=0,
        description="tokens of prompts and responses whose keys and values are kept when no sample holds them any "
        "more, for later prompts that begin alike",
    )
    speculation: Annotated[int | Literal["auto", "adaptive", "off"], _SPECULATION] = Field(
        default="auto",
        description="draft next tokens from what is known and compute several in a step, which changes no sample: "
        "adaptive (as many as pay), auto (the same, where it changes no bit either), off, or tokens of a draft",
    )
    speculation_loss: float = Field(
        default=MAY_LOSE,
        ge=0.005,
        le=0.5,
        description="share of the time of any 32 steps that auto and adaptive may lose by drafts that come out wrong; "
        "with more they draft where more is at stake, such as with a draft model for few samples (0.1)",
    )
    draft_pool_bytes: int = Field(
        default=64 << 20,
        ge=MIN_POOL_BYTES,
        description="memory for the texts in which drafts are looked up: prompts, their samples, earlier ones",
    )
    draft_model: str | None = Field(
        default=None,
        description="a small model with the tokenizer of `model`, a folder or a hub id: where its drafts pay for its "
        "seconds, it drafts, too. By default none",
    )
    decode_groups: Annotated[int | Literal["auto"], _GROUPS] = Field(
        default="auto",
        description="where a model generates in stages (pp above 1): groups of samples that go round them at the same "
        "time, so that no stage waits; auto: as many as fill the stages",
    )
    exact: bool = Field(
        default=False,
        description="logits that are the same to the bit whatever else is computed beside them; many times slower, "
        "for tests, CPU only",
    )

    _paths = path_key("draft_model")

    @model_validator(mode="after")
    def _check_pool(self) -> Self:
        if self.kv_tokens is not None and self.kv_memory is not None:
            raise ValueError("kv_tokens and kv_memory both say how large the pool is; leave one of them out")
        return self

    @model_validator(mode="after")
    def _check_drafts(self) -> Self:
        if self.draft_model is not None and self.speculation == "off":
            raise ValueError(
                f"draft_model is {self.draft_model!r}, but nothing is drafted; set speculation to auto, or leave "
                "draft_model out"
            )
        if self.speculation_loss != MAY_LOSE and self.speculation not in ("auto", "adaptive"):
            raise ValueError(
                f"speculation_loss is what auto and adaptive may lose, but speculation is {self.speculation}; set "
                "speculation to auto or adaptive, or leave speculation_loss out"
            )
        return self

    @property
    def stated_groups(self) -> int | None:
        """`decode_groups`, where it is a number; None: it is left open."""
        return None if self.decode_groups == "auto" else self.decode_groups

    @property
    def states_running(self) -> bool:
        """Whether `max_running` was set, and is not what a device takes by itself."""
        return "max_running" in self.model_fields_set

    @property
    def filters(self) -> bool:
        """Whether top-k, top-p or min-p chooses tokens."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def num_blocks(self, max_positions: int) -> int:
        """Blocks of the pool of an engine whose model has so many positions.

        Raises:
            ConfigError: they depend on the memory of a device, see `sized`.
        """
        if self.kv_memory is not None:
            raise ConfigError(
                f"`sampling.kv_memory` is {self.kv_memory:g}, but an engine takes `kv_tokens`; `settings.sized(...)` "
                "makes the one of the other"
            )
        if self.kv_tokens is not None:
            return self.kv_tokens // BLOCK_TOKENS
        return self.max_running * num_blocks_for(max_positions)

    def sized(
        self, max_positions: int, token_bytes: int, device: str, device_bytes: Callable[[], int | None]
    ) -> SamplingSettings:
        """With `max_running` of the device, unless it is set, and `kv_tokens` in place of what they follow from.

        Args:
            token_bytes: of the keys and values of one token, all layers and heads.
            device: cpu or cuda.
            device_bytes: says how much memory it has, where that is asked; None: it is not here, and bounds nothing.

        Raises:
            ConfigError: the memory has no room for one block.
        """
        running = MOST_REPLAYED if device != "cpu" and not self.states_running else self.max_running
        if self.kv_tokens is not None:
            return self.model_copy(update={"max_running": running})
        memory, key = self.kv_memory, "`sampling.kv_memory`"
        if memory is None and device != "cpu":
            memory, key = GPU_SHARE, "the memory for keys and values (`sampling.kv_memory`)"
        blocks = running * num_blocks_for(max_positions)
        if memory is not None and memory < 1:
            known = device_bytes()
            budget = None if known is None else int(memory * known)
        else:
            budget = None if memory is None else int(memory)
        if budget is not None:
            blocks = min(blocks, budget // max(1, BLOCK_TOKENS * token_bytes))
            if blocks < 1:
                raise ConfigError(
                    f"{key} is {memory:g}, {budget} bytes, but one block of {BLOCK_TOKENS} tokens takes "
                    f"{BLOCK_TOKENS * token_bytes}; give more"
                )
        held = {"kv_tokens": blocks * BLOCK_TOKENS, "kv_memory": None}
        return self.model_copy(update={"max_running": running, **held})

    def limits(self, max_positions: int) -> Limits:
        """What decisions about steps depend on."""
        return Limits(
            self.max_running,
            self.max_prefill_tokens,
            self.num_blocks(max_positions),
            cache_blocks=self.prefix_cache_tokens // BLOCK_TOKENS,
        )

    def sampling(self, **changes: object) -> Sampling:
        """What a request carries; `changes` (`temperature=0.0`, for an evaluation) win over the settings."""
        asked = Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            max_tokens=self.max_response_tokens,
            stop_token_ids=self.stop_token_ids,
            stop=self.stop,
        )
        return replace(asked, **changes)  # type: ignore[arg-type]
