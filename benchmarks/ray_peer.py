"""Ray behind the names of an RPC module: each worker but the first is an actor, a call is a task of it.

It has what the workloads about calls and large tensors need, and nothing else. Ray starts the processes of
its actors itself, so only worker 0, its driver, calls ``init_rpc``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

__all__ = ["TensorPipeRpcBackendOptions", "init_rpc", "remote", "rpc_async", "rpc_sync", "shutdown"]

_THREADS = 16
_STORE_BYTES = 2 << 30
_READY_SECONDS = 120


@dataclass(frozen=True)
class TensorPipeRpcBackendOptions:
    """Where Ray's own files are to be, ``file://PATH``: in the folder that this is in."""

    init_method: str


class _Worker:
    """The functions that an actor runs."""

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call."""
        return function(*args, **kwargs)


class _Future:
    """The value of a call in flight."""

    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def wait(self) -> Any:
        """Block until it is there."""
        return ray.get(self._reference)

    to_here = wait


_actors: dict[str, Any] = {}


def init_rpc(name: str, rank: int, world_size: int, rpc_backend_options: TensorPipeRpcBackendOptions) -> None:
    """Start Ray on this host, with an actor for every worker but this one, the first."""
    del name, rank
    folder = rpc_backend_options.init_method.removeprefix("file://").rpartition("/")[0]
    ray.init(
        address="local",
        num_cpus=world_size,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=_STORE_BYTES,
        _temp_dir=folder,
    )
    actor: Any = ray.remote(_Worker).options(max_concurrency=_THREADS, num_cpus=1)
    for other in range(1, world_size):
        _actors[f"worker{other}"] = actor.remote()
    ray.get([each.run.remote(int, (), {}) for each in _actors.values()], timeout=_READY_SECONDS)


def rpc_async(
    to: str, function: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> _Future:
    """Begin a call."""
    return _Future(_actors[to].run.remote(function, args, kwargs or {}))


remote = rpc_async
"""A call whose value stays where it is until ``to_here`` asks for it: with Ray, every call is one."""


def rpc_sync(
    to: str, function: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Make a call."""
    return rpc_async(to, function, args, kwargs).wait()


def shutdown() -> None:
    """Stop all that was started."""
    _actors.clear()
    ray.shutdown()
