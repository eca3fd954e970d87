"""Signatures of calls, as text: they are compared byte by byte, and shown in errors.

A *signature* is a line such as ``all_reduce(sum, float32[4, 3])`` in a field of fixed size. Ranks that are
about to exchange data exchange signatures first; if two differ, all ranks end with one error that shows both.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

import torch

__all__ = ["FIELD_BYTES", "signature", "text_of", "what_differs"]

FIELD_BYTES: Final = 192

_DIGEST_BYTES: Final = 8


@functools.lru_cache(maxsize=1024)
def signature(
    operation: str,
    dtype: torch.dtype | None = None,
    shape: Sequence[int] | None = None,
    reduction: str = "",
    root: int = -1,
    detail: str = "",
) -> bytes:
    """Return the field for a call.

    Args:
        operation: name of the operation.
        dtype: dtype of its tensors; None if there are none.
        shape: shape that the tensors of all ranks must have; None if they may differ.
        reduction, root, detail: other properties that must be the same everywhere, if there are any.

    Example::

        signature("broadcast", torch.float32, (2, 3), root=1)  # broadcast(float32[2, 3], root 1)
    """
    parts = [reduction] if reduction else []
    if dtype is not None:
        sizes = "" if shape is None else f"[{', '.join(map(str, shape))}]"
        parts.append(str(dtype).removeprefix("torch.") + sizes)
    if root >= 0:
        parts.append(f"root {root}")
    if detail:
        parts.append(detail)
    line = f"{operation}({', '.join(parts)})".encode()
    if len(line) > FIELD_BYTES:
        digest = hashlib.blake2b(line, digest_size=_DIGEST_BYTES).hexdigest().encode()
        line = line[: FIELD_BYTES - len(digest) - 4] + b"... " + digest
    return line.ljust(FIELD_BYTES, b"\0")


def text_of(field: bytes | memoryview) -> str:
    """Return the line in a field."""
    return bytes(field).rstrip(b"\0").decode(errors="replace")


def what_differs(fields: Mapping[int, bytes | memoryview]) -> str | None:
    """Describe which two ranks have called what, if not all have called the same; None if they have.

    Args:
        fields: fields by rank. The first rank and the first that differs from it are named, so the text is
            the same on all ranks that see the same fields.
    """
    ranks = sorted(fields)
    first = ranks[0]
    for rank in ranks[1:]:
        if fields[rank] != fields[first]:
            return f"rank {first} called {text_of(fields[first])}, but rank {rank} {text_of(fields[rank])}"
    return None
