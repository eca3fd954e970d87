"""How a context follows the calls made inside it, and how what they send is recorded.

The interceptor part carries the context from the caller to round the function's run; the tape part records
the tensors of calls and answers that require grad, a send at one end and a recv at the other. An answer is
recorded in the context of its call, whichever thread gives it or reads it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import Token
from typing import Any

import torch
from torch import Tensor

from dist_autograd import recording
from dist_autograd.contexts import Context, Contexts, current
from rpc.errors import ProtocolError
from rpc.peer import Peer
from rpc.serialization import Connect

__all__ = ["Follower", "Inside", "Tape"]


class Inside:
    """A block that runs in a context."""

    __slots__ = ("_context", "_token")

    def __init__(self, context: Context) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._token: Token[Context | None] = current.set(self._context)

    def __exit__(self, *_: object) -> None:
        current.reset(self._token)


class Follower:
    """Carries the context along with calls; see ``rpc.callee.Interceptor``."""

    key = "context"

    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts

    def outgoing(self, to: Peer) -> Any:
        context = self._contexts.current()
        if context is None:
            return None
        if to not in context.told and not to.is_self:
            context.told.add(to)
        return context.to_wire()

    def incoming(self, value: Any, source: Peer) -> AbstractContextManager[Any]:
        context = self._contexts.join(value, source)
        return Inside(context) if context is not None else nullcontext()


class Tape:
    """Records what messages carry; see ``rpc.tape.Tape``."""

    key = "recorded"

    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts

    def calling(self) -> Context | None:
        return self._contexts.current() if torch.is_grad_enabled() else None

    def answering(self, header: dict[str, Any]) -> Context | None:
        asked_in = header.get(Follower.key)
        return None if asked_in is None else self._contexts.find(asked_in[0])

    def sent(self, noted_in: Context, tensors: list[Tensor], to: Peer) -> Any:
        sent = recording.send(tensors, to)
        noted_in.sends[sent.number] = sent
        return [*noted_in.to_wire(), sent.number]

    def received(self, value: Any, source: Peer) -> Connect | None:
        match value:
            case [_, _, int(number)]:
                context = self._contexts.join(value, source)
            case _:
                raise ProtocolError(f"a message says that it is recorded as {str(value)[:80]}")
        if context is None:
            return None

        def connect(tensors: list[Tensor]) -> tuple[Tensor, ...]:
            received = recording.receive(tensors, context.id, source, number)
            context.recvs.append(received[0].grad_fn)
            return received

        return connect
