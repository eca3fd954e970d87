"""``RRef``: a reference to an object that lives on some worker."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import torch

from rpc.agent.agent import UNSET_TIMEOUT
from rpc.agent.futures import Future
from rpc.api import collect
from rpc.errors import AutogradError, RRefError, SerializationError, WorkerLostError, with_article
from rpc.group.peer import Peer
from rpc.group.workers import WorkerInfo
from rpc.runtime import interrupts
from rpc.runtime.blocking import check_may_block
from rpc.runtime.current import check_not_forked, extension
from rpc.runtime.interrupts import protected
from rpc.serialization.payload import Payload
from rref.creation import Creation
from rref.operators import without_operators
from rref.protocol.messages import CREATOR_LOST, Ref, RRefId, State
from rref.proxy import RRefProxy
from rref.references import References
from rref.requests import FETCH, INVOKE, fetch, method_of_object
from rref.value import Value

__all__ = ["RRef", "address_of", "references"]

T = TypeVar("T")

EXTENSION = "rref"
"""Key of the ``References`` in an agent's extensions."""


def references() -> References:
    """Return the references of the current agent."""
    found: References = extension(EXTENSION)
    return found


def address_of(rref: RRef[Any]) -> tuple[Peer, RRefId]:
    """Return the owner of an object, and the object's id, for messages that name it."""
    return rref._owner, rref._rref


