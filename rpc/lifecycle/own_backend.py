"""farcall's own backend: its agent listens, meets the others at the store, and leaves at the end.

Packages above the agent add to it as *extensions*: functions ``install(agent)``, called before the agent
joins its group, which register message kinds, carriers or a tape. Each is declared by the distribution that
contains it, including farcall's own, in the entry point group ``farcall.extensions``::

    [project.entry-points."farcall.extensions"]
    metrics = "my_package.metrics:install"

They are installed in any order: one that needs another installs that first, if it is not there yet.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import sys
from dataclasses import replace
from functools import partial
from typing import Final

from rpc.agent.agent import Agent
from rpc.agent.collected_futures import replace_collect_all, restore_collect_all
from rpc.entry_points import entry_points
from rpc.errors import RpcError
from rpc.group.connections import CRASHED
from rpc.group.workers import Member, WorkerInfo
from rpc.lifecycle import device_agreement
from rpc.lifecycle.neighbours import AgentNeighbours, introduce, make_connection
from rpc.lifecycle.worker_watch import watch
from rpc.options import AgentOptions, parse_listen
from rpc.profiling import installation as profiling
from rpc.rendezvous.address import (
    LifeSign,
    as_others_reach_it,
    host_identity,
    is_loopback,
    listen_address,
)
from rpc.rendezvous.arrivals import Group
from rpc.rendezvous.dynamic import DynamicGroup, join_dynamic
from rpc.rendezvous.init_method import job_key, resolve_group
from rpc.rendezvous.keeping import Keeper, Loss
from rpc.rendezvous.meeting import meet
from rpc.rendezvous.static import join_static
from rpc.rendezvous.store import SharedStore
from rpc.rendezvous.token import find_credential
from rpc.runtime import file_limit
from rpc.runtime.current import clear_current_agent, current_agent, is_initialized, set_current_agent
from rpc.runtime.interrupts import interruptible, protected
from rpc.runtime.torch_internals import INTERNALS
from rpc.serialization.failures import beginning_of, text_of
from rpc.serialization.functions import main_identity
from rpc.transport.authentication import TokenAuthenticator
from rpc.transport.registry import load as load_transports
from rpc.transport.tls import TlsContexts

logger = logging.getLogger(__name__)

EXTENSIONS: Final = "farcall.extensions"

KEEPER: Final = "rpc.keeper"
"""The extension of a dynamic group's agent that has its keeper: the way to the group's store."""

_MOST_REACHED: Final = 64
"""Maximum number of workers to connect to only for reporting why this one ends."""

_REACH_SECONDS: Final = 1.0
"""Maximum time in seconds for connecting to them."""

_ID_BITS: Final = 53
"""Size in bits of the random ids of workers in a storeless group, which makes duplicates unlikely."""

_SHOWN_OF_ERROR: Final = 80
"""Maximum number of characters of a program's last exception that the other workers are sent."""


def start_agent(
    store: SharedStore, name: str, rank: int, world_size: int | None, rpc_backend_options: AgentOptions
) -> Agent:
    """Start an agent and join its group: the ``init_backend`` handler; arguments as for ``init_rpc``."""
    return _start(store, name, rank, world_size, rpc_backend_options, current=True)


def start_separate_agent(
    store: SharedStore, name: str, rank: int, world_size: int | None, rpc_backend_options: AgentOptions
) -> Agent:
    """Like ``start_agent``, for internal use by farcall: the process's calls do not use this agent.

    The caller must close it, also when the process ends or is forked.
    """
    agent = _start(store, name, rank, world_size, rpc_backend_options, current=False)
    agent.group.connections.tell_losses(tells=not is_initialized())
    return agent


def _start(
    store: SharedStore,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: AgentOptions,
    *,
    current: bool,
) -> Agent:
    options = rpc_backend_options
    if world_size is not None:
        file_limit.check(world_size - 1)
    place = resolve_group(rank, world_size, os.environ, options.dynamic or world_size is None)
    if options.listen is not None:
        host, port = parse_listen(options.listen)
    else:
        host, port = listen_address(store.master, single_host=place.single_host)
    return _start_at(host, port, store, WorkerInfo(name, rank), world_size, options, current=current)


@protected  # an agent that could not join is closed
def _start_at(
    host: str,
    port: int,
    store: SharedStore,
    info: WorkerInfo,
    world_size: int | None,
    options: AgentOptions,
    *,
    current: bool,
) -> Agent:
    agent, token = _make(options, host, port)
    try:
        _join(agent, store.sealed(token), info, world_size, options, current=current)
    except BaseException:
        clear_current_agent(agent)
        agent.close("it could not join its group")
        raise
    return agent


@interruptible
def _join(
    agent: Agent,
    store: SharedStore,
    info: WorkerInfo,
    world_size: int | None,
    options: AgentOptions,
    *,
    current: bool,
) -> None:
    draft = _with_sign(agent, _describe(agent, info, store.master))
    met = device_agreement.agree(agent)
    INTERNALS.check()
    profiling.install(agent)
    agent.lifecycle.hooks.closed.append(partial(restore_collect_all, agent))
    replace_collect_all(agent)
    for extension in entry_points(EXTENSIONS):
        extension.load()(agent)
    agent.serializer.allow_function(make_connection)
    group: Group
    keeper: Keeper | None = None
    timeout, job = options.rendezvous_timeout, job_key(os.environ)
    if world_size is None:
        group = joined = join_dynamic(store, draft, timeout, job=job)
        file_limit.check(len(group.others))
        keeper = _keeper(agent, joined, timeout)
    else:
        group = join_static(store, draft, world_size, timeout, job=job)
    device_agreement.check(info.name, options, group.members, static=group.static)
    if current:
        watch(agent.lifecycle.hooks, agent.lifecycle.departure)
        set_current_agent(agent)  # calls of others may arrive as soon as it has joined
    agent.join(group.me, group.members, group.key, static=group.static)
    met(agent.group.peers.own)
    logger.debug(
        "'%s' (id %d) is in a %s group of %d, listening at %s",
        info.name,
        group.me.id,
        "static" if group.static else "dynamic",
        len(group.members),
        ", ".join(agent.addresses),
    )
    if keeper is not None:
        introduce(agent.calls.caller, group.others)
        keeper.start()
        keeper.wait_until_member()
    else:
        meet(store, group, timeout)


