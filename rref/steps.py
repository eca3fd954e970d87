"""The reference protocol, run by whichever thread has an input for it; no thread ever waits for another.

A thread that finds the protocol free takes a step at once. A thread that finds it in use puts the step into a
queue for the thread that uses it, and continues. That may be another thread, or the same one further up its
stack: in the middle of a step, a signal handler or a destructor called by the garbage collector may run and
use references. So steps never interleave, and a thread that is stopped in a step stops no other thread.

Invariants: a step is taken after all steps that were queued or postponed before it began: a reference is
created before it is released. The actions of a step, and callbacks of waiting threads, are run after the
step, when the protocol is free again. A queued step returns nothing to its caller: callers make the ids
beforehand.
"""

from __future__ import annotations

import logging
import threading
from _thread import get_ident
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from rpc.errors import RRefError
from rpc.runtime.interrupts import protected
from rpc.runtime.mailbox import Mailbox
from rref.protocol.machine import Protocol
from rref.protocol.messages import Action, Confirmed, Failed, Ref, State

__all__ = ["LEFT", "Steps"]

logger = logging.getLogger(__name__)

LEFT: Final = object()
"""Returned by ``Steps.do`` if the step is queued for the thread that uses the protocol."""

T = TypeVar("T")
Step = tuple[Callable[..., object], tuple[Any, ...]]


class Steps:
    """Takes the steps of one worker's protocol. From any thread, also in finalizers and signal handlers.

    Args:
        protocol: used by nothing else, except for the methods that may be called from any thread.
        mailbox: mailbox of the agent.
        act: performs actions other than ``Confirmed`` and ``Failed``; it neither waits nor runs user code.
        failed: called on an error in a queued step, such as a ``ProtocolError``, with the step's arguments
            and the error.
    """

    def __init__(
        self,
        protocol: Protocol,
        mailbox: Mailbox,
        act: Callable[[list[Action]], object],
        failed: Callable[[tuple[Any, ...], Exception], object],
    ) -> None:
        self._protocol = protocol
        self._actions = protocol.actions
        self._mailbox = mailbox
        self._act = act
        self._failed = failed
        self._free = threading.Lock()
        self._taker = 0
        self._left: SimpleQueue[Step] = SimpleQueue()
        self._later: SimpleQueue[Step] = SimpleQueue()
        self._later_is_due = False
        self._awaiting: dict[Ref, list[Callable[[], object]]] = {}
        self._callbacks: list[Callable[[], object]] = []
        """Callbacks for references that have been settled, to be called when the protocol is free."""

    @protected
    def do(self, step: Callable[..., Any], *args: Any) -> Any:
        """Take a step, and perform its actions.

        Returns:
            The step's return value; ``LEFT`` if another thread takes it.

        Raises:
            The step's error, unless it is queued.
        """
        if not self._free.acquire(blocking=False):
            self._left.put((step, args))
            self._catch_up()
            return LEFT
        try:
            self._taker = get_ident()
            if not self._left.empty():
                self._take_left()
            return step(*args)
        finally:
            if self._actions or self._callbacks:
                self._let_go()
            else:
                self._taker = 0
                self._free.release()
                if not self._left.empty():
                    self._catch_up()

    def ask(self, question: Callable[[], T]) -> T:
        """Return the answer to a question about the protocol, after taking the postponed steps.

        Raises:
            RRefError: the calling code interrupts a step of its own thread.
        """
        self.catch_up()
        answers: SimpleQueue[T] = SimpleQueue()
        self.do(lambda: answers.put(question()))
        self.check_may_wait()
        return answers.get()

    def later(self, step: Callable[..., Any], *args: Any) -> None:
        """Postpone a step by some milliseconds, to take it together with others."""
        self._later.put((step, args))
        if not self._later_is_due:
            self._later_is_due = True
            self._mailbox.gathered(self._do_later, None)

    def catch_up(self) -> None:
        """Take the postponed steps."""
        if not self._later.empty():
            self._do_later(None)

    def _do_later(self, _: None) -> None:
        self._later_is_due = False
        self.do(self._take_later)

    @protected
    def _catch_up(self) -> None:
        """Take the queued steps, if the protocol has become free."""
        while not self._left.empty():
            if not self._free.acquire(blocking=False):
                return
            self._taker = get_ident()
            self._let_go()

    def _let_go(self) -> None:
        """Take the queued steps and free the protocol, which this thread has."""
        self._take_left()
        actions = self._protocol.take_actions()
        for action in actions:
            if type(action) is Confirmed or type(action) is Failed:
                self._callbacks += self._awaiting.pop(action.ref, ())
        callbacks, self._callbacks = self._callbacks, []
        self._taker = 0
        self._free.release()
        if actions:
            self._act(actions)
        for callback in callbacks:
            callback()
        self._catch_up()  # steps queued since the last check

    def _take_left(self) -> None:
        while not self._left.empty():
            self._take(*self._left.get_nowait())

    def _take_later(self) -> None:
        while not self._later.empty():
            step = self._later.get_nowait()
            self._take_left()  # also steps queued since this began: they may precede the postponed one
            self._take(*step)

    def _take(self, step: Callable[..., object], args: tuple[Any, ...]) -> None:
        try:
            step(*args)
        except RRefError as error:  # such as passing on a reference that has failed in the meantime
            logger.debug("%s", error)
        except Exception as error:
            self._failed(args, error)

    # ---- waiting for a reference

    def check_may_wait(self) -> None:
        """Raise ``RRefError`` if the calling code interrupts a step of its own thread: waiting would
        deadlock.
        """
        if self._taker == get_ident():
            raise RRefError(
                "a destructor or signal handler that interrupts farcall's handling of references "
                "cannot wait for one to be confirmed: do it on another thread"
            )

    def state(self, ref: Ref) -> State:
        """Return the state of a reference; ``PENDING`` if its first step is queued."""
        self.catch_up()
        try:
            return self._protocol.state(ref)
        except RRefError:
            return State.PENDING

    def when_settled(self, ref: Ref, callback: Callable[[], object]) -> bool:
        """Return whether a reference is confirmed or failed; if not, ``callback`` is called when it is."""
        if self.state(ref) is not State.PENDING:
            return True
        self.do(self._await, ref, callback)
        return False

    def _await(self, ref: Ref, callback: Callable[[], object]) -> None:
        try:
            settled = self._protocol.state(ref) is not State.PENDING
        except RRefError:  # released
            settled = True
        if settled:
            self._callbacks.append(callback)
        else:
            self._awaiting.setdefault(ref, []).append(callback)

    def await_no_more(self, ref: Ref, callback: Callable[[], object]) -> None:
        """Forget ``callback``, which need not be called any more."""
        self.do(self._await_no_more, ref, callback)

    def _await_no_more(self, ref: Ref, callback: Callable[[], object]) -> None:
        callbacks = self._awaiting.get(ref, [])
        if callback in callbacks:
            callbacks.remove(callback)
            if not callbacks:
                del self._awaiting[ref]

    def is_awaited(self, ref: Ref) -> bool:
        """Whether any callback waits for a reference to be settled."""
        return ref in self._awaiting
