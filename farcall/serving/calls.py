"""What all methods of the server share: who calls, until when, how errors go back, and what is noted.

Handlers get requests as bytes and parse them themselves, so that what cannot be parsed is the caller's error.
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
"""So much is read in less than a handful of milliseconds, whatever it says."""

_BYTES_OF_A_VALUE: Final = 16

_TURN: Final = 0.02
_QUIET_TURNS: Final = 5
"""Turns of the loop, of so many seconds at least, without a new call, after which gRPC has handed over all
that came. Turns, since a machine that is busy may give the loop no time for seconds.
"""

_DETAILS: Final = "grpc-status-details-bin"


@dataclass(slots=True)
class Caller:
    """One call that has come.

    Attributes:
        name: who makes it.
        seconds: that he waits; None: for ever.
        began: when it came, by ``perf_counter``.
        served: the name that he calls, for logs and metrics.
    """

    name: str
    seconds: float | None
    began: float
    served: str = NOT_SERVED


def parse(kind: type[M], request: bytes, limit: int) -> M:
    """Read a request.

    Args:
        kind: of message that it is.
        request: its bytes.
        limit: bytes of memory that its values may take.

    Raises:
        Malformed: it is none.
        Refused: its values take more memory.
    """
    check_memory(kind.DESCRIPTOR, request, limit)
    try:
        return kind.FromString(request)
    except (DecodeError, UnicodeDecodeError) as error:
        raise Malformed(f"the request is no {kind.DESCRIPTOR.full_name}: {error}") from None


async def beside_the_loop(size: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What a function returns that reads or writes about ``size`` bytes: of many, on a thread, so that others
    need not wait for a message of a million values.
    """
    if size <= _AT_ONCE_BYTES:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def size_of(value: Any) -> int:
    """About how many bytes a value takes as a message, if not more than are written at once."""
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
        host: where calls go.
        callers: tells who calls.
        tracebacks: errors carry them.
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
        """Have calls that come wait until ``release``; returns when no more come.

        gRPC answers ``CANCELLED`` for what it has not handed over when a server is stopped. Who waits for an
        answer makes no more calls, so that after this there is nothing of that kind.

        Args:
            longest: seconds after which it returns whatever comes.
        """
        self._open.clear()
        loop = asyncio.get_running_loop()
        end, quiet = loop.time() + longest, 0
        while quiet < _QUIET_TURNS and loop.time() < end:
            before = self._came
            await asyncio.sleep(_TURN)
            quiet = quiet + 1 if self._came == before else 0

    def release(self) -> None:
        """Let those go on that wait since ``gather``."""
        self._open.set()

    async def all_answered(self) -> None:
        """Wait until every call that has come is answered, to the last byte."""
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
        """Answer with an error, which is raised; unless nobody waits for an answer."""
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
        CancelledError: the client is gone, which gRPC may find out here first; it would log it as an error.
    """
    try:
        await context.write(data)
    except grpc.aio.BaseError as error:
        raise asyncio.CancelledError from error
