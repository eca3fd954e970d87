"""Reads checkpoints without running code from them.

A checkpoint of ``torch.distributed.checkpoint`` consists of tensors, which PyTorch loads with
``weights_only``, and of
pickles: its ``.metadata``, and one for each entry of the state dict that is not a tensor. Loading a pickle
can run any code that it names. So ``.metadata`` is loaded here by an unpickler that only knows the classes
that PyTorch writes there, and other entries are loaded with ``weights_only``; ``bounds`` has what neither
limits. Files are regular ones in the checkpoint's own folder, also through links.

*Archives.* Python and PyTorch find the records of a damaged archive in different ways, and PyTorch loads a
file that is no archive in another way still. So the records are checked and copied into a new archive, and
that one is loaded.
"""

from __future__ import annotations

import enum
import io
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, ClassVar, Final

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.serialization import get_unsafe_globals_in_checkpoint

from spmd.checkpoint.bounds import check_pickle
from spmd.checkpoint.folders import check_file
from spmd.checkpoint.torch_internals import FileRange, FsspecReader

__all__ = ["RestrictedReader", "load_data"]

_METADATA: Final = ".metadata"

_MAX_METADATA_BYTES: Final = 1 << 29
"""Maximum size of the metadata. That of a model with 100,000 tensors on 8 ranks has about 100 MB."""

_CLASSES: Final[dict[str, type]] = {
    name: value
    for name, value in vars(metadata).items()
    if isinstance(value, type) and value.__module__ == metadata.__name__
}

_FileRange: Final = FileRange

