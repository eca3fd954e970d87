"""The folders in which workers write their state files: one for each job, for all processes of the user.

``<jobs>/<job>/<host>.<pid>.<number>.state``, with the stacks that the interpreter could not write itself
beside it, as ``.stacks``. Folders have mode 0700 and files 0600. Old jobs, and those beyond the limits, are
removed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = [
    "JOB",
    "JobFolder",
    "find_job",
    "job_id",
    "jobs",
    "jobs_folder",
    "make_private",
    "own_folder",
    "process_of",
    "remove_old",
]

JOB: Final = "FARCALL_JOB_ID"
"""Environment variable with which ``farcall launch`` names the job of its workers."""

_FOLDER: Final = "FARCALL_JOBS_DIR"
"""Environment variable that names the folder of all jobs."""

_MAX_AGE_SECONDS: Final = 7 * 86400.0
"""Age at which the files of a job are removed, in seconds."""

_MAX_JOBS: Final = 200
"""Maximum number of jobs that are kept."""

_MAX_BYTES: Final = 1 << 30
"""Maximum size of all files that are kept, in bytes."""

_WRITABLE: Final = stat.S_IWGRP | stat.S_IWOTH

_RECENT_SECONDS: Final = 60.0
"""Time in seconds since its last write for which a job is not removed."""

_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class JobFolder:
    """The folder of one job.

    Attributes:
        id: name of the job.
        path: path of the folder.
        written: time when a worker last wrote there, in seconds since 1970.
        size: size of the files, in bytes.
    """

    id: str
    path: Path
    written: float
    size: int

    def state_files(self) -> list[Path]:
        """Return the state files of its workers."""
        return sorted(self.path.glob("*.state"))


def process_of(path: Path) -> int:
    """Return the number of the process that writes a state file, from its name; 0 if that has none."""
    parts = path.name.split(".")
    return int(parts[-3]) if len(parts) > 3 and parts[-3].isdecimal() else 0


def job_id(*parts: object) -> str:
    """Return a short name made of what distinguishes a job from others."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:8]


def jobs_folder(environ: Mapping[str, str]) -> Path:
    """The folder of all jobs of this user; it need not exist."""
    named = environ.get(_FOLDER)
    if named:
        return Path(named)
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if os.path.isabs(cache) and os.access(cache if os.path.isdir(cache) else os.path.dirname(cache), os.W_OK):
        return Path(cache) / "farcall" / "jobs"
    return Path(tempfile.gettempdir()) / f"farcall-{os.getuid()}" / "jobs"


def make_private(folder: Path) -> None:
    """Make a folder, with mode 0700, whose parents may be missing.

    Raises:
        OSError: it cannot be made, or belongs to somebody else.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # a mode is not that of missing parents
    folder.mkdir(mode=0o700, exist_ok=True)
    with own_folder(folder, writable_by_others=True) as descriptor:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o077:
            os.fchmod(descriptor, 0o700)


@contextlib.contextmanager
def own_folder(folder: Path, *, writable_by_others: bool = False) -> Iterator[int]:
    """Open a folder; yields its descriptor. What is opened by it is in this folder, even if another user puts
    another one in its place.

    Args:
        folder: the folder; the last part of its path is no link.
        writable_by_others: whether other users may be able to write there.

    Raises:
        OSError: it cannot be opened, or is not a folder of this user alone.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError as error:
        raise PermissionError(errno.EPERM, f"{folder} is not a folder of this user") from error
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, f"{folder} is not a folder of this user")
        if not writable_by_others and found.st_mode & _WRITABLE:
            mode = stat.S_IMODE(found.st_mode)
            raise PermissionError(errno.EPERM, f"other users can write to {folder}, which has mode {mode:o}")
        yield descriptor
    finally:
        os.close(descriptor)


def jobs(folder: Path) -> list[JobFolder]:
    """Return all jobs of this user, the one that was written to last first. Several users may share the
    folder: what is another one's, or what others can write to, is passed over.
    """
    found: list[JobFolder] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if _ID.fullmatch(entry.name):
                with contextlib.suppress(OSError), own_folder(Path(entry.path)):
                    found.append(_measured(Path(entry.path)))
    return sorted(found, key=lambda job: job.written, reverse=True)


def _measured(path: Path) -> JobFolder:
    written, size = path.stat().st_mtime, 0
    for file in os.scandir(path):
        with contextlib.suppress(OSError):
            known = file.stat(follow_symlinks=False)
            size += known.st_blocks * 512
            if file.name.endswith(".state"):
                written = max(written, known.st_mtime)
    return JobFolder(path.name, path, written, size)


def find_job(folder: Path, given: str | None) -> JobFolder:
    """Find a job by its name or the beginning of it; without one, the newest.

    Raises:
        LookupError: there is none, or there are several; the text names them.
    """
    known = jobs(folder)
    if given is None:
        if not known:
            raise LookupError(f"no job of this user has left anything in {folder}")
        return known[0]
    matching = [job for job in known if job.id == given] or [job for job in known if job.id.startswith(given)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        names = ", ".join(job.id for job in matching[:10])
        raise LookupError(f"several jobs begin with {given!r}: {names}")
    newest = f"; the newest is {known[0].id}" if known else ""
    raise LookupError(f"there is no job {given!r} in {folder}{newest}")


def remove_old(folder: Path, keep: str, now: float | None = None) -> list[str]:
    """Remove jobs that are old or too many, except those that still write, and ``keep``; returns the removed
    ones.
    """
    now = time.time() if now is None else now
    removed: list[str] = []
    total = 0
    for number, job in enumerate(jobs(folder)):
        total += job.size
        is_old = now - job.written > _MAX_AGE_SECONDS or number >= _MAX_JOBS or total > _MAX_BYTES
        if is_old and job.id != keep and now - job.written > _RECENT_SECONDS:
            shutil.rmtree(job.path, ignore_errors=True)
            removed.append(job.id)
    return removed
