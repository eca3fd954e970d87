"""``init_rpc``: from a name to a running agent in its group."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from rpc.agent.agent import Agent
from rpc.device_maps import check_device_maps
from rpc.errors import AlreadyInitializedError, WorkerLostError
from rpc.group.connections import CRASHED
from rpc.group.workers import Member, WorkerInfo, check_name
from rpc.lifecycle import backend_registry
from rpc.lifecycle.backend_registry import BackendType
from rpc.options import (
    UNSET_TIMEOUT,
    AgentOptions,
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    parse_listen,
)
from rpc.rendezvous.address import host_identity, listen_address
from rpc.rendezvous.arrivals import Group
from rpc.rendezvous.dynamic import join_dynamic
from rpc.rendezvous.init_method import job_key, open_store, resolve_group
from rpc.rendezvous.static import join_static
from rpc.rendezvous.store import SharedStore
from rpc.runtime.current import clear_current_agent, current_agent, is_initialized, set_current_agent
from rpc.serialization.exceptions import text_of
from rpc.serialization.functions import main_identity

logger = logging.getLogger(__name__)

__all__ = ["init_rpc", "init_with_store", "on_agent_start"]

BACKEND: Final = "FARCALL"
PYTORCH_BACKEND: Final = "TENSORPIPE"

_SHOWN_OF_ERROR: Final = 200
"""In so many characters the other workers are told of the exception that ended a program."""

_installers: list[Callable[[Agent], None]] = []
_stores: list[SharedStore] = []
"""Kept until the process ends: others may still need a store that it serves, and c10d's file stores count
the processes that let go of them."""


def on_agent_start(install: Callable[[Agent], None]) -> None:
    """Have ``install`` called with each agent before it joins its group: how a package extends the agent."""
    if install not in _installers:
        _installers.append(install)


def init_rpc(
    name: str,
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
        name: unique in the group; letters, digits, ``-``, ``_`` and ``:``, fewer than 128.
        backend: a member of ``BackendType``; default: the one that the options are for, else our own.
        rank: unique in the group, from 0. Default: ``RANK`` from the environment, as torchrun sets it.
        world_size: the number of workers. Default: ``WORLD_SIZE`` from the environment, else dynamic.
        rpc_backend_options: see ``AgentOptions``; says where the workers meet, default ``env://``.

    Raises:
        AlreadyInitializedError: this process has an agent.
        InvalidNameError, TypeError, ValueError: an argument cannot be.
        GroupMismatchError: a name or rank is taken, or ranks and world sizes disagree.
        RendezvousTimeoutError: the others, or the store, were not there in time; says who and where.

    Example::

        rpc.init_rpc("trainer0", rank=0, world_size=2)      # MASTER_ADDR and MASTER_PORT are set
        ...
        rpc.shutdown()
    """
    backend, options = _check(name, backend, rpc_backend_options)
    dynamic = isinstance(options, AgentOptions) and options.dynamic
    place = resolve_group(rank, world_size, os.environ, dynamic, options.init_method)
    timeout = options.rendezvous_timeout if isinstance(options, AgentOptions) else options.rpc_timeout
    store = open_store(options.init_method, place.rank, place.world_size, timeout=timeout)
    _stores.append(store)
    _start(backend, store, name, place.rank, place.world_size, options)


