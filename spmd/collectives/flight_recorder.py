"""A record of the last collectives, to find out after a failure which rank called what.

PyTorch's flight recorder is fed by C++ only: Python can only attach a hook, which does not see the operations
of groups written in Python (see ``torch_internals.py``). So a recorder of our own keeps the last collectives,
sends and receives of a process, and writes them in PyTorch's format. ``torchfrtrace``, which is part of
PyTorch 2.15, reads the files of all ranks and reports where their calls first differ. The environment
variables are PyTorch's:

- ``TORCH_FR_BUFFER_SIZE``: number of operations that are kept, 2000 by default; 0 turns the recorder off.
- ``TORCH_FR_DUMP_TEMP_FILE``: if set, each rank writes its record when a group fails, to a file of this name
  with the rank appended; ``TORCH_FR_DUMP_ON_TIMEOUT=0`` prevents that. Only then the position in the program
  is kept for each operation, which takes longer than everything else (about 5 us).

Shapes are kept, but no tensors.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from time import time_ns
from types import CodeType, FrameType
from typing import Any, Final

import torch

__all__ = ["FlightRecorder", "GroupRecord", "Record"]

logger = logging.getLogger(__name__)

_FORMAT: Final = "2.10"
"""Version of the format, as in PyTorch 2.15."""
_LIBRARY: Final = "c10d"
"""The library that PyTorch's tools expect before the name of an operation that does not belong to a library
of theirs.
"""
_MAX_OBSERVED: Final = 64
"""Maximum number of operations in the observed state; the newest."""
_FRAMES: Final = 12
"""Maximum number of positions in the program that are kept for one operation."""
_NAMES: Final = {
    "all_reduce of sparse tensors": "all_reduce",
    "all_reduce_coalesced": "allreduce_coalesced",
    "all_gather_coalesced": "allgather_coalesced",
    "monitored_barrier": "barrier",
}
"""Names that PyTorch's tools use for our operations, if they differ."""

_Places = list[tuple[CodeType, int]]
_Shapes = list[tuple[torch.Size, torch.dtype]]


class GroupRecord:
    """A group, as its operations refer to it.

    Args:
        name: name of the group, the same on all ranks.
        ranks: its ranks in the world, in order.

    Attributes:
        description: description of the group.
    """

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self.name, self.ranks = name, list(ranks)
        self.description = "undefined"
        self.collectives = count(1)
        self.messages = count(1)
        self.operations = count(1)


@dataclass(slots=True, eq=False)
class Record:
    """One operation. Its times are in nanoseconds since the epoch."""

    number: int
    group: GroupRecord
    name: str
    collective: int
    message: int
    operation: int
    inputs: _Shapes
    outputs: _Shapes
    timeout: float
    places: _Places
    created: int
    started: int = 0
    ended: int = 0
    succeeded: bool = False

    def start(self) -> None:
        """Record that it begins to run."""
        self.started = time_ns()

    def end(self, *, succeeded: bool) -> None:
        """Record that it has ended."""
        self.ended = time_ns()
        self.succeeded = succeeded


def _places() -> _Places:
    """Return the position in the program, innermost first, without this package."""
    places: _Places = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(places) < _FRAMES:
        code = frame.f_code
        if not code.co_filename.startswith(_HERE):
            places.append((code, frame.f_lasti))
        frame = frame.f_back
    return places


_HERE: Final = __file__.rpartition(os.sep)[0]


