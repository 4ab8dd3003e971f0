"""bfloat16 of Triton's interpreter, as a GPU rounds it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


def interpret_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round to the nearest; the interpreter cuts off."""
    from triton import language as tl
    from triton.runtime import interpreter

    builder_of = interpreter.InterpreterBuilder
    cast = builder_of.cast_impl

    def rounded(builder: Any, given: Any, dtype: Any) -> Any:
        if (given.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(builder, given, dtype)
        bits = torch.from_numpy(np.ascontiguousarray(given.data)).bfloat16().view(torch.int16).numpy()
        return interpreter.TensorHandle(bits.view(np.uint16).reshape(given.data.shape), tl.bfloat16)

    monkeypatch.setattr(builder_of, "cast_impl", rounded)
