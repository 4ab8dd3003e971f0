"""What a micro-batch takes while it is scored or trained, and what may come on top of all that. Imports no torch.

Each term is a number of its own. Those above `slack_terms` are what is expected: with SmolLM2-135M in bfloat16 on a
CPU, micro-batches of 229 to 3,664 tokens keep 0 to 20 MiB + 2 % more than `activation_bytes` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plait.cost.connections import GROUP_BYTES
from plait.cost.costs import Amount
from plait.cost.experts import pair_bytes
from plait.cost.kept_sets import KeptSets
from plait.cost.layer_kinds import layer_kinds
from plait.cost.micro_batch import LargestBatch
from plait.cost.shape_parameters import adapter_copies, adapter_inputs
from plait.kept_memory import NUM_KERNELS, NUM_PREPARED
from plait.layout.move import BUCKET_BYTES
from plait.models.logits_room import head_chunk_bytes, head_chunk_rows, kept_logits_bytes
from plait.models.lora_settings import NO_LORA, LoraSettings
from plait.models.shape import KEPT_SCORES, ModelShape
from plait.recipes.recipe import Recipe

IMPORTS_BYTES = 525 << 20
"""Resident before any weight: Python, torch, Transformers, the tokenizer. Measured with tiny models: 518 to 537 MiB."""
KERNEL_BYTES, PREPARED_BYTES = 256 << 10, 1 << 20
"""Bytes of one kernel that oneDNN keeps, and of one product that torch keeps ready for it. Measured: 0.24 and 1 MB."""
PROCESS = "process: libraries, tokenizer, kept kernels"
PROCESS_BYTES = IMPORTS_BYTES + NUM_KERNELS * KERNEL_BYTES + NUM_PREPARED * PREPARED_BYTES

CONTEXT_BYTES = 544 << 20
"""On a GPU what CUDA keeps of it for a process: its context, code of kernels. Not measured here: 0.5 to 1 GB are usual
with workspaces of products, which are named by themselves."""
CONTEXT = "CUDA context, code of libraries"
WORKSPACES, WORKSPACE_BYTES = 3, 8 * 4096 << 10
"""cuBLAS has one for each thread that asks for products and each stream: those of forwards, of backwards (torch's own
thread), and of captures. torch takes them among its tensors. By torch's default (`CUBLAS_WORKSPACE_CONFIG`) one is
:4096:8, 32 MiB, on GPUs of the kinds of H100 and B200; on others :4096:2:16:8, 8.1 MiB, which is not told apart."""
CUBLAS = "cuBLAS: workspaces of products"
NCCL, MESSAGES = "NCCL: buffers of communicators", "NCCL: buffers of messages, of weights and samples"

COMPILING_BYTES = 256 << 20
"""While numba compiles, in the first process on a machine. Measured: 237 MiB in float32, 245 in bfloat16."""
GAPS_SHARE = 0.15
"""Share of the activations that is gaps between tensors of many sizes, which the allocator keeps."""
READING_SHARE = 1.75
"""What reading a model's weights takes beside them, as a share of them. Measured with SmolLM2-135M: 447 MiB for 257."""


KEPT = "activations of training, whose memory the process keeps"


def keeps_freed(device: str) -> bool:
    """Whether what activations took stays with the process when they are gone, where generation cannot use it.

    On a CPU their tensors, of up to 32 MiB each, come from the C library's heap, which does not shrink while anything
    lies above them; pools of keys and values, and packed weights, have pages of their own. Larger tensors, such as
    float32 logits of a chunk and the gradient of a head, go back to the system. Measured of the demo: 5.1 of 5.2 GiB
    stay, with adapters 3.0 of 3.0. On a GPU one allocator serves all.
    """
    return device == "cpu"


def process_terms(device: str, num_devices: int) -> dict[str, int]:
    """What a process holds of its device's memory before any weight, in bytes: on a CPU itself; on a GPU what CUDA
    keeps of it and what products need, and of several GPUs what NCCL takes to connect all of them. The other groups of
    a plan are beside it (`connections`)."""
    if device == "cpu":
        return {PROCESS: PROCESS_BYTES}
    groups = {NCCL: GROUP_BYTES} if num_devices > 1 else {}
    return {CONTEXT: CONTEXT_BYTES, CUBLAS: WORKSPACES * WORKSPACE_BYTES} | groups


OUTSIDE = (CONTEXT, NCCL, MESSAGES)
"""What is held of a GPU and is no tensor of torch's; messages, from the first move on."""


@dataclass(frozen=True)
class Activations:
    """Bytes that a micro-batch takes. kept: for the backward, of all layers; again: beside these, of the one layer that
    is computed again at a time; 0 where none is"""

    kept: int
    again: int = 0