@without_operators(
    "fetch the object by rref.to_here(), or call a method of it, such as rref.rpc_sync().{method}(...)"
)
class RRef(Generic[T]):
    """A reference to an object of type ``T`` on some worker, the *owner*.

    ``RRef(value)`` refers to a local object; ``rpc.remote`` creates one on another worker. A reference can be
    sent to any worker, as an argument or in a result, inside any container. The owner keeps the object as
    long as any worker refers to it, and frees it when the last reference is released or its holder has died.

    Args:
        value: the object to refer to, of any type; it stays on this worker and is not copied.
        type_hint: accepted for compatibility with PyTorch and ignored.

    Raises:
        NotInitializedError: ``rpc.init_rpc`` has not been called.

    Example::

        rref = rpc.remote("worker1", torch.nn.Linear, args=(4, 2))
        weight = rref.rpc_sync().forward(torch.ones(1, 4))
        layer = rref.to_here()
    """

    __slots__ = (
        "__weakref__",
        "_confirmed",
        "_creation",
        "_owner",
        "_ref",
        "_references",
        "_rref",
        "_shown",
        "_type",
    )

    @protected
    def __init__(self, value: T, type_hint: Any = None) -> None:
        del type_hint
        shell = references()
        rref, ref = shell.own(value)
        self._bind(shell, shell.workers.own, rref, ref, None)

    @classmethod
    def _of(
        cls, shell: References, owner: Peer, rref: RRefId, ref: Ref, creation: Creation | None = None
    ) -> RRef[Any]:
        """Make the Python object of a local reference, which it releases when it is destroyed."""
        self: RRef[Any] = cls.__new__(cls)
        self._bind(shell, owner, rref, ref, creation)
        return self

    def _bind(
        self, shell: References, owner: Peer, rref: RRefId, ref: Ref, creation: Creation | None
    ) -> None:
        self._references = shell
        self._owner = owner
        self._rref = rref
        self._ref = ref
        self._creation = creation
        self._type: Future[type] | None = None
        self._confirmed = False
        self._shown: str | None = None

    @protected
    def __del__(self) -> None:
        # May run anywhere, also in the middle of a step of the protocol, so the release is only queued.
        try:
            shell, ref = self._references, self._ref
        except AttributeError:
            return  # the constructor failed
        shell.release(ref)

    # ---- the owner

    def is_owner(self) -> bool:
        """Return whether the object lives on this worker."""
        return self._owner.is_self

    def owner(self) -> WorkerInfo:
        """Return the ``WorkerInfo`` of the worker that the object lives on."""
        return self._owner.member.info

    def owner_name(self) -> str:
        """Return the name of the worker that the object lives on."""
        return self._owner.name

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner has confirmed this reference; for ``remote``, once the object is
        created.
        """
        shell = self._references
        if shell.released:
            return False
        return shell.state(self._ref) is State.CONFIRMED

    # ---- the object

    def local_value(self) -> T:
        """Return the object itself; only on its owner. Waits until it is created.

        Raises:
            RRefError: the object lives on another worker.
            Exception: the error of the function that was to create the object.
        """
        if not self.is_owner():
            me = self._references.workers.own.member.info
            raise RRefError(
                f"For {self._full_name()}, can't call localValue() on user {me}. "
                f"Call it on owner {self.owner()}, or fetch the object with to_here()."
            )
        value: T = self._value("local_value", 0).wait(0, f"{self} is still being made")
        return value

    def to_here(self, timeout: float = UNSET_TIMEOUT) -> T:
        """Return the object: the object itself on its owner, a copy of it on every other worker.

        Args:
            timeout: timeout in seconds; 0 for no limit. Default: the timeout of calls.

        Raises:
            RpcTimeoutError: the object was not created, or did not arrive, in time.
            WorkerLostError: the owner is gone.
            RRefError: the reference cannot be used: its creation failed, or its agent is shut down.
            Exception: the error of the function that was to create the object.
        """
        if self._owner.is_self:
            seconds = self._references.calls.effective_timeout(timeout)
            began = time.monotonic()
            found = self._value("to_here", seconds)
            left = max(seconds - (time.monotonic() - began), 0.001) if seconds else 0.0
            value: T = found.wait(left, f"{self} is still being made")
            return value
        shell = self._usable("to_here", timeout)
        payload = fetch(self._rref)
        shell.calls.attach(payload.header, self._owner)
        try:
            fetched: T = shell.calls.inquire(self._owner, FETCH, payload, timeout, "RRef.to_here")
        except RRefError:
            if self._creation is not None:
                self._creation.check()  # it has failed in the meantime, and its error is more specific
            raise
        return fetched

    def _value(self, doing: str, timeout: float) -> Value:
        """Return the object, on its owner; waits for the message that creates it, which references may
        overtake.
        """
        shell = self._check_open(doing)
        if self._creation is not None:
            self._creation.check()
        value = shell.find(self._rref)
        if value is None:
            self._usable(doing, timeout)
            value = shell.value(self._rref)
        return value

    def _check_open(self, doing: str) -> References:
        if not interrupts.are_wrapped:
            interrupts.ensure_deferred()
        shell = self._references
        if shell.released:
            check_not_forked()
            raise RRefError(
                f"{self} is no longer usable: its agent is shut down. "
                f"Cannot call {doing}() on it after deletion."
            )
        return shell

    def _usable(self, doing: str, timeout: float) -> References:
        """Check that the owner can be asked about the object, once it has confirmed this reference."""
        shell = self._references
        if shell.released or not interrupts.are_wrapped:
            self._check_open(doing)
        if self._confirmed and self._owner.lost is None:
            return shell
        creation = self._creation
        if creation is not None:
            creation.check()
            if creation.awaited.outcome is None and self._owner.lost is None:
                return shell  # no failure is known yet
        elif self._owner.lost is None:
            missing = f"worker '{self._owner.name}', the owner, has not confirmed the reference"
            if self.is_owner():
                missing = f"the message that creates the object of {self} has not arrived"
            shell.wait_settled(self._ref, shell.calls.effective_timeout(timeout), missing)
        if self._owner.lost is not None:
            raise self._owner.lost_error(f"{doing} of {self} is impossible")
        state = shell.state(self._ref)
        if state is State.FAILED:
            reason = shell.reason(self._ref)
            creator = shell.workers.by_incarnation(self._rref[0])
            if reason.startswith(CREATOR_LOST) and creator is not None:
                raise WorkerLostError(f"{self} is not usable: {reason}", creator.name, reason)
            raise RRefError(f"{self} is not usable: {reason}")
        self._confirmed = state is State.CONFIRMED  # this can change only if the owner is lost
        return shell

    # ---- calling its methods

    def rpc_sync(self, timeout: float = UNSET_TIMEOUT) -> RRefProxy:
        """Return a proxy whose methods call those of the object, on its owner, and wait for the result.

        Args:
            timeout: timeout of each call in seconds; 0 for no limit. Default: the timeout of calls.
        Example::

            norm = rref.rpc_sync().norm()           # rpc_sync(rref.owner(), lambda: object.norm())
        """
        return RRefProxy(self, self._invoke_sync, timeout)

    def rpc_async(self, timeout: float = UNSET_TIMEOUT) -> RRefProxy:
        """Like ``rpc_sync``, but each method returns a future immediately."""
        return RRefProxy(self, self._invoke_async, timeout)

    def remote(self, timeout: float = UNSET_TIMEOUT) -> RRefProxy:
        """Like ``rpc_sync``, but each result stays on the owner, and the method returns an RRef to it."""
        return RRefProxy(self, self._invoke_remote, timeout)

    @protected  # references in the arguments are either sent or taken back
    def _invoke_sync(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float) -> Any:
        """Call a method of the object and wait for its value."""
        payload, what = self._message(name, args, kwargs, timeout)
        return self._references.calls.inquire(self._owner, INVOKE, payload, timeout, what)

    @protected
    def _invoke_async(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float
    ) -> Future[Any]:
        """Call a method and return a future of its value. An error of the call is set on the future."""
        caller = self._references.calls
        try:
            payload, what = self._message(name, args, kwargs, timeout)
            call = caller.request(self._owner, INVOKE, payload, timeout, what)
            call.holds = self  # or its release may overtake the message: one to oneself, or one in chunks
            future = Future.for_call(call)
        except RuntimeError as error:
            future = Future()
            future.set_exception(error)
        collect(future)
        return future

    @protected
    def _invoke_remote(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float
    ) -> RRef[Any]:
        """Call a method and return a reference to its value, which stays on the owner.

        Raises:
            AttributeError: the object has no such attribute; the owner is asked once for the object's type.
        """
        timeout = self._references.calls.effective_timeout(timeout)
        kind = self._get_type(timeout)
        may_have = hasattr(kind, name) or hasattr(kind, "__getattr__")
        if not may_have:
            raise AttributeError(f"the object of {self}, {with_article(kind)}, has no attribute '{name}'")
        shell = self._usable(name, timeout)
        payload = self._dump_call(name, args, kwargs)
        what = f"method '{name}' of {self._described()}"
        target = {"object": self._rref, "method": name}
        made = shell.create(self._owner, target, payload, timeout, what, RRef._of)
        assert made._creation is not None
        made._creation.hold(self)
        return made

    def _message(
        self, name: str, args: Sequence[Any], kwargs: dict[str, Any], timeout: float
    ) -> tuple[Payload, str]:
        """Return the message that calls a method of the object, and its description for error messages."""
        self._usable(name, timeout)
        payload = self._dump_call(name, args, kwargs)
        payload.header |= {"object": self._rref, "method": name}
        if self._shown is None:
            self._shown = self._described()
        return payload, f"method '{name}' of {self._shown}"

    def _dump_call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Payload:
        try:
            return self._references.calls.dump_call(method_of_object, tuple(args), kwargs, self._owner)
        except SerializationError as error:
            reason = error
        # The pickler sees this function in place of the method.
        text = str(reason).replace(f"{__package__}.requests.method_of_object", f"'{name}' of {self}")
        try:
            raise SerializationError(text) from reason.__cause__
        finally:
            del reason  # it refers to this frame, a cycle

    def _get_type(self, timeout: float = UNSET_TIMEOUT, blocking: bool = True) -> Any:
        """Return the object's type, which is asked for once; a future of it if not ``blocking``."""
        kind = self._type
        if kind is None:
            if self.is_owner():
                kind = Future()
                kind.set_result(type(self.local_value()))
            else:
                if blocking:
                    check_may_block()
                shell = self._usable("_get_type", timeout)
                ask = fetch(self._rref)
                ask.header["type"] = True
                what = f"the type of {self._described()}"
                call = shell.calls.request(self._owner, FETCH, ask, timeout, what)
                call.how = "remote"
                kind = Future.for_call(call)
            self._type = kind
        if not blocking:
            return kind
        try:
            return kind.wait()
        except BaseException:
            self._type = None  # the next call may have a longer timeout
            raise

    def _get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is done when the object has been created, or creating it has failed."""
        creation = self._creation
        if creation is None:
            done: Future[None] = Future()
            done.set_result(None)
            return done
        if not self._references.released:
            self._check_open("_get_future")
        return creation.future_of_end()

    def _get_profiling_future(self) -> torch.futures.Future[Any]:
        """Like ``_get_future``: when it is done, the profiler has all events of the creation."""
        return self._get_future()

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Start a backward pass at the object, a tensor with one element, on its owner.

        Args:
            dist_autograd_ctx_id: id of the distributed autograd context that accumulates the gradients; -1
                for a local backward pass on the owner, which accumulates them into ``.grad``.
            retain_graph: whether to keep the graph, so that it can be used once more.

        Raises:
            RRefError: the object is not a tensor.
            AutogradError: the owner does not know the context, or the tensor cannot be a root.
            WorkerLostError: the owner, or another worker that takes part, is gone.
        Example::

            with dist_autograd.context() as context_id:
                loss = rref.rpc_sync().forward(x)
                rpc.remote(rref.owner(), torch.sum, args=(loss,)).backward(context_id)
        """
        shell = self._usable("backward", UNSET_TIMEOUT)
        if shell.backward is None:
            raise AutogradError(f"cannot run a backward at {self}: distributed autograd is not installed")
        shell.backward(self, dist_autograd_ctx_id, retain_graph)

    # ---- as a Python object

    def __str__(self) -> str:
        shell = self._references
        rref = shell.id_text(self._rref)
        if self.is_owner():
            return f"OwnerRRef({rref})"
        return f"UserRRef(RRefId = {rref}, ForkId = {shell.id_text(self._ref)})"

    def __repr__(self) -> str:
        creation, of = self._creation, self._described()
        if self.is_owner():
            return f"<{self} to {of}, of this worker, '{self.owner_name()}'>"
        if creation is not None and creation.error is not None:
            made = f"failed: {type(creation.error).__name__}"
        else:
            made = "made" if self.confirmed_by_owner() else "perhaps still being made"
        return f"<{self} to {of}, on worker '{self.owner_name()}', {made}>"

    def _described(self) -> str:
        """Describe the object for error messages."""
        kind = self._known_type()
        if kind is not None:
            return with_article(kind)
        if self._creation is not None:
            return f"the value of {self._creation.asked}(...)"
        return self._references.object_in_words(self._rref)

    def _known_type(self) -> type | None:
        """Return the object's type, if it is known here already."""
        if self._type is not None and self._type.done():
            with contextlib.suppress(Exception):  # asking for it failed
                return self._type.value()
        value = self._references.find(self._rref)
        return None if value is None or not value.is_ready or value.error is not None else type(value.content)

    if not TYPE_CHECKING:  # so that type checkers find misspelled names

        def __getattr__(self, name: str) -> NoReturn:
            """Called only for names that a reference does not define itself."""
            hint = ""
            if not name.startswith("_"):
                hint = f": if the object has it, call rref.rpc_sync().{name}(...), or fetch it by to_here()"
            raise AttributeError(f"an RRef has no attribute '{name}'{hint}", name=name, obj=self)

    def _full_name(self) -> str:
        shell = self._references
        return f"UserRRef(rref_id={shell.id_text(self._rref)}, fork_id={shell.id_text(self._ref)})"

    def deleted_error(self) -> RRefError:
        """Return the error for an attempt to send this reference after its agent is shut down."""
        return RRefError(f"Cannot call fork an UserRRef after deletion. {self} is no longer usable.")

    def _serialize(self) -> NoReturn:
        """Raises an error: a reference can only be serialized by sending it. The name is PyTorch's."""
        if self._creation is not None:
            self._creation.check()
        self.__reduce_ex__(2)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        if self._references.released:
            raise self.deleted_error()
        raise RRefError(
            f"Can not pickle rref in python pickler: {self} can only be sent in RPC messages, "
            "where its owner learns of the new reference"
        )
