"""gRPC's Python server behind the names of an RPC module, as its users write it: a pickle in, a pickle out.

It has what the workloads about calls and large tensors need, and nothing else.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from torch._C._distributed_c10d import FileStore

__all__ = ["TensorPipeRpcBackendOptions", "init_rpc", "rpc_async", "rpc_sync", "shutdown"]

_METHOD = "/benchmark/call"
_THREADS = 16
_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@dataclass(frozen=True)
class TensorPipeRpcBackendOptions:
    """Where the workers meet, ``file://PATH``."""

    init_method: str


class _Worker:
    """The server of this process, and its channels to others."""

    def __init__(self, name: str, rank: int, world_size: int, path: str) -> None:
        self.store = FileStore(path, world_size)
        self.rank, self.world_size = rank, world_size
        self.server = grpc.server(ThreadPoolExecutor(_THREADS), options=_UNLIMITED)
        handler = grpc.unary_unary_rpc_method_handler(_run)
        self.server.add_generic_rpc_handlers([_Handlers(handler)])
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        self.store.set(name, str(port))
        self.stubs: dict[str, Any] = {}

    def stub(self, to: str) -> Any:
        if to not in self.stubs:
            address = f"127.0.0.1:{self.store.get(to).decode()}"
            self.stubs[to] = grpc.insecure_channel(address, options=_UNLIMITED).unary_unary(_METHOD)
        return self.stubs[to]


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def service(self, handler_call_details: Any) -> Any:
        """The one handler that there is."""
        return self._handler


class _Future:
    """The value of a call in flight."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def wait(self) -> Any:
        """Block until it is there."""
        return pickle.loads(self._future.result())


_worker: list[_Worker] = []


def _run(request: bytes, _: Any) -> bytes:
    function, args, kwargs = pickle.loads(request)
    return pickle.dumps(function(*args, **kwargs), 5)


def init_rpc(name: str, rank: int, world_size: int, rpc_backend_options: TensorPipeRpcBackendOptions) -> None:
    """Start a server, and tell the others where it is."""
    path = rpc_backend_options.init_method.removeprefix("file://")
    _worker.append(_Worker(name, rank, world_size, path))


def rpc_async(
    to: str, function: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> _Future:
    """Begin a call."""
    request = pickle.dumps((function, args, kwargs or {}), 5)
    return _Future(_worker[0].stub(to).future(request))


def rpc_sync(
    to: str, function: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Make a call."""
    request = pickle.dumps((function, args, kwargs or {}), 5)
    return pickle.loads(_worker[0].stub(to)(request))


def shutdown() -> None:
    """Stop when all are done."""
    worker = _worker.pop()
    worker.store.set(f"done {worker.rank}", "")
    worker.store.wait([f"done {rank}" for rank in range(worker.world_size)])
    worker.server.stop(None).wait()
