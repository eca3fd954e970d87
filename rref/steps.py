"""The reference protocol, run by whichever thread has something for it; nobody ever waits for a turn.

Whoever finds the protocol free takes a step at once. Whoever finds it taken leaves the step, in a queue, to
the one who has it, and goes on: that is another thread, or this one, further up its stack. For in the middle
of a step there may run a signal handler, or a destructor that the garbage collector calls, in which a user
makes use of references. So steps never tear each other, and a thread stopped in one stops no other thread.

Invariants: a step is taken after all those that were left before it began, or was put off for later: a
reference is created before it is released. What a step asks for (actions, and callbacks of those who waited)
is done after it, with the protocol free again. A step that was left returns nothing to whoever left it:
callers make the ids themselves, before.
"""

from __future__ import annotations

import logging
import threading
from _thread import get_ident
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from rpc.errors import ProtocolError, RRefError
from rpc.runtime.interrupts import protected
from rpc.runtime.mailbox import Mailbox
from rref.protocol.machine import Protocol
from rref.protocol.messages import Action, Confirmed, Failed, Ref, State

__all__ = ["LEFT", "Steps"]

logger = logging.getLogger(__name__)

LEFT: Final = object()
"""What ``Steps.do`` returns if the step is left to whoever has the protocol."""

T = TypeVar("T")
Step = tuple[Callable[..., object], tuple[Any, ...]]


class Steps:
    """Takes the steps of one worker's protocol. From any thread, also in finalizers and signal handlers.

    Args:
        protocol: used by nobody else, but for what may be used on any thread.
        mailbox: of the agent.
        act: does actions, other than ``Confirmed`` and ``Failed``; neither waits nor runs code of the user's.
        malformed: told of a ``ProtocolError`` in a step that was left: the step's arguments, and the error.
    """

    def __init__(
        self,
        protocol: Protocol,
        mailbox: Mailbox,
        act: Callable[[list[Action]], object],
        malformed: Callable[[tuple[Any, ...], ProtocolError], object],
    ) -> None:
        self._protocol = protocol
        self._actions = protocol.actions
        self._mailbox = mailbox
        self._act = act
        self._malformed = malformed
        self._free = threading.Lock()
        self._taker = 0
        self._left: SimpleQueue[Step] = SimpleQueue()
        self._later: SimpleQueue[Step] = SimpleQueue()
        self._later_is_due = False
        self._awaiting: dict[Ref, list[Callable[[], object]]] = {}
        self._callbacks: list[Callable[[], object]] = []
        """Of those who wait for a reference that is settled now; called when the protocol is free."""

    @protected
    def do(self, step: Callable[..., Any], *args: Any) -> Any:
        """Take a step, and have done what it asks for.

        Returns:
            What the step returns; ``LEFT`` if somebody else takes it.

        Raises:
            What the step raises, unless it is left.
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
        """The answer to a question about the protocol, with the steps done that were for later.

        Raises:
            RRefError: the caller interrupts a step of its own thread.
        """
        self.catch_up()
        answers: SimpleQueue[T] = SimpleQueue()
        self.do(lambda: answers.put(question()))
        self.check_may_wait()
        return answers.get()

    def later(self, step: Callable[..., Any], *args: Any) -> None:
        """Have a step taken within milliseconds, together with others."""
        self._later.put((step, args))
        if not self._later_is_due:
            self._later_is_due = True
            self._mailbox.gathered(self._do_later, None)

    def catch_up(self) -> None:
        """Take the steps that were for later."""
        if not self._later.empty():
            self._do_later(None)

    def _do_later(self, _: None) -> None:
        self._later_is_due = False
        self.do(self._take_later)

    @protected
    def _catch_up(self) -> None:
        """Take the steps that were left, if the protocol has been let go of meanwhile."""
        while not self._left.empty():
            if not self._free.acquire(blocking=False):
                return
            self._taker = get_ident()
            self._let_go()

    def _let_go(self) -> None:
        """Having the protocol: take what was left, and free it."""
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
        self._catch_up()  # with what was left since the last look

    def _take_left(self) -> None:
        while not self._left.empty():
            self._take(*self._left.get_nowait())

    def _take_later(self) -> None:
        while not self._later.empty():
            step = self._later.get_nowait()
            self._take_left()  # also what was left since this began: it may have been before that was put off
            self._take(*step)

    def _take(self, step: Callable[..., object], args: tuple[Any, ...]) -> None:
        try:
            step(*args)
        except ProtocolError as error:
            self._malformed(args, error)
        except RRefError as error:  # such as: passing on a reference that has failed meanwhile
            logger.debug("%s", error)

    # ---- waiting for a reference

    def check_may_wait(self) -> None:
        """Raise ``RRefError`` if the caller interrupts a step of its own thread, which cannot go on."""
        if self._taker == get_ident():
            raise RRefError(
                "a destructor or signal handler that runs in the middle of what farcall does for references "
                "cannot wait for one to be confirmed: do it on another thread"
            )

    def state(self, ref: Ref) -> State:
        """How a reference stands; ``PENDING`` if its first step is left."""
        self.catch_up()
        try:
            return self._protocol.state(ref)
        except RRefError:
            return State.PENDING

    def when_settled(self, ref: Ref, callback: Callable[[], object]) -> bool:
        """Whether a reference is confirmed or failed; if not, ``callback`` is called when it is."""
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
        """``callback`` need not be called any more."""
        self.do(self._await_no_more, ref, callback)

    def _await_no_more(self, ref: Ref, callback: Callable[[], object]) -> None:
        callbacks = self._awaiting.get(ref, [])
        if callback in callbacks:
            callbacks.remove(callback)
            if not callbacks:
                del self._awaiting[ref]

    def is_awaited(self, ref: Ref) -> bool:
        """Whether anybody waits for a reference to be settled."""
        return ref in self._awaiting
