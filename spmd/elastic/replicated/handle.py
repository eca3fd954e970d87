"""``Replicated``: what programs use of a replicated object."""

from __future__ import annotations

import contextlib
import functools
import pickle
import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from time import monotonic
from typing import Any, Final

import torch

from dist_autograd.contexts import current
from dist_optim.parameter_groups import HostedParameter
from rpc.agent.agent import UNSET_TIMEOUT
from rpc.agent.futures import Future
from rpc.api import collect
from rpc.errors import NameTakenError, RpcError, RpcTimeoutError
from rpc.runtime import waits
from rpc.runtime.blocking import INFINITE, Condition, Event, check_may_block, wait_for_event, wait_while
from rpc.runtime.torch_internals import pytree
from rref.names import check_object_name
from rref.proxy import RRefProxy
from spmd.elastic.errors import StateLostError
from spmd.elastic.replicated.host import RAISED, UNANSWERED, VALUE, Host, acknowledge, call
from spmd.elastic.replicated.hosts import STANDBY, Hosts, hosts
from spmd.elastic.replicated.machine import OBJECT, WHOLE, Method, check_not_inside
from spmd.elastic.replicated.order import Call

__all__ = ["Replicated"]

_MAX_OPEN: Final = 256
"""Maximum number of calls of one process that are not over; so many answers are remembered for it."""

_LARGE_BYTES: Final = 1 << 20
"""Size of an answer from which on the primary is told at once that it has come."""

_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.5


