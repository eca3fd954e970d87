"""The agent: one per process; everything else is built on it. It composes its parts.

A call is sent on the caller's thread: ``calls`` serializes it, enters it into the table of calls, and
``dispatcher`` passes the frame to the peer, which writes it to the socket. All received frames go through
``dispatcher``, too: a request goes to the executor (``received_requests``), a reply to the
thread that waits for it (``calls``, ``futures``). The loop only moves bytes: it runs no user code and reads
no pickles.

The parts have four interfaces: ``Agent.calls``, ``messages``, ``group`` and ``lifecycle``. Packages above the
agent extend it at four points: message kinds (``messages.on``, and ``messages.control`` for small messages
that must arrive), hooks (``lifecycle.hooks``), the tape (``tracing``), and carriers and reducers
(``serializer``). Other packages are given the parts that they use, and not the agent.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rpc.agent.activity import Activity
from rpc.agent.agent_calls import Calls
from rpc.agent.futures import Future
from rpc.agent.gather import Gathering
from rpc.agent.group import AgentGroup
from rpc.agent.hooks import Hooks
from rpc.agent.lifecycle import Lifecycle
from rpc.agent.messages import Messages
from rpc.agent.platform import Platform
from rpc.agent.reception import Reception
from rpc.agent.tape import Tracing
from rpc.group.membership import WorkerReference
from rpc.group.workers import Member, WorkerInfo
from rpc.options import UNSET_TIMEOUT, AgentOptions
from rpc.runtime.current import clear_current_agent
from rpc.runtime.events import Events
from rpc.runtime.interrupts import protected
from rpc.runtime.mailbox import Mailbox
from rpc.serialization.serializer import Serializer
from rpc.transport.authentication import TokenAuthenticator
from rpc.transport.tls import TlsContexts
from rpc.wire.frames import Kind

__all__ = ["UNSET_TIMEOUT", "Agent"]


class Agent:
    """Sends calls, runs the calls of others, and knows the group's members: an ``AgentInterface``.

    Made in two steps, since peers must know where it listens before the group is known: ``Agent(...)``
    listens, ``join`` makes it part of a group.

    Args:
        options: options of the backend.
        listen_host: host name or address to listen on for other hosts.
        listen_port: port to listen on; 0 for any.
        authenticator: has other workers prove that they belong to the job; None for no authentication.
        transports: names of the transports to use; default: those for this system.
        tls: encrypts network connections.
        platform: its threads and transports; default: threads of its own and the transports named.
        incarnation: distinguishes this worker from all others, including earlier ones with its name; default:
            a random number.

    Attributes:
        info: this worker's name and id, once it has joined its group.
        addresses: addresses at which it listens, best first.
        calls, messages, group, lifecycle: its parts.
        tracing: the tape, and observers of requests.
        serializer: serializes calls and values.
        events: the events for ``rpc.events.listen``.
        mailbox: has functions called on the loop's thread.
        executor: runs tasks.
        gathering: ``all_gather`` and ``barrier``.
        extensions: for each extension, by name, the object that belongs to it.
    """

    info: WorkerInfo

    def __init__(
        self,
        options: AgentOptions,
        listen_host: str,
        listen_port: int = 0,
        *,
        authenticator: TokenAuthenticator | None = None,
        transports: Iterable[str] | None = None,
        tls: TlsContexts | None = None,
        platform: Platform | None = None,
        incarnation: int | None = None,
    ) -> None:
        self._platform = platform = platform or Platform.of_process(options, transports, tls, authenticator)
        self.options = options
        self.incarnation = secrets.randbits(63) if incarnation is None else incarnation
        self.extensions: dict[str, Any] = {}
        self.serializer = serializer = Serializer(safe=options.deserialization == "safe")
        self.events = events = Events()
        self.tracing = tracing = Tracing()
        self.executor = executor = platform.executor
        self.mailbox = mailbox = Mailbox(platform.loop_thread.loop)
        hooks, activity = Hooks(), Activity(mailbox, executor)
        self.group = group = AgentGroup(options, platform, mailbox, serializer, events, hooks, authenticator)
        self.messages = messages = Messages(
            options, group, serializer, events, activity, hooks, executor.submit_batch
        )
        self.calls = calls = Calls(
            options, group, messages, hooks, serializer, tracing, events, activity, executor
        )
        self.lifecycle = lifecycle = Lifecycle(
            hooks, activity, group, messages, calls, platform, forget=lambda: clear_current_agent(self)
        )
        departure, peers = lifecycle.departure, group.peers
        self.gathering = Gathering(calls.caller, peers, executor, activity, departure, hooks, serializer)
        group.connections.serve(Reception(messages, peers, departure, hooks, events))
        try:
            self.addresses = group.listen(listen_host, listen_port)
        except BaseException:
            self.close("it cannot listen")
            raise

    def join(self, me: Member, members: Sequence[Member], group: str, *, static: bool) -> None:
        """Join a group: from now on calls can be made and are answered.

        Args:
            members: all members known so far, with or without ``me``.
            group: a key that all members of this group, and no others, share.
            static: whether no worker can join later.
        """
        self.info = me.info
        self.group.form(me, static=static)
        self.lifecycle.departure.form(me, members if static else None)
        self._platform.process.apply()
        for handler in self.lifecycle.hooks.formed:
            handler(group)

        def form() -> None:
            self.group.join(members, group)
            self.lifecycle.begin()

        self._platform.loop_thread.call(form)

    # ---- the AgentInterface

    @property
    def rpc_timeout(self) -> float:
        """Default timeout of calls, in seconds; 0 for none."""
        return self.calls.caller.rpc_timeout

    @rpc_timeout.setter
    def rpc_timeout(self, seconds: float) -> None:
        self.calls.caller.rpc_timeout = seconds

    @protected  # objects beside the payload are either sent or taken back
    def call(
        self,
        to: WorkerReference,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
    ) -> Any:
        """Call a function on a worker, wait, and return its value or raise its error."""
        caller, peer = self.calls.caller, self.group.peers.find(to)
        payload = caller.dump_call(function, args, kwargs, peer)
        return caller.inquire(peer, Kind.CALL, payload, timeout, function)

    @protected
    def call_async(
        self,
        to: WorkerReference,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
    ) -> Future[Any]:
        """Like ``call``, but return a future of the value immediately. If many calls are under way, it may be
        sent together with the following.
        """
        return Future.for_call(self.calls.caller.call(to, function, args, kwargs, timeout, coalesce=True))

    def all_gather(self, value: Any, worker_names: Iterable[str] | None, timeout: float) -> dict[str, Any]:
        """See ``rpc.all_gather``."""
        return self.gathering.all_gather(value, worker_names, timeout)

    def get_worker_info(self, worker: WorkerReference | None = None) -> WorkerInfo:
        """Return this worker's name and id, or those of another worker."""
        return self.info if worker is None else self.group.peers.view.resolve(worker).info

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Return name and id of all workers in the group, by id."""
        return self.group.peers.view.infos()

    def get_debug_info(self) -> dict[str, int]:
        """Return the current numbers of threads, tasks, calls and messages, under keys that begin with
        ``agent.``, and those of extensions.
        """
        table = self.calls.table
        counts = self.executor.counts()
        counts |= {
            "thread_pool_size": self.options.num_worker_threads,
            "pending_calls": len(table),
            "given_up_calls": table.unanswered() - len(table),
            "cancellable_requests": len(self.calls.requests),
            "postponed_requests": self.lifecycle.activity.postponed.value,
            "unacknowledged_control_messages": self.messages.control.unacknowledged(),
            "bulk_tags": self.messages.bulk.tags,
            "connected_peers": sum(peer.connected and not peer.is_self for peer in self.group.peers.all()),
        }
        info = {f"agent.{key}": value for key, value in counts.items()}
        for extension in list(self.extensions.values()):  # another thread may add one
            describe = getattr(extension, "debug_info", None)
            if describe is not None:
                info |= describe()
        return info

    @property
    def is_static_group(self) -> bool:
        """Whether no worker can join the group any more."""
        return self.group.peers.view.static

    # ---- closing

    @property
    def closed(self) -> bool:
        """Whether this worker is leaving, or has left."""
        return self.lifecycle.closed

    def shutdown(
        self,
        graceful: bool = True,
        timeout: float = 0.0,
        *,
        release_references: bool = True,
        raise_on_leaks: bool = False,
    ) -> None:
        """Leave the group and end; see ``rpc.shutdown``."""
        self.lifecycle.shutdown(
            graceful, timeout, release_references=release_references, raise_on_leaks=raise_on_leaks
        )

    def close(self, reason: str) -> None:
        """Leave immediately; see ``Lifecycle.close``."""
        self.lifecycle.close(reason)

    def abandon_after_fork(self) -> None:
        """Release the parent's connections without disturbing them, in a forked child."""
        self.lifecycle.abandon_after_fork()
