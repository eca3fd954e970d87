"""What waits for what in a job: the graph, made of the state of its workers. Pure.

A node is a thread, a coroutine that serves a request, or a whole process that does nothing any more. An edge
leads from a node to what it waits for. A node without edges is at the end of a chain: what it does is why the
others wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from farcall.observe.native_stacks import is_native
from farcall.observe.state import (
    JobState,
    Place,
    ThreadState,
    WorkerState,
    items,
    mappings,
    number,
    pair,
    whole,
)

__all__ = ["Edge", "Graph", "Key", "Node", "last_place", "wait_graph"]

Key = tuple[int, str]
"""A node: the place of its worker in the job, and what it is there."""

PROCESS: Final = "process"
_SHUTDOWN: Final = "shutdown"
_SPMD_THREAD: Final = "farcall-spmd-worker"
_EARLIER_SECONDS: Final = 3.0
"""A worker of a job that is over ended by itself if its last sign is this much older than that of others."""

_MAX_RANKS: Final = 1 << 16
"""Maximum size of a group whose missing ranks are listed."""

_MAX_NATIVE: Final = 4
"""Maximum number of functions in C that are named: the innermost."""

_CONNECTED: Final = frozenset(("ESTABLISHED", "UNCONNECTED"))


@dataclass(frozen=True, slots=True)
class Edge:
    """What a node waits for: another node, and how that stands between them, for the words of a cycle."""

    to: Key
    how: str = ""


@dataclass(slots=True)
class Node:
    """Something that waits, or that others wait for.

    Attributes:
        key: its key.
        worker: name of its worker.
        rank: rank of its worker.
        host: host of its worker.
        thread: name of the thread; "" for a process.
        kind: what it does: "call", "lock", "barrier", "sleeps", "computes", "dead" and so on.
        text: the same in words.
        seconds: for how long; 0 if that is not known.
        place: where in the program.
        remark: what else is to be said.
        edges: what it waits for.
        stack: the places of its stack, the innermost first.
        serves: function of the request that it runs; "".
    """

    key: Key
    worker: str
    rank: int
    host: str
    thread: str
    kind: str
    text: str
    seconds: float = 0.0
    place: Place | None = None
    remark: str = ""
    edges: list[Edge] = field(default_factory=list)
    stack: list[Place] = field(default_factory=list)
    serves: str = ""

    def to_json(self) -> dict[str, Any]:
        """What it does, and where in the program, as values for JSON."""
        return {
            "thread": self.thread,
            "kind": self.kind,
            "text": self.text,
            "seconds": round(self.seconds, 1),
            "place": None if self.place is None else str(self.place),
            "function": None if self.place is None else self.place.function,
            "remark": self.remark,
        }


@dataclass(slots=True)
class Graph:
    """All nodes, by key."""

    nodes: dict[Key, Node] = field(default_factory=dict)

    def waited_for(self) -> set[Key]:
        """The nodes that others wait for."""
        return {edge.to for node in self.nodes.values() for edge in node.edges if edge.to != node.key}


def wait_graph(job: JobState) -> Graph:
    """The graph of a job."""
    return _Builder(job).build()


def _silence_kind(worker: WorkerState, job: JobState) -> str:
    """Why a worker does nothing any more: "dead", "stopped", "traced", "frozen", "silent"; "" if it does."""
    process = worker.process
    if worker.has_left:
        return "left"
    if worker.is_dead:
        wall = 0.0 if worker.beat is None else worker.beat.wall
        newest = max((each.beat.wall for each in job if each.beat is not None), default=wall)
        alone = any(each.process.alive is not False for each in job)
        if not alone and newest - wall <= _EARLIER_SECONDS:
            return "frozen" if worker.frozen else ""
        if not alone:
            return "frozen" if worker.frozen else "ended first"
        return "dead"
    if process.traced:
        return "traced"
    if process.stopped:
        return "stopped"
    if worker.is_frozen:
        return "frozen"
    return "unreachable" if process.alive is None and worker.silent > 10 * _EARLIER_SECONDS else ""


class _Builder:
    def __init__(self, job: JobState) -> None:
        self._job = job
        self._workers = list(job)
        self._indices = {each.incarnation: n for n, each in enumerate(self._workers) if each.incarnation}
        self._names = {each.name: n for n, each in enumerate(self._workers)}
        self._silent = [_silence_kind(each, job) for each in self._workers]
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
        kind, process = self._silent[index], f"process {worker.pid}"
        ago = worker.silent
        match kind:
            case "dead":
                text = f"is dead: its {process} has ended"
            case "left":
                text = f"has left: its {process} has called shutdown()"
            case "ended first":
                text, kind = (
                    f"gave no sign for a while before the end: its {process} was stopped, or died",
                    "dead",
                )
            case "traced":
                text = f"is held by a debugger (process {worker.process.traced}): {process}"
            case "stopped":
                text = f"is stopped by a signal (SIGSTOP, Ctrl-Z): {process}; SIGCONT continues it"
            case _:
                text = f"has given no sign of life for {ago:.0f} s: {process} on {worker.host}"
        main = next((each for each in worker.threads if each.at is not None), None)
        at = last_place(worker) or (main.at if main is not None else None)
        at = at if kind != "left" else None
        return self._node(index, PROCESS, thread="", kind=kind, text=text, seconds=ago, place=at)

    def _frozen_process(self, index: int, worker: WorkerState) -> Node:
        """Its interpreter does not run: find the thread that is in C code and holds the interpreter lock."""
        known = {each.id: each for each in worker.threads}
        best: tuple[int, str, list[Place], tuple[str, ...]] | None = None
        for ident, stack in worker.frozen.items():
            places = [Place(name, _short(file, worker.folder), line) for name, file, line in stack.frames]
            thread = known.get(ident)
            score = _holds_interpreter(places, thread, worker)
            score += 100 * stack.holds_interpreter
            name = thread.name if thread is not None else stack.name or f"thread {ident}"
            if best is None or score > best[0]:
                best = score, name, places, stack.native
        doing = "computes" if worker.process.computes else "waits or computes"
        text = f"holds the interpreter lock in C code, and {doing}"
        serves = "" if best is None else self._served(worker, best[2])
        if serves:
            text = f"runs {serves}, {text}"
        if best is None or best[0] < 1:
            text = "its interpreter does not run: a thread holds the interpreter lock in C code"
            return self._node(
                index,
                PROCESS,
                thread="",
                kind="frozen",
                text=text,
                seconds=worker.silent,
                place=last_place(worker),
            )
        return self._node(
            index,
            PROCESS,
            thread=best[1],
            kind="frozen",
            text=text,
            seconds=worker.silent,
            place=_users(best[2], worker),
            remark=f"in C: {' ← '.join(best[3][:_MAX_NATIVE])}" if best[3] else "",
            stack=best[2],
        )

    def _served(self, worker: WorkerState, places: list[Place]) -> str:
        """What a thread runs for another worker, by the calls that the others wait for and the names of the
        functions on its stack: the request may have come after the last look at this worker.
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
            node.kind = _kind_of(doing)
            node.text = doing
        if node.serves and node.kind != "call":
            node.text = f"runs {node.serves}, {node.text}".removesuffix(", ")
        node.text = node.text or "runs"
        if worker.phase == "starting":
            node.text = f"has not called init_rpc: {node.text}"
        return node

    def _of_call(self, node: Node, index: int, worker: WorkerState, which: tuple[int, int]) -> None:
        """It waits for a call."""
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
            node.remark = _link_in_words(peer)
        elif callee is None:
            node.remark = f"nothing is known of {to} on this host"
        else:
            self._at_callee(node, callee, (worker.incarnation, which[1]))
            unseen = 0.0 if call is None else _seconds_unseen(worker, call, self._workers[callee])
            if node.kind == "unanswered" and unseen and call is not None:
                node.remark = f"{to} last wrote its state {unseen:.1f} s before this call"
                defined = Place.of(call.get("defined"), worker.folder)
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
        match None if found is None else found.get("state"):
            case "queued":
                assert found is not None
                busy = [key for (index, _), key in self._running.items() if index == callee]
                threads = {key for key in busy if not key[1].startswith("task")}
                node.edges += [Edge(key, "busy thread") for key in sorted(threads)]
                ahead = whole(found.get("ahead"))
                waiting = f"behind {ahead} others" if ahead else "next"
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
        """The requests of a caller that run at a callee, and that no thread of the caller waits for."""
        index = self._indices.get(caller)
        waiting = [] if index is None else [each.call for each in self._workers[index].threads]
        incarnation = self._workers[callee].incarnation
        return [
            key
            for (at, (by, call)), key in self._running.items()
            if at == callee and by == caller and (incarnation, call) not in waiting
        ]

    def _spmd_thread(self, index: int) -> Key | None:
        """The thread that does the steps of an SPMD program, if it does one."""
        for thread in self._workers[index].threads:
            if thread.name == _SPMD_THREAD and (thread.waits or not thread.fields.get("idle")):
                return index, str(thread.id)
        return None

    def _of_object(self, node: Node, index: int, worker: WorkerState, thread: ThreadState) -> None:
        """It waits for a lock, a queue, an event."""
        fields = thread.fields
        name, kind = str(fields.get("on")), str(fields.get("kind", ""))
        node.kind = _kind_of(str(fields.get("doing") or ""), kind)
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
        at = Place.of(fields.get("held_at"), worker.folder)
        sure = "" if fields.get("sure", True) else "most likely "
        node.remark = f"{sure}held by {by}" + (f" since {at}" if at is not None else "")
        node.edges.append(Edge((index, str(holder)), f"`{name}` held by {by}"))

    # ---- operations of a group

    def _of_operation(self, node: Node, index: int, worker: WorkerState, thread: ThreadState) -> None:
        """It waits in a barrier, a collective, a backward, shutdown or rendezvous."""
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
            node.remark = _rendezvous_in_words(details)
            names = [f"rank {each}" for each in _missing(details)]
        node.text = f"waits in {what}" + (f" for {_listed(names)}" if names else "")
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
        """The workers that do not wait in shutdown: those that the others wait for there."""
        names = []
        for other, worker in enumerate(self._workers):
            inside = any(wait.get("what") == _SHUTDOWN for each in worker.threads for wait in each.waits)
            if other != index and not worker.has_left and (self._silent[other] or not inside):
                names.append(worker.name)
        return names

    def _behind(self, index: int, details: Mapping[str, Any]) -> tuple[list[str], str]:
        """The ranks of a process group that have not come to a collective, and what they called instead."""
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
        """What a worker does that others wait for in an operation of a group."""
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
        stack = [Place.of(each, worker.folder) for each in items(request.get("stack"))]
        places = [each for each in stack if each is not None]
        at = _users(places, worker)
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


