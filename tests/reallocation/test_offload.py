"""An idle role in host memory: its bytes leave the device, its values come back, its views stay views."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.reallocation.offload import HostMemory
from plait.runtime.process import resident_bytes


def role() -> tuple[dict[str, torch.Tensor], nn.Linear]:
    buffers = {"weights": torch.arange(1000, dtype=torch.bfloat16), "masters": torch.arange(333, dtype=torch.float32)}
    module = nn.Linear(30, 20, bias=False, dtype=torch.bfloat16)
    module.weight.data = buffers["weights"][64:664].view(20, 30)
    return buffers, module


def run(steps) -> list[int]:
    return [record.bytes for record in steps if record.kind in ("OFFLOAD", "ONLOAD")]


def test_there_and_back() -> None:
    buffers, module = role()
    before, memory = {name: buffer.clone() for name, buffer in buffers.items()}, HostMemory(buffers, name="critic")
    ones = torch.ones(30, dtype=torch.bfloat16)
    answer = module(ones)
    assert (memory.device_bytes, memory.is_away) == (3332, False)
    assert run(memory.offloading(bucket_bytes=512)) == [512, 512, 512, 464, 512, 512, 308]
    assert (memory.device_bytes, memory.is_away) == (0, True)
    assert sum(run(memory.onloading())) == 3332
    assert (memory.device_bytes, memory.is_away) == (3332, False)
    assert all(torch.equal(buffers[name], before[name]) for name in buffers)
    assert torch.equal(module(ones), answer), "the parameter is a view of the buffer as before"
    module.weight.data.zero_()
    assert int((buffers["weights"] != 0).sum()) == 63 + 336


def test_what_does_not_change_is_copied_out_once() -> None:
    buffers, _ = role()
    memory = HostMemory(buffers, keep=True)
    assert sum(run(memory.offloading())) == 3332
    assert sum(run(memory.onloading())) == 3332
    assert run(memory.offloading()) == []
    assert memory.device_bytes == 0


def test_between_the_steps_of_an_offload() -> None:
    """Each buffer has its memory until it is copied: given up half way, what is away comes back."""
    buffers, _ = role()
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    memory = HostMemory(buffers)
    steps = memory.offloading(bucket_bytes=512)
    for _ in range(5):
        next(steps)
    assert (memory.is_away, memory.device_bytes) == (True, 333 * 4)
    steps.close()
    run(memory.onloading())
    assert all(torch.equal(buffers[name], before[name]) for name in buffers)


def test_what_is_dropped_is_written_anew_or_not_used() -> None:
    buffers, module = role()
    memory = HostMemory({"weights": buffers["weights"]}, scratch={"gradients": buffers["masters"]})
    run(memory.offloading())
    copy = memory.now(buffers["weights"])
    assert copy is not None
    assert copy.tolist() == torch.arange(1000, dtype=torch.bfloat16).tolist(), "host memory has the values"
    run(memory.onloading())
    memory.drop()
    assert (memory.device_bytes, memory.is_dropped) == (0, True)
    assert memory.now(buffers["weights"]) is None
    with pytest.raises(AssertionError, match="has to be moved anew"):
        run(memory.onloading())
    memory.allocate()
    assert (memory.device_bytes, memory.is_away, memory.is_dropped) == (3332, False, False)
    assert module(torch.ones(30, dtype=torch.bfloat16)).tolist() == [0.0] * 20
    buffers["weights"].fill_(1)
    assert module(torch.ones(30, dtype=torch.bfloat16)).tolist() == [30.0] * 20


def test_scratch_is_freed_without_a_copy() -> None:
    buffers, _ = role()
    memory = HostMemory({"weights": buffers["weights"]}, scratch={"gradients": buffers["masters"]}, name="actor")
    assert sum(run(memory.offloading())) == 2000
    assert memory.device_bytes == 0
    assert sum(run(memory.onloading())) == 2000
    assert buffers["masters"].unique().tolist() == [0]
    assert buffers["weights"].tolist() == torch.arange(1000, dtype=torch.bfloat16).tolist()


def test_what_numpy_has_seen_gives_its_pages_back() -> None:
    """64 MiB leave this process, though the array still has their address."""
    weights = torch.ones(1 << 24)
    array, memory = weights.numpy(), HostMemory({"weights": weights})
    before = resident_bytes()
    memory.drop()
    assert before - resident_bytes() > 60 << 20
    assert memory.device_bytes == 0
    memory.allocate()
    weights.fill_(3)
    assert sum(run(memory.offloading())) == 1 << 26
    assert memory.device_bytes == 0
    assert array[12345] == 0
    assert sum(run(memory.onloading())) == 1 << 26
    assert array.min() == array.max() == 3


def test_what_cannot_be_freed_is_refused() -> None:
    whole = torch.zeros(10)
    with pytest.raises(AssertionError, match="a part of a larger storage"):
        HostMemory({"weights": whole[:5]})
    memory = HostMemory({"weights": whole})
    run(memory.offloading())
    with pytest.raises(AssertionError, match="is offloaded already"):
        run(memory.offloading())
