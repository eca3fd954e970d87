"""What a worker sends, counted in the worker itself.

Bytes are those of the tensors that the backend ``farcall`` is given, times what the best schedule of each
operation sends of them: whether memory of one host is shared or not is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import Tensor

from spmd.collectives.process_group import FarcallProcessGroup

__all__ = ["count_sent", "sent"]

_sent: Final = [0.0]


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def _size(group: Any) -> int:
    return int(group.getSize())


def _all_reduce(group: Any, tensors: Sequence[Tensor], *_: Any) -> float:
    return 2.0 * (_size(group) - 1) / _size(group) * _bytes(tensors)


def _all_gather(group: Any, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], *_: Any) -> float:
    return (_size(group) - 1) * _bytes(inputs)


def _all_gather_single(group: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *_: Any) -> float:
    return (_size(group) - 1) * _bytes(inputs)


def _reduce_scatter(
    group: Any, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], *_: Any
) -> float:
    return _bytes(inputs[0]) - _bytes(outputs)


def _reduce_scatter_single(group: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *_: Any) -> float:
    return _bytes(inputs) - _bytes(outputs)


def _exchange(group: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *_: Any) -> float:
    return _bytes(inputs) - _bytes([inputs[group.getRank()]])


_COUNTED: Final[dict[str, Callable[..., float]]] = {
    "allreduce": _all_reduce,
    "allreduce_coalesced": _all_reduce,
    "allgather": _all_gather,
    "all_gather_single_coalesced": _all_gather_single,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single_coalesced": _reduce_scatter_single,
    "alltoall": _exchange,
}


def count_sent() -> None:
    """Count from now on."""
    for name, count in _COUNTED.items():
        plain = getattr(FarcallProcessGroup, name)
        if not hasattr(plain, "counts"):
            setattr(FarcallProcessGroup, name, _counting(plain, count))


def _counting(plain: Callable[..., Any], count: Callable[..., float]) -> Callable[..., Any]:
    def operation(group: Any, *args: Any, **kwargs: Any) -> Any:
        _sent[0] += count(group, *args)
        return plain(group, *args, **kwargs)

    operation.counts = True  # type: ignore[attr-defined]
    return operation


def sent() -> float:
    """Bytes that this worker has sent since the last time."""
    found, _sent[0] = _sent[0], 0.0
    return found