def last_place(worker: WorkerState) -> Place | None:
    """Where a worker's main thread was, if that ran code of the program; else where any was."""
    threads = sorted(worker.threads, key=lambda each: (each.name != "MainThread", each.request is None))
    return next((each.at for each in threads if each.at is not None), None)


def _seconds_unseen(caller: WorkerState, call: Mapping[str, Any], callee: WorkerState) -> float:
    """Seconds between the last look at a callee and the begin of a call; 0 if that look came later."""
    if caller.beat is None or callee.beat is None:
        return 0.0
    began = caller.beat.wall - caller.beat.monotonic + number(call.get("began"), -math.inf)
    return max(0.0, began - callee.beat.wall)


def _short(file: str, folder: str) -> str:
    return file.removeprefix(folder.rstrip("/") + "/") if folder else file


def _users(places: list[Place], worker: WorkerState) -> Place | None:
    """The innermost place in the program's own code."""
    places = [place for place in places if not is_native(place.file)]
    own = [place for place in places if not worker.is_library(place.file)]
    return own[0] if own else places[0] if places else None


def _holds_interpreter(places: list[Place], thread: ThreadState | None, worker: WorkerState) -> int:
    """How likely a thread of a frozen process is the one that holds the interpreter lock."""
    places = [place for place in places if not is_native(place.file)]
    if not places:
        return 0
    before = [] if thread is None else thread.stack
    same_place = bool(before) and (before[0].function, before[0].line) == (places[0].function, places[0].line)
    waited = thread is not None and bool(thread.waits or thread.call or thread.fields.get("on"))
    score = 0
    if not worker.is_library(places[0].file):
        score += 3  # it has called C code itself
    if not same_place:
        score += 2
    if same_place and (waited or (thread is not None and thread.fields.get("idle"))):
        score -= 4
    return score