class Replicated:
    """An object of which several workers of a dynamic group have a copy each, so that it survives deaths.

    Each worker that is to keep a copy calls this; more than ``copies`` may, to replace those that die.
    The first one makes the object, the others copy it. Other workers get it by ``Replicated.find``, or as an
    argument of a call. It returns when the object takes calls, that is, when all copies are there.

    ``rpc_sync()`` and ``rpc_async()`` call methods of the object, as those of an ``RRef`` do. Each call runs
    on all copies, in the same order on each. If workers die, it is repeated for as long as one copy is left,
    and it has run exactly once when it returns.

    Methods must do the same on each copy: they depend on the object and their arguments only. Random numbers
    come from generators that are part of the object. They call no other workers.

    Args:
        make: makes the object. It can be copied by ``torch.save``; otherwise it has ``state_dict`` and
            ``load_state_dict``, and ``make`` runs for each copy.
        copies: number of copies (default 2). While fewer workers live, calls go on with those.
        name: name of the object, unique in the group; default: the name of ``make``.
        timeout: time in seconds in which the copies must be there.

    Raises:
        ElasticError: fewer than ``copies`` workers have called this in time; or this worker cannot keep its
            copy; or the group is static.
        NameTakenError: another replicated object has this name.
        Exception: what ``make`` has raised.

    Example::

        server = elastic.Replicated(Server, copies=2, name="server")    # on three workers, say
        server = elastic.Replicated.find("server")                      # on any other worker
        server.rpc_sync().push(gradient)
    """

    _target = OBJECT

    def __init__(
        self,
        make: Callable[[], Any],
        copies: int = 2,
        *,
        name: str | None = None,
        timeout: float = 120.0,
    ) -> None:
        if not callable(make):
            raise TypeError(f"make is called to make the object; got {make!r:.100}")
        if type(copies) is not int or copies < 1:
            raise ValueError(f"copies is the number of copies, 1 or more; got {copies!r:.100}")
        function, arguments = make, ""
        if isinstance(make, functools.partial):
            named = [f"{key}={_shown(value)}" for key, value in sorted(make.keywords.items())]
            function, arguments = make.func, f"({', '.join([*map(_shown, make.args), *named])})"
        made = getattr(function, "__qualname__", type(function).__qualname__)
        self.name = check_object_name(made if name is None else name)
        check_may_block()
        found = hosts()
        description = f"a {made}{arguments} in {copies} copies"
        old = found.by_name.get(self.name)
        if old is not None and (old.description != description or _differ(make, old.machine.maker)):
            if any(each.role not in ("", STANDBY) for each in found.survey(self.name, None).values()):
                raise NameTakenError(
                    f"this worker has another replicated object named '{self.name}', which another function, "
                    "or other arguments, have made. Choose another name, by name="
                )
            old.give_up()  # all copies are gone
        with found.changed:
            host = found.by_name.get(self.name) or Host(found, self.name, description, make, copies)
        with waits.waiting("elastic.Replicated", list, name=self.name):
            self._identity = host.enter(monotonic() + timeout)

    @classmethod
    def find(cls, name: str, timeout: float = UNSET_TIMEOUT) -> Replicated:
        """Return the object with a name, of which this worker keeps no copy; waits until there is one.

        Args:
            name: the name.
            timeout: timeout in seconds; 0 for no limit. Default: the timeout of calls.

        Raises:
            RpcTimeoutError: there was none in time.
        """
        check_object_name(name)
        check_may_block()
        found = hosts()
        deadline, pause = _deadline(found, timeout), _FIRST_PAUSE
        with waits.waiting("elastic.Replicated.find", list, name=name):
            while True:
                found.check()
                ready = [each for each in found.survey(name, None).values() if each.ready]
                if ready:
                    return _handle(name, max(ready, key=lambda each: each.view).identity)
                pause = _pause(pause, deadline, f"no replicated object is named '{name}'")

    # ---- calls

    def rpc_sync(self, timeout: float = UNSET_TIMEOUT) -> RRefProxy:
        """Return a proxy whose methods call those of the object, and wait for the value.

        Args:
            timeout: timeout of each call in seconds, with all repetitions; 0 for no limit. Default: the
                timeout of calls. After a timeout, the call may have run, or may still run.
        """
        return RRefProxy(self, functools.partial(self._call, self._target), timeout)

    def rpc_async(self, timeout: float = UNSET_TIMEOUT) -> RRefProxy:
        """Like ``rpc_sync``, but each method returns a future immediately. Calls may run in another order
        than they were made in; arguments must not be changed until the future is completed.
        """
        return RRefProxy(self, functools.partial(self._start, self._target), timeout)

    def workers(self) -> list[str]:
        """Return the names of the workers that have copies now; the first one answers the calls."""
        found: list[str] = self._call(WHOLE, "workers", (), {}, UNSET_TIMEOUT)
        return found

    def remote_parameters(self) -> list[HostedParameter]:
        """Return references to the parameters of the object, a module, for a ``DistributedOptimizer``."""
        count = self._call(WHOLE, "count_parameters", (), {}, UNSET_TIMEOUT)
        return [_Parameter(self, number) for number in range(count)]

    def _call(self, target: int, name: str, args: Any, kwargs: Any, timeout: float) -> Any:
        check_may_block()
        return _Calling(self, target, name, args, kwargs, timeout).run()

    def _start(self, target: int, name: str, args: Any, kwargs: Any, timeout: float) -> Future[Any]:
        future = _Calling(self, target, name, args, kwargs, timeout).start()
        collect(future)
        return future

    def _line(self) -> _Line:
        found, key = hosts(), (self.name, self._identity)
        line: _Line = found.lines.get(key) or found.lines.setdefault(key, _Line(found, *key))
        return line

    def __reduce__(self) -> Any:
        return _handle, (self.name, self._identity, self._target)

    def __repr__(self) -> str:
        return f"Replicated('{self.name}')"


def _shown(argument: Any) -> str:
    """Return an argument of a maker as text, the same on all workers; "..." if there is no short one."""
    is_plain = argument is None or type(argument) in (bool, int, float, str, bytes)
    return text if is_plain and len(text := repr(argument)) <= 100 else "..."


def _differ(make: Callable[[], Any], other: Callable[[], Any]) -> bool:
    """Return whether these make different objects, as far as pickles tell: a lambda has none."""
    if make is other:
        return False
    try:
        return pickle.dumps(make) != pickle.dumps(other)
    except Exception:
        return False


