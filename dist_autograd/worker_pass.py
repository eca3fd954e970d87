"""A worker's part of one backward pass: a pass of PyTorch's engine over all that takes part here.

The marks tell which tensors, sent from here, will get a gradient. If the graphs behind the messages have no
node in common, each is run separately as soon as its gradients are there. If they meet, one run of the engine
must cover them all, or nodes would run twice and hooks would see a part of a sum.

In such a run each message has a *ticket*, a node that waits until the gradients of that message are there,
and behind which its leaves and send nodes are. Tickets are chained, so that only one is ready at any time,
that of the newest message; all other nodes that are ready run before it. So when it waits, everything that
can run has run.
There is no deadlock: a gradient that is on its way to a message depends only on nodes that were made after
the message was sent. So the run that waits for the newest message of all, on whichever worker, can always
continue. ``await_gradients`` checks this.

A pass knows the graph and the engine. It reaches other workers only through ``Links``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge

from dist_autograd import engine
from dist_autograd.contexts import Context
from dist_autograd.ddp import Models, accumulating, hand_over
from dist_autograd.device_threads import finish, heralded
from dist_autograd.graph import ROOTS, Leaf, Mark, Reach
from dist_autograd.progress import Event, Progress
from dist_autograd.recording import RECV_NODE, Origin, Sent, anchor, computed_from
from rpc.errors import AutogradError, ProtocolError, RpcError
from rpc.group.peer import Peer
from rpc.runtime import spans
from rpc.runtime.interrupts import is_interruption
from rpc.runtime.torch_internals import is_profiler_enabled
from rpc.wire.frames import Frame

__all__ = ["Links", "WorkerPass"]

_EDGE: Final = attrgetter("grad_fn", "output_nr")
"""Returns the edge that a tensor is the value of."""


class Links(Protocol):
    """The interface of a running pass to the code that runs it."""

    def post(self, origin: Origin, gradients: Sequence[Tensor | None]) -> None:
        """Send the gradients of a message's tensors to their sender."""

    def wait(self, ready: Callable[[], bool]) -> None:
        """Block until ``ready`` may have become true, or the backward pass has failed."""


