"""Batches of the user's loader, on the logical device, sharded as specified."""

from __future__ import annotations

import copy
import dataclasses
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from queue import Empty, Full, Queue
from types import NoneType
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from rpc.runtime.torch_internals import pytree
from spmd.engine import api as engine
from spmd.sharding.marks import ShardingSpec

__all__ = ["DeviceLoader", "InputSharding", "send"]

InputSharding: TypeAlias = ShardingSpec | Mapping[str, ShardingSpec | None] | None
"""One spec for every tensor that it fits, or one for each entry of a batch that is a dict."""

_END: Final = object()
_LOOK: Final = 0.1
"""Interval in seconds at which a thread that waits for room checks whether there is still a reader."""
_PATIENCE: Final = 5.0
"""Timeout in seconds for the user's loader to end."""
_log: Final = logging.getLogger(__name__)


class DeviceLoader:
    """Iterates over a loader's batches with their tensors moved to a device.

    A thread reads ahead from the loader. A batch is moved when it is requested; the program recorded so far
    is sent then, so that workers compute while the next step is recorded.

    Args:
        loader: yields batches: tensors in tuples, lists, mappings and dataclasses, which may have other
            values.
        device: the logical device.
        input_sharding: one spec shards every tensor with the same number of dimensions; the others are
            replicated. A dict has a spec, or None, for each entry of a batch.
        loader_prefetch_size: number of batches to read ahead.
        batches_per_execution: number of batches per program.
        options: other options of PyTorch/XLA's loader, which are accepted and ignored.

    Raises:
        TypeError: an option is unknown, or ``input_sharding`` is of another kind.

    Raises, while iterating:
        ValueError: a dict of specs, and a batch is no dict.
        KeyError: an entry of a batch is not in the dict of specs.
        RuntimeError: a spec with ``minibatch`` does not divide a batch.

    Example::

        specs = {"input_ids": spmd.ShardingSpec(mesh, ("data", None)), "labels": None}
        for batch in spmd.DeviceLoader(loader, spmd.device(), input_sharding=specs):
            loss = model(**batch).loss
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str,
        *,
        input_sharding: InputSharding = None,
        loader_prefetch_size: int = 16,
        batches_per_execution: int = 1,
        **options: Any,
    ) -> None:
        unknown = set(options) - _IGNORED
        if unknown:
            raise TypeError(f"DeviceLoader has no option {', '.join(sorted(unknown))}")
        self._loader = loader
        self._device = torch.device(device)
        several: Iterable[Any] = (
            input_sharding.values() if isinstance(input_sharding, Mapping) else [input_sharding]
        )
        wrong = next((each for each in several if not isinstance(each, (ShardingSpec, NoneType))), None)
        if wrong is not None:
            raise TypeError(
                "input_sharding is a spmd.ShardingSpec(mesh, spec), or a dict with one for each entry; got "
                f"{wrong!r}"
            )
        self._sharding = input_sharding
        self._ahead = max(loader_prefetch_size, 1)
        self._every = max(batches_per_execution, 1)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        batches: Queue[Any] = Queue(self._ahead)
        abandoned = threading.Event()
        reader = threading.Thread(
            target=_read, args=(self._loader, batches, abandoned), name="spmd loader", daemon=True
        )
        reader.start()
        try:
            count = 0
            while (item := batches.get()) is not _END:
                if isinstance(item, _Failed):
                    raise item.error
                item = send(item, self._device, self._sharding)
                yield item
                item = None  # nobody keeps a batch while the next one is waited for
                count += 1
                if count % self._every == 0:
                    engine.flush()
        finally:
            abandoned.set()
            _end(reader, batches)


_IGNORED: Final = frozenset({"batchdim", "device_prefetch_size", "host_to_device_transfer_threads"})


class _Failed:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def _read(loader: Iterable[Any], batches: Queue[Any], abandoned: threading.Event) -> None:
    def put(item: Any) -> None:
        while not abandoned.is_set():
            try:
                return batches.put(item, timeout=_LOOK)
            except Full:
                continue
        return None

    try:
        for batch in loader:
            put(batch)
            if abandoned.is_set():
                return
        put(_END)
    except BaseException as error:  # raised in the iterating thread
        put(_Failed(error))


def _end(reader: threading.Thread, batches: Queue[Any]) -> None:
    """Let the thread end, which may be waiting for room, or in the user's loader."""
    for _ in range(round(_PATIENCE / _LOOK)):
        _empty(batches)
        reader.join(_LOOK)
        if not reader.is_alive():
            return
    _log.warning(
        "no more batches are needed, and the loader has not returned one for %g s: its thread is abandoned",
        _PATIENCE,
    )


def _empty(batches: Queue[Any]) -> None:
    try:
        while True:
            batches.get_nowait()
    except Empty:
        return


def send(batch: Any, device: torch.device, sharding: InputSharding = None) -> Any:
    """Return a batch with its tensors moved to a device and sharded; see :class:`DeviceLoader`."""
    if not isinstance(sharding, Mapping):
        return pytree.tree_map(lambda leaf: _moved(leaf, device, sharding), batch)
    if not isinstance(batch, Mapping):
        raise ValueError("input batch should be a dict when input sharding is a dict.")
    missing = [key for key in batch if key not in sharding]
    if missing:
        raise KeyError(f"Keys: {missing} are missing from input_sharding.")
    return _with(batch, {key: send(value, device, sharding[key]) for key, value in batch.items()})


def _with(batch: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """A batch of the same kind with these entries."""
    if type(batch) is dict:
        return entries
    if not isinstance(batch, MutableMapping):
        return type(batch)(entries)  # type: ignore[call-arg]
    copied = copy.copy(batch)
    copied.update(entries)
    return copied


def _moved(t: Any, device: torch.device, spec: ShardingSpec | None) -> Any:
    """Move a tensor; other values are returned unchanged, except mappings and dataclasses unknown
    to pytree.
    """
    if isinstance(t, Mapping):
        return _with(t, {key: send(value, device, spec) for key, value in t.items()})
    if dataclasses.is_dataclass(t) and not isinstance(t, type):
        copied = copy.copy(t)
        for field in dataclasses.fields(t):
            if hasattr(t, field.name):
                object.__setattr__(copied, field.name, send(getattr(t, field.name), device, spec))
        return copied
    if not isinstance(t, Tensor):
        return t
    if spec is not None:
        spec.xla_spec(t)  # raises before anything moves
    moved = t.to(device)
    if spec is not None and spec.can_apply(moved):
        spec.apply(moved)
    return moved
