"""Frames: whole messages at any cut, and none that was not made with the key."""

from __future__ import annotations

import pickle
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.launch import wire
from plait.launch.wire import Call, Channel, Forged, pickled_arguments

KEY = bytes(range(32))


class Bomb:
    """Must never be unpickled."""

    def __reduce__(self):
        return pytest.fail, ("a message without the key was unpickled",)


@pytest.fixture
def ends():
    left, right = socket.socketpair()
    yield left, right
    left.close()
    right.close()


def frames(messages, key=KEY):
    """The bytes that a controller sends."""
    left, right = socket.socketpair()
    with left, right:
        channel = Channel(left, key, controller=True)
        for message in messages:
            assert channel.put(message)
        return right.recv(1 << 20)


@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=5), cut=st.integers(1, 50))
def test_messages_arrive_whole_and_in_order_however_they_are_cut(sizes, cut):
    messages = [Call(number, "method", bytes(size)) for number, size in enumerate(sizes)]
    data = frames(messages)
    left, right = socket.socketpair()
    with left, right:
        worker = Channel(right, KEY, controller=False)
        received = []
        for start in range(0, len(data), cut):
            left.sendall(data[start : start + cut])
            received += worker.receive()
        assert received == messages
        assert worker.bytes_received == len(data)
        assert not worker.ended
        left.close()
        assert worker.receive() == []
        assert worker.ended


def test_a_stranger_is_refused_before_anything_is_unpickled(ends):
    left, right = ends
    body = pickle.dumps(Bomb())
    left.sendall(struct.pack("<Q32s", len(body), bytes(32)) + body)
    with pytest.raises(Forged, match="key"):
        Channel(right, KEY, controller=False).receive()


def test_another_key_is_refused(ends):
    left, right = ends
    left.sendall(frames([Bomb()], key=bytes(32)))
    with pytest.raises(Forged, match="key"):
        Channel(right, KEY, controller=False).receive()


def test_a_message_is_not_taken_twice_nor_sent_back(ends):
    left, right = ends
    data = frames([Call(0, "method", b"")])
    left.sendall(data * 2)
    worker = Channel(right, KEY, controller=False)
    with pytest.raises(Forged):
        worker.receive()
    right.sendall(data)
    with pytest.raises(Forged):
        Channel(left, KEY, controller=True).receive()


def test_a_length_beyond_reason_is_refused_before_memory_is_taken(ends):
    left, right = ends
    left.sendall(struct.pack("<Q32s", 1 << 60, bytes(32)))
    with pytest.raises(Forged, match="announced"):
        Channel(right, KEY, controller=False).receive()


def test_sending_to_one_who_does_not_read_never_blocks(ends):
    left, right = ends
    controller = Channel(left, KEY, controller=True)
    assert not controller.put(Call(0, "method", bytes(10_000_000)))
    worker = Channel(right, KEY, controller=False)
    received = []
    while not received:
        received = worker.receive()
        controller.flush()
    assert received == [Call(0, "method", bytes(10_000_000))]
    assert controller.flush()


def test_arrays_are_told_to_go_another_way(monkeypatch):
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 1000)
    assert pickled_arguments((bytes(900),), {})
    with pytest.raises(ValueError, match="worker to worker"):
        pickled_arguments((bytes(1001),), {})