_KINDS: Final = (
    ("sleeps", "sleeps"),
    ("computes", "computes"),
    ("subprocess", "subprocess"),
    ("socket", "socket"),
    ("pipe", "pipe"),
    ("queue", "queue"),
    ("Event", "event"),
    ("Condition", "condition"),
    ("semaphore", "semaphore"),
    ("Barrier", "thread barrier"),
    ("thread to end", "join"),
    ("with block", "lock"),
    ("lock", "lock"),
    ("file", "file"),
)


def _kind_of(doing: str, type_name: str = "") -> str:
    """The kind of a wait, by the words for it and the type of what is waited for."""
    for part, kind in (
        ("queue.", "queue"),
        ("Queue", "queue"),
        ("threading.Event", "event"),
        ("socket.", "socket"),
        ("subprocess.", "subprocess"),
        ("_thread.", "lock"),
        ("Lock", "lock"),
        ("threading.Condition", "condition"),
    ):
        if part in type_name:
            return kind
    return next((kind for part, kind in _KINDS if part in doing), "runs")


def _link_in_words(peer: Mapping[str, Any]) -> str:
    state = str(peer.get("state"))
    name = peer.get("name")
    if state == "LOST":
        return f"{name} is lost: {peer.get('lost', '')}"
    if state in ("HANDSHAKING", "CROSSED"):
        return f"the connection to {name} is being made again, and {name} has not answered the handshake yet"
    tries = whole(peer.get("failures"))
    return f"the connection to {name} is down; {tries} attempts to make it again have failed so far"


def _missing(details: Mapping[str, Any]) -> list[int]:
    present = details.get("present")
    here = {each for each in present if isinstance(each, int)} if isinstance(present, list) else set()
    size = min(whole(details.get("world_size")), _MAX_RANKS)
    return sorted(set(range(size)) - here)


def _rendezvous_in_words(details: Mapping[str, Any]) -> str:
    size, missing = whole(details.get("world_size")), _missing(details)
    if not size:
        return ""
    shown = ", ".join(map(str, missing[:10])) + (" ..." if len(missing) > 10 else "")
    return f"{size - len(missing)} of {size} ranks have come to {details.get('place', '')}; missing: {shown}"


def _listed(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
