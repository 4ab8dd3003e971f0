"""Compile what computes on GPUs as it would be launched, by Triton's own compiler, for
GPUs that need not be here.

    python -m tests.kernels.compiled_for_gpus CAPABILITY SHARED_BYTES

Each line of what is printed: a kernel, and the bytes of shared memory that a program of it takes. TRITON_INTERPRET must
not be set.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from plait.kernels import (
    device_attention,
    device_draw,
    device_draw_kernels,
    device_gather,
    device_gather_kernels,
    device_head_kernels,
    device_kernels,
    device_logprobs,
    device_rotation,
    device_rotation_kernels,
    device_rows,
)
from plait.kernels.noise import DrawNoise
from plait.kernels.paged_call import PagedCall
from plait.models.compute.layer_forms import GEMMA, LLAMA
from tests.kernels.test_paged_attention import random_tree, work

TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}

SIZES = [(9, 3, 64, 64), (12, 2, 128, 128), (8, 4, 256, 256), (16, 1, 192, 128), (4, 2, 80, 80)]
"""Query heads, key heads, numbers of keys and values of a head."""
OPTIONS: list[dict[str, Any]] = [{}, {"window": 100}, {"window": 33, "softcap": 30.0}]


class Compiled:
    """In the place of a kernel: a launch compiles it."""

    def __init__(self, kernel: Any, capability: int) -> None:
        self._kernel, self._target = kernel, GPUTarget("cuda", capability, 32)

    def __getitem__(self, grid: tuple[int, ...]) -> Compiled:
        return self

    def __call__(
        self,
        *arguments: Any,
        num_stages: int = 3,
        num_warps: int = 4,
        enable_fp_fusion: bool = True,
        **constants: Any,
    ) -> None:
        given = dict(zip(self._kernel.arg_names, arguments, strict=False))
        fixed = {param.name for param in self._kernel.params if param.is_constexpr}
        constants |= {name: value for name, value in given.items() if value is None or name in fixed}
        signature = {name: "constexpr" if name in constants else _type(value) for name, value in given.items()}
        signature |= dict.fromkeys(constants, "constexpr")
        # As Triton finds it at a launch: what is never specialised says nothing.
        aligned = [
            (isinstance(x, Tensor) and not param.do_not_specialize_on_alignment)
            or (isinstance(x, int) and not param.do_not_specialize and param.name not in constants and x % 16 == 0)
            for param, x in zip(self._kernel.params, arguments, strict=False)
        ]
        attributes = {(place,): [["tt.divisibility", 16]] for place, is_so in enumerate(aligned) if is_so}
        source = ASTSource(self._kernel, signature, constants, attributes)
        options = {"num_stages": num_stages, "num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
        made = triton.compile(source, target=self._target, options=options)
        print(self._kernel.__name__, made.metadata.shared, flush=True)  # type: ignore[attr-defined]


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def main(capability: int, shared_bytes: int) -> None:
    for name in ("attend", "merge", "store"):
        setattr(device_kernels, name, Compiled(getattr(device_kernels, name), capability))
    for name in ("logprobs", "logprobs_backward"):
        setattr(device_head_kernels, name, Compiled(getattr(device_head_kernels, name), capability))
    for name in ("tops", "choose", "weigh", "decide"):
        setattr(device_draw_kernels, name, Compiled(getattr(device_draw_kernels, name), capability))
    device_rotation_kernels.rotate = Compiled(device_rotation_kernels.rotate, capability)
    for name in ("gather", "fold"):
        setattr(device_gather_kernels, name, Compiled(getattr(device_gather_kernels, name), capability))
    if device_rows.AVAILABLE:
        from liger_kernel.ops import geglu, rms_norm, swiglu

        for module in (rms_norm, swiglu, geglu):
            for name, kernel in list(vars(module).items()):
                if isinstance(kernel, triton.JITFunction) and name.endswith("_kernel"):
                    setattr(module, name, Compiled(kernel, capability))
    device_attention.shared_bytes_of = lambda device: shared_bytes  # type: ignore[assignment]
    device_attention.programs_for = lambda device: 264  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        for sizes in SIZES:
            for options in OPTIONS if sizes == SIZES[0] else OPTIONS[:1]:
                sinks = {"sinks": torch.zeros(sizes[0], dtype=dtype)} if options else {}
                for held, rows in (([100], [1]), ([700, 700], [16, 3])):  # in one part, and in several
                    given = work(dtype, sizes, held, rows, seed=0)
                    device_attention.paged_attention(PagedCall(*given, scale=0.1, **options, **sinks))
        given = work(dtype, SIZES[0], [700, 3], [7, 1], seed=0)
        query, key_pool, value_pool = given[:3]
        rows = query[:, :3].transpose(0, 1), query[:, 3:6].transpose(0, 1)
        device_attention.store(key_pool, value_pool, torch.zeros(len(query), dtype=torch.int64), *rows)
        trees = (random_tree(7, generator), None)
        device_attention.paged_attention(PagedCall(*given, trees, scale=0.1, window=40))
        compile_gather(dtype)
        compile_head(dtype)
        compile_draw(dtype)
        compile_rotation(dtype)
        if device_rows.AVAILABLE:
            compile_rows(dtype)


def compile_gather(dtype: torch.dtype) -> None:
    """For keys of two and of three heads."""
    table = device_gather.GatherTable(*torch.zeros(3, 5, dtype=torch.int32).unbind())
    for sizes in SIZES[:2]:
        keys = torch.zeros(4, sizes[1], sizes[2], dtype=dtype)
        device_gather.folded(*device_gather.gathered(keys, keys, table), table)


def compile_head(dtype: torch.dtype) -> None:
    logits, targets = torch.zeros(2, 151_936, dtype=dtype), torch.zeros(2, dtype=torch.int64)
    first, second, third = torch.zeros(3, 2).unbind()
    device_logprobs.logprobs(logits, 0.7, targets, first, second, third, torch.zeros(2, dtype=torch.bool))
    for given in ((first, None), (None, second), (first, second)):
        device_logprobs.logprobs_backward_(logits, 0.7, targets, third, second, *given)


def compile_draw(dtype: torch.dtype) -> None:
    logits, zeros = torch.zeros(2, 151_936, dtype=dtype), torch.zeros(2, dtype=torch.int64)
    keys = DrawNoise(zeros, zeros)
    temperature, greedy = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.bool)
    device_draw.draw(logits, keys, 64)
    device_draw.draw(logits, keys, 64, greedy_B=greedy, all_greedy=True)
    device_draw.draw(logits, keys, 64, temperature_B=temperature, greedy_B=greedy, threshold_B=torch.zeros(2))


def compile_rotation(dtype: torch.dtype) -> None:
    for query_heads, key_heads, size in ((12, 2, 128), (9, 3, 64), (4, 4, 80)):
        query, key = (torch.zeros(1, 3, heads, size, dtype=dtype).transpose(1, 2) for heads in (query_heads, key_heads))
        cos = torch.zeros(1, 3, size, dtype=dtype)
        for computes in (device_rotation.rotated, device_rotation.rotated_backward):
            computes(query, key, cos, cos)


def compile_rows(dtype: torch.dtype) -> None:
    """A hidden state's norm, and one of heads, of many rows."""
    for rows, size in ((3, 1536), (1 << 15, 128)):
        x, weight = torch.zeros(rows, size, dtype=dtype), torch.zeros(size, dtype=dtype)
        for form in (LLAMA, GEMMA):
            _, inverse, launch = device_rows.normalised(x, weight, 1e-6, *form)
            for needs in (True, False) if form is LLAMA else (True,):
                device_rows.normalised_backward(x, x, weight, inverse, launch, needs_weight=needs)
    gate, up = torch.zeros(2, 3, 8960, dtype=dtype).unbind()
    for forward, backward in (
        (device_rows.gated_silu, device_rows.gated_silu_backward_),
        (device_rows.gated_gelu, device_rows.gated_gelu_backward_),
    ):
        backward(forward(gate, up), gate, up)


if __name__ == "__main__":
    assert not device_kernels.INTERPRETED, "TRITON_INTERPRET is set"
    main(*map(int, sys.argv[1:]))
