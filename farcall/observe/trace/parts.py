"""The recording of one process for a trace, as ``recorder.Recorder.stop`` returns it.

A part is a sequence of msgpack objects: a map with its origin, lists that are the fields of all records, one
after another, and nil. Records are read from it repeatedly, and never held all at once, since there may be a
million of them.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgpack

from farcall.observe.format.job_files import open_file

__all__ = ["LENGTHS", "Part", "open_part", "read_part"]

_MAX_BYTES: Final = 1 << 30
"""Maximum size of a list of records, in bytes."""

LENGTHS: Final = {
    "span": 7,  # name, end, whether the thread waits, details
    "serialized": 6,  # function, seconds, bytes
    "call": 8,  # index of the caller in ``workers``, number of the call, callee, what it asks for, how
    "sent": 6,  # caller, number of the call, bytes
    "called": 6,  # caller, number of the call, error
    "came": 5,  # name of the caller, number of the call
    "run": 8,  # name of the caller, number of the call, function, seconds in the queue and of loading
    "ran": 5,  # name of the caller, number of the call
    "answered": 7,  # name of the caller, number of the call, whether it is a failure, bytes
}
"""Number of fields of each kind of record: the kind, the time, the thread, and the fields above."""

_FIELDS: Final[dict[str, type]] = {
    "worker": str,
    "workers": list,
    "host": str,
    "boot": str,
    "pid": int,
    "wall": float,
    "threads": list,
    "dropped": int,
}


@dataclass(frozen=True, slots=True)
class Part:
    """The recording of one process.

    Attributes:
        worker: name of the process, for people.
        workers: names of its agents; records have indices into this list.
        host, boot: name of its host, and identifier of the host's monotonic clock.
        pid: process number.
        wall: seconds since 1970 at zero of the monotonic clock.
        threads: names of threads; records have indices into this list.
        records: in the order in which they were made; iterated over more than once.
        dropped: number of calls, requests and spans beyond the limit.
    """

    worker: str
    workers: list[str]
    host: str
    boot: str
    pid: int
    wall: float
    threads: list[str]
    records: Iterable[Any]
    dropped: int


class _Records:
    def __init__(self, open_file: Callable[[], BinaryIO]) -> None:
        self._open = open_file

    def __iter__(self) -> Iterator[Any]:
        fields = self._fields()
        for kind in fields:
            yield (kind, *itertools.islice(fields, LENGTHS[kind] - 1))

    def _fields(self) -> Iterator[Any]:
        with self._open() as file:
            for batch in itertools.islice(_unpacked(file), 1, None):
                if batch is None:
                    return
                yield from batch


def _unpacked(file: BinaryIO) -> Iterator[Any]:
    return iter(msgpack.Unpacker(file, strict_map_key=False, max_buffer_size=_MAX_BYTES))


def read_part(packed: bytes) -> Part:
    """Parse a part.

    Raises:
        ValueError: the bytes are not the output of a recorder.
    """
    return _read(lambda: io.BytesIO(packed))


def open_part(path: Path) -> Part:
    """Open the part in a file, which must stay; otherwise like ``read_part``.

    Raises:
        OSError: it cannot be read.
    """
    return _read(lambda: open_file(path))


def _read(open_file: Callable[[], BinaryIO]) -> Part:
    try:
        with open_file() as file:
            objects = _unpacked(file)
            header = next(objects)
            found = {name: header[name] for name in _FIELDS}
            if not all(isinstance(found[name], kind) for name, kind in _FIELDS.items()):
                raise ValueError("fields of other types")
            for batch in objects:
                if batch is None:
                    return Part(**found, records=_Records(open_file))
                if not isinstance(batch, list):
                    break
        raise ValueError("its end is missing")
    except OSError:
        raise
    except (msgpack.UnpackException, StopIteration, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"this is not a part of a trace: {error}") from error
