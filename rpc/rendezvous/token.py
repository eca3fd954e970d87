"""Finding a job's token: options, environment, a file, or this user's own key on this host.

Workers of one user on one host find the same key by themselves, so that programs that stay on one host need
no token: it is in a directory that only this user can read, ``/tmp/farcall-<uid>``, in a file named for the
running kernel, so that a file that was copied with a machine's image is not used elsewhere. One key serves
all jobs of the user: processes of one user can read each other's memory anyway. The path does not depend on
anything that differs between shells (``TMPDIR``, ``XDG_RUNTIME_DIR``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rpc.errors import InvalidOptionError, RendezvousError
from rpc.options import AgentOptions, to_token
from rpc.runtime.regular_files import open_regular_file

__all__ = ["WAYS", "Credential", "find_credential", "user_key"]

WAYS: Final = (
    "Give all workers the same one: by the option token=, by the environment variable FARCALL_TOKEN, or in a "
    "file that only its user can read, by token_file= or FARCALL_TOKEN_FILE (docs/security.md). On a network "
    "without other users, insecure=True works without one."
)
"""How to give a token, for errors."""

_FOLDERS: Final = ("/tmp", "/dev/shm")
"""Candidates for the parent directory; the first one that is usable. All processes of a host see the same."""

_KEY_BYTES: Final = 32
_LARGEST_FILE: Final = 4096


@dataclass(frozen=True)
class Credential:
    """The proof that a worker belongs to the job.

    Attributes:
        token: the token; None for no proof, by the option ``insecure``.
        automatic: whether it is this user's key, so that all workers are on this host.
    """

    token: bytes | None
    automatic: bool = False


def find_credential(options: AgentOptions, environ: Mapping[str, str]) -> Credential:
    """Return the job's token: options have precedence over the environment; without any, the user's key is
    used.

    Raises:
        InvalidOptionError: a token is too short, a file cannot be read, or others can read or change it.
        RendezvousError: there is no token, and no place for the user's key.
    """
    if options.insecure:
        if options.token is not None or options.token_file is not None:
            raise InvalidOptionError("the option insecure=True does without a token, but one is given")
        return Credential(None)
    if options.token is not None:
        return Credential(options.token)
    if options.token_file is not None:
        return Credential(token_in_file("token_file", options.token_file))
    if environ.get("FARCALL_TOKEN"):
        return Credential(to_token("FARCALL_TOKEN", environ["FARCALL_TOKEN"]))
    if environ.get("FARCALL_TOKEN_FILE"):
        return Credential(token_in_file("FARCALL_TOKEN_FILE", environ["FARCALL_TOKEN_FILE"]))
    return Credential(user_key(), automatic=True)


def token_in_file(what: str, path: str) -> bytes:
    """Read the token in a file; ``what`` names the option in errors.

    Raises:
        InvalidOptionError: it cannot be read, is too short, or others can read or change it.
    """
    try:
        with open_regular_file(path) as file:
            _check_private(path, os.fstat(file.fileno()))
            text = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise InvalidOptionError(f"{what}: cannot read the token in {path!r}: {error.strerror}") from error
    if len(text) > _LARGEST_FILE:
        raise InvalidOptionError(f"{what}: {path!r} is no token: it has more than {_LARGEST_FILE} bytes")
    return to_token(f"{what} {path!r}", text.strip())


def _check_private(path: str, status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(status.st_mode) & 0o077:
        raise InvalidOptionError(
            f"{path!r} is user {status.st_uid}'s, with mode {stat.S_IMODE(status.st_mode):o}: others could "
            f"know or change the token. It must be this user's and mode 0600: chmod 600 {path}"
        )


def user_key(folders: Sequence[str] = _FOLDERS) -> bytes:
    """Return this user's key on this host; the first caller makes it.

    Args:
        folders: candidates for the parent of its directory.

    Raises:
        RendezvousError: it cannot be stored, or its directory does not belong to this user alone.
    """
    try:
        with _private_directory(folders) as directory:
            return _key_in(directory, f"key-{_boot()}")
    except OSError as error:
        where = error.filename or folders[0]
        raise RendezvousError(
            f"there is no token for this job, and no place for this user's own: {where}: {error.strerror}. "
            f"{WAYS}"
        ) from error


@contextlib.contextmanager
def _private_directory(folders: Sequence[str]) -> Iterator[int]:
    """Return a descriptor of the directory, which is made if necessary."""
    failure: OSError | None = None
    for folder in folders:
        path = os.path.join(folder, f"farcall-{os.geteuid()}")
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if os.path.lexists(path):
                raise
            failure = failure or error  # there is no such folder here, or it is read-only
            continue
        try:
            _check_own(path, os.fstat(directory))
            yield directory
        except OSError as error:
            error.filename = os.path.join(path, os.path.basename(error.filename or ""))
            raise
        finally:
            os.close(directory)
        return
    assert failure is not None
    raise failure


def _check_own(path: str, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(
            errno.EACCES,
            f"it is user {status.st_uid}'s, with mode {stat.S_IMODE(status.st_mode):o}, and must be "
            f"user {os.geteuid()}'s alone",
            path,
        )


def _key_in(directory: int, name: str) -> bytes:
    key = _read_key(directory, name)
    if key is None:
        made = f"new-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(made, flags, 0o600, dir_fd=directory)
        try:
            with open(descriptor, "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
            with contextlib.suppress(FileExistsError):  # another process was first: its key is used
                os.link(made, name, src_dir_fd=directory, dst_dir_fd=directory)
        finally:
            os.unlink(made, dir_fd=directory)
        key = _read_key(directory, name)
        if key is None:
            raise FileNotFoundError(errno.ENOENT, "it was removed at once", name)
    return key


def _read_key(directory: int, name: str) -> bytes | None:
    try:
        file = open_regular_file(name, dir_fd=directory, flags=os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with file:
        _check_own(name, os.fstat(file.fileno()))
        key = file.read(_KEY_BYTES + 1)
        os.utime(file.fileno())  # keeps cleaners of /tmp from removing it as old
    if len(key) != _KEY_BYTES:
        raise OSError(errno.EINVAL, "it is no key", name)
    return key


def _boot() -> str:
    """Return the id of the running kernel, if the kernel provides it."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return "unknown"
