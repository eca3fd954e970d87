"""``init_rpc``: from a name to a running agent in its group."""

from __future__ import annotations

import atexit
import inspect
import os
from typing import Any, Final

from torch.distributed import Store  # type: ignore[attr-defined]

from rpc.errors import AlreadyInitializedError, InvalidNameError
from rpc.group.workers import check_name
from rpc.lifecycle import backend_registry
from rpc.lifecycle.backend_registry import BackendType
from rpc.lifecycle.logs import show_log
from rpc.lifecycle.own_backend import start_agent
from rpc.options import AgentOptions, GrpcRpcBackendOptions, RpcBackendOptions
from rpc.rendezvous.engines import placed_by_engine
from rpc.rendezvous.init_method import open_store, resolve_group
from rpc.runtime import file_limit
from rpc.runtime.current import current_agent, is_initialized, set_current_agent
from rpc.runtime.interrupts import defer_interrupts, interruptible, protected, restore_interrupts
from rpc.runtime.preemption import end_at_sigterm
from rpc.runtime.tracebacks import fold_uncaught

_RANK: Final = "{rank}"
"""Placeholder for the rank in a name."""


def init_rpc(
    name: str = "worker{rank}",
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Start this process's agent and join the group.

    In a *static* group, whose size is known, this returns when all workers have arrived. Without a world
    size, in the arguments, the ``init_method`` or the environment, the group is *dynamic*: workers join and
    leave at any time.

    Args:
        name: name that is unique in the group; letters, digits, ``-``, ``_`` and ``:``, fewer than 128
            characters. ``{rank}`` is replaced by the rank. Default: ``worker0`` for rank 0, and so on.
        backend: a member of ``BackendType``; default: the backend of the options' class, else farcall's own.
        rank: number that is unique in the group, from 0. Default: ``RANK`` from the environment, as torchrun
            sets it, or the value from the variables of ``srun``, ``mpirun`` or Kubeflow.
        world_size: number of workers. Default: ``WORLD_SIZE`` from the environment, or likewise; without
            any, the group is dynamic.
        rpc_backend_options: see ``AgentOptions``; contains the meeting place, by default ``env://``.

    Raises:
        AlreadyInitializedError: this process has an agent.
        InvalidNameError, TypeError, ValueError: an argument is invalid.
        GroupMismatchError: a name or rank is taken, or ranks and world sizes disagree.
        RendezvousTimeoutError: the others, or the store, were not there in time; the text says which and
            where.
        RpcError: this process may not open as many files as the group needs; the text has the number.

    Example::

        rpc.init_rpc("trainer0", rank=0, world_size=2)      # MASTER_ADDR and MASTER_PORT are set
        ...
        rpc.shutdown()
    """
    init_with_store(backend, None, name, rank, world_size, rpc_backend_options)


@protected
def init_with_store(
    backend: BackendType | None,
    store: Store | None,
    name: str,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Like ``init_rpc``, with an existing c10d store, if any, in place of an ``init_method``."""
    fold_uncaught()
    defer_interrupts()
    try:
        _init(backend, store, name, rank, world_size, rpc_backend_options)
    finally:
        restore_interrupts()


@interruptible
def _init(
    backend: BackendType | None,
    store: Store | None,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: RpcBackendOptions | None,
) -> None:
    backend, options = _check(name, backend, rpc_backend_options)
    end_at_sigterm()
    dynamic, timeout = False, options.rpc_timeout
    if isinstance(options, AgentOptions):
        dynamic, timeout = options.dynamic, options.rendezvous_timeout
    init_method = options.init_method if store is None else ""
    environ = os.environ if dynamic or rank not in (None, -1) else placed_by_engine(os.environ)
    place = resolve_group(rank, world_size, environ, dynamic, init_method)
    name = _with_rank(name, place.rank)
    show_log(name)
    ours = _is_ours(backend)
    if ours:
        file_limit.check((place.world_size or 1) - 1)
    shared = open_store(
        options.init_method if store is None else store,
        place.rank,
        place.world_size,
        timeout=timeout,
        environ=environ,
    )
    # Kept until the process ends: others may still need a store that it serves, and c10d's file stores count
    # the
    # processes that release them.
    atexit.register(lambda: shared)
    agent = backend_registry.init_backend(
        backend,
        store=shared if ours else shared.store,
        name=name,
        rank=-1 if place.rank is None else place.rank,
        world_size=place.world_size,
        rpc_backend_options=options,
    )
    if not ours:
        set_current_agent(agent)


def _with_rank(name: object, rank: int | None) -> Any:
    """Return a name with ``{rank}`` replaced by the rank."""
    if not isinstance(name, str) or _RANK not in name:
        return name
    if rank is None:
        raise InvalidNameError(
            f"init_rpc got no name, or one with {_RANK}, and no rank: this group is dynamic and numbers its "
            "workers itself. Pass a name, or a rank (rank= or the environment variable RANK)."
        )
    return name.replace(_RANK, str(rank))


def _check(
    name: str, backend: BackendType | None, options: RpcBackendOptions | None
) -> tuple[BackendType, RpcBackendOptions]:
    """Check the arguments as far as possible before other workers are involved."""
    if backend is not None and backend not in BackendType:
        raise TypeError(f"Argument backend must be a member of BackendType, not {backend!r}")
    if options is not None and not isinstance(options, RpcBackendOptions):
        raise TypeError(
            f"Argument rpc_backend_options must be an instance of RpcBackendOptions, not {options!r}"
        )
    if is_initialized():
        raise AlreadyInitializedError(
            f"RPC is already initialized in this process, as '{current_agent().get_worker_info().name}': "
            "call shutdown() first"
        )
    check_name(_with_rank(name, 0))
    if backend is None:
        backend = BackendType.FARCALL if options is None else _backend_of(options)
    if options is None:
        options = backend_registry.construct_rpc_backend_options(backend)
    if _is_ours(backend) and not isinstance(options, AgentOptions):
        raise TypeError(
            "`rpc_backend_options` must be a `TensorPipeRpcBackendOptions` or `AgentOptions` "
            f"for {backend!r}, not {options!r}"
        )
    if backend is BackendType.GRPC and not isinstance(options, GrpcRpcBackendOptions):
        raise TypeError(
            f"`rpc_backend_options` must be `GrpcRpcBackendOptions` for {backend!r}, not {options!r}"
        )
    return backend, options


def _backend_of(options: RpcBackendOptions) -> BackendType:
    for candidate in BackendType:
        if type(options) is type(backend_registry.construct_rpc_backend_options(candidate)):
            return candidate
    if isinstance(options, AgentOptions):
        return BackendType.FARCALL
    raise TypeError(f"Could not infer backend for options {options}")


def _is_ours(backend: BackendType) -> bool:
    return inspect.unwrap(backend.value.init_backend_handler) is start_agent
