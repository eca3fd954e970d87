"""Tensors and nothing else, such as the gradients of a message: a tuple with the arguments of ``dense`` for
each usual tensor, None for none, and any other tensor as it is pickled everywhere.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from rpc.errors import RpcError
from rpc.serialization.failures import cannot_send, unreadable
from rpc.serialization.memory import inline_limit
from rpc.serialization.payload import Buffer, Destination, Payload, Source
from rpc.serialization.pickler import PROTOCOL, dump, load
from rpc.serialization.safe import AllowList
from rpc.serialization.tensors import dense, plain

__all__ = ["dump_tensors", "load_tensors"]

_SMALL_BYTES: Final = 1024
_NOTHING_UNUSUAL: Final = frozenset((tuple, type(None)))
_pickle = pickle.dumps
_inference = torch.is_inference_mode_enabled


def dump_tensors(tensors: Sequence[Tensor | None], to: Destination, what: object) -> Payload:
    """Serialize some tensors.

    Args:
        tensors: of any kind. One that occurs twice may arrive as two.
        to: where they go.
        what: for error messages: a text that names them.

    Raises:
        SerializationError: one of them cannot be sent.
    """
    inline = inline_limit(len(tensors))
    record = tuple([None if tensor is None else _usual(tensor, inline) for tensor in tensors])
    if not _NOTHING_UNUSUAL.issuperset(map(type, record)):
        try:
            return dump(record, to)
        except Exception as error:
            reason = error
        raise cannot_send(reason, record, to, what)
    buffers: list[pickle.PickleBuffer] = []
    segments: list[Buffer] = [_pickle(record, PROTOCOL, buffer_callback=buffers.append)]
    if not buffers:
        return Payload({}, segments)
    segments += map(pickle.PickleBuffer.raw, buffers)
    return Payload({}, segments, range(1, len(segments)))


def _usual(tensor: Tensor, inline: int) -> Any:
    """The arguments of ``dense``; of an unusual tensor itself."""
    if type(tensor) is not Tensor or tensor.__dict__:
        return tensor
    try:
        usual = plain(tensor, inline)
        if usual is None and _is_small_and_spread(tensor):  # the gradient of a sum
            usual = plain(tensor.contiguous())
    except RuntimeError:  # inside a torch.func transform; the slow way says which
        return tensor
    return tensor if usual is None else usual


def _is_small_and_spread(tensor: Tensor) -> bool:
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return strided and tensor.nbytes <= _SMALL_BYTES and not tensor.is_contiguous()


def load_tensors(segments: Sequence[Any], source: Source, *, allow: AllowList | None) -> list[Tensor | None]:
    """Rebuild what ``dump_tensors`` serialized.

    Args:
        segments: buffers that belong to the receiver now.
        source: who sent them.
        allow: read it with this allow-list ("safe").

    Raises:
        SerializationError: it cannot be read, or is something else.
    """
    if _inference():
        with torch.inference_mode(False):
            return load_tensors(segments, source, allow=allow)
    try:
        if allow is not None:
            return allow.load_tensors(segments)
        return [
            each if each is None or isinstance(each, Tensor) else dense(*each)
            for each in load(segments, None)
        ]
    except RpcError:
        raise
    except Exception as error:
        raise unreadable(error, f"what worker '{source.name}' sent") from error