class FlightRecorder:
    """The last operations of a process. From any thread."""

    def __init__(self) -> None:
        self._records: deque[Record] = deque(maxlen=_buffer_size())
        self._numbers = count()
        self._has_dumped = threading.Lock()
        self._prefix = os.environ.get("TORCH_FR_DUMP_TEMP_FILE")

    def begin(
        self,
        group: GroupRecord,
        name: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        timeout: float,
        *,
        is_message: bool = False,
    ) -> Record | None:
        """Record that an operation was called. Returns None if the recorder is off.

        Args:
            group: its group; all ranks call the group's collectives in the same order.
            name: its name, with or without its arguments; for messages, with the two ranks.
            inputs, outputs: its tensors, of which shapes and dtypes are kept.
            timeout: timeout in seconds; 0 for none.
            is_message: whether it is a send or a receive.
        """
        if not self._records.maxlen:
            return None
        shapes = [(each.shape, each.dtype) for each in inputs]
        record = Record(
            next(self._numbers),
            group,
            name,
            0 if is_message else next(group.collectives),
            next(group.messages) if is_message else 0,
            next(group.operations),
            shapes,
            shapes if outputs is inputs else [(each.shape, each.dtype) for each in outputs],
            timeout,
            _places() if self._prefix else [],
            time_ns(),
        )
        self._records.append(record)
        return record

    def since(self, number: int) -> list[Record]:
        """Return the recorded operations from a number on, as far as they are still kept."""
        return [record for record in self._records.copy() if record.number >= number]

    def observed(self) -> list[dict[str, Any]]:
        """State for observers: the last operations, with their sizes in bytes and times in seconds since
        1970.
        """
        return [
            {
                "name": record.name,
                "group": record.group.name,
                "number": record.number,
                "started": record.started / 1e9,
                "ended": record.ended / 1e9,
                "succeeded": record.succeeded,
                "bytes": sum(shape.numel() * dtype.itemsize for shape, dtype in record.inputs),
            }
            for record in list(self._records)[-_MAX_OBSERVED:]
        ]

    def dump(self, prefix: str, rank: int) -> str:
        """Write the record to a file, and return its name.

        Args:
            prefix: beginning of the name; the rank is appended.
            rank: rank of this process in the world.
        """
        path = f"{prefix}{rank}"
        records = list(self._records)
        groups = {record.group.name: record.group for record in records}
        found = {
            "version": _FORMAT,
            "pg_config": {
                name: {"name": name, "desc": group.description, "ranks": str(group.ranks)}
                for name, group in groups.items()
            },
            "pg_status": {},
            "entries": [_entry(record) for record in records],
        }
        with open(path, "wb") as file:
            pickle.dump(found, file)
        return path

    def group_failed(self, rank: int) -> None:
        """Write the record, once, on a thread of its own, if the environment requests it."""
        prefix = self._prefix
        wanted = os.environ.get("TORCH_FR_DUMP_ON_TIMEOUT", "1").lower() not in ("0", "false", "off", "no")
        if prefix and wanted and self._records.maxlen and self._has_dumped.acquire(blocking=False):
            try:
                threading.Thread(
                    target=self._dump, args=(prefix, rank), name="farcall-flight-recorder"
                ).start()
            except RuntimeError as error:
                logger.warning("the flight recorder's file could not be written: %s", error)

    def _dump(self, prefix: str, rank: int) -> None:
        try:
            path = self.dump(prefix, rank)
        except OSError as error:
            logger.warning("the flight recorder's file could not be written: %s", error)
        else:
            logger.warning("a process group has failed; what was called is in %s, for torchfrtrace", path)


def _buffer_size() -> int:
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        text = os.environ.get(name)
        if text:
            try:
                return max(int(text), 0)
            except ValueError:
                logger.warning("%s=%s is no number: the default is used", name, text)
    return 2000


def _entry(record: Record) -> dict[str, Any]:
    name, arguments, _ = record.name.partition("(")
    if not arguments:
        name = record.name
    state = "completed" if record.succeeded else "started" if record.started else "scheduled"
    entry: dict[str, Any] = {
        "record_id": record.number,
        "pg_id": 0,
        "process_group": (record.group.name, record.group.description),
        "collective_seq_id": record.collective,
        "p2p_seq_id": record.message,
        "op_id": record.operation,
        "is_p2p": record.message > 0,
        "profiling_name": f"{_LIBRARY}:{_NAMES.get(name, name)}",
        "time_created_ns": record.created,
        "timeout_ms": int(record.timeout * 1000),
        "state": state,
        "retired": record.ended > 0,
        "input_sizes": [list(shape) for shape, _ in record.inputs],
        "input_dtypes": _dtypes(record.inputs),
        "output_sizes": [list(shape) for shape, _ in record.outputs],
        "output_dtypes": _dtypes(record.outputs),
        "time_discovered_started_ns": record.started or None,
        "time_discovered_completed_ns": record.ended if record.succeeded else None,
        "frames": [
            {"name": code.co_qualname, "filename": code.co_filename, "line": _line(code, instruction)}
            for code, instruction in record.places
        ],
    }
    if record.succeeded and record.started:
        entry["duration_ms"] = (record.ended - record.started) / 1e6
    return entry


def _dtypes(tensors: _Shapes) -> list[str]:
    return [str(dtype).removeprefix("torch.") for _, dtype in tensors]


def _line(code: CodeType, instruction: int) -> int:
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
    return next(lines, None) or code.co_firstlineno
