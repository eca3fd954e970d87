"""Reads checkpoints without running code of whoever wrote them.

A checkpoint of ``torch.distributed.checkpoint`` consists of tensors, which PyTorch loads with
``weights_only``, and of pickles: its ``.metadata``, and one for each entry of the state dict that is no
tensor. To load a pickle runs what it names. So ``.metadata`` is loaded here by an unpickler that knows only
the classes which PyTorch writes there, and other entries are loaded with ``weights_only``.
"""

from __future__ import annotations

import enum
import io
import pickle
from pathlib import PurePosixPath
from typing import Any, Final

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.serialization import get_unsafe_globals_in_checkpoint

from spmd.checkpoint.file_systems import FsspecReader

__all__ = ["RestrictedReader", "only_data"]

_METADATA: Final = ".metadata"

_CLASSES: Final[dict[str, type]] = {
    name: value
    for name, value in vars(metadata).items()
    if isinstance(value, type) and (value.__module__ == metadata.__name__ or issubclass(value, enum.Enum))
}


class RestrictedReader(FsspecReader):
    """A ``StorageReader`` that loads ``.metadata`` without running anything that it names.

    Args:
        path: of one checkpoint: a folder, or a URL that ``fsspec`` knows. Its metadata is read at once, since
            ``load`` would look for another file where it cannot be read.

    Raises:
        pickle.UnpicklingError: the metadata has something that no metadata has, or names a file outside the
            checkpoint.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._metadata = self._read(self.fs.concat_path(self.path, _METADATA))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata."""
        return self._metadata

    def _read(self, path: Any) -> Metadata:
        with self.fs.create_stream(path, "rb") as file:
            found = _MetadataUnpickler(file, str(path)).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(
                f"{path} is no metadata of a checkpoint, but a {type(found).__name__}"
            )
        for each in (found.storage_data or {}).values():
            place = PurePosixPath(each.relative_path)
            if place.is_absolute() or ".." in place.parts:
                raise pickle.UnpicklingError(f"{path} names a file outside the checkpoint: {place}")
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


def only_data(entry: str, pickled: io.BytesIO) -> io.BytesIO:
    """An entry of a checkpoint that is no tensor, pickled again from what ``weights_only`` admits of it.

    Args:
        entry: its name, for errors.
        pickled: the entry as ``torch.save`` wrote it.

    Raises:
        pickle.UnpicklingError: it has objects of classes or functions that were not declared as safe.
    """
    try:
        value = torch.load(pickled, weights_only=True)
    except pickle.UnpicklingError as error:
        pickled.seek(0)
        named = ", ".join(sorted(get_unsafe_globals_in_checkpoint(pickled)))
        raise pickle.UnpicklingError(
            f"the entry {entry!r} of the checkpoint cannot be restored: it names {named or 'no class'}, and "
            "to load a pickle runs what it names. If these classes are safe, declare them with "
            "torch.serialization.add_safe_globals; if you trust whoever wrote the checkpoint, use "
            "restore(..., weights_only=False)"
        ) from error
    again = io.BytesIO()
    torch.save(value, again)
    again.seek(0)
    return again


class _MetadataUnpickler(pickle.Unpickler):
    """Loads what PyTorch writes into ``.metadata``."""

    def __init__(self, file: Any, path: str) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if module == metadata.__name__ and name in _CLASSES:
            return _CLASSES[name]
        if module == filesystem.__name__ and name == "_StorageInfo":
            return filesystem._StorageInfo
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):
            return PurePosixPath  # the folder that it was saved to, which nobody asks for
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise pickle.UnpicklingError(
            f"{self._path} names {module}.{name}, which the metadata of a checkpoint does not have: it is "
            "damaged, or was made to run code. If you trust whoever wrote it, use "
            "restore(..., weights_only=False)"
        )


def _layout(name: str) -> torch.layout:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise pickle.UnpicklingError(f"{name!r} is no layout of tensors")
    return found
