"""Contexts: what a forward pass spread over workers has recorded, and the gradients of its backward pass.

A context is made by one worker, the *creator*, and known to every worker that a call made inside it reaches.
Its id holds the creator's rank in the upper 16 bits of 64; the rest is a counter that starts at a random
number, so that ids are unique in the group even if a rank is used again.

*Release.* The creator's calls in a context say which of its contexts is the oldest that it has not left, so
that with the next step's first call a worker frees what it keeps of the last step. A call may be dropped
before it is read, and perhaps none follows. So each worker also remembers which workers it has sent a context
to. Some moments after the end of the ``with`` block, the creator notifies its workers that the context is
over, and they notify theirs, several contexts in one message: an open connection loses nothing, and if it
breaks, the worker behind it is gone. A call that arrives late is run outside of any context: no backward pass
can follow.

*Loss.* When a worker is gone, the contexts that it made are over, and workers that know another context only
through it ask the context's creator to notify them of its end. A worker may be gone for some workers only,
and the others continue in its contexts. So wherever a context is over because of a loss, every use of it is
an error, ``WorkerLostError``: what is not recorded would be missing in a gradient.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, Final

from torch import Tensor

from dist_autograd.graph import Leaf
from dist_autograd.recording import Sent
from rpc.agent.border import Work
from rpc.agent.hooks import Hooks
from rpc.agent.messages import Messages
from rpc.agent.received_requests import ReceivedRequests
from rpc.errors import AutogradError, ProtocolError, WorkerLostError
from rpc.group.peer import Peer, PeerTable
from rpc.runtime.blocking import this_thread
from rpc.runtime.executor import Executor
from rpc.runtime.interrupts import interruptible, protected
from rpc.runtime.mailbox import Mailbox
from rpc.runtime.tasks import Task
from rpc.serialization.payload import Payload
from rpc.wire.frames import Frame, Kind

__all__ = ["COUNTER_BITS", "Context", "Contexts", "current"]

logger = logging.getLogger(__name__)

COUNTER_BITS: Final = 48
_TOPIC: Final = "autograd"
OVER: Final = Kind.EXTENSION + 20
_NOTICE_SECONDS: Final = 0.05
"""Time in seconds after which workers are notified that contexts of this worker are over."""
_REMEMBERED: Final = 4096
_LONGEST: Final = 300
"""Maximum number of characters of a name or a reason that another worker says."""
_INTEGERS: Final = frozenset((int,))

Loss = tuple[str, str]
"""The name of a worker that is gone, and the reason."""

current: Final[ContextVar[Context | None]] = ContextVar("dist_autograd.current", default=None)
"""The context that this thread, or coroutine, runs in."""


class Context:
    """One context on one worker. From any thread.

    Attributes:
        id: id, the same on all workers.
        requests: the requests of other workers.
        creator: incarnation of the worker that made it.
        through: the worker that sent it here; None on its creator.
        sends: the messages sent from here, by number.
        recvs: the recv node of each message received here.
        kept: objects that are kept as long as the context.
        told: the workers that this worker has sent it to.
        over: whether it is released.
        loss: the loss of a worker that ended it; None if there was none.
    """

    def __init__(self, contexts: Contexts, context_id: int, creator: int, through: Peer | None) -> None:
        self.contexts = contexts
        self.requests = contexts.requests
        self.id = context_id
        self.creator = creator
        self.through = through
        self.sends: dict[int, Sent] = {}
        self.recvs: list[Any] = []
        self.kept: list[Any] = []
        self.told: set[Peer] = set()
        self.over = False
        self.loss: Loss | None = None
        self._lock = threading.RLock()  # reentrant: a signal handler may leave this context while it is held
        self._gradients: dict[int, tuple[Tensor, Tensor]] = {}
        """Each leaf and its gradient, by the leaf's identity."""
        self._work: Work | None = None
        """The work that computes the gradients; None if they are computed."""

    def gradients(self) -> dict[Tensor, Tensor]:
        """The gradient of each leaf of this worker that a backward has reached."""
        with self._lock:
            found = dict(self._gradients.values())
            if self._work is not None:
                self._work.join(found)
            return found

    def gradients_of(self, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of some leaves of this worker, None for one without."""
        with self._lock:
            known = self._gradients
            found = [known[id(leaf)][1] if id(leaf) in known else None for leaf in leaves]
            if self._work is not None:
                self._work.join([gradient for gradient in found if gradient is not None])
            return found

    def accumulate(self, leaves: Sequence[Leaf], gradients: Sequence[Tensor | None]) -> None:
        """Add to leaves' gradients. Their tensors are not changed in place, as other code may refer to them.

        A leaf that no longer requires grad gets none, as in PyTorch.
        """
        with self._lock:
            known = self._gradients
            border = self.requests.border
            if border.encloses:
                self._work = self._work or border.work_on(gradients)
            if self._work is not None:
                self._work.join([known[id(leaf.tensor)][1] for leaf in leaves if id(leaf.tensor) in known])
            for reached, gradient in zip(leaves, gradients, strict=True):
                leaf = reached.tensor
                if gradient is None or not leaf.requires_grad:
                    continue
                before = known.get(id(leaf))
                known[id(leaf)] = leaf, gradient if before is None else _sum(before[1], gradient)
            if self._work is not None:
                self._work.renew()

    def change(self, leaves: Iterable[Tensor], change: Callable[[Tensor], Tensor]) -> None:
        """Replace the gradients of some leaves by ``change`` of them; other threads wait in the meantime."""
        with self._lock:
            if self._work is not None:
                self._work.join([gradient for _, gradient in self._gradients.values()])
            for leaf in leaves:
                known = self._gradients.get(id(leaf))
                if known is not None:
                    self._gradients[id(leaf)] = leaf, change(known[1])
            if self._work is not None:
                self._work.renew()

    @interruptible
    def let_go(self) -> None:
        """Free what was recorded; this may run destructors of user code."""
        self.sends.clear()
        self.recvs.clear()
        self.kept.clear()
        with self._lock:
            gradients, self._gradients = self._gradients, {}
        gradients.clear()


def _sum(before: Tensor, gradient: Tensor) -> Tensor:
    if before.is_sparse and not gradient.is_sparse:
        return gradient + before  # PyTorch supports this order only
    return before + gradient


class Contexts:
    """The contexts that one worker knows of.

    Args:
        incarnation: incarnation of this worker.
        requests, workers, messages: parts of this worker's agent.
        when_first: called before the first context becomes known, or may become so.

    Attributes:
        incarnation, requests: as given.
        oldest: id of the oldest context of this worker that is not over, if there is any.
        find: returns the context with an id; None if it is over, or was never known here.
    """

    def __init__(
        self,
        incarnation: int,
        requests: ReceivedRequests,
        workers: PeerTable,
        messages: Messages,
        hooks: Hooks,
        mailbox: Mailbox,
        executor: Executor,
        when_first: Callable[[], object],
    ) -> None:
        self.incarnation = incarnation
        self.requests = requests
        self._workers = workers
        self._messages = messages
        self._mailbox = mailbox
        self._executor = executor
        self._when_first: Callable[[], object] | None = when_first
        self._known: dict[int, Context] = {}
        self.find: Callable[[int], Context | None] = self._known.get
        self._counter = itertools.count(secrets.randbits(COUNTER_BITS - 1))
        self.oldest = 0
        self._newest = 0
        self._own: dict[int, None] = {}
        """The contexts of this worker that are not over."""
        self._left: dict[int, int] = {}
        """For each creator, by incarnation: its contexts with smaller ids are over, as it has said."""
        self._notice_due = False
        self._lock = threading.RLock()  # reentrant: a signal handler may leave a context while it is held
        self._end_handlers: list[Callable[[Context], object]] = []
        self._over: dict[int, Loss | None] = {}
        """The latest contexts that are over, for calls made inside them that arrive late; with the loss that
        ended them, if one did.
        """
        self._unsaid: dict[tuple[Peer, Loss | None], list[int]] = {}
        messages.on(OVER, self._over_arrived, any_thread=True)
        messages.control.on(_TOPIC, self._told)
        hooks.gone.append(self._gone)
        hooks.release.append(self._give_notice)
        hooks.close.append(self._give_notice)

    def __len__(self) -> int:
        return len(self._known)

    def on_end(self, handler: Callable[[Context], object]) -> None:
        """Register ``handler`` to be called with each context that is over, before its objects are freed."""
        self._end_handlers.append(handler)

    def current(self) -> Context | None:
        """Return the context that this thread runs in; None outside of one, and when it was left.

        Raises:
            WorkerLostError: it is over because of a loss.
        """
        context = current.get()
        if context is None or context.contexts is not self:
            return None
        if context.over:
            self.check(context.id, context.loss)
            return None
        return context

    def _begin(self) -> None:
        call = self._when_first
        if call is not None:
            call()  # first: another thread must not go on before
            self._when_first = None

    def new(self) -> Context:
        """Make a context whose creator is this worker."""
        if self._when_first is not None:
            self._begin()
        rank = self._workers.own.member.id << COUNTER_BITS
        with self._lock:
            while True:
                context_id = rank + next(self._counter) % (1 << COUNTER_BITS)
                self._own[context_id] = None
                if context_id > self._newest:
                    break
                del self._own[context_id]  # a finalizer, in between, has made one, and may have used it
            self._newest = context_id
            if len(self._own) == 1:
                self.oldest = context_id
            context = self._known[context_id] = Context(self, context_id, self.incarnation, None)
        return context

    def largest_id(self) -> int:
        """Return the largest id that a context of this worker can have."""
        return (self._workers.own.member.id << COUNTER_BITS) + (1 << COUNTER_BITS) - 1

    def get(self, context_id: int) -> Context:
        """Like ``find``, but raises the error of ``unknown`` if there is no such context."""
        context = self._known.get(context_id)
        if context is None:
            raise self.unknown(context_id)
        return context

    def unknown(self, context_id: int) -> AutogradError | WorkerLostError:
        """Return the error for the use of a context that is not known here."""
        loss = self._over.get(context_id)
        if loss is not None:
            return self.lost_error(context_id, loss)
        return AutogradError(
            f"Could not find autograd context with id: {context_id} on worker '{self._workers.own.name}'. It "
            "is over, or no call made inside it has come here: use the id inside its "
            "'with dist_autograd.context() as context_id:'."
        )

    def join(self, context_id: int, creator: int, through: Peer) -> Context | None:
        """Return the context that a message names, and register it if it is new here; None if it was left.

        Raises:
            WorkerLostError: it is over because of a loss, or its creator is gone.
        """
        if self._when_first is not None:
            self._begin()
        with self._lock:
            if creator == self.incarnation or context_id in self._over:
                self.check(context_id)
                return self._known.get(context_id)
            if context_id < self._left.get(creator, 0):
                return None
            maker = self._workers.by_incarnation(creator)
            if maker is not None and maker.lost is not None:
                raise self.lost_error(context_id, _loss_of(maker))
            context = self._known.setdefault(context_id, Context(self, context_id, creator, through))
        self._look_after(context)
        if context.over:
            self.check(context_id, context.loss)
            return None
        return context

    def over_before(self, oldest: int, creator: Peer) -> None:
        """End the contexts of a worker that are older than ``oldest``, since it has left them.

        What they keep is freed at once, by the thread that is about to run the call: a destructor may call
        others there, but not the object whose turn the call is.
        """
        maker = creator.incarnation
        with self._lock:
            if oldest <= self._left.get(maker, 0) or creator.lost is not None:
                return
            self._left[maker] = oldest
        ended = [
            each
            for each in self._known.copy().values()
            if each.creator == maker and each.id < oldest and self._end(each, creator)
        ]
        if this_thread.must_not_block is None:  # it runs the call, and another thread would have to be woken
            _let_go(ended)
        elif ended:
            self._executor.submit((_let_go, ended))

    def check(self, context_id: int, loss: Loss | None = None) -> None:
        """Raise ``WorkerLostError`` if a context is over because of a loss.

        Args:
            loss: the loss, if it is known to the caller.
        """
        loss = loss or self._over.get(context_id)
        if loss is not None:
            raise self.lost_error(context_id, loss)

    def lost_error(self, context_id: int, loss: Loss) -> WorkerLostError:
        """Return the error for the use of a context that is over because of a loss."""
        name, reason = loss
        return WorkerLostError(
            f"autograd context {context_id} is over on worker '{self._workers.own.name}', as worker '{name}' "
            f"is gone: {reason}. Nothing more can be recorded there, so gradients would be missing: leave "
            "the context, and compute again in a new one, without the worker that is gone",
            name,
            reason,
        )

    def release(self, context: Context) -> None:
        """End a context: forget it, notify the workers that it was sent to, and free what it holds.

        Not on the loop's thread, which must not run destructors of user code.
        """
        if self._end(context, None):
            context.let_go()

    def release_soon(self, context: Context) -> None:
        """Like ``release``, from a finalizer: on the loop's thread."""
        self._mailbox.call(self._end_on_loop, context)

    @protected
    def _end(self, context: Context, heard_from: Peer | None, loss: Loss | None = None) -> bool:
        """Do all but the last step of ending a context, at the word of a worker, or because of a loss; false
        if it was over already.
        """
        with self._lock:
            if self._known.pop(context.id, None) is None:
                return False
            self._remember(context.id, loss)
            own = context.creator == self.incarnation
            if own:
                self._own.pop(context.id, None)
                self.oldest = min(self._own, default=context.id + 1)
        context.loss = loss  # first, for threads that find it over
        context.over = True
        for peer in context.told.copy():
            if peer is not heard_from:
                self._say_over(peer, context.id, loss, later=own)
        for handler in self._end_handlers:
            handler(context)
        return True

    def _end_on_loop(self, context: Context, loss: Loss | None = None) -> None:
        if self._end(context, None, loss):
            self._executor.submit((Context.let_go, context))

    def _say_over(
        self, peer: Peer, context_id: int, loss: Loss | None = None, *, later: bool = False
    ) -> None:
        """Notify a worker that a context is over, together with others that end in the next moments.

        Args:
            later: whether the notice has time, as a call is likely to say the same before.
        """
        with self._lock:
            self._unsaid.setdefault((peer, loss), []).append(context_id)
            due, self._notice_due = self._notice_due, self._notice_due or later
        if not later:
            self._mailbox.gathered(self._say_all_over, None)
        elif not due:
            self._mailbox.later(_NOTICE_SECONDS, self._give_notice)

    def _give_notice(self) -> None:
        with self._lock:
            self._notice_due = False
        self._say_all_over(None)

    def _say_all_over(self, _: object) -> None:
        with self._lock:
            unsaid, self._unsaid = self._unsaid, {}
        for (peer, loss), context_ids in unsaid.items():
            header: dict[str, Any] = {"over": context_ids}
            if loss is not None:
                header["lost"] = loss
            try:
                self._messages.sender.send(peer, OVER, 0, Payload(header, []), wait=False)
            except WorkerLostError as error:
                logger.debug("no worker is left to be notified that contexts are over: %s", error)

    def _remember(self, context_id: int, loss: Loss | None) -> None:
        self._over[context_id] = loss
        if len(self._over) > _REMEMBERED:
            del self._over[next(iter(self._over))]

    def _over_arrived(self, peer: Peer, frame: Frame) -> Task | None:
        said = frame.header.get("over")
        if type(said) is not list or not _INTEGERS.issuperset(map(type, said)):
            raise ProtocolError(f"contexts said to be over by the ids {str(said)[:80]}")
        loss = _read_loss(frame, peer)
        ended: list[Context] = []
        for context_id in said:
            with self._lock:
                context = self._known.get(context_id)
                if context is None and (loss is None or context_id not in self._over):
                    self._remember(context_id, loss)
            if context is None or context.creator == self.incarnation:  # only this worker ends its own
                continue
            if self._end(context, peer, loss):
                ended.append(context)
        return (_let_go, ended) if ended else None

    def _told(self, peer: Peer, message: Any) -> None:
        match message:
            case ["joined", int(context_id)]:
                context = self._known.get(context_id)
                if context is not None:
                    context.told.add(peer)
                if context is None or context.over:
                    self._say_over(peer, context_id, self._over.get(context_id))
            case _:
                raise ProtocolError(f"an autograd message that cannot be: {str(message)[:80]}")

    def _gone(self, peer: Peer, reason: str) -> None:
        for context in list(self._known.values()):
            context.told.discard(peer)
            self._look_after(context)
        with self._lock:
            self._left.pop(peer.incarnation, None)

    def _look_after(self, context: Context) -> None:
        """Make sure that this worker learns of a context's end, even if the worker that it came
        from is gone.
        """
        creator = self._workers.by_incarnation(context.creator)
        through = context.through
        nobody_tells = through is not None and through.lost is not None
        if creator is not None and creator.lost is not None:
            self._end_on_loop(context, _loss_of(creator))
        elif creator is None and through is not None and nobody_tells:
            self._end_on_loop(context, _loss_of(through))
        elif creator is not None and nobody_tells:
            context.through = creator
            self._messages.control.post(creator, _TOPIC, ["joined", context.id])


def _loss_of(peer: Peer) -> Loss:
    return peer.name, peer.lost or ""


def _read_loss(frame: Frame, peer: Peer) -> Loss | None:
    """Read which loss has ended contexts, as a worker says."""
    match frame.header.get("lost"):
        case None:
            return None
        case [str(name), str(reason)]:
            return name[:_LONGEST], f"{reason[:_LONGEST]} (as worker '{peer.name}' says)"
        case other:
            raise ProtocolError(f"contexts said to be over by a loss of {str(other)[:80]}")


def _let_go(ended: list[Context]) -> None:
    for context in ended:
        context.let_go()
