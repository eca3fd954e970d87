"""One-sided transfers through PyTorch's own interface: the contract of a transport, and two processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from tests.support.workers import RunWorkers, Worker

api: Any = pytest.importorskip("torch.distributed._transport", reason="PyTorch 2.15 has it first")


@pytest.fixture
def pair() -> Iterator[tuple[Any, Any]]:
    """Two transports of this process, connected with each other."""
    first, second = (api.new_transport("farcall", "cpu") for _ in range(2))
    urls = first.bind(), second.bind()
    first.connect(urls[1])
    second.connect(urls[0])
    yield first, second
    first.close()
    second.close()


def sent(buffer: Any) -> Any:
    """A descriptor as the peer gets it."""
    return type(buffer).deserialize(buffer.serialize())


def test_it_is_found_by_its_name() -> None:
    assert "farcall" in api.available_transports()
    with pytest.raises(RuntimeError, match="failed to create"):
        api.new_transport("farcall", "cuda")


def test_memory_is_written_and_read(pair: tuple[Any, Any]) -> None:
    first, second = pair
    assert first.connected()
    source, target, back = torch.arange(4096.0), torch.zeros(4096), torch.zeros(4096)
    remote = sent(second.register_memory(target).to_remote_buffer())
    assert first.write(first.register_memory(source).to_view(), remote) == 0
    assert first.read(first.register_memory(back).to_mutable_view(), remote) == 0
    assert torch.equal(source, target)
    assert torch.equal(source, back)


def test_a_view_is_a_range_of_bytes(pair: tuple[Any, Any]) -> None:
    first, second = pair
    source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(32, dtype=torch.uint8)
    memory, remote = first.register_memory(source), second.register_memory(target).to_remote_buffer()
    view = memory.to_view(16, 16)
    assert isinstance(view, api.MemoryView)
    assert not isinstance(view, api.MutableMemoryView)
    assert isinstance(memory.to_mutable_view(), api.MutableMemoryView)
    first.write(view, remote)
    assert target.tolist() == [*range(16, 32), *[0] * 16]
    first.write(memory.to_view(5, 0), remote)
    for offset, length in ((65, None), (-1, None), (60, 5), (0, -1)):
        with pytest.raises(ValueError, match="registered memory of 64 bytes"):
            memory.to_view(offset, length)


def test_operations_that_cannot_be_are_refused(pair: tuple[Any, Any]) -> None:
    first, second = pair
    memory = first.register_memory(torch.zeros(8))
    remote = second.register_memory(torch.zeros(4)).to_remote_buffer()
    with pytest.raises(ValueError, match="does not fit"):
        first.write(memory.to_view(), remote)
    with pytest.raises(TypeError, match="no FarcallMutableMemoryView"):
        first.read(memory.to_view(0, 4), remote)
    with pytest.raises(ValueError, match="does not belong to the connected peer"):
        first.write(memory.to_view(), memory.to_remote_buffer())
    with pytest.raises(ValueError, match="finite and non-negative"):
        first.write(memory.to_view(0, 4), remote, timeout=float("nan"))
    with pytest.raises(RuntimeError, match="already connected"):
        first.connect(second.bind())
    for tensor in (torch.zeros(0), torch.zeros(4, 4).T):
        with pytest.raises(ValueError, match="contiguous"):
            first.register_memory(tensor)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"farcall": 1, "endpoint": 7, "region": 0, "length": 1}']
)
def test_what_is_no_descriptor_is_refused(data: bytes, pair: tuple[Any, Any]) -> None:
    kind = type(pair[0].register_memory(torch.zeros(1)).to_remote_buffer())
    with pytest.raises(ValueError, match="descriptor of farcall's"):
        kind.deserialize(data)


def test_memory_is_reused_until_it_is_unregistered(pair: tuple[Any, Any]) -> None:
    first, second = pair
    tensor, target = torch.zeros(4), torch.zeros(4)
    one, other = first.register_memory(tensor), first.register_memory(tensor)
    remote = second.register_memory(target)
    descriptor = remote.to_remote_buffer()
    first.unregister_memory(one)
    first.unregister_memory(other)
    with pytest.raises(RuntimeError, match="has been unregistered"):
        other.to_view()
    second.unregister_memory(remote)
    with pytest.raises(RuntimeError, match="has been unregistered"):
        first.write(first.register_memory(tensor).to_view(), descriptor)


def test_works_and_coroutines(pair: tuple[Any, Any]) -> None:
    first, second = pair
    source, target = torch.arange(16.0), torch.zeros(16)
    local, remote = first.register_memory(source), second.register_memory(target).to_remote_buffer()
    work = first.write(local.to_view(), remote, async_op=True)
    assert isinstance(work, torch.distributed.Work)
    assert work.wait(timedelta(seconds=60))
    assert work.is_completed()
    assert work.is_success()
    assert work.get_future().wait() == []

    async def run() -> None:
        await first.write_async(local.to_view(), remote)
        works = [first.read(local.to_mutable_view(), remote, async_op=True) for _ in range(3)]
        await api.wait_all(works, timeout=60)
        await first.close_async()

    asyncio.run(run())
    assert torch.equal(source, target)
    with pytest.raises(RuntimeError, match="transport is closed"):
        first.bind()


SIZE = 1 << 22


def own_and_wait(worker: Worker) -> None:
    store = FileStore(worker.init_method.removeprefix("file://"), 2)
    transport = api.new_transport_rank("farcall", "cpu", store=store, rank=1, peer_rank=0)
    target = torch.zeros(SIZE)
    store.set("memory", transport.register_memory(target).to_remote_buffer().serialize())
    store.wait(["written"], timedelta(seconds=60))
    assert torch.equal(target, torch.arange(float(SIZE)))
    worker.report("seen")
    store.wait(["never"], timedelta(seconds=60))


def write_and_read(worker: Worker) -> str:
    from farcall.one_sided.memory import FarcallRemoteBuffer

    store = FileStore(worker.init_method.removeprefix("file://"), 2)
    transport = api.new_transport_rank("farcall", "cpu", store=store, rank=0, peer_rank=1)
    store.wait(["memory"], timedelta(seconds=60))
    remote = FarcallRemoteBuffer.deserialize(store.get("memory"))
    source, back = torch.arange(float(SIZE)), torch.zeros(SIZE)
    view = transport.register_memory(source).to_view()
    for _ in range(3):  # through the socket, then through shared memory
        transport.write(view, remote)
        transport.read(transport.register_memory(back).to_mutable_view(), remote)
        assert torch.equal(source, back)
        back.zero_()
    store.set("written", "")
    worker.report("written")
    worker.wait_for("go on")
    try:
        transport.write(view, remote)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        transport.close()
    return "written"


def test_a_peer_that_is_killed_ends_the_transfer(run_workers: RunWorkers) -> None:
    workers = run_workers.start([write_and_read, own_and_wait], 2)
    workers[0].wait_for("written")
    workers[1].wait_for("seen")
    workers[1].kill()
    workers[0].tell("go on")
    assert "WorkerLostError" in str(workers[0].result())
