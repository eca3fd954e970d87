"""How a context follows the calls made inside it, and how what they send is recorded.

The interceptor part carries the context from the caller to round the function's run; the tape part records
the tensors of calls and answers that require grad, a send at one end and a recv at the other. An answer is
recorded in the context of its call, whichever thread gives it or reads it.

A call that is made under ``no_grad`` is not recorded, and neither is its answer: as in one process, what it
takes and what it gives has no history. The context goes along all the same.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import Token
from operator import index
from typing import Any, Final

import torch
from torch import Tensor

from dist_autograd import recording
from dist_autograd.contexts import Context, Contexts, current
from dist_autograd.graph import Mark
from rpc.errors import ProtocolError
from rpc.peer import Peer
from rpc.serialization import Connect

__all__ = ["Follower", "Inside", "Tape"]

_NO_GRAD: Final = "no grad"
"""Stands in messages for a context in which they are not recorded."""


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
            if context.over:  # meanwhile: nobody would tell that worker
                return None
        return context.to_wire() if torch.is_grad_enabled() else [*context.to_wire(), _NO_GRAD]

    def incoming(self, value: Any, source: Peer) -> AbstractContextManager[Any]:
        context = self._contexts.join(value, source)
        return Inside(context) if context is not None else nullcontext()


class Tape:
    """Records what messages carry; see ``rpc.tape.Tape``."""

    key = "recorded"

    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts

    def calling(self) -> Context | str | None:
        context = self._contexts.current()
        return context if context is None or torch.is_grad_enabled() else _NO_GRAD

    def answering(self, header: dict[str, Any], to: Peer) -> Context | str | None:
        match header.get(Follower.key):
            case None:
                return None
            case [_, _, "no grad"]:
                return _NO_GRAD
            case asked_in:
                return self._contexts.join(asked_in, to)

    def sent(self, noted_in: Context | str, tensors: list[Tensor], to: Peer) -> Any:
        if isinstance(noted_in, str):
            return noted_in
        sent = recording.send(tensors, to)
        noted_in.sends[sent.number] = sent
        said: list[Any] = [*noted_in.to_wire(), sent.number]
        if to.incarnation == noted_in.creator:  # who may begin a backward, and spares itself a question
            behind = recording.behind(sent, noted_in.id)
            if behind is not None:
                said.append(behind)
        return said

    def received(self, value: Any, source: Peer) -> Connect | None:
        match value:
            case "no grad":
                return tuple
            case [_, _, int(number), *rest]:
                context = self._contexts.join(value, source)
                behind = _marks(rest)
            case _:
                raise ProtocolError(f"a message says that it is recorded as {str(value)[:80]}")
        if context is None:
            return None

        def connect(tensors: list[Tensor]) -> tuple[Tensor, ...]:
            if behind is not None and len(behind) != len(tensors):
                raise ProtocolError(
                    f"a message of {len(tensors)} tensors says what lies behind {len(behind)}"
                )
            received = recording.receive(tensors, context.id, source, number, behind)
            context.recvs.append(received[0].grad_fn)
            return received

        return connect


def _marks(said: list[Any]) -> list[list[Mark]] | None:
    """What lies behind each tensor of a message, as its header says it, if it does."""
    if not said:
        return None
    try:
        (tensors,) = said
        return [[Mark(*map(index, mark)) for mark in marks] for marks in tensors]
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"a message says badly what lies behind its tensors: {error}") from None