@dataclass(frozen=True)
class Blocks:
    """How the blocks of one rank compute.

    width:         bytes of a number in the compute dtype
    fused:         as of `layer_bytes`
    checkpointed:  a block keeps its input alone, and one at a time is computed again
    tp:            ranks that divide them
    splits_tokens: what enters a block, norms and residuals are divided over tp, too (`sequence_parallel`); of a block
                   that is computed again, what enters the products is not
    by_kernel:     attention is one kernel, as on GPUs (`flash_plan`, `flex_plan`), which keeps no weights
    by_masks:      of a forward without a backward, on a GPU (`experts.passing_elements`)
    balanced:      logits of routers are kept for a loss of theirs (`optimizer.router_aux_loss_coef`), by each rank of
                   tp all of them, of a block that is computed again as well
    """

    width: int
    fused: bool
    checkpointed: bool = False
    tp: int = 1
    splits_tokens: bool = False
    by_kernel: bool = False
    by_masks: bool = False
    balanced: bool = False


def activations_by_kind(
    shape: ModelShape, batch: LargestBatch, blocks: Blocks, lora: LoraSettings = NO_LORA
) -> tuple[Activations, ...]:
    """`activation_bytes` of as many layers, all of one kind: for each of `layer_kinds`."""
    by_kind = []
    for kind in layer_kinds(shape):
        copied = adapter_copies(kind.shape, lora, blocks.width, blocks.tp)
        whole = activation_bytes(kind.shape, batch, blocks, adapter_inputs(kind.shape, lora), copied)
        inputs = batch.tokens * _inputs(shape, blocks)
        routed = blocks.width * batch.tokens * kind.shape.experts * kind.shape.expert_layers if blocks.balanced else 0
        kept, again = (inputs, whole - inputs) if blocks.checkpointed else (whole, 0)
        by_kind.append(Activations(kept + routed, again))
    return tuple(by_kind)


def stage_activations(
    kinds: Sequence[Activations], counts: Sequence[int], num_layers: int, num_in_flight: int | None
) -> int:
    """What micro-batches keep of the layers of a stage, and the widest of its layers if they are computed again.

    Args:
        kinds: of all layers of the model, if they were of one kind: by kind.
        counts: layers of the stage, by kind; num_layers: of the model.
        num_in_flight: micro-batches at a time; None: nothing is kept for a backward, one layer's activations at a time.
    """
    layers = [(kind, count) for kind, count in zip(kinds, counts, strict=True) if count]
    if num_in_flight is None:
        return int(max(kind.kept / num_layers for kind, _ in layers))
    kept = sum(num_in_flight * count * (kind.kept / num_layers) for kind, count in layers)
    return int(kept + max((kind.again for kind, _ in layers), default=0))


def _inputs(shape: ModelShape, blocks: Blocks) -> int:
    """Bytes of a token that enter all blocks."""
    return shape.layers * shape.hidden * blocks.width // (blocks.tp if blocks.splits_tokens else 1)


def activation_bytes(shape: ModelShape, batch: LargestBatch, blocks: Blocks, low: int = 0, copied: int = 0) -> int:
    """What the blocks of one rank of tp keep for their backward, and the attention weights, as long as they are few.

    Args:
        low: numbers of a token that adapters make of all blocks' inputs (`shape_parameters.adapter_inputs`).
        copied: numbers of adapters themselves, of all blocks (`shape_parameters.adapter_copies`).
    """
    between, within = layer_bytes(shape, blocks.width, fused=blocks.fused, by_kernel=blocks.by_kernel)
    ways = blocks.tp if blocks.splits_tokens else 1
    together = 2 * blocks.width * shape.hidden if blocks.splits_tokens and blocks.checkpointed else 0
    kept = together + (between - together) // ways + within // blocks.tp + blocks.width * low // shape.layers
    kept += pair_bytes(shape, blocks.width, blocks.tp, fused=blocks.fused, by_masks=blocks.by_masks)
    count = 1 if blocks.checkpointed else shape.layers
    inputs = _inputs(shape, blocks) if blocks.checkpointed else 0
    kept_scores = 0 if blocks.by_kernel else min(KEPT_SCORES, shape.heads * batch.scores)
    scores = count * blocks.width * kept_scores // blocks.tp * shape.attending // shape.layers
    return batch.tokens * (kept * count + inputs) + scores + blocks.width * copied * count // shape.layers


def layer_bytes(shape: ModelShape, width: int, *, fused: bool, by_kernel: bool = False) -> tuple[int, int]:
    """Bytes of one token in one block, kept for the backward: between the products that ranks of tp divide (inputs,
    norms, residuals, and what is added to these), and within them.

    Fused: the block's input, the norm of it, queries, keys, values and attention, the projection of that, the residual
    and its norm; gate, up and their product. Else the activated gate, too, and the norms' inputs in float32.
    """
    heads = shape.heads if by_kernel and _expands_keys(shape, width) else shape.kv_heads
    attention = width * 2 * (shape.heads + heads) * shape.head_dim
    if by_kernel:
        attention += 4 * shape.heads  # log-sum-exps
    mixers = len(shape.recurrent) * shape.mixer.kept_bytes(width)
    attention = (shape.attending * attention + mixers) // shape.layers
    if fused:
        return width * 5 * shape.hidden, attention + width * 3 * shape.active_intermediate
    return (4 * width + 4 * 2) * shape.hidden, attention + width * 4 * shape.active_intermediate


