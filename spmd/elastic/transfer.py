"""How a newcomer gets the state of the job from a neighbour, while the others compute.

Large tensors are sent in pieces, each of which is copied to its place when it comes: neither side has memory
for them twice, and tensors of modules are filled where they are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from rpc.errors import GivenUpError, MessageLostError, WorkerLostError
from rpc.runtime.torch_internals import pytree
from rpc.streaming import stream
from spmd.elastic.agreement import Ballot, View
from spmd.elastic.errors import ElasticError
from spmd.elastic.requests import ask
from spmd.elastic.views import Views

__all__ = ["fetch", "in_pieces", "put_together"]

logger = logging.getLogger(__name__)

_PIECE_BYTES: Final = 8 << 20
_LEAST_BYTES: Final = 1 << 20
"""Minimum size of a tensor that is sent in pieces."""


@dataclass
class _LeftOut:
    """Takes the place of a tensor that comes later.

    Attributes:
        shape, dtype: its own.
        room: where its pieces are put.
    """

    shape: torch.Size
    dtype: torch.dtype
    room: torch.Tensor | None = None


def in_pieces(state: Any) -> Iterator[Any]:
    """Yield a state without its large tensors, and then the pieces of these."""
    large: list[torch.Tensor] = []

    def left_out(value: Any) -> Any:
        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.is_cpu
        if not is_plain or value.layout != torch.strided or value.nbytes < _LEAST_BYTES:
            return value
        large.append(value.detach())
        return _LeftOut(value.shape, value.dtype)

    yield pytree.tree_map(left_out, state)
    for each in large:
        flat, count = each.reshape(-1), _PIECE_BYTES // each.itemsize
        for start in range(0, flat.numel(), count):
            yield flat[start : start + count]


def put_together(values: Iterator[Any], rooms: Mapping[str, Mapping[str, torch.Tensor]]) -> Any:
    """Return the state that ``in_pieces`` has cut.

    Args:
        values: what it has yielded.
        rooms: tensors that are filled, by their names in the parts of the state; others are new.
    """
    state = next(values)
    for name, own in rooms.items():
        for key, each in state[name].items():
            room = own.get(key)
            if isinstance(each, _LeftOut) and room is not None and _fits(room, each):
                each.room = room
    with torch.no_grad():
        return pytree.tree_map_only(_LeftOut, lambda each: _filled(each, values), state)


def _fits(room: torch.Tensor, each: _LeftOut) -> bool:
    is_plain = type(room) is torch.Tensor and room.is_cpu and room.is_contiguous()
    return is_plain and room.shape == each.shape and room.dtype == each.dtype


def _filled(each: _LeftOut, values: Iterator[Any]) -> torch.Tensor:
    room = torch.empty(each.shape, dtype=each.dtype, device="cpu") if each.room is None else each.room
    flat, place = room.view(-1), 0
    while place < flat.numel():
        piece = next(values)
        flat[place : place + piece.numel()].copy_(piece)
        place += piece.numel()
    return room


def fetch(
    views: Views, view: View, rooms: Mapping[str, Mapping[str, torch.Tensor]]
) -> tuple[Ballot | None, Any] | None:
    """Return the view of the last commit and the state of a view's first step, from a neighbour; None if the
    view is over.

    Args:
        views: this worker's part of the job.
        view: the view.
        rooms: see ``put_together``.

    Raises:
        ElasticError: a neighbour's state cannot be sent.
    """
    olds = [each for each in view.counterparts(views.me) if each not in view.newcomers]
    first = view.rank(views.me) % len(olds)
    for each in olds[first:] + olds[:first]:
        peer = views.losses.peer(each)
        if peer is None or peer.lost is not None:
            continue
        try:
            args = (each, Views.give, view.ballot, view.first)
            with stream(peer.member.info, ask, args, timeout=0) as values:
                last: Ballot | None = next(values)
                return last, put_together(values, rooms)
        except (WorkerLostError, MessageLostError, GivenUpError) as error:
            logger.debug("worker '%s' does not give its state: %s", peer.name, error)
        except Exception as error:
            if views.losses.is_lost(each):  # the group may have forgotten it already
                continue
            raise ElasticError(
                f"worker '{views.name}' cannot get the state of the elastic job from worker "
                f"'{peer.name}': {type(error).__name__}: {error}"
            ) from error
    return None