def _handle(name: str, identity: int, target: int = OBJECT) -> Replicated:
    found = Replicated.__new__(Replicated)
    found.name, found._identity, found._target = name, identity, target
    return found


class _Begun:
    """Kept by an autograd context: the primary with which it has begun."""

    def __init__(self, line: _Line, primary: int) -> None:
        self.line, self.primary = line, primary


class _Line:
    """This process's calls of one object. From any thread."""

    def __init__(self, found: Hosts, name: str, identity: int) -> None:
        self.hosts, self.name, self.identity = found, name, identity
        self.primary: int | None = None
        self._changed = Condition()
        self._open: set[int] = set()
        self._next = 1

    def begin(self, deadline: float) -> int:
        """Return the number of another call; waits while too many are not over."""
        with self._changed:
            is_full = lambda: bool(self._open) and self._next - min(self._open) >= _MAX_OPEN  # noqa: E731
            if not wait_while(is_full, self._changed, deadline):
                raise RpcTimeoutError(f"{_MAX_OPEN} calls of replicated object '{self.name}' are not over")
            number, self._next = self._next, self._next + 1
            self._open.add(number)
            return number

    def end(self, number: int) -> None:
        """The caller has the answer, or has given it up."""
        with self._changed:
            self._open.discard(number)
            self._changed.notify_all()

    def answered(self) -> int:
        """Return the number of the earliest call that is not over."""
        with self._changed:
            return min(self._open, default=self._next)

    def find(self) -> Any:
        """Return the primary, a ``Peer``; None if there is none yet.

        Raises:
            StateLostError: all copies are gone.
        """
        primary = self.primary
        if primary is None:
            statuses = self.hosts.survey(self.name, None)
            members = {each: status for each, status in statuses.items() if status.identity == self.identity}
            primary = max(members, key=lambda each: members[each].view, default=None)
            if primary is None and self.hosts.is_complete(statuses):
                raise StateLostError(
                    f"all workers that had a copy of '{self.name}' are gone: its state is lost. Make it "
                    "again, from a checkpoint"
                )
            if primary is None or members[primary].view == 0:
                return None
        peer = self.hosts.losses.peer(primary)
        is_there = peer is not None and peer.lost is None
        self.primary = primary if is_there else None
        return peer if is_there else None


