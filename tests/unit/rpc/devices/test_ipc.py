"""What a worker does with messages and handles of device memory that no honest worker sends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rpc.devices.cuda_handles import checked
from rpc.devices.installation import Devices
from rpc.devices.ipc import TOPIC, Exchange, Import
from rpc.errors import ProtocolError, SerializationError
from rpc.options import AgentOptions
from rpc.serialization.serializer import Serializer

HANDLE = [100, 28, b"memory", 128, 4096, b"/torch_12_345_6", 7, b"event", True]


class Forger:
    """A worker of the group, as far as device memory is concerned."""

    name = "forger"
    lost = None
    link = SimpleNamespace(process=None)


PEER: Any = Forger()


class Memory:
    """Memory of another process, as ``Handles``: a handle is the number of bytes that opening it finds."""

    def __init__(self) -> None:
        self.opened: list[Any] = []
        self.released: list[Any] = []

    def identity(self, index: int) -> str:
        return str(index)

    def export(self, elements: torch.Tensor) -> list[Any]:
        return [elements.numel()]

    def open(self, handle: Any, index: int) -> torch.Tensor:
        self.opened.append(handle)
        return torch.zeros(handle[0], dtype=torch.uint8)

    def release(self, handle: Any) -> None:
        self.released.append(handle)


def exchange(memory: Memory, tasks: list[Any]) -> Exchange:
    return Exchange("cuda", memory, lambda *_: None, tasks.append)


@pytest.mark.parametrize(
    "body",
    [
        ["take", 0],
        ["take", -1],
        ["take", 1 << 70],
        ["refuse", 0, False, "why"],
        ["offer", "cuda", -1, "0", []],
        ["offer", "cuda", 1 << 40, "0", []],
        ["offer", "cuda", "0", "0", []],
        ["offer", "cuda", 0, "0", b"handle"],
        ["done", "1"],
        ["else"],
        [],
        None,
    ],
)
def test_a_message_that_answers_no_offer_ends_the_connection(body: object) -> None:
    tasks: list[Any] = []
    with pytest.raises(ProtocolError):
        exchange(Memory(), tasks).received(PEER, body)
    assert tasks == []


def test_a_device_is_offered_once() -> None:
    tasks: list[Any] = []
    tried = exchange(Memory(), tasks)
    tried.received(PEER, ["offer", "cuda", 0, "0", [64]])
    with pytest.raises(ProtocolError):
        tried.received(PEER, ["offer", "cuda", 0, "0", [64]])
    assert len(tasks) == 1


def test_what_was_not_sent_is_not_released() -> None:
    memory, tasks = Memory(), list[Any]()
    sending = exchange(memory, tasks)
    for number in (0, 1, 1 << 70):
        sending.received(PEER, ["done", number])
    assert (memory.released, tasks) == ([], [])


@pytest.mark.parametrize("descriptor", [[1, 0, [64]], [1, [], [64]], ["1", 0, [64]], [1, 0, "x"], [1], []])
def test_a_handle_of_a_device_that_was_not_agreed_on_is_refused(descriptor: list[Any]) -> None:
    memory = Memory()
    with pytest.raises((SerializationError, TypeError)):
        exchange(memory, []).arrive([descriptor], PEER)
    assert memory.opened == []


def test_a_worker_in_safe_mode_refuses_what_is_offered() -> None:
    handlers: dict[str, Any] = {}
    posted: list[Any] = []
    control: Any = SimpleNamespace(on=handlers.__setitem__, post=lambda *message: posted.append(message))
    executor: Any = None
    devices = Devices(AgentOptions(deserialization="safe"), executor, Serializer(safe=True), control, "me")
    handlers[TOPIC](PEER, ["offer", "cuda", 0, "0", HANDLE])
    assert posted == [(PEER, TOPIC, ["refuse", 0, False, "it is in safe mode"])]
    for body in (["take", 0], ["done", 1], ["refuse", 0, False, "why"], ["offer"], None):
        with pytest.raises(ProtocolError):
            handlers[TOPIC](PEER, body)
    devices.closed()


@pytest.mark.parametrize("size", [0, 1, 63, 65])
def test_memory_of_another_size_is_not_copied_and_the_sender_is_told(size: int) -> None:
    """One byte would otherwise be copied to all."""
    memory, done = Memory(), list[str]()
    arrived = Import(memory, [size], 0, PEER, lambda: done.append("done"), memory.release)
    target = torch.full((64,), 7, dtype=torch.uint8)
    with pytest.raises(SerializationError, match=f"has 64 bytes, and the memory that came with it {size}"):
        arrived.copy_to(target)
    assert is_unchanged(target)
    assert done == ["done"]
    with pytest.raises(SerializationError, match="once only"):
        arrived.copy_to(target)
    del arrived
    assert memory.released == []  # it was opened


def is_unchanged(target: torch.Tensor) -> bool:
    return bool((target == 7).all())


def changed(**places: Any) -> list[Any]:
    found: list[Any] = list(HANDLE)
    for place, value in places.items():
        found[int(place[1:])] = value
    return found


def test_a_handle_of_cuda_memory_is_admitted() -> None:
    assert checked(HANDLE) == HANDLE


@pytest.mark.parametrize(
    "forged",
    [
        changed(_0=101),
        changed(_0=-1),
        changed(_0=1 << 62),
        changed(_1=-1),
        changed(_1=1 << 62),
        changed(_3=64),
        changed(_3="128"),
        changed(_2=None),
        changed(_5=b"/other_12_345_6"),
        changed(_5=b"/torch_1/../../x"),
        changed(_5="/torch_12_345_6"),
        changed(_6=-1),
        changed(_6=10_000),
        HANDLE[:-1],
        [*HANDLE, 1],
        [],
        None,
        b"handle",
    ],
)
def test_a_forged_handle_of_cuda_memory_is_refused(forged: Any) -> None:
    with pytest.raises(SerializationError):
        checked(forged)
