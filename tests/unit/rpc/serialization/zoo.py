"""Exception classes of every kind that people write."""

from __future__ import annotations

import copyreg
import errno
import threading
from dataclasses import dataclass
from typing import Any, Self

import torch

from rpc.errors import RemoteError, RpcTimeoutError, WorkerLostError


class BuildsItsText(Exception):
    """Its constructor makes the text of what it is given."""

    def __init__(self, path: str) -> None:
        super().__init__(f"cannot open {path}")
        self.path = path


class TakesMore(Exception):
    """Cannot be called with its ``args``."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code


class Counted(Exception):
    """Knows how often it was constructed."""

    made = 0

    def __init__(self, *args: Any) -> None:
        Counted.made += 1
        super().__init__(*args, f"error number {Counted.made}")


class OwnNew(Exception):
    """Its ``__new__`` takes something and sets something."""

    number: int

    def __new__(cls, number: int, *args: Any) -> Self:
        error = super().__new__(cls, *args)
        error.number = number
        return error


class Slotted(Exception):
    """Has slots, of which one is unset and one is private."""

    __slots__ = ("__private", "place", "unset")

    def __init__(self, place: Any) -> None:
        super().__init__("slotted")
        self.place = place
        self.__private = 3

    @property
    def private(self) -> int:
        """The private slot."""
        return self.__private


@dataclass(frozen=True)
class Frozen(Exception):
    """A dataclass of which attributes cannot be set."""

    code: int
    detail: str = ""


class OwnArgs(Exception):
    """Has a property in the place of ``args`` and an attribute that cannot be set."""

    @property
    def args(self) -> Any:  # type: ignore[override]
        """Something else than the base class has."""
        return ("other",)

    @property
    def fixed(self) -> int:
        """Cannot be set."""
        return 7


class Reduces(Exception):
    """Says how it is pickled."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code, self.reason = code, reason

    def __reduce__(self) -> Any:
        return type(self), (self.code, self.reason)


class Registered(Exception):
    """``copyreg`` says how it is pickled."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code, self.reason = code, reason


copyreg.pickle(Registered, lambda error: (Registered, (error.code, error.reason)))


class SetsState(Exception):
    """Takes its attributes in its own way."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state, was_set=True)


class OnDisk(OSError):
    """An ``OSError`` with a constructor of its own."""

    def __init__(self, path: str, sector: int) -> None:
        super().__init__(errno.EIO, "bad sector", path)
        self.sector = sector


class Both(ValueError, TimeoutError):
    """Has two bases, of which one decides how it lies in memory."""

    def __init__(self, host: str) -> None:
        super().__init__(f"{host} does not answer")


class Group(ExceptionGroup[Exception]):
    """A group with a constructor of its own."""

    def __new__(cls, errors: list[Exception], code: int) -> Self:
        group = super().__new__(cls, f"{len(errors)} errors", errors)
        group.code = code
        return group

    code: int


class Locks(Exception):
    """Has an argument and an attribute that cannot be pickled."""

    def __init__(self, code: int) -> None:
        super().__init__(code, threading.Lock())
        self.code = code
        self.lock = threading.Lock()


class TextOfLock(Exception):
    """Its text depends on what cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __str__(self) -> str:
        return f"{self.lock} is taken"


class Cyclic(Exception):
    """Refers to itself."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.me = self


class Guarded(Exception):
    """Refuses access to what an exception has."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__class__", "__reduce_ex__", "__setstate__"):
            raise PermissionError(name)
        return super().__getattribute__(name)


class CountsPickles(Exception):
    """Counts how often it is pickled."""

    pickles = 0

    def __reduce__(self) -> Any:
        self.pickles += 1
        return CountsPickles, self.args


def unset_os_error() -> OSError:
    """One whose attributes do not come from its arguments."""
    error = OSError()
    error.errno, error.strerror, error.filename = errno.ENOENT, "no such thing", "f"
    return error


def import_error() -> ImportError:
    """One with a name and a path."""
    return ImportError("cannot import", name="m", path="/m.py")


def caught(source: str) -> Exception:
    """What a statement raises."""
    try:
        exec(source, {})
    except Exception as error:
        return error.with_traceback(None)
    raise AssertionError(source)


def zoo() -> list[Exception]:
    """One of each; all can be pickled."""
    return [
        BuildsItsText("f.txt"),
        TakesMore(3, "busy"),
        Counted("x"),
        OwnNew(5, "text"),
        Slotted("here"),
        Frozen(6, "why"),
        OwnArgs("own"),
        Reduces(8, "busy"),
        Registered(9, "busy"),
        SetsState(10, "busy"),
        OnDisk("/dev/sda", 11),
        Both("host"),
        Group([TakesMore(1, "a"), Group([Frozen(2)], 3)], 12),
        Cyclic("round"),
        OSError(errno.ENOENT, "no such thing", "a", None, "b"),
        BlockingIOError(errno.EAGAIN, "would block", 5),
        unset_os_error(),
        import_error(),
        StopIteration(3),
        KeyError("k"),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
        SyntaxError("bad", ("f.py", 1, 2, "x = ", 1, 3)),
        caught("x ="),
        caught("'a'.nothing"),
        caught("import nowhere_at_all"),
        ExceptionGroup("several", [ValueError("a"), ExceptionGroup("inner", [OSError(2, "b")])]),
        torch.OutOfMemoryError("oom"),
        ValueError("\nFirst line \n next line"),
        RpcTimeoutError("too slow"),
        WorkerLostError("gone", "w", "why"),
        RemoteError("text", "kind", "trace"),
    ]
