"""Where a token comes from, and that nobody else can read or choose it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rpc.errors import InvalidOptionError, RendezvousError
from rpc.options import AgentOptions
from rpc.rendezvous import token
from rpc.rendezvous.token import Credential, find_credential, user_key

ONE, TWO = "a token of the job's own", "another token that is it"


def private(path: Path, text: str = ONE) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def test_the_options_count_before_the_environment(tmp_path: Path) -> None:
    environ = {"FARCALL_TOKEN": TWO}
    assert find_credential(AgentOptions(token=ONE), environ) == Credential(ONE.encode())
    assert find_credential(AgentOptions(token=ONE.encode()), {}) == Credential(ONE.encode())
    in_file = AgentOptions(token_file=private(tmp_path / "token", f"{ONE}\n"))
    assert find_credential(in_file, environ) == Credential(ONE.encode())
    assert find_credential(AgentOptions(), environ) == Credential(TWO.encode())


def test_the_environment_may_name_a_file(tmp_path: Path) -> None:
    environ = {"FARCALL_TOKEN_FILE": private(tmp_path / "token")}
    assert find_credential(AgentOptions(), environ) == Credential(ONE.encode())


def test_a_token_of_any_bytes_is_the_same_in_the_environment_and_in_a_file(tmp_path: Path) -> None:
    secret = bytes(range(128, 160))
    path = tmp_path / "token"
    path.write_bytes(secret)
    path.chmod(0o600)
    for environ in ({"FARCALL_TOKEN": os.fsdecode(secret)}, {"FARCALL_TOKEN_FILE": str(path)}):
        assert find_credential(AgentOptions(), environ) == Credential(secret)


def test_a_token_is_not_read_from_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token", 0o600)
    writer = os.open(tmp_path / "token", os.O_RDWR)
    try:
        with pytest.raises(InvalidOptionError, match="is not a regular file"):
            find_credential(AgentOptions(token_file=str(tmp_path / "token")), {})
    finally:
        os.close(writer)


def test_without_any_the_users_key_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(token, "user_key", lambda: b"key")
    assert find_credential(AgentOptions(), {}) == Credential(b"key", automatic=True)
    assert find_credential(AgentOptions(insecure=True), {"FARCALL_TOKEN": ONE}) == Credential(None)


def test_a_token_is_not_shown() -> None:
    assert ONE not in repr(AgentOptions(token=ONE))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"token": "short"}, "token: a token must have at least 16 characters, this one has 5"),
        ({"token_file": "/no/such/file"}, "cannot read the token in '/no/such/file': No such file"),
        ({"token": ONE, "insecure": True}, "insecure=True does without a token, but one is given"),
    ],
)
def test_what_is_no_token_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidOptionError, match=complaint):
        find_credential(AgentOptions(**options), {})


def open_to_all(path: Path) -> None:
    path.chmod(0o640)


def empty(path: Path) -> None:
    path.write_text("\n")


def enormous(path: Path) -> None:
    path.write_text("x" * 5000)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (open_to_all, "mode 640: others could know or change the token.*chmod 600"),
        (empty, "at least 16 characters"),
        (enormous, "more than 4096 bytes"),
    ],
)
def test_a_file_that_is_no_secret_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None], complaint: str
) -> None:
    path = tmp_path / "token"
    private(path)
    spoil(path)
    with pytest.raises(InvalidOptionError, match=complaint):
        find_credential(AgentOptions(token_file=str(path)), {})


# ---- the user's key


def directory_in(folder: Path) -> Path:
    return folder / f"farcall-{os.geteuid()}"


def test_all_who_ask_at_once_get_one_key_that_only_this_user_can_read(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as threads:
        (key,) = set(threads.map(lambda _: user_key([str(tmp_path)]), range(64)))
    assert len(key) == 32
    assert stat.S_IMODE(directory_in(tmp_path).stat().st_mode) == 0o700
    (kept,) = directory_in(tmp_path).iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_a_key_of_another_boot_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = user_key([str(tmp_path)])
    monkeypatch.setattr(token, "_boot", lambda: "another")
    assert user_key([str(tmp_path)]) != key


def test_where_there_is_no_such_folder_the_next_is_taken(tmp_path: Path) -> None:
    assert user_key([str(tmp_path / "none"), str(tmp_path)]) == user_key([str(tmp_path)])


def readable(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o750)


def linked(directory: Path) -> None:
    (directory.parent / "elsewhere").mkdir(mode=0o700)
    directory.symlink_to(directory.parent / "elsewhere")


def anothers(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    os.chown(directory, 65534, 65534)


def place_of_key(directory: Path) -> Path:
    """Where the key is kept, found by having one kept elsewhere."""
    elsewhere = directory.parent / "elsewhere"
    elsewhere.mkdir()
    user_key([str(elsewhere)])
    (kept,) = elsewhere.rglob("key-*")
    directory.mkdir(mode=0o700)
    return directory / kept.name


def not_a_key(directory: Path) -> None:
    kept = place_of_key(directory)
    kept.write_bytes(b"short")
    kept.chmod(0o600)


def chosen_by_another(directory: Path) -> None:
    place_of_key(directory).symlink_to("/dev/zero")


def pipe(directory: Path) -> None:
    os.mkfifo(place_of_key(directory), 0o600)


@pytest.mark.parametrize("prepare", [readable, linked, anothers, not_a_key, chosen_by_another, pipe])
def test_a_directory_that_others_may_have_prepared_is_refused(
    tmp_path: Path, prepare: Callable[[Path], None]
) -> None:
    prepare(directory_in(tmp_path))
    with pytest.raises(RendezvousError, match=r"no place for this user's own.*FARCALL_TOKEN"):
        user_key([str(tmp_path), str(tmp_path.parent)])
