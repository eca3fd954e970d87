"""What users can set about serialization: another pickler, and what safe mode admits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rpc.serialization import ReplacementPickler, allow_class, allow_function

__all__ = ["allow_class", "allow_function", "replacement", "use_pickler"]


class _Replacement:
    """The pickler that the user has put in place of ours, process-wide; None while there is none."""

    pickler: ReplacementPickler | None = None


replacement = _Replacement()


@contextlib.contextmanager
def use_pickler(pickler: ReplacementPickler) -> Iterator[None]:
    """Serialize calls with another pickler inside the block, on all threads of this process.

    Args:
        pickler: has ``serialize(obj) -> (bytes, tensors)`` and ``deserialize(bytes, tensors) -> obj``; best
            derived from ``rpc.serialization.PortablePickler``. The callee must use it too, unless it can
            be read by the default one.

    Example::

        with rpc.use_pickler(MyPickler()):
            rpc.rpc_sync("worker1", evaluate, args=(batch,))
    """
    before, replacement.pickler = replacement.pickler, pickler
    try:
        yield
    finally:
        replacement.pickler = before
