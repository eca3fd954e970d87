"""The agent: one per process; everything else is built on it. It composes its parts.

A call is sent on the caller's thread: ``caller`` serializes it, enters it into the table of ``calls``, and
``dispatcher`` passes the frame to the peer, which writes it to the socket. All received frames go through
``dispatcher``, too: a request goes to the executor (``received_requests``, ``request_runner``,
``answer_sender``), a reply to the thread that waits for it (``calls``, ``futures``). The loop only moves
bytes: it runs no user code and reads no pickles.

The parts have four interfaces: ``Agent.calls``, ``messages``, ``group`` and ``lifecycle``. Packages above the
agent extend it at four points: message kinds (``messages.on``, and ``messages.control`` for small messages
that must arrive), hooks (``lifecycle.hooks``), the tape (``tracing``), and carriers and reducers
(``serializer``). Other packages are given the parts that they use, as ports (``ports``), and not the agent.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rpc.agent.activity import Activity
from rpc.agent.answer_sender import AnswerSender
from rpc.agent.call_frames import running
from rpc.agent.caller import UNSET_TIMEOUT, Caller
from rpc.agent.calls import CallTable
from rpc.agent.departure import Departure
from rpc.agent.dispatcher import Dispatcher, KindHandler, Sender
from rpc.agent.futures import Completions, Future
from rpc.agent.gather import Gathering
from rpc.agent.group import AgentGroup, Reception
from rpc.agent.hooks import Hooks
from rpc.agent.lifecycle import Lifecycle
from rpc.agent.messages import Messages
from rpc.agent.platform import Platform
from rpc.agent.ports import CANCEL
from rpc.agent.received_requests import ReceivedRequests
from rpc.agent.request_runner import RequestRunner
from rpc.agent.tape import Tracing
from rpc.agent.waiting import Waiting
from rpc.bulk.point_to_point import Bulk
from rpc.bulk.shared_memory.exchange import SharedMemory
from rpc.bulk.streams import BulkStreams
from rpc.group.control import Control
from rpc.group.handshake import Authenticator
from rpc.group.heartbeat import Heartbeat
from rpc.group.membership import WorkerReference
from rpc.group.workers import Member, WorkerInfo
from rpc.options import AgentOptions
from rpc.runtime.current import clear_current_agent
from rpc.runtime.events import Events
from rpc.runtime.executor import Executor
from rpc.runtime.mailbox import Mailbox
from rpc.serialization.serializer import Serializer
from rpc.transport.tls import TlsContexts
from rpc.wire.frames import Kind

__all__ = ["UNSET_TIMEOUT", "Agent", "Calls"]

_SHOWN: Final = 5
"""Maximum number of calls named in one log line."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of one agent, and the requests of other workers.

    Attributes:
        caller: makes calls, and the futures of calls.
        table: the calls under way.
        requests: the requests of other workers that are not answered yet.
        answers: answers requests.
        runner: runs requests.
        completions: runs tasks, and completes futures, on executor threads.
        gathering: ``all_gather`` and ``barrier``.
    """

    caller: Caller
    table: CallTable
    requests: ReceivedRequests
    answers: AnswerSender
    runner: RequestRunner
    completions: Completions
    gathering: Gathering


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
        extensions: for each extension, by name, the object that belongs to it.
    """

    info: WorkerInfo

    def __init__(
        self,
        options: AgentOptions,
        listen_host: str,
        listen_port: int = 0,
        *,
        authenticator: Authenticator | None = None,
        transports: Iterable[str] | None = None,
        tls: TlsContexts | None = None,
        platform: Platform | None = None,
        incarnation: int | None = None,
    ) -> None:
        platform = platform or Platform.of_process(options, transports, tls, authenticator)
        loop = platform.loop_thread.loop
        self.options = options
        self.incarnation = secrets.randbits(63) if incarnation is None else incarnation
        self.extensions: dict[str, Any] = {}
        self.serializer = serializer = Serializer(safe=options.deserialization == "safe")
        self.events = events = Events()
        self.tracing = tracing = Tracing()
        self.executor = executor = platform.executor
        self.mailbox = mailbox = Mailbox(loop)
        self._platform = platform
        hooks = Hooks()
        completions = Completions(executor)
        activity = Activity(mailbox, executor)

        # Workers, and messages from and to them.
        self.group = group = AgentGroup(options, platform, mailbox, serializer, events, hooks, authenticator)
        peers, connections = group.peers, group.connections
        dispatcher = Dispatcher(serializer, events, activity, completions.run_soon, group.lose, mailbox.later)
        control = Control(loop, mailbox, connections.lose)
        shared_memory = SharedMemory(
            loop,
            mailbox.call,
            connections.lose,
            bound=options.shared_memory_bytes,
            max_message_bytes=options.max_message_bytes,
            takes=serializer.allow is None,
        )
        bulk_streams = BulkStreams(
            loop,
            mailbox,
            connections,
            dispatcher.frames_received,
            dispatcher.take_bulk,
            options.tcp_stripes,
            options.max_message_bytes,
            options.send_queue_bytes,
        )
        bulk = Bulk(shared_memory.send, bulk_streams.consider, group.lose)
        sender = Sender(serializer, events, activity, shared_memory.send, bulk_streams.consider, group.lose)
        self.messages = Messages(dispatcher, sender, control, bulk, shared_memory, bulk_streams)

        # Calls, and answers.
        caller = Caller(
            options.rpc_timeout,
            loop,
            serializer,
            tracing,
            events,
            activity,
            find=peers.find,
            send=sender.send,
            post=control.post,
            run_soon=completions.run_soon,
        )
        table = caller.table
        requests = ReceivedRequests(serializer, events, executor, activity)
        answers = AnswerSender(
            requests, peers, serializer, tracing, events, sender.send, completions.run_soon
        )
        runner = RequestRunner(peers, serializer, tracing, events, executor, activity, answers)
        hooks.gone.extend((lambda peer, _: control.forget(peer), lambda peer, _: table.lost(peer)))
        hooks.gone.append(requests.peer_gone)
        activity.add(table.unanswered, lambda: table.opened)
        activity.add(control.unacknowledged, lambda: control.posted)
        activity.serve(lambda: requests.begun)
        describe = functools.partial(_under_way, table, executor)
        departure = Departure(activity, peers, connections, platform.loop_thread, hooks, describe)
        gathering = Gathering(caller, peers, executor, activity, departure, hooks, serializer)
        self.calls = Calls(caller, table, requests, answers, runner, completions, gathering)

        # Detection of silent workers, slow calls, lost workers.
        heartbeat = Heartbeat(
            loop,
            peers.all,
            connections.lose,
            dispatcher.message_lost,
            connections.greet_again,
            options.lost_after,
            connections.own_time,
            connections.neighbours,
        )
        heartbeat.interests += [table.peers, control.peers, bulk.peers, departure.awaited]
        heartbeat.interests.append(lambda: (peer for each in hooks.awaited for peer in each()))
        waiting = Waiting(table, requests, control, peers, executor, loop, options.slow_call_seconds)
        hooks.broke.extend((bulk_streams.peer_broke, bulk.peer_broke))
        hooks.gone.extend((shared_memory.peer_gone, bulk_streams.peer_gone, bulk.peer_gone))
        hooks.closed.append(bulk.close)
        hooks.forked.extend((bulk.abandon, shared_memory.abandon, bulk_streams.abandon))
        self.lifecycle = Lifecycle(
            hooks,
            activity,
            departure,
            group,
            self.messages,
            caller,
            runner,
            completions,
            heartbeat,
            waiting,
            platform,
            mailbox,
            forget=lambda: clear_current_agent(self),
        )

        # The handlers of all kinds of messages.
        on_the_loop: tuple[tuple[int, KindHandler], ...] = (
            (Kind.CONTROL, control.received),
            (Kind.GOODBYE, connections.goodbye_received),
            (Kind.SEGMENTS, shared_memory.received),
            (Kind.STREAMS, bulk_streams.received),
            (Kind.SHUTDOWN, departure.received),
        )
        from_any_thread: tuple[tuple[int, KindHandler], ...] = (
            (Kind.CALL, functools.partial(requests.received, runner.run)),
            (Kind.REPLY, caller.received),
            (Kind.FAILURE, caller.received),
            (Kind.ALIVE, heartbeat.received),
            (Kind.ARRIVED, heartbeat.arrived),
            (Kind.BULK, bulk.received),
            (Kind.BULK_CREDIT, bulk.credited),
            (Kind.BULK_CLOSE, bulk.closed),
        )
        for kind, handler in on_the_loop:
            dispatcher.on(kind, handler)
        for kind, handler in from_any_thread:
            dispatcher.on(kind, handler, any_thread=True)
        dispatcher.unwrap(Kind.IN_SEGMENT, shared_memory.unwrap)
        dispatcher.on_lost((Kind.REPLY, Kind.FAILURE), answers.answer_lost)
        dispatcher.on_lost(
            (Kind.BULK,),
            lambda peer, call_id, _: completions.run_soon([(bulk.send_again, (peer, call_id))]),
        )
        dispatcher.on_lost((None,), caller.request_lost)
        dispatcher.on_failed((Kind.REPLY, Kind.FAILURE), caller.request_unsent)
        dispatcher.on_failed((None,), answers.request_failed)
        sender.on_unsent((Kind.REPLY, Kind.FAILURE), answers.answer_unsent)
        sender.on_unsent((None,), caller.request_unsent)
        control.on(CANCEL, requests.cancel)
        connections.serve(Reception(dispatcher, bulk, bulk_streams, peers, departure, hooks, events))
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
        self.calls.caller.set_timeout(seconds)

    def call(
        self,
        to: WorkerReference,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
    ) -> Any:
        """Call a function on a worker, wait, and return its value or raise its error."""
        return self.calls.caller.ask(to, function, args, kwargs, timeout)

    def call_async(
        self,
        to: WorkerReference,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
    ) -> Future[Any]:
        """Like ``call``, but return a future of the value immediately."""
        return self.calls.caller.call_async(to, function, args, kwargs, timeout)

    def all_gather(self, value: Any, worker_names: Iterable[str] | None, timeout: float) -> dict[str, Any]:
        """See ``rpc.all_gather``."""
        return self.calls.gathering.all_gather(value, worker_names, timeout)

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
        for extension in self.extensions.values():
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


def _under_way(calls: CallTable, executor: Executor) -> str:
    """Describe the calls that an agent waits for, and those that it runs."""
    made = [f"{call.asked} on worker '{call.peer.name}'" for call in calls.waiting()]
    parts = [
        f"{words}: {', '.join(which[:_SHOWN])}"
        for words, which in (("waiting for", made), ("running", running(executor.threads())))
        if which
    ]
    return "; ".join(parts)
