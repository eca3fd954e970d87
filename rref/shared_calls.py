"""One call of a method, with the same arguments, of objects on several workers: it is serialized once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rpc.agent.futures import Future
from rpc.runtime.interrupts import protected
from rpc.serialization.payload import Payload
from rref.requests import INVOKE

if TYPE_CHECKING:
    from rref.reference import RRef

__all__ = ["SharedCall"]


class SharedCall:
    """A call of a method, which can be sent to any number of objects. It has no timeout.

    Args:
        method: name of the method.
        args: its arguments: bytes, numbers, texts, and short sequences of them, whose pickles are the same
            for all workers.
    """

    __slots__ = ("_args", "_buffers", "_method")

    def __init__(self, method: str, args: tuple[Any, ...]) -> None:
        self._method, self._args = method, args
        self._buffers: list[Any] | None = None

    @protected
    def send(self, reference: RRef[Any]) -> Future[Any]:
        """Call the method of one object; returns a future of its value.

        Raises:
            RpcError: the call cannot be sent.
        """
        caller = reference._usable(self._method, 0).calls
        if self._buffers is None:
            self._buffers = reference._dump_call(self._method, self._args, {}).buffers
        payload = Payload({"object": reference._rref, "method": self._method}, [*self._buffers])
        what = f"method '{self._method}' of {reference._shown or reference._described()}"
        call = caller.request(reference._owner, INVOKE, payload, 0, what)
        call.holds = reference  # as for any call of a method
        return Future.for_call(call)
