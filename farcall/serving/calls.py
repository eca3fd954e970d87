"""The common part of the server's methods: caller, deadline, errors, and logging.

Handlers get requests as bytes and parse them themselves, so that a malformed request is the caller's error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, ParamSpec, TypeVar

import grpc
import numpy as np
import torch
from google.protobuf.message import DecodeError, Message

from farcall.grpc.values import Malformed
from farcall.serving.callers import Callers
from farcall.serving.errors import details_of, status_of, text_of
from farcall.serving.host import Host
from farcall.serving.memory import check_memory
from farcall.serving.metrics import NOT_SERVED

__all__ = ["Caller", "Calls", "beside_the_loop", "parse", "size_of"]

M = TypeVar("M", bound=Message)
P = ParamSpec("P")
R = TypeVar("R")

_AT_ONCE_BYTES: Final = 64 << 10
"""Number of bytes that are parsed in a few milliseconds, whatever they contain."""

_BYTES_OF_A_VALUE: Final = 16

_TURN: Final = 0.02
_QUIET_TURNS: Final = 5
"""Number of iterations of the loop, with a minimum duration each, without a new call, after which gRPC has
delivered all received calls. Iterations, since on a busy machine the loop may get no time for seconds.
"""

_DETAILS: Final = "grpc-status-details-bin"


@dataclass(slots=True)
class Caller:
    """One call that has arrived.

    Attributes:
        name: name of its caller.
        seconds: the caller's timeout in seconds; None for no limit.
        began: arrival time, by ``perf_counter``.
        served: the name that it calls, for logs and metrics.
    """

    name: str
    seconds: float | None
    began: float
    served: str = NOT_SERVED


def parse(kind: type[M], request: bytes, limit: int) -> M:
    """Parse a request.

    Args:
        kind: class of the message.
        request: its bytes.
        limit: maximum memory in bytes for its values.

    Raises:
        Malformed: it is not such a message.
        Refused: its values take more memory.
    """
    check_memory(kind.DESCRIPTOR, request, limit)
    try:
        return kind.FromString(request)
    except (DecodeError, UnicodeDecodeError) as error:
        raise Malformed(f"the request is no {kind.DESCRIPTOR.full_name}: {error}") from None


async def beside_the_loop(size: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return the result of a function that reads or writes about ``size`` bytes; large ones on a thread, so
    that others need not wait for a message of a million values.
    """
    if size <= _AT_ONCE_BYTES:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def size_of(value: Any) -> int:
    """Return a value's approximate size in bytes as a message, up to the size that is written at once."""
    size, ahead = 0, [value]
    while ahead and size <= _AT_ONCE_BYTES:
        each = ahead.pop()
        match each:
            case torch.Tensor():
                size += each.numel() * each.itemsize
            case np.ndarray():
                size += each.nbytes
            case str() | bytes() | bytearray() | memoryview():
                size += len(each)
            case list() | tuple() | Mapping():
                size += _BYTES_OF_A_VALUE * len(each)
                if size <= _AT_ONCE_BYTES:
                    ahead += [*each.keys(), *each.values()] if isinstance(each, Mapping) else each
    return size


class Calls:
    """Makes gRPC handlers.

    Args:
        host: runs the calls.
        callers: identifies callers.
        tracebacks: whether errors contain tracebacks.
    """

    def __init__(self, host: Host, callers: Callers, *, tracebacks: bool) -> None:
        self._host = host
        self._callers = callers
        self.tracebacks = tracebacks
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._came = 0
        self._open = asyncio.Event()
        self._open.set()

    async def gather(self, longest: float) -> None:
        """Make arriving calls wait until ``release``; returns when no more arrive.

        When a server is stopped, gRPC answers ``CANCELLED`` to calls that it has not delivered. A client that
        waits for an answer makes no more calls, so that after this there are no such calls.

        Args:
            longest: maximum time in seconds, even if calls still arrive.
        """
        self._open.clear()
        loop = asyncio.get_running_loop()
        end, quiet = loop.time() + longest, 0
        while quiet < _QUIET_TURNS and loop.time() < end:
            before = self._came
            await asyncio.sleep(_TURN)
            quiet = quiet + 1 if self._came == before else 0

    def release(self) -> None:
        """Continue the calls that wait since ``gather``."""
        self._open.set()

    async def all_answered(self) -> None:
        """Wait until every call that has arrived is answered completely."""
        await self._idle.wait()

    def unary(self, answer: Callable[[bytes, Caller], Awaitable[Message]]) -> Any:
        """A handler of a method with one answer."""

        async def handle(request: bytes, context: Any) -> bytes:
            caller = self._comes(context)
            try:
                await self._open.wait()
                data = (await answer(request, caller)).SerializeToString()
            except BaseException as error:
                await self._fails(caller, context, error)
                raise
            self._ends(caller, grpc.StatusCode.OK)
            return data

        return grpc.unary_unary_rpc_method_handler(handle)

    def streaming(self, answers: Callable[[bytes, Caller], AsyncIterator[Message]]) -> Any:
        """A handler of a method with many answers."""

        async def handle(request: bytes, context: Any) -> None:
            caller = self._comes(context)
            try:
                await self._open.wait()
                results = answers(request, caller)
                try:
                    async for each in results:
                        await _send(context, each.SerializeToString())
                finally:
                    await results.aclose()  # type: ignore[attr-defined]
            except BaseException as error:
                await self._fails(caller, context, error)
                raise
            self._ends(caller, grpc.StatusCode.OK)

        return grpc.unary_stream_rpc_method_handler(handle)

    def _comes(self, context: Any) -> Caller:
        self._under_way += 1
        self._idle.clear()
        self._came += 1
        context.add_done_callback(self._goes)
        return Caller(self._callers.name(context), context.time_remaining(), perf_counter())

    def _goes(self, _: Any) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._idle.set()

    async def _fails(self, caller: Caller, context: Any, error: BaseException) -> None:
        """Answer with an error, which is raised; unless the caller is gone."""
        if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            self._ends(caller, grpc.StatusCode.CANCELLED)
            return
        code = status_of(error)
        self._ends(caller, code, f"{type(error).__qualname__}: {text_of(error)[:200]!r}")
        details = details_of(error, tracebacks=self.tracebacks)
        await context.abort(
            code, details.message, trailing_metadata=((_DETAILS, details.SerializeToString()),)
        )

    def _ends(self, caller: Caller, code: grpc.StatusCode, text: str = "") -> None:
        served = caller.served if caller.served in self._host.endpoints else NOT_SERVED
        self._host.metrics.ended(served, caller.name, code, perf_counter() - caller.began, text)


async def _send(context: Any, data: bytes) -> None:
    """Send one of many answers.

    Raises:
        CancelledError: the client is gone, which gRPC may find out here first, and would log as an error.
    """
    try:
        await context.write(data)
    except grpc.aio.BaseError as error:
        raise asyncio.CancelledError from error
