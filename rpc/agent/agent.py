"""The agent: one per process, on which everything else is built.

A call goes out on the caller's thread: ``caller`` serializes it, enters it into the table of calls and hands
the frame (``messages``) to the peer, which writes it to the socket. Frames come in on the loop's thread, in
``dispatch``: a request goes to the executor (``callee``), a reply to whoever waits for it (``pending``,
``futures``). The loop moves bytes and nothing else: no user code runs on it, no pickle is read on it.

What stands on the agent extends it at three points: message kinds (``on``, and ``control`` for small
messages that must arrive), the tape (``tape``), and carriers and reducers (``serialization``).
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from rpc.agent.call_table import CallTable
from rpc.agent.caller import UNSET_TIMEOUT, Caller
from rpc.agent.departure import Departure
from rpc.agent.dispatcher import Dispatcher, KindHandler
from rpc.agent.futures import Future
from rpc.agent.idle_reader import Standby
from rpc.agent.outbox import Messages
from rpc.agent.pending_call import PendingCall
from rpc.agent.request_runner import RequestRunner
from rpc.agent.tape import Recording, Tape
from rpc.bulk.point_to_point import Bulk
from rpc.bulk.shared_memory import SharedMemory
from rpc.bulk.striping import Striping
from rpc.errors import ForkedProcessError, NotInitializedError
from rpc.group.connections import Connections
from rpc.group.control import Control
from rpc.group.membership import Membership, WorkerReference
from rpc.group.peer import Peer
from rpc.group.workers import Member, WorkerInfo
from rpc.options import AgentOptions
from rpc.runtime import file_limit, process_tuning
from rpc.runtime.events import Events, PeerJoined, PeerLost
from rpc.runtime.executor import Executor, Task
from rpc.runtime.interrupts import defer_interrupts, restore_interrupts
from rpc.runtime.loop import LoopThread
from rpc.runtime.mailbox import Counter, Mailbox
from rpc.serialization.serializer import Serializer
from rpc.transport import Connection, transports
from rpc.wire.frames import Frame, Kind

__all__ = ["UNSET_TIMEOUT", "Agent"]

_STOP_SECONDS: Final = 1.0
"""How long ``close`` waits for user code that still runs; its threads are daemons and left behind then."""


class Agent:
    """Sends calls, runs the calls of others, and knows who is there.

    Made in two steps, since peers must know where it listens before the group is known:
    ``Agent(...)`` listens, ``join`` makes it part of a group.

    Args:
        options: of the backend.
        listen_host: where TCP listens, a host name or address.
        listen_port: 0 for any.
    """

    def __init__(self, options: AgentOptions, listen_host: str, listen_port: int = 0) -> None:
        self.options = options
        self.rpc_timeout = options.rpc_timeout
        self.incarnation = secrets.randbits(63)
        self.events = Events()
        self.serializer = Serializer(safe=options.deserialization == "safe")
        self.tape: Tape | None = None
        self._loop_thread = LoopThread(
            "farcall-loop", "a blocking call on the agent's own thread would stop the agent"
        )
        self.loop = self._loop_thread.loop
        self.executor = Executor(options.num_worker_threads, "farcall", options.max_worker_threads)
        self.calls = CallTable(self, self.loop, self._complete_all)
        self.caller = Caller(self)
        self.runner = RequestRunner(self)
        self.dispatcher = Dispatcher(self)
        self.frames_received = self.dispatcher.frames_received
        messages = Messages(self)
        self.send, self.answer = messages.send, messages.answer
        self.reply, self.dump_reply, self.fail = messages.reply, messages.dump_reply, messages.fail
        self.connections = Connections(
            self.loop,
            transports(self.loop, options.send_queue_bytes, options.transports),
            self,
            options.max_message_bytes,
        )
        self.dispatcher.on(Kind.GOODBYE, self.connections.goodbye_received)
        self._gone_handlers: list[Callable[[Peer, str], None]] = []
        self._close_handlers: list[Callable[[], object]] = []
        self._closed_handlers: list[Callable[[], object]] = []
        self._forked_handlers: list[Callable[[], object]] = []
        self._joined_handlers: list[Callable[[Peer], None]] = []
        self.mailbox = Mailbox(self.loop, self._look_whether_idle)
        self.control = Control(self.loop, self.mailbox, self.connections.lose)
        self.dispatcher.on(Kind.CONTROL, self.control.received)
        self.shared_memory = SharedMemory(
            self, options.shared_memory_bytes, options.max_message_bytes, takes=self.serializer.allow is None
        )
        self.unwrap = self.shared_memory.unwrap
        self.dispatcher.on(Kind.SEGMENTS, self.shared_memory.received)
        self.dispatcher.on(Kind.IN_SEGMENT, self.shared_memory.message_received)
        self.on_gone(self.shared_memory.peer_gone)
        self.stripes = Striping(self, options.tcp_stripes, options.max_message_bytes)
        self.dispatcher.on(Kind.STRIPES, self.stripes.received)
        self.dispatcher.on(Kind.STRIPED, self.stripes.message_opened)
        self.connections.stripe_came = self.stripes.stripe_came
        self.on_gone(self.stripes.peer_gone)
        self.bulk = Bulk(
            self.shared_memory.send,
            self.stripes.send,
            lambda peer, reason: self.mailbox.call(self.connections.lose, peer, reason),
        )
        self.dispatcher.on(Kind.BULK, self.bulk.received, any_thread=True)
        self.dispatcher.on(Kind.BULK_CREDIT, self.bulk.credited, any_thread=True)
        self.on_gone(self.bulk.peer_gone)
        self.on_closed(self.bulk.close)
        self.on_forked(self.bulk.abandon)
        self.extensions: dict[str, Any] = {}
        """What stands on this agent, by name: each part's own object, where its code finds it again."""
        self._peers: dict[int, Peer] = {}
        self.peer_by_incarnation: Callable[[int], Peer | None] = self._peers.get
        """Returns the peer of an incarnation, present or gone; None if it was never in the group."""
        self._routes: dict[str, Peer] = {}
        self.postponed = Counter()
        """Requests that no task works on, but which are still to be run or answered."""
        self.departure: Departure | None = None
        self.closed = False
        self._interval: float | None = None
        self._kept_memory = 0
        try:
            self.addresses = self._loop_thread.call(self.connections.listen, listen_host, listen_port)
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
            me: this worker.
            members: everybody known so far, with or without ``me``.
            group: a key that all members of this group, and no others, share.
            static: nobody joins later.
        """
        self.info = me.info
        self.view = Membership(me, static=static)
        self._peers[me.incarnation] = self.own_peer = Peer(me, self._connect, is_self=True)
        self.own_peer.agent = self
        self.connections.loop_back(self.own_peer, self.serializer.brings_nothing)
        self.departure = Departure(self, members if static else None)
        self.dispatcher.on(Kind.SHUTDOWN, self.departure.received)
        if self.options.switch_interval is not None:
            self._interval = sys.getswitchinterval()
            sys.setswitchinterval(min(self._interval, self.options.switch_interval))
        defer_interrupts()
        if process_tuning.keep(self.options.kept_memory_bytes):
            self._kept_memory = self.options.kept_memory_bytes

        def form() -> None:
            for member in members:
                self.view.join(member)
            for member in self.view.present():
                self.peer_for(member)
            self.connections.join_group(self.view, group)

        self._loop_thread.call(form)

    def peer(self, callee: WorkerReference) -> Peer:
        """The peer that a callee names.

        Raises:
            UnknownWorkerError: there is no such worker in the group.
            ValueError: ``callee`` is neither a name, an id nor a ``WorkerInfo``.
        """
        if type(callee) is str:  # nothing else: 1.0 and True would be found under 1
            peer = self._routes.get(callee)
            if peer is not None and peer.lost is None:  # else another may have the name now
                return peer
        peer = self._peers[self.view.resolve(callee).incarnation]
        self._routes[peer.name] = peer
        return peer

    def peer_for(self, member: Member) -> Peer:
        peer = self._peers.get(member.incarnation)
        if peer is None:
            file_limit.provide_for(len(self._peers))
            peer = self._peers[member.incarnation] = Peer(
                member,
                self._connect,
                send_queue_bytes=self.options.send_queue_bytes,
                near=member.host == self.view.me.host,
            )
            peer.agent = self
            self._routes.clear()
            for handler in self._joined_handlers:
                handler(peer)
            if self.events.peer_joined:
                self.events.tell(self.events.peer_joined, PeerJoined(member.name, member.id))
        return peer

    def _connect(self, peer: Peer) -> None:
        self.mailbox.call(self.connections.connect, peer)

    def watch_over(self, peer: Peer) -> None:
        """Be connected to a peer from now on, so that its death is noticed though nothing is sent to it."""
        if not peer.connected:
            self._connect(peer)

    def peer_connected(self, peer: Peer, connection: Connection) -> None:
        if connection.direct is not None:
            peer.standby = Standby(self, peer, connection.direct)

    def peer_gone(self, peer: Peer, reason: str) -> None:
        self.view.leave(peer.incarnation, reason)
        self._routes.clear()
        self.control.forget(peer)
        assert self.departure is not None
        unattended = [
            call.future
            for call in self.calls.take_all(peer)
            if call.settle(call.lost_error()) and call.future is not None
        ]
        self._complete_all(unattended)
        for handler in self._gone_handlers:
            handler(peer, reason)
        self.departure.worker_gone(peer)
        if self.events.peer_lost:
            self.events.tell(self.events.peer_lost, PeerLost(peer.name, peer.member.id, reason))

    def on_gone(self, handler: Callable[[Peer, str], None]) -> None:
        """Have ``handler`` called, on the loop's thread, when a worker is gone for good."""
        self._gone_handlers.append(handler)

    def on_close(self, handler: Callable[[], object]) -> None:
        """Have ``handler`` called, on the closing thread, when this worker leaves."""
        self._close_handlers.append(handler)

    def on_closed(self, handler: Callable[[], object]) -> None:
        """Have ``handler`` called, on the closing thread, when this worker has left: nobody it waits for
        will answer any more.
        """
        self._closed_handlers.append(handler)

    def on_forked(self, handler: Callable[[], object]) -> None:
        """Have ``handler`` called in a forked child, where it may wait for no lock."""
        self._forked_handlers.append(handler)

    def on_joined(self, handler: Callable[[Peer], None]) -> None:
        """Have ``handler`` called, on the loop's thread, when a worker joins."""
        self._joined_handlers.append(handler)

    # ---- receiving

    def on(
        self,
        kind: int,
        handler: KindHandler,
        *,
        any_thread: bool = False,
        followed: bool = False,
    ) -> None:
        """Extension point: have frames of a kind from ``Kind.EXTENSION`` on passed to ``handler``.

        It runs on the loop's thread, or with ``any_thread`` on any other: it must neither block nor run user
        code. What does, it may return as a task for an executor thread. More is said in ``Dispatcher.on``.
        """
        if kind < Kind.EXTENSION:
            raise ValueError(f"message kind {kind} is reserved")
        self.dispatcher.on(kind, handler, any_thread=any_thread, followed=followed)

    # ---- what pending calls need (CallOwner)

    def decode(self, call: PendingCall, frame: Frame) -> Any:
        if frame.kind == Kind.FAILURE:
            raise self.serializer.load_exception(frame.header, frame.buffers, call.arrivals, call.peer)
        _, _, header, buffers = frame
        recording = self.recording_of(header, call.peer, answer=True)
        connect = None if recording is None else recording.connect
        return self.serializer.loads(header, buffers, call.arrivals, call.peer, connect=connect)

    def recording_of(self, header: dict[str, Any], source: Peer, *, answer: bool = False) -> Recording | None:
        """What a request with this header, or an answer, is noted in."""
        tape = self.tape
        if tape is None or tape.key not in header:
            return None
        follow = tape.answered if answer else tape.received
        return follow(header[tape.key], source)

    def answered(self, call: PendingCall) -> None:
        self.calls.take(call.call_id)
        if self.departure is not None and self.departure.listening:
            self.something_ended()

    def unattended(self, peer: Peer, frame: Frame) -> PendingCall | None:
        if frame.kind != Kind.REPLY or frame.header:
            return None
        call = self.calls.find(frame.call_id)
        free = call is not None and call.any_thread and call.peer is peer and call.future is None
        return call if free else None

    def complete_soon(self, future: Future[Any]) -> None:
        self.run_soon([(future.complete, None)])

    def expire(self, call: PendingCall) -> BaseException | None:
        error = call.timeout_error() if self.calls.give_up(call) else None
        self.something_ended()  # if its callee is gone, or its answer has just come
        return error

    def _complete_all(self, futures: Sequence[Future[Any]]) -> None:
        if futures:
            self.run_soon([(future.complete, None) for future in futures])

    def run_soon(self, tasks: Sequence[Task]) -> None:
        """Run tasks on executor threads; when these have ended, only futures are completed still."""
        if not self.executor.submit_batch(tasks):
            _complete_futures(tasks)

    def on_loop(self, function: Callable[..., Any], *args: object) -> Any:
        """Run a function on the loop's thread and return its result."""
        return self._loop_thread.call(function, *args)

    # ---- looking in

    def under_way(self) -> int:
        """How much is under way here: calls not answered yet, requests not answered yet, tasks, callbacks,
        and control messages not acknowledged.
        """
        return (
            self.calls.unanswered()
            + self.postponed.value
            + self.executor.active()
            + self.control.unacknowledged()
            + self.mailbox.pending()
        )

    def begun(self) -> int:
        """How many calls, requests and control messages have ever begun here: grows with each."""
        return self.calls.opened + self.dispatcher.requests_begun + self.control.posted

    def something_ended(self) -> None:
        """This worker may have become idle, which interests who waits to leave."""
        if self.departure is not None and self.departure.listening:
            self.mailbox.call(self.departure.look)

    def _look_whether_idle(self) -> None:
        if self.departure is not None and self.departure.listening:
            self.departure.look()

    @property
    def is_static_group(self) -> bool:
        return self.view.static

    def get_worker_info(self, worker: WorkerReference | None = None) -> WorkerInfo:
        """This worker's name and id, or those of the one that ``worker`` names."""
        return self.info if worker is None else self.view.resolve(worker).info

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Name and id of everybody in the group, by id."""
        return self.view.infos()

    def get_debug_info(self) -> dict[str, int]:
        """Counts of threads, tasks, calls and messages right now, under keys that begin ``agent.``."""
        counts = self.executor.counts()
        counts |= {
            "thread_pool_size": self.options.num_worker_threads,
            "pending_calls": len(self.calls),
            "postponed_requests": self.postponed.value,
            "unacknowledged_control_messages": self.control.unacknowledged(),
            "connected_peers": sum(
                peer.connected and not peer.is_self for peer in list(self._peers.values())
            ),
        }
        return {f"agent.{key}": value for key, value in counts.items()}

    # ---- the end

    def close(self, reason: str) -> None:
        """Leave now: say goodbye to all, fail what is under way, end the threads. Idempotent.

        What interrupts a step, such as Ctrl-C while a peer does not read, is raised after the last one.
        """
        if self.closed:
            return
        self.closed = True
        _do_all(
            self.mailbox.close,
            *self._close_handlers,
            functools.partial(self._leave_group, reason),
            self._settle_calls,
            *self._closed_handlers,
            self.runner.stop,
            self._stop_executor,
            self._loop_thread.stop,
            self._restore_process,
        )

    def _leave_group(self, reason: str) -> None:
        if not self._loop_thread.is_current():
            self._loop_thread.wait_for(self._say_goodbye(reason))

    async def _say_goodbye(self, reason: str) -> None:
        """On the loop's thread. Once cancelled it waits for no peer, and only closes what is open."""
        try:
            await self.stripes.finish()
        finally:
            try:
                await self.connections.close(list(self._peers.values()), reason)
            finally:
                self.shared_memory.close()
                self.stripes.close()

    def _settle_calls(self) -> None:
        _do_all(*(functools.partial(self._settle, call) for call in self.calls.waiting()))

    def _settle(self, call: PendingCall) -> None:
        if self.calls.take(call.call_id) is not None:
            asked = f"{call.asked} on worker '{call.peer.name}'"
            error = NotInitializedError(f"RPC has been shut down: {asked} was not answered before")
            if call.settle(error) and call.future is not None:
                call.future.complete()

    def _stop_executor(self) -> None:
        dropped = self.executor.drop_backlog()
        try:
            self.executor.stop(timeout=_STOP_SECONDS)
        finally:
            _complete_futures(dropped)

    def _restore_process(self) -> None:
        restore_interrupts()
        if self._interval is not None:
            sys.setswitchinterval(self._interval)
        if self._kept_memory:
            process_tuning.release(self._kept_memory)

    def abandon_after_fork(self) -> None:
        """In a forked child: let go of the parent's connections without disturbing them.

        The child has none of the agent's threads, and its locks may be held by threads that are not there,
        so nothing is called that would take one. The descriptors are closed, or the parent's peers would
        not notice the parent's death while the child lives.
        """
        self.closed = True
        self.mailbox.close()
        _inherited.append(self)  # destroying the loop here would touch what the parent still uses
        for handler in self._forked_handlers:
            handler()
        for connection in self.connections.connections(self._peers.values()):
            connection.abandon()
        self.shared_memory.abandon()
        self.stripes.abandon()
        for call in self.calls.waiting():
            call.abandon(ForkedProcessError(f"this process was forked while {call.asked} was under way"))
        if self._interval is not None:
            sys.setswitchinterval(self._interval)
        if self._kept_memory:
            process_tuning.release(self._kept_memory, give_back=False)


def _do_all(*steps: Callable[[], object]) -> None:
    """Do one step after the other, also when one raises; what was raised is raised at the end."""
    with contextlib.ExitStack() as stack:
        for step in reversed(steps):
            stack.callback(step)


def _complete_futures(tasks: Sequence[Task]) -> None:
    """Of tasks that no thread will run, complete the futures: nobody shall wait for them in vain."""
    _do_all(
        *(
            functools.partial(function, argument)
            for function, argument in tasks
            if isinstance(getattr(function, "__self__", None), Future)
        )
    )


_inherited: Final[list[Agent]] = []