def start_storeless_agent(
    name: str, group: str, options: AgentOptions, incarnation: int | None = None
) -> Agent:
    """Start an agent like ``start_separate_agent``, in a group without a store. Its members learn of each
    other by ``admit``, and from connections. Extensions are not installed.

    Args:
        name: a name that is unique in the group.
        group: a key that the agents of this group, and no others, share.
        options: options, including ``listen`` and a token.
        incarnation: one that the others know; default: a random number.
    """
    assert options.listen is not None
    agent, _ = _make(options, *parse_listen(options.listen), incarnation=incarnation)
    agent.group.connections.tell_losses(tells=False)
    me = _describe(agent, WorkerInfo(name, secrets.randbits(_ID_BITS)), None)
    agent.join(me, [], group, static=False)
    return agent


def admit(agent: Agent, member: Member) -> None:
    """Add a member that another worker has named to an agent's group, unless it is there, or is this one."""
    if agent.group.peers.view.find(member.incarnation) is None:
        AgentNeighbours(agent.group).meet([member])


def _make(
    options: AgentOptions, host: str, port: int, incarnation: int | None = None
) -> tuple[Agent, bytes | None]:
    """Make an agent that listens; returns it and its job's token."""
    credential = find_credential(options, os.environ)
    token, transports = credential.token, options.transports
    on_one_host = options.listen is None and (credential.automatic or is_loopback(host))
    if transports is None and on_one_host:
        transports = ("unix",)  # the kernel tells which user's process connects
    if transports is not None:
        load_transports(transports)
    authenticator = None if token is None else TokenAuthenticator(token)
    tls = None if options.tls is None else TlsContexts.of(options.tls)
    agent = Agent(
        options,
        host,
        port,
        authenticator=authenticator,
        transports=transports,
        tls=tls,
        incarnation=incarnation,
    )
    return agent, token


def _describe(agent: Agent, info: WorkerInfo, master: str | None) -> Member:
    """Describe an agent as other workers see it."""
    return Member(
        info,
        agent.incarnation,
        host_identity(),
        tuple(as_others_reach_it(each, master) for each in agent.addresses),
        main_identity(),
        agent.options.max_message_bytes,
        agent.serializer.allow is not None,
        *device_agreement.described(agent.options),
    )


def _with_sign(agent: Agent, me: Member) -> Member:
    """Add a sign of life to the description of an agent that has no Unix address, for as long as it lives."""
    if not LifeSign.available or any(each.startswith("unix:") for each in me.addresses):
        return me
    try:
        sign = LifeSign()
    except OSError:  # the system may forbid Unix sockets: then the port tells, as for other hosts
        return me
    agent.lifecycle.hooks.closed.append(sign.close)
    agent.lifecycle.hooks.forked.append(sign.close)
    return replace(me, addresses=(*me.addresses, sign.address))


def _keeper(agent: Agent, joined: DynamicGroup, timeout: float) -> Keeper:
    """Make the keeper that shows this worker to later joiners, and watches the store."""
    hooks = agent.lifecycle.hooks
    keeper = Keeper(joined, timeout, AgentNeighbours(agent.group, hooks.out))
    agent.extensions[KEEPER] = keeper
    hooks.gone.append(lambda peer, _: keeper.worker_gone(Loss(peer.incarnation, left=peer.has_left)))
    hooks.close.append(keeper.leave)
    hooks.forked.append(keeper.abandon_after_fork)
    return keeper


def _why_the_process_ends() -> str:
    error = getattr(sys, "last_value", None)  # the exception whose traceback Python has printed
    if not isinstance(error, Exception) or hasattr(sys, "ps1"):
        return "its process ended without shutdown()"
    said = f"{type(error).__name__}: {text_of(error)}"
    return f"{CRASHED}, {beginning_of(said, _SHOWN_OF_ERROR)}"


def _leave_at_exit() -> None:
    """Say goodbye when the process ends without ``shutdown``, so that others learn of it at once."""
    agent = current_agent() if is_initialized() else None
    if isinstance(agent, Agent) and not agent.closed:
        why = _why_the_process_ends()
        if why.startswith(CRASHED):
            _reach_all(agent)
        clear_current_agent(agent)
        agent.close(why)


def _reach_all(agent: Agent) -> None:
    """Connect to the other members of a small group, so that a goodbye tells them why this worker ends: a
    closed socket alone would not.
    """
    others = [
        peer for peer in agent.group.peers.all() if not peer.is_self and not peer.connected and not peer.lost
    ]
    if not others or len(others) > _MOST_REACHED:
        return
    agent.group.connections.tell_losses(tells=False)  # the others may be about to end, too
    calls = []
    for peer in others:
        with contextlib.suppress(RpcError):
            calls.append(agent.calls.caller.call(peer.name, make_connection, (), {}, _REACH_SECONDS))
    for call in calls:
        with contextlib.suppress(RpcError):
            call.result()


# On import, so that handlers that the program registers run before it: one of them may call ``shutdown``.
atexit.register(_leave_at_exit)
