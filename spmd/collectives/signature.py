"""What a rank says that it calls, in words: compared byte by byte, and shown in errors as it is.

A *signature* is a line such as ``all_reduce(sum, float32[4, 3])`` in a field of fixed size. Ranks that are
about to exchange data exchange signatures first; where two differ, all end in one error that shows both.
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
    """The field for a call.

    Args:
        operation: its name.
        dtype: of its tensors; None where there are none.
        shape: which all ranks' tensors must have; None where they may differ.
        reduction, root, detail: what else must be the same everywhere, if there is such a thing.

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
    """The line in a field."""
    return bytes(field).rstrip(b"\0").decode(errors="replace")


def what_differs(fields: Mapping[int, bytes | memoryview]) -> str | None:
    """Says which two ranks have called what, if not all have called the same; None if they have.

    Args:
        fields: by rank. The first rank and the first that differs from it are named, so that all who see
            the same fields say the same.
    """
    ranks = sorted(fields)
    first = ranks[0]
    for rank in ranks[1:]:
        if fields[rank] != fields[first]:
            return f"rank {first} called {text_of(fields[first])}, but rank {rank} {text_of(fields[rank])}"
    return None
