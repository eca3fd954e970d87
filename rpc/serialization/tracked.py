"""Tensors that require grad, when the receiver is to make them part of a graph of its own.

The receiver must have all of them before it builds what they are part of, for one node of its graph brings
them all. So they are pickled apart: in the pickle proper each is a number, as if it travelled beside it.
Calls and results that are nothing but usual tensors need no second pickle (``calls``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from rpc.errors import SerializationError
from rpc.serialization.carriers import arrived
from rpc.serialization.payload import TRACKED, Arrivals, Connect

__all__ = ["connected", "is_tracked", "rebuilt", "take_out"]


def is_tracked(tensor: Tensor) -> bool:
    """Whether a tensor stays part of the sender's graph: any that requires grad, other than a parameter,
    which arrives as a parameter of its own.
    """
    return tensor.requires_grad and not isinstance(tensor, Parameter)


def take_out(tensor: Tensor, tracked: list[Tensor]) -> tuple[Any, ...]:
    """Put a tensor among those that are pickled apart; how it is reduced in the pickle proper."""
    tracked.append(tensor)
    return arrived, (TRACKED, len(tracked) - 1)


def rebuilt(
    header: dict[str, Any],
    segments: Sequence[Any],
    arrivals: Arrivals | None,
    connect: Connect | None,
    read: Callable[[Sequence[Any], Arrivals | None], Any],
) -> tuple[Sequence[Any], Arrivals | None]:
    """Read the tensors that were pickled apart, if there are any.

    Args:
        header, segments, arrivals: of the message.
        connect: makes them part of a graph; without, they arrive as leaves that require grad.
        read: reads one pickle and its buffers.

    Returns:
        The segments of the pickle proper, and what it is to be read with.

    Raises:
        SerializationError: the message is malformed.
    """
    place = header.get(TRACKED)
    if place is None:
        return segments, arrivals
    if type(place) is not int or not 0 < place < len(segments):
        raise SerializationError(f"the message has its tensors in segment {str(place)[:20]}, which cannot be")
    tensors = read(segments[place:], None)
    if type(tensors) is not tuple or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise SerializationError("what the message has in place of its tensors are none")
    return segments[:place], {**(arrivals or {}), TRACKED: connected(list(tensors), connect)}


def connected(tensors: list[Tensor], connect: Connect | None) -> Sequence[Tensor]:
    """What stands for received tensors that require grad at the sender."""
    if connect is not None:
        return connect(tensors)
    return [tensor.requires_grad_() for tensor in tensors]
