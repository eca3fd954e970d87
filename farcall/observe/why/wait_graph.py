"""What waits for what in a job: the graph, made from the state of its workers. Pure.

A node is a thread, a coroutine that serves a request, or a whole process that makes no progress. An edge
leads from a node to what it waits for. A node without edges is at the end of a chain: what it does is why the
others wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from farcall.observe.reading.state import (
    JobState,
    Position,
    ThreadState,
    WorkerState,
    items,
    mappings,
    number,
    pair,
    whole,
)
from farcall.observe.why.silent_processes import (
    innermost_own_place,
    interpreter_holder,
    last_place,
    silence_in_words,
    silence_kind,
)
from farcall.observe.why.wait_kinds import (
    kind_of_wait,
    link_in_words,
    listed,
    missing_ranks,
    rendezvous_in_words,
)
from farcall.observe.why.wait_nodes import PROCESS, Edge, Graph, Key, Node

__all__ = ["call_chain", "wait_graph"]

_MAX_HOPS: Final = 16
"""Maximum number of nodes that a call is followed through."""

_SHUTDOWN: Final = "shutdown"
_SPMD_THREAD: Final = "farcall-spmd-worker"
_CONNECTED: Final = frozenset(("ESTABLISHED", "UNCONNECTED"))


def wait_graph(job: JobState) -> Graph:
    """Return the graph of a job."""
    return _Builder(job).build()


def call_chain(job: JobState, caller: int, which: tuple[int, int]) -> tuple[list[Node], Node | None]:
    """Follow one call to what it waits for.

    Args:
        caller: incarnation of the caller.
        which: incarnation of the callee, and number of the call.

    Returns:
        The thread that waits for the call, if one does, or the call itself; what it waits for, what that
        waits for, and so on; and that of these for which the last one waits, if they are a cycle.
    """
    builder = _Builder(job)
    graph = builder.build()
    chain = [node] if (node := builder.of_call(caller, which)) is not None else []
    while chain and chain[-1].edges and len(chain) <= _MAX_HOPS:
        following = graph.nodes[chain[-1].edges[0].to]
        if following in chain:
            return chain, following
        chain.append(following)
    return chain, None


class _Builder:
    def __init__(self, job: JobState) -> None:
        self._job = job
        self._workers = list(job)
        self._indices = {each.incarnation: n for n, each in enumerate(self._workers) if each.incarnation}
        self._names = {each.name: n for n, each in enumerate(self._workers)}
        self._silent = [silence_kind(each, job) for each in self._workers]
        self._graph = Graph()
        self._running: dict[tuple[int, tuple[int, int]], Key] = {}
        """The node that runs a request, by worker and request."""
        for index, worker in enumerate(self._workers):
            for thread in worker.threads:
                if thread.request is not None:
                    self._running[index, thread.request] = (index, str(thread.id))
            for request in worker.requests:
                which = pair([request.get("incarnation"), request.get("id")])
                if which is not None and request.get("state") == "awaiting":
                    self._running.setdefault((index, which), (index, f"task {which[0]} {which[1]}"))

    def build(self) -> Graph:
        for index, worker in enumerate(self._workers):
            if self._silent[index] and self._silent[index] != "frozen":
                self._add(self._silent_process(index, worker))
                continue
            frozen = self._silent[index] == "frozen"
            if frozen:
                self._add(self._frozen_process(index, worker))
            for thread in worker.threads:
                if not thread.fields.get("idle") or thread.waits:
                    self._add(self._of_thread(index, worker, thread))
            for request in worker.requests:
                node = self._of_task(index, worker, request)
                if node is not None and node.key in self._running.values():
                    self._add(node)
        self._drop_loose_edges()
        return self._graph

    def of_call(self, caller: int, which: tuple[int, int]) -> Node | None:
        """Return the thread that waits for a call, or a node for the call; None if its caller is unknown."""
        index = self._indices.get(caller)
        if index is None:
            return None
        worker = self._workers[index]
        waiting = next((each for each in worker.threads if each.call == which), None)
        if waiting is not None and (index, str(waiting.id)) in self._graph.nodes:
            return self._graph.nodes[index, str(waiting.id)]
        node = self._node(index, "call", thread="", kind="call", text="")
        self._of_call(node, index, worker, which)
        node.edges = [edge for edge in node.edges if edge.to in self._graph.nodes]
        return node

    def _add(self, node: Node) -> None:
        self._graph.nodes[node.key] = node

    def _drop_loose_edges(self) -> None:
        nodes = self._graph.nodes
        for node in nodes.values():
            node.edges = [edge for edge in dict.fromkeys(node.edges) if edge.to in nodes]

    def _node(self, index: int, what: str, **fields: Any) -> Node:
        worker = self._workers[index]
        return Node((index, what), worker.name, worker.rank, worker.host, **fields)

    # ---- processes

    def _silent_process(self, index: int, worker: WorkerState) -> Node:
        kind = self._silent[index]
        return self._node(
            index,
            PROCESS,
            thread="",
            kind="dead" if kind == "ended first" else kind,
            text=silence_in_words(kind, worker),
            seconds=worker.silent,
            place=last_place(worker) if kind != "left" else None,
        )

    def _frozen_process(self, index: int, worker: WorkerState) -> Node:
        holder = interpreter_holder(worker)
        doing = "computes" if worker.process.computes else "waits or computes"
        text = f"holds the interpreter lock in C code, and {doing}"
        serves = "" if holder is None else self._served(worker, holder.stack)
        if serves:
            text = f"runs {serves}, {text}"
        elif holder is None:
            text = "its interpreter does not run: a thread holds the interpreter lock in C code"
        return self._node(
            index,
            PROCESS,
            thread="" if holder is None else holder.thread,
            kind="frozen",
            text=text,
            seconds=worker.silent,
            place=last_place(worker) if holder is None else innermost_own_place(holder.stack, worker),
            remark="" if holder is None else holder.native_in_words(),
            stack=[] if holder is None else holder.stack,
        )

    def _served(self, worker: WorkerState, places: list[Position]) -> str:
        """Return what a thread runs for another worker, from the calls that the others wait for and the names
        of the functions on its stack: the request may have come after the last look at this worker.
        """
        names = {place.function for place in places}
        for other in self._workers:
            for call in other.calls:
                what = str(call.get("what"))
                if call.get("incarnation") == worker.incarnation and what.rpartition(".")[2] in names:
                    return f"{what} for {other.name}"
        return ""

    # ---- threads

    def _of_thread(self, index: int, worker: WorkerState, thread: ThreadState) -> Node:
        fields = thread.fields
        function = str(fields.get("function", ""))
        node = self._node(
            index,
            str(thread.id),
            thread=thread.name,
            kind="runs",
            text="",
            seconds=worker.age(fields.get("since")),
            place=thread.at,
            stack=thread.stack,
            serves=function if thread.request is not None else "",
            moves=bool(fields.get("computes") or fields.get("ran")),
        )
        if self._silent[index] == "frozen":
            node.kind, node.text = "frozen out", "waits for the interpreter lock"
            node.edges.append(Edge((index, PROCESS), "interpreter lock"))
        elif thread.waits:
            self._of_operation(node, index, worker, thread)
        elif thread.call is not None:
            self._of_call(node, index, worker, thread.call)
        elif fields.get("computes"):
            node.kind, node.text = "computes", "computes"
        elif fields.get("on"):
            self._of_object(node, index, worker, thread)
        else:
            doing = str(fields.get("doing") or "")
            node.kind = kind_of_wait(doing)
            node.text = doing
        if node.serves and node.kind != "call":
            node.text = f"runs {node.serves}, {node.text}".removesuffix(", ")
        node.text = node.text or "runs"
        if worker.phase == "starting":
            node.text = f"has not called init_rpc: {node.text}"
        return node

    def _of_call(self, node: Node, index: int, worker: WorkerState, which: tuple[int, int]) -> None:
        """Describe the wait for a call."""
        call = next(
            (each for each in worker.calls if (each.get("incarnation"), each.get("id")) == which), None
        )
        if call is not None:
            node.seconds = worker.age(call.get("began"))
        callee = self._indices.get(which[0])
        to = str(call.get("to")) if call is not None else "another worker"
        if callee is not None:
            to = self._workers[callee].name
        what = str(call.get("what")) if call is not None else "a call"
        node.kind, node.text = "call", f"waits for {to}: {what}"
        peer = next((each for each in worker.peers if each.get("incarnation") == which[0]), None)
        if callee is not None and self._silent[callee]:
            node.edges.append(Edge((callee, PROCESS)))
        elif peer is not None and peer.get("state") not in (*_CONNECTED, None):
            node.kind = "link"
            node.remark = link_in_words(peer)
        elif callee is None:
            node.remark = f"nothing is known of {to} on this host"
        else:
            self._at_callee(node, callee, (worker.incarnation, which[1]))
            unseen = 0.0 if call is None else _seconds_unseen(worker, call, self._workers[callee])
            if node.kind == "unanswered" and unseen and call is not None:
                node.remark = f"{to} last wrote its state {unseen:.1f} s before this call"
                defined = Position.of(call.get("defined"), worker.folder)
                node.remark += f"; {what} is defined at {defined}" if defined is not None else ""

    def _at_callee(self, node: Node, callee: int, request: tuple[int, int]) -> None:
        key = self._running.get((callee, request))
        if key is not None:
            node.edges.append(Edge(key))
            return
        state = self._workers[callee]
        found = next(
            (each for each in state.requests if (each.get("incarnation"), each.get("id")) == request), None
        )
        to = state.name
        left_out = found is None and whole(state.snapshot.get("left_out"))
        match "queued" if left_out else None if found is None else found.get("state"):
            case "queued":
                busy = [key for (index, _), key in self._running.items() if index == callee]
                threads = {key for key in busy if not key[1].startswith("task")}
                node.edges += [Edge(key, "busy thread") for key in sorted(threads)]
                ahead = len(state.requests) if found is None else whole(found.get("ahead"))
                waiting = f"behind {'more than ' if left_out else ''}{ahead} others" if ahead else "next"
                node.kind = "queued"
                node.remark = f"queued at {to}, {waiting}: all of its {len(threads)} threads are busy"
            case "arriving":
                node.kind, node.remark = "arriving", f"its arguments are still arriving at {to}"
            case "begun" if doing := self._spmd_thread(callee):
                node.edges.append(Edge(doing))
            case "begun":
                node.kind = "postponed"
                node.remark = f"{to} has run it, and waits for the future that it returned"
            case _:
                made = self._others_of(callee, request[0])
                node.edges += [Edge(key) for key in made]
                node.kind = "unanswered"
                node.remark = f"{to} runs no such call: it waits for an object, or the answer is under way"
                if made:
                    node.remark = f"the object is still being made at {to}"

    def _others_of(self, callee: int, caller: int) -> list[Key]:
        """Return the requests of a caller that run at a callee, and that no thread of the caller waits
        for.
        """
        index = self._indices.get(caller)
        waiting = [] if index is None else [each.call for each in self._workers[index].threads]
        incarnation = self._workers[callee].incarnation
        return [
            key
            for (at, (by, call)), key in self._running.items()
            if at == callee and by == caller and (incarnation, call) not in waiting
        ]

    def _spmd_thread(self, index: int) -> Key | None:
        """Return the thread that does the steps of an SPMD program, if it does one."""
        for thread in self._workers[index].threads:
            if thread.name == _SPMD_THREAD and (thread.waits or not thread.fields.get("idle")):
                return index, str(thread.id)
        return None

    def _of_object(self, node: Node, index: int, worker: WorkerState, thread: ThreadState) -> None:
        """Describe the wait for a lock, a queue, an event."""
        fields = thread.fields
        name, kind = str(fields.get("on")), str(fields.get("kind", ""))
        node.kind = kind_of_wait(str(fields.get("doing") or ""), kind)
        what = {"lock": "the lock", "queue": "the queue", "event": "the Event", "socket": "the socket"}
        known = what.get(node.kind)
        node.text = f"waits for {known} `{name}`" if known else str(fields.get("doing") or "")
        holder = fields.get("holder")
        if not isinstance(holder, int):
            if node.kind == "lock":
                node.remark = "no thread is known to hold it"
            return
        others = {each.id: each for each in worker.threads}
        by = others[holder].name if holder in others else f"a thread that has ended ({holder})"
        at = Position.of(fields.get("held_at"), worker.folder)
        sure = "" if fields.get("sure", True) else "most likely "
        node.remark = f"{sure}held by {by}" + (f" since {at}" if at is not None else "")
        node.edges.append(Edge((index, str(holder)), f"`{name}` held by {by}"))

    # ---- operations of a group

    def _of_operation(self, node: Node, index: int, worker: WorkerState, thread: ThreadState) -> None:
        """Describe the wait in a barrier, a collective, a backward, shutdown or rendezvous."""
        wait = thread.waits[-1]
        what = str(wait.get("what", "another worker"))
        node.kind, node.seconds = what, worker.age(wait.get("since"))
        node.place = node.place or last_place(worker)
        names = [str(each) for each in items(wait.get("whom")) if str(each) != worker.name]
        details = wait.get("details")
        details = details if isinstance(details, Mapping) else {}
        if what == _SHUTDOWN:
            names = self._not_in_shutdown(index)
        elif "group" in details:
            names, node.remark = self._behind(index, details)
        elif "to" in details:
            names = [each for each in self._names if f"'{each}'" in str(details["to"])]
            node.remark = f"of the connection to {details['to']}"
        elif what == "rendezvous":
            node.remark = rendezvous_in_words(details)
            names = [f"rank {each}" for each in missing_ranks(details)]
        node.text = f"waits in {what}" + (f" for {listed(names)}" if names else "")
        for name in names:
            callee = self._names.get(name)
            if callee is None and name.startswith("rank "):
                callee = next(
                    (n for n, each in enumerate(self._workers) if f"rank {each.rank}" == name), None
                )
            if callee is not None and callee != index:
                node.edges += [Edge(key) for key in self._doings(callee)]
        if thread.call is not None and not names:
            self._of_call(node, index, worker, thread.call)

    def _not_in_shutdown(self, index: int) -> list[str]:
        """Return the workers that do not wait in shutdown: those that the others wait for there."""
        names = []
        for other, worker in enumerate(self._workers):
            inside = any(wait.get("what") == _SHUTDOWN for each in worker.threads for wait in each.waits)
            if other != index and not worker.has_left and (self._silent[other] or not inside):
                names.append(worker.name)
        return names

    def _behind(self, index: int, details: Mapping[str, Any]) -> tuple[list[str], str]:
        """Return the ranks of a process group that have not come to a collective, and what they called
        instead.
        """
        group, count, text = details.get("group"), number(details.get("number")), details.get("operation")
        ranks = details.get("ranks")
        members = [str(each) for each in ranks] if isinstance(ranks, list) else []
        names, remarks = [], []
        for name in members:
            other = self._names.get(name)
            if other is None or other == index:
                continue
            theirs = next(
                (
                    each
                    for each in mappings(self._workers[other].snapshot.get("spmd.node"))
                    if each.get("name") == group
                ),
                None,
            )
            begun = 0.0 if theirs is None else number(theirs.get("number"))
            if begun < count or self._silent[other]:
                names.append(name)
            elif theirs is not None and begun == count and theirs.get("operation") != text:
                names.append(name)
                remarks.append(f"{name} called {theirs.get('operation')}")
        return names, "; ".join(remarks[:3])

    def _doings(self, index: int) -> Iterable[Key]:
        """Return the nodes of a worker that others wait for in an operation of a group."""
        if self._silent[index]:
            return [(index, PROCESS)]
        worker = self._workers[index]
        busy = [each for each in worker.threads if not each.fields.get("idle") or each.waits]
        outside = [each for each in busy if all(wait.get("what") != _SHUTDOWN for wait in each.waits)]
        busy = outside or busy
        own = [each for each in busy if each.request is None]
        main = [each for each in own if each.name == "MainThread"]
        return [(index, str(each.id)) for each in (main or own or busy)]

    # ---- coroutines

    def _of_task(self, index: int, worker: WorkerState, request: Mapping[str, Any]) -> Node | None:
        which = pair([request.get("incarnation"), request.get("id")])
        if which is None or request.get("state") != "awaiting":
            return None
        stack = [Position.of(each, worker.folder) for each in items(request.get("stack"))]
        places = [each for each in stack if each is not None]
        at = innermost_own_place(places, worker)
        node = self._node(
            index,
            f"task {which[0]} {which[1]}",
            thread="coroutine",
            kind="awaits",
            text=str(request.get("doing") or "awaits a future"),
            seconds=worker.age(request.get("began")),
            place=at,
            stack=places,
            serves=at.function if at is not None else "a coroutine",
        )
        call = pair(request.get("call"))
        if call is not None:
            self._of_call(node, index, worker, call)
        else:
            node.text = f"runs {node.serves}, which {node.text}"
        return node


def _seconds_unseen(caller: WorkerState, call: Mapping[str, Any], callee: WorkerState) -> float:
    """Return the seconds between the last look at a callee and the beginning of a call; 0 if that look came
    later.
    """
    if caller.beat is None or callee.beat is None:
        return 0.0
    began = caller.beat.wall - caller.beat.monotonic + number(call.get("began"), -math.inf)
    return max(0.0, began - callee.beat.wall)
