"""Jobs of the past, in an SQLite file beside the folders of jobs: what ran, how it ended, and its figures.

The file has mode 0600. It is bounded by the number of jobs, by the number of points of each, and by the
length of texts; jobs are removed by age. A file that is damaged is replaced; where none can be written, the
page works on without.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sqlite3
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

__all__ = ["History", "PastJob", "Point"]

logger = logging.getLogger(__name__)

FILE: Final = "history.sqlite"

_VERSION: Final = 1
_MAX_AGE_SECONDS: Final = 30 * 86400.0
"""Age at which a job is removed, in seconds."""

MAX_JOBS: Final = 300
"""Maximum number of jobs that are kept."""

MAX_POINTS: Final = 360
"""Maximum number of points of one job; when there are more, every second one is removed."""

_MAX_TEXT: Final = 4000
"""Maximum length of a text, in characters."""

_MAX_WHOLE: Final = (1 << 63) - 1
"""Largest whole number that SQLite holds."""

_TABLES: Final = """
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, program TEXT, host TEXT, began REAL, seen REAL, workers INTEGER, state TEXT, why TEXT
);
CREATE TABLE IF NOT EXISTS points (
    job TEXT REFERENCES jobs(id) ON DELETE CASCADE, at REAL,
    calls REAL, requests REAL, cores REAL, memory INTEGER,
    PRIMARY KEY (job, at)
) WITHOUT ROWID;
"""

Point = tuple[float, float, float, float, int]
"""Time in seconds since 1970, calls and requests per second, cores in use, bytes of memory."""


@dataclass(frozen=True, slots=True)
class PastJob:
    """A job as the history has it.

    Attributes:
        id: its name.
        program: its program, for people.
        host: the host on which it was seen.
        began, seen: when it began, and was seen last, in seconds since 1970.
        workers: number of workers.
        state: "running", "left" (all its workers have left), "failed" or "dead".
        why: what was found out about it at its end, a finding a line.
    """

    id: str
    program: str
    host: str
    began: float
    seen: float
    workers: int
    state: str
    why: str

    def to_json(self) -> dict[str, Any]:
        """For the page."""
        return asdict(self)


class History:
    """The history of one user's jobs. For one thread at a time.

    Args:
        folder: the folder of all jobs.

    Attributes:
        trouble: why there is no history; "" if there is one.
    """

    def __init__(self, folder: Path) -> None:
        self.trouble = ""
        self._path = folder / FILE
        self._database: sqlite3.Connection | None = None
        try:
            try:
                self._open()
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                logger.warning("the history of jobs, %s, is replaced: %s", self._path, error)
                self._path.unlink()
                self._open()
        except (OSError, sqlite3.Error) as error:
            self.trouble = f"{self._path}: {error}"
            self.close()

    def _open(self) -> None:
        _check_folder(self._path.parent)
        file = os.open(
            self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600
        )
        try:
            known = os.fstat(file)
            if not stat.S_ISREG(known.st_mode) or known.st_uid != os.getuid():
                raise PermissionError("it is not a file of this user")
            os.fchmod(file, 0o600)
        finally:
            os.close(file)
        self.close()
        self._database = sqlite3.connect(self._path, timeout=2.0, check_same_thread=False)
        with self._changes() as database:
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _VERSION):
                raise OSError(f"it has version {version}, and this farcall reads version {_VERSION}")
            database.executescript(_TABLES)
            database.execute("PRAGMA foreign_keys = ON")
            database.execute(f"PRAGMA user_version = {_VERSION}")

    def close(self) -> None:
        """Close the file."""
        if self._database is not None:
            self._database.close()
            self._database = None

    @contextlib.contextmanager
    def _changes(self) -> Iterator[sqlite3.Connection]:
        assert self._database is not None
        with self._database:
            yield self._database

    def record(self, job: PastJob, points: Sequence[Point] = ()) -> None:
        """Note how a job is now, with points that are new."""
        if self._database is None:
            return
        row = [_storable(each) for each in asdict(job).values()]
        try:
            with self._changes() as database:
                database.execute(
                    "INSERT INTO jobs VALUES (?,?,?,?,?,?,?,?) ON CONFLICT(id) DO UPDATE SET"
                    " program=excluded.program, host=excluded.host, began=excluded.began, seen=excluded.seen,"
                    " workers=excluded.workers,"
                    " state=excluded.state, why=excluded.why",
                    row,
                )
                database.executemany(
                    "INSERT OR REPLACE INTO points VALUES (?,?,?,?,?,?)",
                    [(job.id, *map(_storable, each)) for each in points],
                )
                self._thin(database, job.id)
        except sqlite3.Error as error:
            self._give_up(error)

    def _thin(self, database: sqlite3.Connection, job: str) -> None:
        times = [
            row[0] for row in database.execute("SELECT at FROM points WHERE job = ? ORDER BY at", (job,))
        ]
        if len(times) > MAX_POINTS:
            database.executemany(
                "DELETE FROM points WHERE job = ? AND at = ?", [(job, at) for at in times[1::2]]
            )

    def prune(self, now: float | None = None) -> None:
        """Remove jobs that are old or too many."""
        if self._database is None:
            return
        now = time.time() if now is None else now
        try:
            with self._changes() as database:
                database.execute("DELETE FROM jobs WHERE seen < ?", (now - _MAX_AGE_SECONDS,))
                database.execute(
                    "DELETE FROM jobs WHERE id NOT IN (SELECT id FROM jobs ORDER BY seen DESC LIMIT ?)",
                    (MAX_JOBS,),
                )
        except sqlite3.Error as error:
            self._give_up(error)

    def jobs(self) -> list[PastJob]:
        """All jobs, the one that was seen last first."""
        if self._database is None:
            return []
        try:
            found = self._database.execute(
                "SELECT id, program, host, COALESCE(began, 0.0), COALESCE(seen, 0.0), workers,"
                " state, why FROM jobs ORDER BY seen DESC"
            )
            return [PastJob(*map(_plain, row)) for row in found]
        except sqlite3.Error as error:
            self._give_up(error)
            return []

    def points(self, job: str) -> list[Point]:
        """The points of a job, the oldest first."""
        if self._database is None:
            return []
        try:
            found = self._database.execute(
                "SELECT at, calls, requests, cores, memory FROM points WHERE job = ? ORDER BY at", (job,)
            )
            return [tuple(row) for row in found]
        except sqlite3.Error as error:
            self._give_up(error)
            return []

    def _give_up(self, error: sqlite3.Error) -> None:
        """The file cannot be used any more: the page works on without."""
        logger.warning("the history of jobs cannot be written any more: %s", error)
        self.trouble = f"{self._path}: {error}"
        self.close()


def _check_folder(folder: Path) -> None:
    """Make the folder if it is missing. One that exists keeps its mode: the user may share it.

    Raises:
        OSError: it cannot be made, or other users could replace files in it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{folder} is not a folder of this user")
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        raise PermissionError(f"other users can write to {folder}")


def _storable(value: Any) -> Any:
    """A value that SQLite can hold: texts are cut, whole numbers have 64 bits, NaN and infinity become 0."""
    match value:
        case str():
            return value[:_MAX_TEXT]
        case int():
            return max(-_MAX_WHOLE, min(value, _MAX_WHOLE))
        case float():
            return value if math.isfinite(value) else 0.0
    return value


def _plain(value: Any) -> Any:
    return "" if value is None else value
