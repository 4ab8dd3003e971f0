"""liger-kernel by Triton's interpreter, on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.interpreted_bfloat16 import interpret_bfloat16


def interpret_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the interpreter what it lacks: functions of CUDA's library, numbers that a kernel may convert, arithmetic of
    bfloat16."""
    from liger_kernel.ops import geglu, rms_norm
    from triton import language as tl
    from triton.runtime import interpreter

    builder_of, converted = interpreter.InterpreterBuilder, interpreter._implicit_cvt
    computed = builder_of.binary_op

    def with_numbers(argument: Any) -> Any:
        if not isinstance(argument, float):
            return converted(argument)
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    def with_bfloat16(builder: Any, left: Any, right: Any, operation: Any) -> Any:
        if left.dtype.scalar != tl.bfloat16:
            return computed(builder, left, right, operation)
        wide = [builder.cast_impl(one, tl.float32) for one in (left, right)]
        return builder.cast_impl(computed(builder, *wide, operation), tl.bfloat16)

    interpret_bfloat16(monkeypatch)
    monkeypatch.setattr(interpreter, "_implicit_cvt", with_numbers)
    monkeypatch.setattr(builder_of, "binary_op", with_bfloat16)
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: tl.rsqrt(x))  # which is another while a kernel runs
    monkeypatch.setattr(geglu, "tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1)
