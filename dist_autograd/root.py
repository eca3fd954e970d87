"""A backward as its root sees it: mark, run, wait for the others.

The root alone knows who takes part. It asks each worker what the marks on it lead to, and passes on what it
is told, round after round, until nothing new comes up. Then it runs its own pass, from which gradients flow
to the others, and waits until each has said that it is done. The first error ends it everywhere.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dist_autograd import engine
from dist_autograd.graph import Mark
from dist_autograd.passes import Pass
from rpc.errors import AutogradError, BackwardError, RpcError
from rpc.peer import Peer
from rpc.workers import WorkerInfo

__all__ = ["Root", "Workers", "failure_of"]

Marks = dict[Peer, list[tuple[int, int]]]
"""For each worker the tensors that take part, by message and index."""


class Workers:
    """What the root asks of other workers; made by ``Backwards``."""

    def __init__(
        self,
        ask: Callable[[Pass, Peer, list[tuple[int, int]]], Callable[[], list[Mark]]],
        abort: Callable[[Pass, Peer, BaseException], None],
        find: Callable[[int], Peer | None],
    ) -> None:
        self.ask = ask
        """Sends marks; returns what waits for the marks that follow."""
        self.abort = abort
        self.find = find
        """The worker of an incarnation."""


class Root:
    """Runs one backward. ``run`` is called once; ``done`` on the loop's thread.

    Args:
        own: this worker's own part.
        workers: the others.
    """

    def __init__(self, own: Pass, workers: Workers) -> None:
        self.own = own
        self._me = own.root.member.info
        self.others: set[Peer] = set()
        self._workers = workers
        self._left: set[Peer] = set()
        self._marked: set[Mark] = set()

    def run(self, roots: Sequence[Tensor]) -> None:
        """Run the backward; raises what ended it."""
        try:
            edges = [get_gradient_edge(root) for root in roots]
            self._mark_all(self.own.start(edges))
            self._left = self.others.copy()
            gradients = [torch.ones_like(root) for root in roots]
            self._run_own(edges, gradients)
            self.own.wait_until(lambda: not self._left)
        except BaseException as error:
            for peer in self.others:
                self._workers.abort(self.own, peer, error)
            raise

    def _run_own(self, edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
        try:
            if engine.is_running():
                _on_another_thread(lambda: self.own.run(edges, gradients))
            else:
                self.own.run(edges, gradients)
        except RpcError:
            raise
        except Exception as error:
            raise failure_of(self._me, error) from error

    def _mark_all(self, found: Sequence[Mark]) -> None:
        while found:
            asked: list[Callable[[], list[Mark]]] = []
            following: list[Mark] = []
            for peer, marks in self._by_worker(found).items():
                if peer.is_self:
                    following += self.own.mark(marks, peer)
                else:
                    self.others.add(peer)
                    asked.append(self._workers.ask(self.own, peer, marks))
            for answer in asked:
                following += answer()
            found = following

    def _by_worker(self, found: Sequence[Mark]) -> Marks:
        marks: defaultdict[Peer, list[tuple[int, int]]] = defaultdict(list)
        for mark in found:
            if mark in self._marked:
                continue
            self._marked.add(mark)
            peer = self._workers.find(mark.sender)
            if peer is None:
                raise AutogradError("the graph leads to a worker that is not in this group")
            marks[peer].append((mark.message, mark.tensor))
        return marks

    def done(self, peer: Peer) -> None:
        """A worker's part is done."""
        self._left.discard(peer)
        self.own.news()


def failure_of(worker: WorkerInfo, error: BaseException) -> BackwardError:
    """What the failure of a worker's part is to the one who called ``backward``."""
    return BackwardError(
        f"Error on Node {worker.id}: {error}\n(raised in the backward on worker '{worker.name}')", worker.name
    )


def _on_another_thread(run: Callable[[], Any]) -> None:
    """Run a pass from within another, whose nodes the engine would mix with its own on this thread."""
    errors: list[BaseException] = []

    def catch() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=catch, name="farcall-nested-backward", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
