"""Weights that another process reads are those that were written, and the hash says so."""

from __future__ import annotations

import os

import torch

from plait.vllm.shared_weights import SharedReader, shared


def test_what_is_read_is_what_was_written() -> None:
    torch.manual_seed(0)
    embedding = torch.randn(7, 5).bfloat16()
    state = {
        "embed": embedding,
        "norm": torch.randn(3),
        "count": torch.tensor(4),
        "head": embedding,
        "none": torch.empty(0, 3),
    }
    expected = dict(state)
    with shared(state) as (stored, written):
        assert not state, "it is given up, tensor by tensor"
        reader = SharedReader(stored)
        read = dict(reader)
        path = f"/proc/{stored.pid}/fd/{stored.fd}"
        assert "plait-weights (deleted)" in os.readlink(path), "it has no name that could be left behind"
    assert read.keys() == expected.keys()
    assert stored.tensors[0].start == stored.tensors[3].start, "a tensor of two names is written once"
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    assert reader.digest() == written


def test_one_bit_changes_the_hash() -> None:
    weights = torch.arange(100, dtype=torch.float32)
    digests = []
    for value in (1.0, 1.0, 1.0000001):
        weights[50] = value
        with shared({"w": weights.clone()}) as (_, written):
            digests.append(written)
    assert digests[0] == digests[1] != digests[2]
    with shared({"v": weights.clone()}) as (stored, _), shared({"w": weights.clone()}) as (_, other):
        reader = SharedReader(stored)
        assert len(dict(reader)) == 1
        assert reader.digest() != other, "names belong to it"