class WorkerPass:
    """One worker's part of one backward pass.

    ``start``, ``mark`` and ``run`` are called on one thread at a time, everything else from any thread.

    Args:
        context: the context that it runs in.
        retain_graph: whether the graph can be run again.
        models: the models whose gradients are averaged over processes.

    Attributes:
        progress: progress of the backward pass on this worker.
        awaited: the workers whose gradients it waits for now.
    """

    _links: Links
    """Set only while it runs, since the object that runs it refers to it."""

    def __init__(self, context: Context, retain_graph: bool, models: Models) -> None:
        self.context = context
        self.retain_graph = retain_graph
        self.progress = Progress()
        self.awaited: Collection[Peer] = ()
        self._models = models
        self._reach = Reach(RECV_NODE)
        self._sent: dict[int, Sent] = {}
        self._origins: dict[tuple[int, int], Origin] = {}
        self._marked: dict[int, set[int]] = {}
        self._elsewhere = False
        """Whether a recv runs on another thread of the engine's."""
        self._run: set[int] = set()
        self._unchecked: list[Any] = []
        """The recvs of which no ticket has checked that they have run, those received last at the end."""
        self._arrived: dict[int, tuple[Peer, Frame]] = {}
        self._gradients: dict[int, Sequence[Tensor | None]] = {}
        self._posting = threading.Lock()
        """Lock held while a recv posts its gradients: recvs may run on several threads."""

    # ---- before it runs

    def start(self, roots: Sequence[Tensor]) -> list[Mark]:
        """Start from the roots; returns the marks that they lead to on other workers, or on this one."""
        return self._extend(ROOTS, list(map(_EDGE, roots)))

    def mark(self, marks: Iterable[tuple[int, int]], receiver: Peer) -> list[Mark]:
        """Record which tensors of messages sent from here take part; returns the marks that follow.

        Raises:
            AutogradError: there is no such message.
        """
        found: list[Mark] = []
        for number, index in marks:
            sent = self._sent.get(number) or self.context.sends.get(number)
            if sent is None or type(index) is not int or not 0 <= index < len(sent.ends):
                self.progress.check()  # if its context is over, that error is more specific
                raise AutogradError(
                    f"worker '{receiver.name}' asks for tensor {index} of message {number}, which was not "
                    f"sent in context {self.context.id}"
                )
            self._sent[number] = sent
            marked = self._marked.setdefault(number, set())
            if index not in marked:
                marked.add(index)
                node = sent.nodes[index]
                if node is not None:
                    found += self._extend(number, [(node, 0)])
                elif sent.takes(index):
                    self._reach.add_leaf(number, sent.ends[index])
                else:
                    self._reach.extend(number, ())
        return found

    def _extend(self, start: int, edges: list[tuple[Any, int]]) -> list[Mark]:
        recvs = self._reach.recvs
        known = len(recvs)
        marks = self._reach.extend(start, edges)
        for node in recvs[known:]:
            if node.origin.context_id != self.context.id:
                raise AutogradError(
                    f"the graph leads to a tensor that was received from worker '{node.origin.source.name}' "
                    f"in context {node.origin.context_id}, but this backward runs in {self.context.id}: use "
                    "one context for the forward and its backward"
                )
            self._origins[node.origin.sender, node.origin.message] = node.origin
            self._elsewhere = self._elsewhere or node.elsewhere
        return marks

    def behind(self, mark: Mark) -> list[Mark] | None:
        """Return what follows from a mark, if its sender has provided it to this worker."""
        origin = self._origins.get(mark[:2])
        return None if origin is None else origin.marks_behind(mark[2])

    # ---- while it runs

    def run(self, links: Links, roots: Sequence[Tensor] = (), gradients: Sequence[Tensor] = ()) -> None:
        """Run all that takes part here, waiting for gradients from other workers, and accumulate those of the
        leaves in the context.

        Raises:
            BaseException: the error of a node, or the error that ended the backward pass elsewhere.
        """
        self._links = links
        reach = self._reach
        try:
            leaves = list(chain.from_iterable(reach.leaves.values()))
            averaged = self._models.among([leaf.tensor for leaf in leaves]) if self._models.any else []
            if averaged and self._accumulates(leaves, averaged):
                with accumulating([leaf.tensor for leaf in leaves], self._models, self) as captured:
                    self._run_together(roots, gradients, leaves, accumulate=True)
            else:
                if reach.separate:
                    captured = self._run_apart(roots, gradients)
                else:
                    captured = self._run_together(roots, gradients, leaves, accumulate=False)
                if averaged:
                    captured = self._average(leaves, captured, averaged)
            self._check_recvs_have_run(reach.recvs, "at the end")
            if leaves:
                self._gradients.clear()  # or no gradient that came through would belong to the leaves alone
                self.context.accumulate(leaves, engine.owned(captured))
        except BaseException as error:
            if not is_interruption(error):
                self.progress.check()
            raise
        finally:
            del self._links

    def _accumulates(self, leaves: list[Leaf], averaged: list[int]) -> bool:
        """Whether the engine accumulates gradients while it runs, for models that average them.

        That holds locks, so not if the pass waits for gradients of other workers; unless a parameter has a
        hook, which would run twice if its gradient were handed over later.
        """
        return not self._marked or any(leaves[position].tensor._backward_hooks for position in averaged)

    def _average(
        self, leaves: list[Leaf], captured: list[Tensor | None], averaged: list[int]
    ) -> list[Tensor | None]:
        """Return the gradients, with those of models that average them averaged."""
        parameters = [leaves[position] for position in averaged]
        found = hand_over(
            [leaf.tensor for leaf in parameters],
            [captured[position] for position in averaged],
            self._models,
            self,
            lambda edges, gradients: self._run_engine(edges, gradients, parameters, accumulate=True),
        )
        result = list(captured)
        for position, gradient in zip(averaged, found, strict=True):
            result[position] = gradient
        return result

    def _run_together(
        self,
        roots: Sequence[Tensor],
        gradients: Sequence[Tensor],
        leaves: list[Leaf],
        *,
        accumulate: bool,
    ) -> list[Tensor | None]:
        """Run the engine once over everything; returns the gradients of the leaves."""
        if self._marked:
            roots = [*roots, self._tickets()]
            gradients = [*gradients, engine.empty()]
        return self._run_engine(roots, gradients, leaves, accumulate=accumulate)

    def _run_apart(self, roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Run each start separately, as its gradients arrive: no node needs more than one of them."""
        found: dict[int, list[Tensor | None]] = {}
        if roots:
            found[ROOTS] = self._run_engine(roots, gradients, self._reach.leaves[ROOTS])
        left = set(self._marked)
        senders: dict[Peer, int] = {}
        for number in left:
            sender = self._sent[number].to
            senders[sender] = senders.get(sender, 0) + 1
        while left:
            self._await_one_of(left, tuple(senders))
            for number in left.intersection(self._arrived):
                left.remove(number)
                sender = self._sent[number].to
                senders[sender] -= 1
                if not senders[sender]:
                    del senders[sender]
                self._take_gradients(self._sent[number])
                found[number] = self._run_message(number, self._reach.leaves[number])
        if len(found) == 1:
            return found.popitem()[1]
        return list(chain.from_iterable(map(found.__getitem__, self._reach.leaves)))

    def _run_message(self, number: int, leaves: list[Leaf]) -> list[Tensor | None]:
        """Run the graph behind a message; returns the gradients of its leaves."""
        sent, received = self._sent[number], self._gradients[number]
        indices = list(filter(sent.takes, sorted(self._marked[number])))
        if not indices:
            return [None] * len(leaves)
        if not is_profiler_enabled():  # the profile must show the sends
            straight = sent.gradients_of_leaves(indices, received, leaves)
            if straight is not None:
                return straight
            gradients = [gradient for index in indices if (gradient := received[index]) is not None]
            if len(gradients) == len(indices):
                return self._run_engine(list(map(sent.entry, indices)), gradients, leaves)
        begin = engine.empty()
        return self._run_engine([sent.end(index) for index in indices], [begin] * len(indices), leaves)

    def _run_engine(
        self,
        roots: Sequence[Tensor | GradientEdge],
        gradients: Sequence[Tensor],
        leaves: Sequence[Leaf],
        *,
        accumulate: bool = False,
    ) -> list[Tensor | None]:
        border = self.context.requests.border
        if border.encloses:  # go on with parameters as they are now: others may have stepped meanwhile
            border.catch_up()
        ends = [_end(leaf) if leaf.node is None else GradientEdge(leaf.node, 0) for leaf in leaves]
        ends.append(anchor())
        hooked = accumulate and any(not leaf.tensor.is_cpu for leaf in leaves)
        run = partial(
            engine.run, inputs=ends, retain_graph=self.retain_graph, accumulate=accumulate, known_as=self
        )
        with spans.span("gradients", leaves=len(leaves)):
            if hooked or self._elsewhere:
                with heralded(roots, gradients, anchor()) as begin:
                    captured = run(*begin)
            else:
                captured = run(roots, gradients)
        found = list(captured[: len(leaves)])
        if border.encloses:
            border.keep(found)
        return found

    def _tickets(self) -> Tensor:
        """Make the chain of tickets, oldest first; returns the newest, which is the first to run."""
        for node in self._reach.nodes():
            engine.give_way(node)
        self._unchecked = sorted(self._reach.recvs, key=lambda node: node.origin.received)
        ticket = anchor()
        with torch.enable_grad():
            for number in sorted(self._marked):
                sent = self._sent[number]
                indices = sorted(self._marked[number])
                for index in indices:
                    if sent.nodes[index] is not None:
                        engine.give_way(sent.nodes[index])
                ends = [
                    sent.ends[index] if sent.nodes[index] is not None else computed_from(sent.ends[index])
                    for index in indices
                ]
                ticket = new_ticket(sent, indices, ticket, *ends)
                assert ticket.grad_fn is not None
                engine.hold_back(ticket.grad_fn)
        return ticket

    def await_gradients(self, sent: Sent, indices: Sequence[int]) -> list[Tensor | None]:
        """Wait for the gradients of a message; only when nothing else can run.

        Returns:
            The gradients of its leaves among these tensors; for a tensor with a send node, which fetches its
            gradient itself, anything.
        """
        newer, unchecked = [], self._unchecked  # tickets of newer messages have checked the others
        while unchecked and unchecked[-1].origin.received > sent.number:
            newer.append(unchecked.pop())
        if not self._run.issuperset(map(id, newer)):
            finish(self._reach.nodes(), lambda: self._run.issuperset(map(id, newer)), self.progress.check)
        self._check_recvs_have_run(newer, f"before message {sent.number}")
        self._await_one_of((sent.number,), (sent.to,))
        border = self.context.requests.border
        if border.encloses:
            border.catch_up()
        self._take_gradients(sent)
        gradients, nothing = self._gradients[sent.number], engine.empty()
        return [gradients[index] if sent.nodes[index] is None else nothing for index in indices]

    def _take_gradients(self, sent: Sent) -> None:
        sender, frame = self._arrived.pop(sent.number)
        gradients = sender.codec.load_tensors(frame.buffers, sender)
        if len(gradients) != len(sent.ends):
            raise AutogradError(
                f"worker '{sent.to.name}' sent {len(gradients)} gradients for {len(sent.ends)} tensors"
            )
        self._gradients[sent.number] = gradients

    def _check_recvs_have_run(self, recvs: list[Any], when: str) -> None:
        if not self._run.issuperset(map(id, recvs)):
            raise RpcError(
                f"a backward has left out some of the {len(recvs)} messages that take part ({when}): this is "
                "a defect of farcall's, please report it"
            )

    def gradient(self, number: int, index: int) -> Tensor | None:
        """Return the gradient of a tensor that was sent; for its send node."""
        return self._gradients[number][index]

    def post(self, node: Any, gradients: Sequence[Tensor | None]) -> None:
        """Send the gradients of a recv node that has run to the sender of its tensors."""
        with self._posting:
            if id(node) in self._run:
                raise RpcError(
                    "a backward has run a message twice: this is a defect of farcall's, please report it"
                )
            self._links.post(node.origin, gradients)
            self._run.add(id(node))

    def _await_one_of(self, numbers: Collection[int], senders: Collection[Peer]) -> None:
        """Wait for the gradients of one of these messages, which these workers send. Raises the error that
        ended the backward pass, or ``WorkerLostError`` if a worker that was to send them is gone.

        That worker may have done its part and told the root so, and its gradients may be lost with its
        connection to this worker: no other worker would notice that this one waits.
        """

        def has_ended() -> bool:
            if not arrived.keys().isdisjoint(numbers):
                return True
            for peer in senders:  # noqa: SIM110  # a generator costs more than the rest, for each message
                if peer.lost is not None:
                    return True
            return False

        arrived = self._arrived
        self.progress.check()
        if not arrived.keys().isdisjoint(numbers):
            return
        self.awaited = senders
        while not has_ended():
            self._links.wait(has_ended)
            self.progress.check()
        self.awaited = ()
        if self._arrived.keys().isdisjoint(numbers):
            gone = next(peer for peer in senders if peer.lost is not None)
            raise gone.lost_error("The backward cannot be finished, as it has not sent its gradients")

    # ---- called for messages from other workers

    def arrived(self, number: int, sender: Peer, frame: Frame) -> None:
        """Handle gradients for a message that was sent from here, perhaps before it is marked.

        Raises:
            ProtocolError: the sender never received such a message, so no mark will ever refer to them.
        """
        sent = self._sent.get(number) or self.context.sends.get(number)
        if sent is None or sent.to is not sender:
            if self.context.over:
                return  # the record of what was sent is gone
            raise ProtocolError(
                f"gradients for message {number}, which worker '{sender.name}' was not sent in context "
                f"{self.context.id}"
            )
        self._arrived[number] = sender, frame
        self.progress.on(Event.NEWS)


def _end(leaf: Leaf) -> Tensor:
    """Return where a run ends at a leaf without a node; nothing reaches one that was frozen since."""
    tensor: Tensor = leaf.tensor
    return tensor if tensor.requires_grad else anchor()


class Ticket(Function):
    """Waits for the gradients of one message; then its leaves have them, and its send nodes can run."""

    @staticmethod
    def forward(ctx: Any, sent: Sent, indices: Sequence[int], previous: Tensor, *ends: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sent, ctx.indices = sent, indices
        return engine.empty()

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients = engine.running.known_as.await_gradients(ctx.sent, ctx.indices)
        return (None, None, engine.empty(), *gradients)


new_ticket: Final[Callable[..., Tensor]] = engine.directly(Ticket)