def _expands_keys(shape: ModelShape, width: int) -> bool:
    """Whether the kernel of such layers takes keys and values once for each query head (`flex_plan`), and not as they
    are (`flash_plan`). So it does with a softcap or sinks, of which a shape does not know, and for the few rows with
    prompts many times as long as their responses: no room is kept for these, as the slack is larger. Nor is room kept
    for what either takes for a moment in a layer's backward: the head's takes more."""
    return width != 2 or any(shape.windows)


def logits_bytes(shape: ModelShape, width: int, device: str, tp: int) -> int:
    """Bytes of the rows that pass the head of a language model at a time, on the rank of tp that has most of it."""
    vocabulary = -(-shape.vocabulary // tp)
    return head_chunk_bytes(vocabulary, width, device)


def kept_logits(shape: ModelShape, width: int, device: str, tokens: int, tp: int = 1) -> int:
    """Bytes of logits that the forward of a micro-batch leaves for its backward, where activations are kept: of a whole
    linear head, in a dtype in which one kernel does all with them (`compute.head_kernels`).

    Args:
        tokens: of the micro-batch, all of which may be read.
    """
    if tp > 1 or width not in ((2,) if device == "cpu" else (2, 4)):
        return 0
    return min(tokens * shape.vocabulary * width, kept_logits_bytes(device))


def head_gradient_bytes(shape: ModelShape, width: int, tp: int) -> int:
    """Beside the accumulated one, while the head's weights are trained; as of `logits_bytes`."""
    return -(-shape.vocabulary // tp) * shape.hidden * (4 + 2 * width)


def sets_at_head(shape: ModelShape, width: int, tp: int, sets: KeptSets) -> int:
    """Bytes on a GPU of what the tokens of one chunk of logits were drawn from."""
    rows = head_chunk_rows(-(-shape.vocabulary // tp), width, "cuda")
    return sets.placed_bytes(rows, width)


WIDE_NUMBER_BYTES = 32
"""What a number of a column of several per token takes on a device: itself, as it comes and as it is read or sent (10),
what a loss keeps of the log-probs that belong to it (10 for a divergence from a mixture), and what its forward and
backward take for a moment (12)."""


def wide_bytes(batch: LargestBatch) -> int:
    """What the numbers of columns of several per token take, where the head is."""
    return WIDE_NUMBER_BYTES * batch.numbers * batch.tokens


def is_fused(recipe: Recipe) -> bool:
    """Whether kernels compute norms and gates, where the family's are of the common form: `kernels.fused_rows` on a
    CPU, on a GPU those of liger-kernel, which is taken to be installed there."""
    return recipe.device == "cuda" or recipe.dtype == "bfloat16"


def fused_at_worst(device: str, *, fused: bool) -> bool:
    """Whether layers are fused in what there is to be room for: on a CPU also in a family of another form they are not.
    On a GPU no room is kept for one: it would be on top of the fullest moment, a rollout, which has no activations."""
    return fused and device != "cpu"


def is_packed(recipe: Recipe) -> bool:
    """Whether an instance of one device lays the weights out once more, for decoding."""
    return recipe.device == "cpu" and recipe.dtype != "float64" and not recipe.sampling.exact


@dataclass(frozen=True)
class Expected:
    """Bytes by which it is told what may come on top of them.

    activations: those expected of the largest micro-batch
    plain:       of a family whose layers are not fused
    weights:     of the largest model, in the compute dtype
    working:     what the fullest moment of a step takes beyond that in which all models have been read
    widened:     what the fullest moment grows by if packed weights are (`generation_memory.widened_bytes`)
    """

    activations: Amount
    plain: Amount
    weights: Amount
    working: Amount
    widened: Amount = 0


def slack_terms(device: str, expected: Expected, *, moves: bool) -> Mapping[str, Amount]:
    """What may come on top of what is expected, in bytes; with it the expected becomes an upper bound.

    Args:
        device: cpu or cuda.
        moves: whether weights are moved between layouts or leave the device.
    """
    activations = expected.activations
    terms: dict[str, Amount] = {"gaps that the allocator keeps": np.floor(GAPS_SHARE * activations)}
    plain = np.maximum(0, expected.plain - activations)
    terms["activations, where the family's layers are not of the common form"] = plain
    if device == "cpu":
        terms["compiling kernels, in the first run on a machine"] = COMPILING_BYTES
        terms["packed weights, where a CPU without AVX-512 computes with the family's own layers"] = expected.widened
    if moves:
        terms["buckets of a move"] = 2 * BUCKET_BYTES
    # Reading is over when the first step begins; a GPU gets what its host has read.
    if device == "cpu":
        reading = np.maximum(0, np.floor(READING_SHARE * expected.weights) - expected.working)
        terms["reading a model, beyond what a step takes"] = reading
    return terms


def slack_rows(device: str, expected: Expected, *, moves: bool = False) -> list[tuple[str, int]]:
    """(what, bytes) of `slack_terms` of one device, as far as there is any."""
    return [(what, int(count)) for what, count in slack_terms(device, expected, moves=moves).items() if count]
