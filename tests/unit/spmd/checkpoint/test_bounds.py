"""What a pickle builds is found without building it, and what is out of proportion is refused."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from spmd.checkpoint.bounds import check_pickle
from spmd.checkpoint.reading import load_data

HEAD = b"\x80\x04"


def get(number: int) -> bytes:
    return pickle.BINGET + bytes([number])


def put(number: int) -> bytes:
    return pickle.BINPUT + bytes([number])


def doubled(levels: int) -> bytes:
    """Opcodes of tuples, each of which has the one before it twice."""
    packed = pickle.NONE + put(0)
    for number in range(levels):
        packed += get(number) * 2 + pickle.TUPLE2 + put(number + 1)
    return packed


def grown_from_the_top(levels: int) -> bytes:
    """The same with lists, which are filled after they were put into others."""
    packed = b"".join(pickle.EMPTY_LIST + put(number) for number in range(levels))
    for number in reversed(range(1, levels)):
        packed += get(number) + pickle.MARK + get(number - 1) * 2 + pickle.APPENDS
    return packed


HARMFUL = {
    "doubled": HEAD + doubled(60) + pickle.STOP,
    "as a key": HEAD + pickle.EMPTY_DICT + doubled(60) + pickle.NONE + pickle.SETITEM + pickle.STOP,
    "grown from the top": HEAD + grown_from_the_top(60) + pickle.STOP,
    "duplicated": HEAD + pickle.NONE + (pickle.DUP + pickle.TUPLE2) * 60 + pickle.STOP,
    "deep": HEAD + pickle.NONE + pickle.TUPLE1 * 100_000 + pickle.STOP,
    "of an argument": HEAD + b"cbuiltins\nlen\n" + doubled(60) + pickle.TUPLE1 + pickle.REDUCE + pickle.STOP,
    "contains itself": HEAD + pickle.EMPTY_LIST + put(0) + get(0) + pickle.APPEND + pickle.STOP,
    "takes too much": HEAD + pickle.NONE + pickle.TUPLE3 + pickle.STOP,
    "takes a mark": HEAD + pickle.MARK + pickle.TUPLE1 + pickle.STOP,
    "lacks a mark": HEAD + pickle.NONE + pickle.TUPLE + pickle.STOP,
    "refers to nothing": HEAD + get(7) + pickle.STOP,
    "has nothing": HEAD + put(0) + pickle.STOP,
    "a huge text": HEAD + pickle.BINUNICODE8 + b"\xff" * 7 + b"\x7f" + pickle.STOP,
    "a number of text": HEAD + pickle.LONG + b"9" * 5000 + b"L\n.",
    "cut off": HEAD + pickle.NONE,
    "": b"",
}


@pytest.mark.parametrize("packed", HARMFUL.values(), ids=HARMFUL)
def test_what_does_harm_is_refused(packed: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError):
        check_pickle(packed)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_programs_write_is_admitted(protocol: int) -> None:
    values: list[Any] = [
        [{"a": (1, 2.5, b"x", "y", None)}] * 500,
        {1, 2},
        frozenset("ab"),
        OrderedDict(a=1),
        1 << 2000,
        [[]] * 3,
        ((),) * 3,
    ]
    for value in values:
        check_pickle(pickle.dumps(value, protocol))


def test_metadata_of_many_tensors_that_share_their_parts_is_admitted() -> None:
    properties, size = TensorProperties(), torch.Size([8, 8])
    metadata = Metadata(
        {
            f"layers.{number}.weight": TensorStorageMetadata(
                properties, size, [ChunkStorageMetadata(torch.Size([8 * part, 0]), size) for part in range(8)]
            )
            for number in range(2000)
        },
        {f"layers.{number}.weight": ("layers", number, "weight") for number in range(2000)},
        {MetadataIndex(f"layers.{number}.weight", torch.Size([0, 0]), 0): number for number in range(2000)},
    )
    check_pickle(pickle.dumps(metadata))


def archive(
    packed: bytes, compression: int = zipfile.ZIP_STORED, *, name: str = "data.pkl", twice: bool = False
) -> io.BytesIO:
    """A file as ``torch.save`` makes it, with another pickle, or with both."""
    saved, changed = io.BytesIO(), io.BytesIO()
    torch.save({}, saved)
    with zipfile.ZipFile(saved) as before, zipfile.ZipFile(changed, "w", compression) as after:
        for each in before.namelist():
            if each.endswith("data.pkl"):
                after.writestr(each.replace("data.pkl", name), packed)
            if twice or not each.endswith("data.pkl"):
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Duplicate name")
                    after.writestr(each, before.read(each))
    changed.seek(0)
    return changed


def test_entries_are_checked_too() -> None:
    saved: Any = io.BytesIO()
    torch.save({"steps": [1, 2], "x": torch.arange(3)}, saved)
    saved.seek(0)
    assert load_data("entry", saved)["steps"] == [1, 2]  # type: ignore[index]
    with pytest.raises(pickle.UnpicklingError, match=r"entry 'entry' .* build more than"):
        load_data("entry", archive(HARMFUL["as a key"]))
    with pytest.raises(pickle.UnpicklingError, match="it is compressed"):
        load_data("entry", archive(HARMFUL["as a key"], zipfile.ZIP_DEFLATED))
    with pytest.raises(pickle.UnpicklingError, match="no archive"):
        load_data("entry", io.BytesIO(HARMFUL["as a key"]))
