"""The agent: one per process, on which everything else is built. It composes its parts, and ends them.

A call goes out on the caller's thread: ``caller`` serializes it, enters it into the table of ``calls``, and
``dispatcher`` hands the frame to the peer, which writes it to the socket. There all frames come in, too: a
request goes to the executor (``request_runner``), a reply to whoever waits for it (``calls``, ``futures``).
The loop moves bytes and nothing else: no user code runs on it, no pickle is read on it.

What stands on the agent extends it at four points: message kinds (``on``, and ``control`` for small messages
that must arrive), the turns of its life (``hooks``), the tape (``tape``), and carriers and reducers
(``serialization``).
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Final

from rpc.agent.caller import UNSET_TIMEOUT, Caller
from rpc.agent.calls import CallTable
from rpc.agent.departure import SHUT_DOWN, Activity, Departure
from rpc.agent.dispatcher import Dispatcher, KindHandler
from rpc.agent.futures import Completions
from rpc.agent.gather import Gathering
from rpc.agent.ground import Ground
from rpc.agent.hooks import Hooks
from rpc.agent.ports import CANCEL
from rpc.agent.request_runner import RequestRunner, running
from rpc.agent.standstill import Standstill
from rpc.agent.tape import Observation, Recording, Tape
from rpc.agent.waiting import Waiting
from rpc.bulk.point_to_point import Bulk
from rpc.bulk.shared_memory.exchange import SharedMemory
from rpc.bulk.streams import BulkStreams
from rpc.errors import ForkedProcessError, RpcError
from rpc.group.connections import Connections
from rpc.group.control import Control
from rpc.group.handshake import Authenticator
from rpc.group.heartbeat import Heartbeat
from rpc.group.membership import Membership, WorkerReference
from rpc.group.peer import Peer, PeerTable
from rpc.group.workers import Member, WorkerInfo
from rpc.options import AgentOptions
from rpc.runtime.blocking import INFINITE, check_may_block
from rpc.runtime.current import clear_current_agent
from rpc.runtime.events import Events, PeerLost
from rpc.runtime.executor import Executor
from rpc.runtime.interrupts import interruptible, protected
from rpc.runtime.mailbox import Mailbox
from rpc.serialization.serializer import Serializer
from rpc.transport.tls import TlsContexts
from rpc.wire.frames import Kind

__all__ = ["UNSET_TIMEOUT", "Agent"]

_STOP_SECONDS: Final = 1.0
"""How long ``close`` waits for user code that still runs; its threads are daemons and left behind then."""


_SHOWN: Final = 5
"""So many calls are named in the log."""


class Agent:
    """Sends calls, runs the calls of others, and knows who is there: an ``AgentInterface``.

    Made in two steps, since peers must know where it listens before the group is known:
    ``Agent(...)`` listens, ``join`` makes it part of a group.

    Args:
        options: of the backend.
        listen_host: where to listen for other hosts, a host name or address.
        listen_port: 0 for any.
        authenticator: has other workers prove that they belong to the job; None to ask nothing.
        transports: which to use; default: those for this system.
        tls: encrypts what goes over a network.
        ground: what it stands on; default: threads of its own and the transports named.

    Attributes:
        extensions: what stands on this agent, by name: each part's own object, where its code finds it again.
        tape: notes what tensors calls carry.
        observer: a key of the header, and what observes a request that has it.
    """

    info: WorkerInfo
    view: Membership
    calls: CallTable
    control: Control
    dispatcher: Dispatcher

    def __init__(
        self,
        options: AgentOptions,
        listen_host: str,
        listen_port: int = 0,
        *,
        authenticator: Authenticator | None = None,
        transports: Iterable[str] | None = None,
        tls: TlsContexts | None = None,
        ground: Ground | None = None,
    ) -> None:
        self.options = options
        self.rpc_timeout = options.rpc_timeout
        self.incarnation = secrets.randbits(63)
        self.serializer = Serializer(safe=options.deserialization == "safe")
        self.extensions: dict[str, Any] = {}
        self.tape: Tape | None = None
        self.observer: tuple[str, Callable[[Any, Recording | None], Observation]] | None = None
        self.closed = False
        ground = ground or Ground.of_process(options, transports, tls, authenticator)
        self._process = ground.process
        self.events = Events()
        self.hooks = hooks = Hooks()
        self.on_joined, self.on_gone = hooks.joined.append, hooks.gone.append
        self.on_close, self.on_closed = hooks.close.append, hooks.closed.append
        self.on_forked = hooks.forked.append
        self._loop_thread = ground.loop_thread
        self.loop = self._loop_thread.loop
        self.on_loop = self._loop_thread.call
        self.mailbox = Mailbox(self.loop)
        self.executor = ground.executor
        self._completions = Completions(self.executor)
        self.run_soon = self._completions.run_soon
        self.activity = Activity(
            self.mailbox,
            self.executor,
            lambda: self.calls.unanswered() + self.control.unacknowledged(),
            lambda: self.calls.opened + self.dispatcher.requests_begun + self.control.posted,
            lambda: _under_way(self.calls, self.executor),
            lambda: self.dispatcher.requests_begun,
        )
        self.postponed, self.something_ended = self.activity.postponed, self.activity.ended

        self.peers = PeerTable(self._make_peer, self._connect, hooks.joined, self.events, self.on_loop)
        self.peer, self.peer_for, self.gone_peer = self.peers.find, self.peers.ensure, self.peers.gone
        self.peer_by_incarnation = self.peers.by_incarnation
        self.connections = Connections(
            self.loop,
            ground.transports,
            self,
            options.max_message_bytes,
            authenticator,
        )
        self.connections.handshake_seconds = INFINITE  # the heartbeat decides
        self.connections.reconnect_seconds = options.reconnect_within
        self.control = Control(self.loop, self.mailbox, self.connections.lose)

        self.caller = Caller(self)
        self.call, self.call_async = self.caller.ask, self.caller.call_async
        self.calls = CallTable(self.caller, self.loop, self.events)
        self.runner = runner = RequestRunner(self)
        self.reply, self.answer, self.fail = runner.reply, runner.answer, runner.fail
        self.dispatcher = dispatcher = Dispatcher(self, runner.run, runner.cancellable)
        self.send, self.followed = dispatcher.send, dispatcher.followed
        self.frames_received, self.take_inline = dispatcher.frames_received, dispatcher.take_inline

        self.shared_memory = SharedMemory(
            self.loop,
            self.mailbox.call,
            self.connections.lose,
            bound=options.shared_memory_bytes,
            max_message_bytes=options.max_message_bytes,
            takes=self.serializer.allow is None,
        )
        self.share = self.shared_memory.send
        self.bulk_streams = BulkStreams(
            self.loop,
            self.mailbox,
            self.connections,
            self.frames_received,
            dispatcher.take_bulk,
            options.tcp_stripes,
            options.max_message_bytes,
            options.send_queue_bytes,
        )
        self.connections.stream_came = self.bulk_streams.stream_came
        self.bulk = Bulk(self.share, self.bulk_streams.consider, self.lose)
        self.find_target = self.bulk.find_target

        self.heartbeat = Heartbeat(
            self.loop,
            self.peers.all,
            self.connections.lose,
            dispatcher.message_lost,
            self.connections.greet_again,
            options.lost_after,
        )
        self.large_came = self.heartbeat.large_came
        self.waiting = Waiting(self, self.loop, options.slow_call_seconds)
        self.departure = Departure(self.activity, self.peers, self.connections, self._loop_thread, hooks)
        self.standstill = Standstill(
            self.caller, self.peers, self.executor, self.activity, self.departure, self.serializer
        )
        self.gathering = Gathering(self.caller, self.peers, hooks, self.serializer, self.standstill)
        self.all_gather = self.gathering.all_gather
        self.heartbeat.interests += [
            self.calls.peers,
            self.control.peers,
            self.bulk.peers,
            self.departure.awaited,
        ]
        hooks.gone.extend((self.shared_memory.peer_gone, self.bulk_streams.peer_gone, self.bulk.peer_gone))
        hooks.closed.append(self.bulk.close)
        hooks.forked.extend((self.bulk.abandon, self.shared_memory.abandon, self.bulk_streams.abandon))
        for kind, handler in (
            (Kind.CONTROL, self.control.received),
            (Kind.GOODBYE, self.connections.goodbye_received),
            (Kind.SEGMENTS, self.shared_memory.received),
            (Kind.STREAMS, self.bulk_streams.received),
            (Kind.SHUTDOWN, self.departure.received),
        ):
            self.dispatcher.on(kind, handler)
        self.control.on(CANCEL, runner.cancel)
        self.dispatcher.unwrap(Kind.IN_SEGMENT, self.shared_memory.unwrap)
        self.dispatcher.on(Kind.ALIVE, self.heartbeat.received, any_thread=True)
        self.dispatcher.on(Kind.ARRIVED, self.heartbeat.arrived, any_thread=True)
        self.dispatcher.on_lost(Kind.BULK, self._send_again)
        self.dispatcher.on(Kind.BULK, self.bulk.received, any_thread=True)
        self.dispatcher.on(Kind.BULK_CREDIT, self.bulk.credited, any_thread=True)
        self.dispatcher.on(Kind.BULK_CLOSE, self.bulk.closed, any_thread=True)
        try:
            self.addresses = self.on_loop(self.connections.listen, listen_host, listen_port)
        except BaseException as error:
            self.close("it cannot listen")
            if isinstance(error, OSError):
                reason = f"cannot listen on {listen_host!r}, port {listen_port}: {error.strerror or error}"
                raise OSError(error.errno, reason) from error
            raise

    # ---- the group

    def join(self, me: Member, members: Sequence[Member], group: str, *, static: bool) -> None:
        """Take part in a group: from now on calls can be made and are answered.

        Args:
            members: everybody known so far, with or without ``me``.
            group: a key that all members of this group, and no others, share.
            static: nobody joins later.
        """
        self.info = me.info
        self.view = Membership(me, static=static)
        self.own_peer = Peer(me, self.serializer.between(me.safe), self._connect, is_self=True)
        self.connections.loop_back(self.own_peer)
        self.peers.form(self.view, self.own_peer)
        self.departure.form(me, members if static else None)
        self._process.apply()

        def form() -> None:
            for member in members:
                self.view.join(member)
            self.peers.present()
            self.connections.join_group(self.view, group)
            self.heartbeat.begin()
            self.waiting.begin()

        self.on_loop(form)

    def _make_peer(self, member: Member) -> Peer:
        return Peer(
            member,
            self.serializer.between(member.safe),
            self._connect,
            send_queue_bytes=self.options.send_queue_bytes,
            near=member.host == self.view.me.host,
        )

    def _connect(self, peer: Peer) -> None:
        self.mailbox.call(self.connections.connect, peer)

    def lose(self, peer: Peer, reason: str) -> None:
        """Cut a worker off. From any thread; on the loop's at once."""
        if self._loop_thread.is_current():
            self.connections.lose(peer, reason)
        else:
            self.mailbox.call(self.connections.lose, peer, reason)

    def peer_broke(self, peer: Peer) -> None:
        """The connection to a worker broke, and is made again."""
        self.bulk_streams.peer_broke(peer)
        self.bulk.peer_broke(peer)

    def _send_again(self, peer: Peer, call_id: int) -> None:
        self.run_soon([(self.bulk.send_again, (peer, call_id))])

    def peer_gone(self, peer: Peer, reason: str) -> None:
        """A worker is gone for good: end what was under way with it."""
        self.peers.leave(peer, reason)
        self.control.forget(peer)
        self.calls.lost(peer)
        for handler in list(self.hooks.gone):  # one may be removed meanwhile
            handler(peer, reason)
        self.departure.worker_gone(peer)
        if self.events.peer_lost:
            self.events.tell(self.events.peer_lost, PeerLost(peer.name, peer.member.id, reason))

    # ---- what the API needs (AgentInterface)

    def get_worker_info(self, worker: WorkerReference | None = None) -> WorkerInfo:
        """This worker's name and id, or those of the one that ``worker`` names."""
        return self.info if worker is None else self.view.resolve(worker).info

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Name and id of everybody in the group, by id."""
        return self.view.infos()

    def get_debug_info(self) -> dict[str, int]:
        """Counts of threads, tasks, calls and messages right now, under keys that begin ``agent.``, and of
        what stands on the agent.
        """
        counts = self.executor.counts()
        counts |= {
            "thread_pool_size": self.options.num_worker_threads,
            "pending_calls": len(self.calls),
            "given_up_calls": self.calls.unanswered() - len(self.calls),
            "cancellable_requests": len(self.runner.cancellable),
            "postponed_requests": self.postponed.value,
            "unacknowledged_control_messages": self.control.unacknowledged(),
            "bulk_tags": self.bulk.tags,
            "connected_peers": sum(peer.connected and not peer.is_self for peer in self.peers.all()),
        }
        info = {f"agent.{key}": value for key, value in counts.items()}
        for extension in self.extensions.values():
            describe = getattr(extension, "debug_info", None)
            if describe is not None:
                info |= describe()
        return info

    @property
    def is_static_group(self) -> bool:
        return self.view.static

    # ---- extension points

    def on(
        self, kind: int, handler: KindHandler, *, any_thread: bool = False, followed: bool = False
    ) -> None:
        """See ``Dispatcher.on``; only for kinds from ``Kind.EXTENSION`` on."""
        if kind < Kind.EXTENSION:
            raise ValueError(f"message kind {kind} is reserved")
        self.dispatcher.on(kind, handler, any_thread=any_thread, followed=followed)

    def recording_of(
        self, header: dict[str, Any], source: Peer, *, answer: bool = False
    ) -> Recording | Observation | None:
        """What a request with this header, or an answer, is noted in."""
        tape, observer = self.tape, self.observer
        recording: Recording | None = None
        if tape is not None and tape.key in header:
            follow = tape.answered if answer else tape.received
            recording = follow(header[tape.key], source)
        if observer is None or answer or observer[0] not in header:
            return recording
        return observer[1](header[observer[0]], recording)

    # ---- the end

    @protected  # but for the waiting: once that has ended, however it has, nothing may keep it from closing
    def shutdown(
        self,
        graceful: bool = True,
        timeout: float = 0.0,
        *,
        release_references: bool = True,
        raise_on_leaks: bool = False,
    ) -> None:
        """Leave the group and end; see ``rpc.shutdown``."""
        if graceful:
            check_may_block()
            if self.executor.owns_current_thread():
                raise RpcError("a callee cannot shut down gracefully: it would wait for its own call to end")
        timeout = self.caller.effective_timeout(timeout)
        if graceful and not self.departure.claim():
            raise RpcError(f"worker '{self.info.name}' is being shut down by another thread already")
        try:
            if graceful:
                self.departure.wait_for_all(
                    timeout,
                    release=self.hooks.release if release_references else (),
                    check=self.hooks.check if raise_on_leaks else (),
                )
        finally:
            clear_current_agent(self)
            self.close(SHUT_DOWN if graceful else "it has shut down without waiting")

    @protected
    def close(self, reason: str) -> None:
        """Leave now: say goodbye to all, fail what is under way, end the threads. Idempotent.

        What interrupts a step, such as Ctrl-C while a peer does not read, is raised after the last one.
        """
        if self.closed:
            return
        self.closed = True
        steps: tuple[Callable[[], object], ...] = (
            self.mailbox.close,
            *(functools.partial(_interruptibly, step) for step in self.hooks.close),
            functools.partial(self._leave_group, reason),
            self.calls.end,
            *self.hooks.closed,
            self.runner.stop,
            functools.partial(self._completions.stop, _STOP_SECONDS),
            self._loop_thread.stop,
            self._process.restore,
        )
        with ExitStack() as stack:
            for step in reversed(steps):
                stack.callback(step)

    def _leave_group(self, reason: str) -> None:
        if not self._loop_thread.is_current():
            self._loop_thread.wait_for(self.say_goodbye(reason))

    async def say_goodbye(self, reason: str) -> None:
        """The part of ``close`` on the loop's thread. Once cancelled it waits for no peer, and only closes
        what is open.
        """
        self.heartbeat.stop()
        self.waiting.stop()
        try:
            await self.bulk_streams.finish()
        finally:
            try:
                await self.connections.close(self.peers.all(), reason)
            finally:
                self.shared_memory.close()
                await self.bulk_streams.close()

    def abandon_after_fork(self) -> None:
        """In a forked child: let go of the parent's connections without disturbing them.

        No lock may be taken: threads may hold it that are not there. Descriptors are closed, or the parent's
        peers would not notice its death while the child lives.
        """
        self.closed = True
        self.mailbox.close()
        for handler in self.hooks.forked:
            handler()
        for connection in self.connections.connections(self.peers.all()):
            connection.abandon()
        for call in self.calls.waiting():
            call.abandon(ForkedProcessError(f"this process was forked while {call.asked} was under way"))
        self._process.restore(give_back=False)


@interruptible
def _interruptibly(step: Callable[[], object]) -> None:
    step()


def _under_way(calls: CallTable, executor: Executor) -> str:
    """Which calls an agent waits for, and which it runs, in words."""
    made = [f"{call.asked} on worker '{call.peer.name}'" for call in calls.waiting()]
    parts = [
        f"{words}: {', '.join(which[:_SHOWN])}"
        for words, which in (("waiting for", made), ("running", running(executor.threads())))
        if which
    ]
    return "; ".join(parts)
