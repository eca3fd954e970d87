"""Context propagation: how a context follows the calls made inside it, and how their tensors are recorded.

The context travels in the header of each call, and is current while the called function runs. The tensors of
calls and answers that require grad are recorded, as a send on one side and a recv on the other; the header
then has the number of the message, too. An answer is recorded in the context of its call, whichever thread
sends or reads it.

A call made under ``no_grad`` is not recorded, and neither is its answer: as in one process, its inputs and
outputs have no history. The context is sent all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import Token
from dataclasses import dataclass
from operator import index
from typing import Any, Final

import torch
from torch import Tensor

from dist_autograd import recording
from dist_autograd.contexts import Context, Contexts, current
from rpc.errors import ProtocolError
from rpc.group.peer import Peer
from rpc.runtime.interrupts import protected

__all__ = ["Propagation", "Recorded"]

_NOT_RECORDED: Final = 0
"""Used in place of a message's number: its tensors have no history at the receiver."""


@dataclass(slots=True, eq=False)
class Recorded:
    """One side of a call made in a context; see ``rpc.agent.tape.Recording``."""

    context: Context
    tracks: bool
    source: Peer | None = None
    """At the receiver of a message, its sender."""
    number: int | None = None
    """Number of the message, if it has one."""
    behind: Sequence[Any] | None = None
    """For each of its tensors the marks that its gradient leads to, if the sender provides them."""
    answer: bool = False
    """Whether that message is an answer."""
    token: Token[Context | None] | None = None

    @protected
    def __enter__(self) -> None:
        self.token = current.set(self.context)

    def __exit__(self, *_: object) -> None:
        assert self.token is not None
        current.reset(self.token)

    def sent(self, tensors: list[Tensor], to: Peer) -> Any:
        context = self.context
        number, behind = None if self.tracks else _NOT_RECORDED, None
        if tensors and self.tracks:
            sent = recording.send(tensors, to)
            number = sent.number
            context.sends[number] = sent
            if to.incarnation == context.creator:  # it may start a backward pass, and saves a round trip then
                behind = recording.behind(sent, context.id)
        if context.through is None and not to.is_self:
            age = max(0, context.id - context.contexts.oldest)
            return [context.id, context.creator, number, behind, age]
        return [context.id, context.creator, number, behind]

    def connect(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        number, context, source, behind = self.number, self.context, self.source, self.behind
        if not self.tracks:
            return tensors
        if number is None or source is None:
            return [tensor.requires_grad_() for tensor in tensors]
        if behind is not None and len(behind) != len(tensors):
            raise ProtocolError(f"a message of {len(tensors)} tensors says what lies behind {len(behind)}")
        received = recording.receive(tensors, context.id, source, number, behind, answer=self.answer)
        context.recvs.append(received[0].grad_fn)
        return received


class Propagation:
    """Sends the context along with calls, and has their tensors recorded; see ``rpc.agent.tape.Tape``."""

    key = "context"

    def __init__(self, contexts: Contexts) -> None:
        self.current = current.get
        self._contexts = contexts

    def calling(self, to: Peer) -> Recorded | None:
        context = current.get()
        if context is None or context.contexts is not self._contexts:
            return None
        if to not in context.told and not to.is_self:
            context.told.add(to)
        if context.over:  # checked last, since no other code would notify that worker any more
            self._contexts.check(context.id, context.loss)
            return None
        return Recorded(context, torch.is_grad_enabled())

    def received(self, value: Any, source: Peer) -> Recorded | None:
        return self._recorded(value, source, join=True)

    def answered(self, value: Any, source: Peer) -> Recorded | None:
        return self._recorded(value, source, join=False)

    def _recorded(self, value: Any, source: Peer, *, join: bool) -> Recorded | None:
        number: int | None = None
        behind: list[Any] | None = None
        age: int | None = None
        try:
            context_id, creator = index(value[0]), index(value[1])
            if len(value) > 2 and value[2] is not None:
                number = index(value[2])
            if len(value) > 3 and value[3] is not None:
                behind = list(value[3])
            if len(value) > 4:
                age = index(value[4])
        except (TypeError, LookupError) as error:
            raise ProtocolError(f"a message says badly what it is recorded as: {error}") from None
        if join and age is not None and source.incarnation == creator:
            self._contexts.over_before(context_id - age, source)
        context = self._contexts.find(context_id)
        if context is not None and context.creator != creator:
            raise ProtocolError(f"a message says that autograd context {context_id} has another creator")
        if context is None:
            if join:
                context = self._contexts.join(context_id, creator, source)
            else:
                self._contexts.check(context_id)
        if context is None:
            return None
        return Recorded(context, number != _NOT_RECORDED, source, number, behind, not join)
