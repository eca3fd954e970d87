"""The transport: one endpoint, with one peer.

The transports of a process have an agent in common, beside any that the program has. Those of one user on
one host need no secret. On several hosts they need ``FARCALL_TOKEN``, as workers do, and ``MASTER_ADDR``, by
which each finds the address to listen at.
"""

from __future__ import annotations

import atexit
import itertools
import json
import math
import os
import secrets
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
from torch.distributed import Work

import rpc  # noqa: F401  # whole, before its parts: several threads may import them at once
from farcall.one_sided.memory import (
    FarcallMemory,
    FarcallMemoryView,
    FarcallMutableMemoryView,
    FarcallRemoteBuffer,
    Region,
)
from farcall.one_sided.torch_internals import Transport, wait_all
from rpc.agent.agent import Agent
from rpc.agent.futures import Future
from rpc.errors import RpcError
from rpc.group.workers import Member
from rpc.lifecycle.own_backend import admit, start_storeless_agent
from rpc.options import AgentOptions
from rpc.rendezvous.address import listen_address

__all__ = ["FarcallTransport"]

_GROUP: Final = "farcall one-sided"

_ENDED: Final = "it has closed its transports"

_SECONDS: Final = 30.0


class FarcallTransport(Transport):  # type: ignore[misc]
    """One-sided transfers of CPU memory by farcall; see ``torch.distributed._transport.Transport``.

    A thread of farcall's in the peer's process does the peer's part; the peer's program takes none.

    Args:
        device: ``"cpu"``, or None.
        timeout: default timeout of operations, in seconds.
    """

    def __init__(self, device: torch.device | str | None = None, *, timeout: float = _SECONDS) -> None:
        super().__init__(device)
        if self.device is not None and self.device.type != "cpu":
            raise ValueError(f"farcall moves CPU memory only, not that of {self.device}")
        _check_timeout(timeout)
        self._default_timeout = self._timeout = timeout
        self.endpoint = secrets.token_hex(16)
        self._lock = threading.RLock()  # a finalizer that runs while it is held may unregister memory
        self._numbers = itertools.count()
        self._regions: dict[int, Region] = {}
        self._pending: set[_TransferWork] = set()
        self._peer: tuple[str, str] | None = None
        self._closed = False
        self._agent = _enter(self)

    @staticmethod
    def supported() -> bool:
        return True

    # ---- the peer

    def bind(self, *, timeout: float | None = None) -> bytes:
        self._check_open()
        return json.dumps(
            {"endpoint": self.endpoint, "process": self._agent.group.peers.view.me.to_wire()}
        ).encode()

    def connect(self, peer_url: bytes, *, timeout: float | None = None) -> int:
        self._check_open()
        if self._peer is not None:
            raise RuntimeError("transport is already connected")
        try:
            found = json.loads(peer_url)
            member = Member.from_wire(found["process"])
            admit(self._agent, member)
            self._peer = member.name, str(found["endpoint"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"not what bind() of a transport of farcall's returns: {error}") from None
        return 0

    def connected(self) -> bool:
        return self._peer is not None and not self._closed

    # ---- memory

    def register_memory(self, tensor: torch.Tensor, *, timeout: float | None = None) -> FarcallMemory:
        self._check_open()
        if tensor.device.type != "cpu":
            raise ValueError(f"farcall moves CPU memory only, not that of {tensor.device}")
        if not tensor.is_contiguous() or tensor.numel() == 0:
            raise ValueError("only contiguous tensors that are not empty can be registered")
        with self._lock:
            for region in list(self._regions.values()):
                if (region.address, region.data.nbytes) == (tensor.data_ptr(), tensor.nbytes):
                    return FarcallMemory(region)
            data = tensor.detach().reshape(-1).view(torch.uint8)
            region = Region(self, next(self._numbers), tensor, data)
            self._regions[region.number] = region
        return FarcallMemory(region)

    def unregister_memory(self, memory: Any, *, timeout: float | None = None) -> None:
        self._check_open()
        if not isinstance(memory, FarcallMemory) or memory.region.owner is not self:
            raise TypeError("memory was not registered by this transport")
        with self._lock:
            if memory.region.active and memory.region.pending:
                raise RuntimeError("memory has pending transfers; wait before unregistering")
            memory.region.active = False
            self._regions.pop(memory.region.number, None)

    # ---- what the peer asks for

    def put(self, region: int, data: torch.Tensor) -> None:
        """Write the first bytes of a region."""
        self._find(region, data.nbytes)[: data.nbytes].copy_(data)

    def get(self, region: int, length: int) -> torch.Tensor:
        """The first bytes of a region."""
        return self._find(region, length)[:length]

    def _find(self, number: int, length: int) -> torch.Tensor:
        region = self._regions.get(number)
        if region is None:
            raise RuntimeError("memory has been unregistered")
        region.check()
        if length > region.data.nbytes:
            raise ValueError(f"{length} bytes do not fit in registered memory of {region.data.nbytes} bytes")
        return region.data

    # ---- transfers

    def write(
        self, local_buffer: Any, remote_buffer: Any, *, async_op: bool = False, timeout: float | None = None
    ) -> int | Work:
        worker, endpoint = self._check(local_buffer, remote_buffer, FarcallMemoryView)

        def begin(data: torch.Tensor) -> Future[Any]:
            return self._agent.call_async(worker, _put, (endpoint, remote_buffer.region, data), {}, 0.0)

        return self._transfer(local_buffer, begin, lambda _: None, async_op, timeout)

    def read(
        self, local_buffer: Any, remote_buffer: Any, *, async_op: bool = False, timeout: float | None = None
    ) -> int | Work:
        worker, endpoint = self._check(local_buffer, remote_buffer, FarcallMutableMemoryView)

        def begin(data: torch.Tensor) -> Future[Any]:
            asked = endpoint, remote_buffer.region, data.nbytes
            return self._agent.call_async(worker, _get, asked, {}, 0.0)

        def end(found: torch.Tensor) -> None:
            local_buffer.data().copy_(found)

        return self._transfer(local_buffer, begin, end, async_op, timeout)

    def _check(self, local: Any, remote: Any, kind: type[FarcallMemoryView]) -> tuple[str, str]:
        self._check_open()
        if not isinstance(local, kind) or local.region.owner is not self:
            raise TypeError(f"local_buffer is no {kind.__name__} of this transport")
        if not isinstance(remote, FarcallRemoteBuffer):
            raise TypeError("remote_buffer was not registered by a transport of farcall's")
        peer: tuple[str, str] | None = self._peer
        if peer is None or peer[1] != remote.endpoint:
            raise ValueError("remote buffer does not belong to the connected peer")
        if local.size() > remote.length:
            raise ValueError("local view does not fit in the remote buffer")
        local.region.check()
        return peer

    def _transfer(
        self,
        local: FarcallMemoryView,
        begin: Callable[[torch.Tensor], Future[Any]],
        end: Callable[[Any], None],
        async_op: bool,
        timeout: float | None,
    ) -> int | Work:
        seconds = self._timeout if timeout is None else timeout
        _check_timeout(seconds)
        work = _TransferWork(local, seconds)
        with self._lock:
            self._check_open()
            self._pending.add(work)
            local.region.pending += 1

        def over(coming: Future[Any] | None) -> None:
            error: Exception | None = None
            try:
                if coming is not None:
                    end(coming.value())
            except Exception as failure:
                error = failure
            with self._lock:
                self._pending.discard(work)
                local.region.pending -= 1
            work.settle(error)

        try:
            if local.size() == 0:
                over(None)
            else:
                begin(local.data()).add_done_callback(over)
        except BaseException:
            with self._lock:
                self._pending.discard(work)
                local.region.pending -= 1
            raise
        if async_op:
            return work
        work.wait()
        return 0

    # ---- the end

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("transport is closed")

    def _stop(self, timeout: float | None) -> tuple[list[_TransferWork], float]:
        seconds = self._timeout if timeout is None else timeout
        _check_timeout(seconds)
        with self._lock:
            self._closed = True
            return list(self._pending), seconds

    def _release(self) -> None:
        for region in self._regions.values():
            region.active = False
        self._regions.clear()
        _leave(self.endpoint)
        self._peer = None

    def close(self, *, timeout: float | None = None) -> None:
        pending, seconds = self._stop(timeout)
        until = time.monotonic() + seconds
        errors = [work.ended_with(max(0.0, until - time.monotonic())) for work in pending]
        self._release()
        for error in errors:
            if error is not None:
                raise error

    async def close_async(self, *, timeout: float | None = None) -> None:  # noqa: ASYNC109  # PyTorch's
        pending, seconds = self._stop(timeout)
        try:
            await wait_all(pending, timeout=seconds)
        finally:
            if all(work.is_completed() for work in pending):
                self._release()


class _TransferWork(Work):
    """One transfer."""

    def __init__(self, local: FarcallMemoryView, seconds: float) -> None:
        super().__init__()
        self._local = local  # its memory is needed until the transfer has ended
        self._seconds = seconds
        self._over = threading.Event()
        self._error: Exception | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

    def settle(self, error: Exception | None) -> None:
        """The transfer has ended."""
        self._error = error
        self._over.set()
        if error is None:
            self._future.set_result([])
        else:
            self._future.set_exception(error)  # type: ignore[arg-type]  # as PyTorch's stub has it

    def ended_with(self, seconds: float) -> Exception | None:
        """Wait for the end; returns the error. ``TimeoutError`` if it has not ended by then."""
        if not self._over.wait(seconds):
            raise TimeoutError("transport wait timed out; operation remains pending")
        return self._error

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        error = self.ended_with(timeout.total_seconds() or self._seconds)
        if error is not None:
            raise error
        return True

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error if self._over.is_set() else None

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return []

    def synchronize(self) -> None:
        self.wait()


def _check_timeout(timeout: float) -> None:
    if not math.isfinite(timeout) or timeout < 0:
        raise ValueError(f"timeout must be finite and non-negative, got {timeout}")


_transports_lock: Final = threading.RLock()  # a finalizer that runs while it is held may close a transport
_transports: Final[dict[str, FarcallTransport]] = {}
_agent: Agent | None = None


def _enter(transport: FarcallTransport) -> Agent:
    """Let peers reach a transport; returns the process's agent, which the first of them starts."""
    global _agent
    with _transports_lock:
        if _agent is None:
            host, _ = listen_address(os.environ.get("MASTER_ADDR"))
            name = f"one-sided-{secrets.token_hex(8)}"
            _agent = start_storeless_agent(name, _GROUP, AgentOptions(listen=host))
            atexit.register(_agent.close, _ENDED)
        _transports[transport.endpoint] = transport
        return _agent


def _leave(endpoint: str) -> None:
    """Forget a transport. The last of them ends the agent."""
    global _agent
    with _transports_lock:
        if _agent is None or _transports.pop(endpoint, None) is None or _transports:
            return
        ended, _agent = _agent, None
    atexit.unregister(ended.close)
    ended.close(_ENDED)


def _find(endpoint: str) -> FarcallTransport:
    found = _transports.get(endpoint)
    if found is None:
        raise RpcError(f"the peer's transport {endpoint} is closed")
    return found


def _put(endpoint: str, region: int, data: torch.Tensor) -> None:
    _find(endpoint).put(region, data)


def _get(endpoint: str, region: int, length: int) -> torch.Tensor:
    return _find(endpoint).get(region, length)