_STATEFUL: Final = {_FileRange, *(each for each in _CLASSES.values() if not issubclass(each, enum.Enum))}
"""Classes of the instances that have a state in a pickle."""


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
        self.transforms: Any = _Checked()
        self._metadata = self._read(self.fs.concat_path(self.path, _METADATA))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata."""
        return self._metadata

    def _read(self, path: Any) -> Metadata:
        self._check_file(_METADATA)
        with self.fs.create_stream(path, "rb") as file:
            packed = file.read(_MAX_METADATA_BYTES + 1)
        if len(packed) > _MAX_METADATA_BYTES:
            raise pickle.UnpicklingError(f"{path} has more than {_MAX_METADATA_BYTES} bytes")
        try:
            check_pickle(packed)
        except pickle.UnpicklingError as error:
            raise pickle.UnpicklingError(
                f"{path} is damaged, or made to do harm: {error}. If you trust whoever wrote it, use "
                "restore(..., weights_only=False)"
            ) from error
        found = _MetadataUnpickler(io.BytesIO(packed), str(path)).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(
                f"{path} is no metadata of a checkpoint, but a {type(found).__name__}"
            )
        files = {} if found.storage_data is None else found.storage_data
        if type(files) is not dict or any(type(each) is not _FileRange for each in files.values()):
            raise pickle.UnpicklingError(f"{path} is damaged: it does not say in which files its tensors are")
        names: list[Any] = [getattr(each, "relative_path", None) for each in files.values()]
        if not all(type(each) is str for each in names):
            raise pickle.UnpicklingError(f"{path} is damaged: it names files by what is no text")
        for name in dict.fromkeys(names):
            place = PurePosixPath(name)
            if place.is_absolute() or ".." in place.parts:
                raise pickle.UnpicklingError(f"{path} names a file outside the checkpoint: {place}")
            self._check_file(name)
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found

    def _check_file(self, name: str) -> None:
        """Check where a file of a local checkpoint is, and that reading it does not wait for a writer."""
        found_by, local = fsspec.core.url_to_fs(str(self.path))
        if isinstance(found_by, LocalFileSystem):
            try:
                check_file(local, name)
            except PermissionError as error:
                raise pickle.UnpicklingError(str(error.strerror)) from error


class _Checked:
    """Checks what a ``RestrictedReader`` reads from its files, where PyTorch decompresses it."""

    def transform_load_stream(self, read_item: ReadItem, descriptors: Sequence[str], stream: Any) -> Any:
        """Return the stream that an item is loaded from; those of entries are checked by ``load_data``."""
        name = read_item.storage_index.fqn
        if descriptors:
            raise pickle.UnpicklingError(f"{name!r} is compressed, as no CheckpointManager does")
        return stream if read_item.type is LoadItemType.BYTE_IO else _checked(f"the tensor {name!r}", stream)


def load_data(entry: str, pickled: io.BytesIO) -> object:
    """Load an entry of a checkpoint that is no tensor, if ``weights_only`` admits it.

    Args:
        entry: its name, for errors.
        pickled: the entry as ``torch.save`` wrote it.

    Raises:
        pickle.UnpicklingError: it has objects of classes or functions that were not declared as safe.
    """
    pickled = _checked(f"the entry {entry!r}", pickled)
    try:
        return torch.load(pickled, weights_only=True)
    except pickle.UnpicklingError as error:
        pickled.seek(0)
        named = ", ".join(sorted(get_unsafe_globals_in_checkpoint(pickled)))
        raise pickle.UnpicklingError(
            f"the entry {entry!r} of the checkpoint cannot be restored: it names {named or 'no class'}, and "
            "to load a pickle runs what it names. If these classes are safe, declare them with "
            "torch.serialization.add_safe_globals; if you trust whoever wrote the checkpoint, use "
            "restore(..., weights_only=False)"
        ) from error


def _checked(what: str, stream: Any) -> io.BytesIO:
    """Return an archive of ``torch.save`` with the records of another one, whose pickles are bounded.

    Args:
        what: what is stored there, for errors.
        stream: the archive.
    """
    try:
        return _copied(stream.read())
    except (pickle.UnpicklingError, zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise pickle.UnpicklingError(
            f"{what} of the checkpoint is damaged, or made to do harm: {error}. If you trust whoever wrote "
            "it, use restore(..., weights_only=False)"
        ) from error


def _copied(packed: bytes) -> io.BytesIO:
    if not packed.startswith(b"PK"):
        raise pickle.UnpicklingError("it is no archive of torch.save")
    copy, names = io.BytesIO(), set[str]()
    with zipfile.ZipFile(io.BytesIO(packed)) as archive, zipfile.ZipFile(copy, "w") as copied:
        records = archive.infolist()
        if sum(each.file_size for each in records) > len(packed):
            raise pickle.UnpicklingError("its records overlap, or are compressed")
        for each in records:
            name = each.filename.lower()  # PyTorch finds a record in either case
            if name in names or each.compress_type != zipfile.ZIP_STORED:
                raise pickle.UnpicklingError("it is compressed, or has two records of one name")
            names.add(name)
            record = archive.read(each)
            if name.endswith(".pkl"):
                check_pickle(record)
            copied.writestr(each.filename, record)
    copy.seek(0)
    return copy


class _MetadataUnpickler(pickle._Unpickler):
    """Loads what PyTorch writes into ``.metadata``.

    It is the unpickler that is written in Python: in the other one, a pickle could set attributes of the
    classes themselves, and of the function, for the whole process.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, file: Any, path: str) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if module == metadata.__name__ and name in _CLASSES:
            return _CLASSES[name]
        if module == filesystem.__name__ and name == _FileRange.__name__:
            return _FileRange
        if module == "torch" and (name == "Size" or isinstance(vars(torch).get(name), torch.dtype)):
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

    def load_build(self) -> None:
        target = self.stack[-2]  # type: ignore[attr-defined]
        if type(target) not in _STATEFUL:
            raise pickle.UnpicklingError(
                f"{self._path} changes {target!r}, which is no part of the checkpoint: it was made to do harm"
            )
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


def _layout(name: str) -> torch.layout:
    found = vars(torch).get(str(name).removeprefix("torch."))
    if not isinstance(found, torch.layout):
        raise pickle.UnpicklingError(f"{name!r} is no layout of tensors")
    return found
