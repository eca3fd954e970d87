from __future__ import annotations

import contextlib
import gc
import itertools
import operator
import signal
import weakref
from collections.abc import Callable, Iterator
from pickle import PickleBuffer
from types import FrameType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc.runtime.interrupts import defer_interrupts, restore_interrupts
from rpc.serialization.memory import INLINE_BYTES, inline_limit, layout_of, memory_at, settle
from rpc.serialization.payload import Payload
from tests.support.stepping import Step
from tests.unit.rpc.serialization.journey import CALLEE, CALLER, PICKLES, SERIALIZER, deliver

SMALL_FRAME_BYTES = 64 << 10

Dump = Callable[[list[torch.Tensor]], Payload]


def as_arguments(tensors: list[torch.Tensor]) -> Payload:
    return PICKLES.dump_call(torch.stack, tuple(tensors), {}, CALLEE)


def as_gradients(tensors: list[torch.Tensor]) -> Payload:
    return PICKLES.dump_tensors(tensors, CALLEE, "gradients")


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=3))
def test_layout_agrees_with_enumerated_addresses(dimensions: list[tuple[int, int]]) -> None:
    shape, stride = [size for size, _ in dimensions], [step for _, step in dimensions]
    addresses = [sum(map(operator.mul, index, stride)) for index in np.ndindex(*shape)]
    layout = layout_of(shape, stride)
    assert layout.span == max(addresses, default=-1) + 1
    if not layout.overlapping:
        assert layout.distinct == len(set(addresses))
    if layout.dense:
        assert len(set(addresses)) == layout.span


def test_buffers_are_the_tensors_memory_and_keep_it_alive() -> None:
    payload = PICKLES.dumps(torch.arange(100_000.0), CALLEE)
    torch.full((100_000,), -1.0)  # would reuse the memory
    assert np.array_equal(np.frombuffer(payload.buffers[1], "f"), np.arange(100_000, dtype="f"))


@pytest.mark.parametrize("count", [1, 2, 3, 11, 12])
@pytest.mark.parametrize("dump", [as_arguments, as_gradients])
def test_what_few_tensors_hold_stays_in_the_pickle_as_long_as_the_frame_stays_small(
    dump: Dump, count: int
) -> None:
    elements = inline_limit(count) // 4
    small = dump([torch.zeros(elements) for _ in range(count)])
    assert [len(each) <= SMALL_FRAME_BYTES for each in small.buffers] == [True]
    larger = dump([torch.zeros(elements + 1) for _ in range(count)])
    assert len(larger.buffers) == 1 + count


def test_where_tensors_are_many_only_small_ones_stay_in_the_pickle() -> None:
    tensors = [torch.zeros(INLINE_BYTES // 4) for _ in range(100)]
    assert len(as_gradients(tensors).buffers) == 1
    assert len(as_gradients([each.repeat(2) for each in tensors]).buffers) == 101


def test_sending_does_not_forbid_resizing() -> None:
    for tensor in (torch.ones(3), torch.ones(INLINE_BYTES)):
        PICKLES.dumps(tensor, CALLEE)
        PICKLES.dumps([tensor], CALLEE)
        tensor.resize_(100_000)


def test_small_part_of_a_frame_is_copied_out_of_it() -> None:
    frame = bytearray(64 << 20)
    small = settle(memoryview(frame)[:100_000])
    assert type(small) is bytearray
    assert len(small) == 100_000


def test_large_part_of_a_frame_is_used_as_it_is() -> None:
    frame = bytearray(1 << 20)
    part = memoryview(frame)[16:]
    assert settle(part).obj is frame


def test_misaligned_or_readonly_memory_is_copied() -> None:
    for memory in (memoryview(bytearray(1 << 20))[8:], memoryview(bytes(1 << 20))):
        assert type(settle(memory)) is bytearray


def test_received_large_tensor_is_the_frames_memory() -> None:
    _, buffers = deliver(PICKLES.dumps(torch.zeros(1 << 18), CALLEE))
    tensor = PICKLES.loads({}, buffers, None, CALLEE)
    tensor[0] = 1
    assert bytes(buffers[1][:4]) != bytes(4)


@pytest.mark.parametrize("raw", [False, True])
def test_memory_in_a_cycle_is_collected(raw: bool) -> None:
    """Where one buffer is exported by another, CPython up to 3.12.3 crashes."""
    tensor = torch.zeros(INLINE_BYTES)
    buffer = memory_at(tensor.data_ptr(), tensor.nbytes, tensor)
    assert isinstance(buffer, PickleBuffer)
    gone = weakref.ref(tensor)
    cycle: list[object] = [buffer, buffer.raw()] if raw else [buffer]
    cycle.append(cycle)
    del tensor, buffer, cycle
    gc.collect()
    assert gone() is None


@pytest.fixture
def stop() -> Iterator[Callable[[], object]]:
    """A signal whose handler raises what ends the iteration of a built-in function without a word."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise StopIteration

    defer_interrupts()
    before = signal.signal(signal.SIGUSR1, handle)
    yield lambda: signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    restore_interrupts()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_what_a_signal_handler_raises_while_a_value_arrives_is_raised(
    requires_grad: bool, stop: Callable[[], object]
) -> None:
    values = [torch.zeros(30_000, requires_grad=requires_grad), np.zeros(30_000)]
    payload = PICKLES.dumps(values, CALLEE)
    for number in itertools.count(1):
        header, buffers = deliver(payload)
        step = Step(number, stop, files=[settle.__code__.co_filename])
        with step, contextlib.suppress(StopIteration):
            PICKLES.loads(header, buffers, SERIALIZER.adopt(header, CALLER), CALLER)
            assert not step.taken, number
        if not step.taken:
            break
    assert number > 10