def init_with_store(
    backend: BackendType | None,
    store: Store,
    name: str,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """As ``init_rpc``, with a c10d store that exists already in place of an ``init_method``."""
    backend, options = _check(name, backend, rpc_backend_options)
    dynamic = isinstance(options, AgentOptions) and options.dynamic
    place = resolve_group(rank, world_size, os.environ, dynamic)
    timeout = options.rendezvous_timeout if isinstance(options, AgentOptions) else options.rpc_timeout
    shared = open_store(store, place.rank, place.world_size, timeout=timeout)
    _stores.append(shared)
    _start(backend, shared, name, place.rank, place.world_size, options)


def _check(
    name: str, backend: BackendType | None, options: RpcBackendOptions | None
) -> tuple[BackendType, RpcBackendOptions]:
    """Everything that can be found wrong before anybody else is involved."""
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
    check_name(name)
    if backend is None:
        backend = BackendType[BACKEND] if options is None else _backend_of(options)
    if options is None:
        options = backend_registry.construct_rpc_backend_options(backend)
    if backend.name in (BACKEND, PYTORCH_BACKEND) and not isinstance(options, AgentOptions):
        raise TypeError(
            "`rpc_backend_options` must be a `TensorPipeRpcBackendOptions` or `AgentOptions` "
            f"for {backend!r}, not {options!r}"
        )
    return backend, options


def _backend_of(options: RpcBackendOptions) -> BackendType:
    for candidate in BackendType:
        if type(options) is type(backend_registry.construct_rpc_backend_options(candidate)):
            return candidate
    if isinstance(options, AgentOptions):
        return BackendType[BACKEND]
    raise TypeError(f"Could not infer backend for options {options}")


def _start(
    backend: BackendType,
    store: SharedStore,
    name: str,
    rank: int | None,
    world_size: int | None,
    options: RpcBackendOptions,
) -> None:
    ours = backend.name in (BACKEND, PYTORCH_BACKEND)
    agent = backend_registry.init_backend(
        backend,
        store=store if ours else store.store,
        name=name,
        rank=-1 if rank is None else rank,
        world_size=world_size,
        rpc_backend_options=options,
    )
    if not ours:
        set_current_agent(agent)


def start_agent(
    store: SharedStore, name: str, rank: int, world_size: int | None, rpc_backend_options: AgentOptions
) -> Agent:
    """Start our own agent: the ``init_backend`` handler of our backends."""
    options = rpc_backend_options
    place = resolve_group(rank, world_size, os.environ, options.dynamic or world_size is None)
    if options.listen is not None:
        host, port = parse_listen(options.listen)
    else:
        host, port = listen_address(store.master, single_host=place.single_host)
    agent = Agent(options, host, port)
    try:
        draft = Member(
            WorkerInfo(name, rank),
            agent.incarnation,
            host_identity(),
            tuple(agent.addresses),
            main_identity(),
            options.max_message_bytes,
        )
        for install in _installers:
            install(agent)
        agent.serializer.allow_function(_noop)
        group: Group
        if world_size is None:
            joined = join_dynamic(store, draft, options.rendezvous_timeout, job=job_key(os.environ))
            agent.on_close(joined.leave)
            group = joined
        else:
            group = join_static(store, draft, world_size, options.rendezvous_timeout, job=job_key(os.environ))
        check_device_maps(
            name,
            options.device_maps,
            options.devices,
            torch.cuda.device_count() if options.device_maps or options.devices else 0,
            [member.name for member in group.members] if group.static else None,
        )
        set_current_agent(agent)  # calls of others may arrive as soon as it has joined
        agent.join(group.me, group.members, group.key, static=group.static)
        if not group.static:
            _introduce(agent, group.others)
    except BaseException:
        clear_current_agent(agent)
        agent.close("it could not join its group")
        raise
    atexit.unregister(_leave_at_exit)  # what an earlier agent has left behind
    atexit.register(_leave_at_exit, weakref.ref(agent), os.getpid())
    return agent


def _introduce(agent: Agent, members: Sequence[Member]) -> None:
    """Connect to the members of a dynamic group, so that they know this worker; who is gone is left out."""
    for member in members:
        try:
            agent.caller.call(member.name, _noop, (), {}, UNSET_TIMEOUT).result()
        except WorkerLostError as error:
            logger.info("left out of the group: %s", error)


def _noop() -> None:
    """What is called to make a connection."""


def _why_the_process_ends() -> str:
    error = getattr(sys, "last_value", None)  # what Python has printed the traceback of
    if not isinstance(error, Exception) or hasattr(sys, "ps1"):
        return "its process ended without shutdown()"
    said = " ".join(text_of(error).split())
    return f"{CRASHED}, {type(error).__name__}: {said}"[:_SHOWN_OF_ERROR]


def _leave_at_exit(which: weakref.ref[Agent], pid: int) -> None:
    """The process ends without ``shutdown``: say goodbye, so that others need not find out."""
    agent = which()
    if os.getpid() == pid and agent is not None and not agent.closed:
        agent.close(_why_the_process_ends())
        clear_current_agent(agent)


backend_registry.register_backend(BACKEND, AgentOptions, start_agent)
backend_registry.register_backend(PYTORCH_BACKEND, TensorPipeRpcBackendOptions, start_agent)