class _Calling:
    """One call, and its repetitions."""

    def __init__(
        self, handle: Replicated, target: int, name: str, args: Any, kwargs: Any, timeout: float
    ) -> None:
        check_not_inside()
        self._line = line = handle._line()
        self._context = current.get()
        tracked = self._context is not None and _requires_grad((args, kwargs))
        self._what = Method(target, name, tuple(args), dict(kwargs), tracked)
        self._deadline = _deadline(line.hosts, timeout)
        self._number = line.begin(self._deadline)

    def run(self) -> Any:
        """Make the call until it is answered."""
        line, pause = self._line, _FIRST_PAUSE
        text = f"{self._what.name} of replicated object '{line.name}' was not answered; it may have run"
        try:
            with waits.waiting(f"{line.name}.{self._what.name}", list):
                while True:
                    line.hosts.check()
                    peer = line.find()
                    answered = None
                    if peer is not None:
                        with contextlib.suppress(*UNANSWERED):
                            answered = self._send(peer).wait()
                    if answered is not None and answered[0] in (VALUE, RAISED):
                        break
                    line.primary = None
                    pause = _pause(pause, self._deadline, text)
        finally:
            line.end(self._number)
        self._acknowledge(peer, answered)
        return _value(answered)

    def start(self) -> Future[Any]:
        """Make the call, and return a future of its value."""
        result: Future[Any] = Future()
        line = self._line
        peer = None if line.primary is None else line.find()
        if peer is None:
            self._go_on(result)
            return result
        try:
            sent = self._send(peer)
        except UNANSWERED:
            self._go_on(result)
            return result
        except BaseException:
            line.end(self._number)
            raise
        context = copy_context()

        def done(sent: Future[Any]) -> None:
            try:
                answered = sent.value()
            except UNANSWERED:
                answered = None
            except Exception as error:
                line.end(self._number)
                result.set_exception(error)
                return
            if answered is None or answered[0] not in (VALUE, RAISED):
                line.primary = None
                context.run(self._go_on, result)
                return
            line.end(self._number)
            self._acknowledge(peer, answered)
            _complete(result, lambda: _value(answered))

        sent.add_done_callback(done)
        return result

    def _go_on(self, result: Future[Any]) -> None:
        run = functools.partial(copy_context().run, _complete, result, self.run)
        threading.Thread(target=run, name=f"calls {self._line.name}", daemon=True).start()

    def _acknowledge(self, peer: Any, answered: tuple[str, Any]) -> None:
        """Have the copies forget a large answer, before this process makes another call."""
        leaves = pytree.tree_leaves(answered)
        if sum(each.nbytes for each in leaves if isinstance(each, torch.Tensor)) >= _LARGE_BYTES:
            line = self._line
            args = (line.name, line.identity, line.hosts.me, line.answered())
            with contextlib.suppress(RpcError):  # it is gone
                line.hosts.agent.call_async(peer.member.info, acknowledge, args, {}, 0.0)

    def _send(self, peer: Any) -> Future[Any]:
        line, begun = self._line, 0
        if self._context is not None:
            kept = self._context.kept
            first = next((each for each in kept if isinstance(each, _Begun) and each.line is line), None)
            if first is None:
                first = _Begun(line, peer.incarnation)
                kept.append(first)
            begun = first.primary
        sent = Call(line.hosts.me, self._number, line.answered(), self._what)
        left = 0.0 if self._deadline == INFINITE else max(self._deadline - monotonic(), 0.001)
        found: Future[Any] = line.hosts.agent.call_async(
            peer.member.info, call, (line.name, line.identity, sent, begun), {}, left
        )
        return found


def _value(answered: tuple[str, Any]) -> Any:
    kind, value = answered
    if kind == RAISED:
        raise value
    return value


def _complete(result: Future[Any], run: Callable[[], Any]) -> None:
    try:
        value = run()
    except Exception as error:
        result.set_exception(error)
    else:
        result.set_result(value)


def _requires_grad(value: Any) -> bool:
    leaves = pytree.tree_leaves(value)
    return any(isinstance(each, torch.Tensor) and each.requires_grad for each in leaves)


def _deadline(found: Hosts, timeout: float) -> float:
    seconds = found.agent.calls.caller.effective_timeout(timeout)
    return monotonic() + seconds if seconds else INFINITE


def _pause(pause: float, deadline: float, text: str) -> float:
    wait_for_event(Event(), min(deadline, monotonic() + pause))
    if monotonic() >= deadline:
        raise RpcTimeoutError(f"{text}. The timeout is over")
    return min(2 * pause, _LONGEST_PAUSE)


class _Parameter(HostedParameter):
    """A parameter of a replicated module."""

    def __init__(self, handle: Replicated, number: int) -> None:
        self._handle, self._number = handle, number

    def owner_name(self) -> str:
        return f"replicated object '{self._handle.name}'"

    def make_optimizer(
        self, optimizer_class: Callable[..., Any], references: Sequence[_Parameter], *how: Any
    ) -> Future[tuple[Any, list[list[int]]]]:
        """Make one on all copies; in place of its ``RRef`` comes a ``Replicated`` that calls it."""
        handle, numbers = self._handle, [each._number for each in references]
        args = (hosts().me, optimizer_class, numbers, *how)
        made = handle._start(WHOLE, "make_optimizer", args, {}, UNSET_TIMEOUT)
        return made.then(
            lambda done: (_handle(handle.name, handle._identity, done.value()[0]), done.value()[1])
        )
